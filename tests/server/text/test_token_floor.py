"""Lower bounds of token counts: never too high, close to the count for text that is too long, and fast."""

import functools
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.token_floor import CUT_TOKENS, SLICE_CHARACTERS, TokenFloor
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.cluster.servers import python_path
from tests.examples import examples

WORDS = [
    "the ",
    "in",
    "ing ",
    "aaaa",
    " " * 9,
    "\n\n",
    "0123",
    "don't ",
    "é",
    "e\u0301",
    "日本",
    "🦀",
    "\x13",
    "<|im_end|>",
]
texts = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=60).map("".join)


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2"))


@functools.cache
def fallback_tokenizer(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """As in Llama 2: spaces become ▁, characters without a token become bytes, and merges may have any length."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁ab", "▁ab▁ab", "▁▁"]
    merges = [("a", "b"), ("▁", "ab"), ("▁ab", "▁ab"), ("▁", "▁")]
    model = models.BPE({piece: index for index, piece in enumerate(pieces)}, merges, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.normalizer = spaces if normalizer is None else normalizers.Sequence([spaces, normalizer])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, special_tokens={}, chat_template=None)


@settings(max_examples=examples(200, 70), deadline=None)
@given(text=texts, limit=st.integers(0, 40))
@pytest.mark.parametrize("kind", ["smollm2", "fallback"])
def test_bound_never_exceeds_the_number_of_tokens(kind: str, text: str, limit: int, smollm2: Tokenizer) -> None:
    tokenizer = smollm2 if kind == "smollm2" else fallback_tokenizer()
    found = tokenizer.floor.above(text, limit)
    assert found is None or limit < found <= len(tokenizer.encode(text, add_special_tokens=False))


@settings(max_examples=examples(200, 70), deadline=None)
@given(first=texts, second=texts)
@pytest.mark.parametrize("kind", ["smollm2", "fallback"])
def test_cut_adds_few_tokens(kind: str, first: str, second: str, smollm2: Tokenizer) -> None:
    """At most half of CUT_TOKENS; with real text one or two tokens."""
    tokenizer = smollm2 if kind == "smollm2" else fallback_tokenizer()
    whole, *parts = [len(tokenizer.encode(text, add_special_tokens=False)) for text in (first + second, first, second)]
    assert sum(parts) <= whole + CUT_TOKENS // 2


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_text_without_word_boundaries(smollm2: Tokenizer, seed: int) -> None:
    """One long word, or only spaces: slices cannot end at a word boundary."""
    alphabet = ["a", " ", "ab", "".join(map(chr, range(97, 123)))][seed]
    text = "".join(random.Random(seed).choices(alphabet, k=8 * SLICE_CHARACTERS))
    tokens = len(smollm2.encode(text))
    found = smollm2.floor._by_slices(text, int(0.9 * tokens))
    assert found is not None
    assert found <= tokens
    assert smollm2.floor._by_slices(text, tokens) is None


def test_bound_uses_the_longest_token(smollm2: Tokenizer) -> None:
    longest = max(range(smollm2.vocab_size), key=lambda token: len(smollm2.token_bytes(token)))
    piece = smollm2.token_text(longest)
    assert smollm2.floor.longest_token_bytes == len(piece.encode())
    assert len(smollm2.encode(piece * 100)) == 100
    assert smollm2.floor.above(piece * 100, 100) is None
    assert smollm2.floor.above(piece * 101, 100) == 101


def test_bound_uses_the_normalized_text() -> None:
    """NFC joins three Korean characters of nine bytes into one of three bytes."""
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer, backend.normalizer = pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.NFC()
    floor = TokenFloor(backend, lambda _token: b"x")
    text = unicodedata.normalize("NFD", "각") * 100
    assert (len(text.encode()), len(backend.encode(text))) == (900, 300)
    assert floor.above(text, 110) == 300


def dropping(change: str) -> TokenFloor:
    """The bound of a tokenizer that may drop text, or whose tokens may hold any amount of text."""
    tokenizer = fallback_tokenizer(normalizers.Replace("b", "") if change == "deletes" else None)
    backend = tokenizer._backend
    if change == "strips":
        backend.add_special_tokens([AddedToken("<end>", rstrip=True)])
    if change == "removes":
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if change == "unknown":
        backend.model = models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")
    return TokenFloor(backend, lambda _token: b"x")


@pytest.mark.parametrize("change", ["deletes", "strips", "removes", "unknown"])
def test_no_bound_when_the_tokenizer_may_drop_text(change: str) -> None:
    assert dropping(change).longest_token_bytes is None


def test_bytes_without_a_token_do_not_count(smollm2: Tokenizer) -> None:
    assert smollm2.encode("\x13" * 1000) == []
    assert smollm2.floor.above("\x13" * 100_000, 10) is None


def test_text_that_cannot_fit_takes_little_memory() -> None:
    """The texts have 4 MB each. Tokenizing one takes 350 to 900 MB."""
    program = """
import resource
from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(locate_model("smollm2"))
texts = ["x y " * 1_000_000, "a" * 4_000_000, "0123456789abcdef" * 250_000]
tokenizer.floor.above("a" * 100_000, 8192)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for text in texts:
    assert tokenizer.floor.above(text, 8192) > 8192
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""
    environment = {"PYTHONPATH": python_path(), "PATH": str(Path(sys.executable).parent)}
    output = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True).stdout
    assert int(output) < 40
