"""The tokenizer compared with that of transformers for the same files, chat templates, and streamed text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers
from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing
from transformers.convert_slow_tokenizer import TikTokenConverter

from pdserve.common.errors import ClientError, StartupError
from pdserve.models.formats.gguf_file import GgufFile
from pdserve.models.formats.gguf_tokenizer import gguf_tokenizer
from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.tokenizer import TextStream, Tokenizer, load_tokenizer
from tests.checkpoints import EOS_ID, make_checkpoint

TEXTS = [
    "Hello, world!",
    "In 2024 it cost 1234.50 euros",
    "naïve café 日本語 🦀🏳️‍🌈 ▁",
    "  leading, trailing  \n\n\ttabs and don't I'LL we've",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


def reload(directory: Path, **settings: Any) -> Tokenizer:
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return load_tokenizer(locate_model(str(directory)))


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text), skip_special_tokens=False) == text


def test_smollm2_token_ids_are_unchanged(smollm2: Tokenizer) -> None:
    """Digits are single tokens, special tokens single ids, and there is no BOS. Another pre-tokenizer has other ids."""
    assert smollm2.encode("<|im_start|>system\n") == [1, 9690, 198]
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    digits = smollm2.encode("45")
    assert [smollm2.decode([token]) for token in digits] == ["4", "5"]
    assert smollm2.vocab_size == 49152
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"


def test_smollm2_chat_prompt(smollm2: Tokenizer) -> None:
    assert smollm2.has_chat_template
    assert smollm2.render_chat([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", TEXTS)
def test_hugging_face_tokenizer_equals_transformers(directory: Path, text: str) -> None:
    ours = load_tokenizer(locate_model(str(directory)))
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    assert ours.encode(text) == theirs(text)["input_ids"]
    for skip in (True, False):
        assert ours.decode(ours.encode(text), skip) == theirs.decode(ours.encode(text), skip_special_tokens=skip)


def test_bos_is_added_by_the_post_processor(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(locate_model(str(tmp_path)))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.encode("ab")[0] == 256
    assert tokenizer.encode("ab") == theirs("ab")["input_ids"]
    assert tokenizer.encode("ab", add_special_tokens=False) == tokenizer.encode("ab")[1:]


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": 'Say "é" & <b>'}]


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",  # noqa: E501
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{{ messages | tojson(indent=2) }}{% if add_generation_prompt %}>{% endif %}",
        "{{ messages | tojson(ensure_ascii=False) }}{{ messages | tojson(ensure_ascii=True) }}",
        "{{ messages | tojson(True, 1, (',', ':'), True) }}{{ messages | tojson(sort_keys=True, separators=',:') }}",
        "{{ strftime_now('%Y') }}",
        "{% if tools is not none %}T{% endif %}{% if documents is defined %}D{% endif %}",
    ],
)
def test_templates_render_as_in_transformers(template: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    ours = reload(tmp_path, chat_template=template)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(MESSAGES, add_generation_prompt=prompt) == expected


def test_template_variables_override_special_tokens_only(tmp_path: Path) -> None:
    """As in transformers: they override the names of special tokens, but not `messages`."""
    make_checkpoint(tmp_path)
    ours = reload(tmp_path, chat_template="{{ eos_token }}{% if thinking is defined %}{{ thinking }}{% endif %}")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for variables in ({}, {"thinking": False}, {"thinking": True, "eos_token": "!"}):
        expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **variables)
        assert ours.render_chat(MESSAGES, variables=variables) == expected
    shadowed = reload(tmp_path, chat_template="{{ messages | length }}")
    assert shadowed.render_chat(MESSAGES, variables={"messages": []}) == "2"


def test_template_is_found_in_each_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    assert reload(tmp_path, chat_template=named).render_chat([]) == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert reload(tmp_path).render_chat([]) == "F"


@pytest.mark.parametrize("in_files", [False, True])
def test_requests_with_tools_use_the_template_named_tool_use(tmp_path: Path, in_files: bool) -> None:
    make_checkpoint(tmp_path)
    templates = {"default": "D{{ messages | length }}", "tool_use": "T{{ tools | tojson }}"}
    ours = reload(tmp_path, chat_template=[{"name": name, "template": text} for name, text in templates.items()])
    if in_files:
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        theirs.save_pretrained(tmp_path)
        assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").read_text() == templates["tool_use"]
        ours = reload(tmp_path, chat_template=None)
    assert ours.render_chat([]) == "D0"
    assert ours.render_chat([], tools=[{"type": "function"}]) == 'T[{"type": "function"}]'
    assert ours.template_has_tools


def test_chat_without_a_template_or_refused_by_it_is_a_client_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    none = reload(tmp_path, chat_template=None)
    assert not none.has_chat_template
    with pytest.raises(ClientError, match="no chat template"):
        none.render_chat(MESSAGES)
    refusing = reload(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ClientError, match="roles must alternate"):
        refusing.render_chat(MESSAGES)
    escaping = reload(tmp_path, chat_template="{{ messages.__class__.__mro__ }}")
    with pytest.raises(ClientError, match="unsafe"):
        escaping.render_chat(MESSAGES)
    failing = reload(tmp_path, chat_template="{{ messages[0].content.encode(thinking) }}")
    with pytest.raises(ClientError, match="unknown encoding: x"):  # LookupError
        failing.render_chat(MESSAGES, variables={"thinking": "x"})
    with pytest.raises(StartupError, match="cannot be compiled"):
        reload(tmp_path, chat_template="{% for %}")


def test_end_tokens_are_those_of_model_and_tokenizer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, eos_token_id=7)
    assert locate_model(str(tmp_path)).config.eos_token_ids == (7, EOS_ID)


def test_error_names_a_damaged_tokenizer(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(locate_model(str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("chat_template.jinja", b"\xff\xfe", "cannot be read: 'utf-8' codec"),
        ("tokenizer_config.json", b"[1, 2]", "expected a JSON object"),
        ("special_tokens_map.json", b"{", "cannot be read: Expecting"),
    ],
)
def test_error_names_a_damaged_file(tmp_path: Path, name: str, data: bytes, problem: str) -> None:
    directory = make_checkpoint(tmp_path)
    (directory / name).write_bytes(data)
    with pytest.raises(StartupError, match=f"{name}: {problem}"):
        load_tokenizer(locate_model(str(directory)))


@settings(max_examples=100, deadline=None)
@given(
    text=st.one_of(st.text(max_size=40), st.lists(st.integers(0, 49151), max_size=30)),
    sizes=st.lists(st.integers(1, 4), max_size=40),
    skip=st.booleans(),
)
def test_streamed_deltas_concatenate_to_the_decoded_whole(
    smollm2: Tokenizer, text: str | list[int], sizes: list[int], skip: bool
) -> None:
    """For real text and for random ids, most of which are invalid UTF-8."""
    token_ids = smollm2.encode(text) if isinstance(text, str) else text
    stream = TextStream(smollm2, skip_special_tokens=skip)
    whole, position, out = smollm2.decode(token_ids, skip), 0, ""
    for size in [*sizes, *[1] * len(token_ids)]:
        out += stream.push(token_ids[position : position + size])
        position += size
        assert whole.startswith(out)
    assert out + stream.finish() == whole
    assert stream.finish() == ""


@pytest.fixture(scope="module")
def broken(smollm2: Tokenizer) -> dict[bytes, int]:
    """Tokens that are one byte of a longer character."""
    ids = {smollm2.token_bytes(token): token for token in range(smollm2.vocab_size)}
    return {bytes([byte]): ids[bytes([byte])] for byte in (0xE2, 0x82, 0xAC, 0xF0)}


@settings(max_examples=50, deadline=None)
@given(run=st.lists(st.sampled_from([b"\xe2", b"\x82", b"\xac", b"\xf0"]), min_size=1, max_size=7), skip=st.booleans())
def test_long_runs_of_invalid_utf8_stream_as_they_decode(
    smollm2: Tokenizer, broken: dict[bytes, int], run: list[bytes], skip: bool
) -> None:
    token_ids = [*smollm2.encode("a"), *(broken[byte] for byte in run * 40), *smollm2.encode(" z")]
    stream = TextStream(smollm2, skip_special_tokens=skip)
    out = "".join(stream.push([token]) for token in token_ids)
    assert out + stream.finish() == smollm2.decode(token_ids, skip)


@pytest.mark.parametrize("run", [(2,), (10**6,), (b"\xe2",), (b"\x82",), (b"\xe2", b"\x82"), (b"\xe2", 2)], ids=repr)
def test_push_decodes_a_bounded_number_of_tokens(
    smollm2: Tokenizer, broken: dict[bytes, int], run: tuple[int | bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long runs of EOS (ignore_eos), of ids without a token (dummy weights) and of invalid UTF-8."""
    token_ids = [broken[item] if isinstance(item, bytes) else item for item in run] * (2000 // len(run))
    whole, decoded = smollm2.decode(token_ids), []

    def decode(tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        decoded.append(len(tokens))
        return Tokenizer.decode(smollm2, tokens, skip_special_tokens)

    monkeypatch.setattr(smollm2, "decode", decode)
    stream = TextStream(smollm2)
    out = "".join(stream.push([token]) for token in token_ids)
    assert out + stream.finish() == whole
    assert max(decoded) <= 64
    assert sum(decoded) < 64 * len(token_ids)


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """As in Llama 2, Mistral and Gemma: token i is byte i, followed by a few words."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "<unk>", *_WORDS]
    backend = Backend(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend, special_tokens={}, chat_template=None)


_WORDS = ["\N{LOWER ONE EIGHTH BLOCK}Hi", "\N{LOWER ONE EIGHTH BLOCK}", "a", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("text", ["你好", "🦀🦀", "a🦀é你", "🦀 Hi"])
def test_characters_of_byte_tokens_stream_when_they_are_complete(byte_fallback: Tokenizer, text: str) -> None:
    """The first byte of a character must not change the characters before it."""
    stream, token_ids = TextStream(byte_fallback), list(text.encode())
    assert byte_fallback.decode(token_ids) == text
    assert [delta for token in token_ids if (delta := stream.push([token]))] == list(text)
    assert stream.finish() == ""


_RUNS = st.lists(
    st.one_of(
        st.text(max_size=3).map(lambda text: list(text.encode())),
        st.lists(st.integers(0, 255), max_size=3),
        st.lists(st.sampled_from([b"\xe2"[0], b"\x82"[0], *range(257, 257 + len(_WORDS)), 10**6]), max_size=40),
    ),
    max_size=8,
)


_HI = 257
"""The token of the first word in _WORDS."""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([], "Hi"),
        ([10**6], "Hi"),
        ([_HI], " Hi"),
        ([_HI, 10**6], " Hi"),
        ([*b"\n"], " Hi"),
        ([_HI + 1], " Hi"),
        ([*"é".encode()[:1]], "Hi"),
        ([_HI, *[10**6] * 127], " Hi"),
        ([_HI, *[10**6] * 128], "Hi"),
    ],
    ids=[
        *("nothing", "no token", "word", "word and no token", "byte", "space", "part of a character"),
        *("word and many others", "word and too many others"),
    ],
)
def test_text_that_continues_another_keeps_its_first_space(
    byte_fallback: Tokenizer, before: list[int], expected: str
) -> None:
    stream = TextStream(byte_fallback, before=before)
    assert stream.push([_HI]) + stream.push([_HI]) + stream.finish() == expected + " Hi"


@settings(max_examples=100, deadline=None)
@given(runs=_RUNS, size=st.integers(1, 4))
def test_streamed_byte_tokens_concatenate_to_the_decoded_whole(
    byte_fallback: Tokenizer, runs: list[list[int]], size: int
) -> None:
    token_ids = [token for run in runs for token in run]
    stream = TextStream(byte_fallback)
    out = "".join(stream.push(token_ids[at : at + size]) for at in range(0, len(token_ids), size))
    assert out + stream.finish() == byte_fallback.decode(token_ids)


def test_invalid_bytes_are_replaced_and_valid_ones_kept(byte_fallback: Tokenizer) -> None:
    token_ids = [*"é".encode(), 0xFF, *"🦀".encode()[:3]]
    assert byte_fallback.decode(token_ids) == "é\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_incomplete_character_is_held_back(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("🦀!")
    assert len(token_ids) > 2
    stream = TextStream(smollm2)
    deltas = [stream.push([token]) for token in token_ids]
    assert [delta for delta in deltas if delta] == ["🦀", "!"]


def test_incomplete_character_is_returned_at_the_end(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("a🦀")
    stream = TextStream(smollm2)
    assert stream.push(token_ids[:-1]) == "a"
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, 49151), max_size=30))
def test_bytes_of_tokens_concatenate_to_the_text(smollm2: Tokenizer, token_ids: list[int]) -> None:
    """Also for random ids, most of which are invalid UTF-8."""
    joined = b"".join(smollm2.token_bytes(token) for token in token_ids)
    assert joined.decode(errors="replace") == smollm2.decode(token_ids, skip_special_tokens=False)


def test_text_of_single_tokens(smollm2: Tokenizer) -> None:
    assert [smollm2.token_text(token) for token in smollm2.encode("Hi there")] == ["Hi", " there"]
    assert smollm2.token_text(smollm2.encode("🦀")[0]) == "\N{REPLACEMENT CHARACTER}"
    assert smollm2.token_text(0) == "<|endoftext|>"
    assert smollm2.token_bytes(10**6) == b"", "vocabularies are padded: not every id has a token"


def test_bytes_of_sentencepiece_tokens() -> None:
    """A leading space, which decoding strips from a single token, and tokens of single bytes."""
    pieces = ["<unk>", "\N{LOWER ONE EIGHTH BLOCK}Hi", "<0xF0>", "<0xZZ>"]
    backend = Backend(
        models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[], unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend, special_tokens={}, chat_template=None)
    assert [tokenizer.token_bytes(token) for token in (1, 2, 3)] == [b" Hi", b"\xf0", b"<0xZZ>"]


def test_bytes_of_added_tokens_are_those_of_the_text() -> None:
    """Gemma has runs of spaces and of line ends among its added tokens. Grammars need the text that they stand for."""
    block = "\N{LOWER ONE EIGHTH BLOCK}"
    vocabulary = {"<unk>": 0, "a": 1, block: 2, 2 * block: 3, "\n\n": 4}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[(block, block)], unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", block)
    backend.decoder = decoders.Sequence([decoders.Replace(block, " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken(text, normalized=False) for text in (2 * block, "\n\n")])
    backend.add_special_tokens([AddedToken(f"<start{block}of>", normalized=False)])
    tokenizer = Tokenizer(backend, special_tokens={}, chat_template=None)
    tokens = tokenizer.encode("a  a\n\na")
    assert tokens == [1, 3, 1, 4, 1]
    assert b"".join(map(tokenizer.token_bytes, tokens)) == b"a  a\n\na"
    assert tokenizer.token_text(5) == f"<start{block}of>"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer is of kind 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
    ],
)
def test_unknown_gguf_tokenizers_are_refused(change: dict[str, str], message: str) -> None:
    file = GgufFile(locate_model("smollm2").path)
    file.metadata.update(change)
    with pytest.raises(StartupError, match=message):
        gguf_tokenizer(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.merges": ["ab"]}, r"merges is damaged: 'ab' is not two parts with a space between"),
        ({"tokenizer.ggml.merges": ["a "]}, r"merges is damaged: 'a ' is not two parts with a space between"),
        ({"tokenizer.ggml.merges": ["a no-such-token"]}, r"merges is damaged: "),
        ({"tokenizer.ggml.merges": [7]}, r"merges is damaged: entry 0 must be text, got 7"),
        ({"tokenizer.ggml.merges": 7}, r"merges is missing"),
        ({"tokenizer.ggml.tokens": ["a", 7]}, r"tokens is damaged: entry 1 must be text, got 7"),
        ({"tokenizer.ggml.token_type": 7}, r"token_type is damaged: must be a list, got 7"),
    ],
)
def test_damaged_gguf_tokenizer_is_reported_in_one_line(change: dict[str, Any], message: str) -> None:
    file = GgufFile(locate_model("smollm2").path)
    file.metadata.update(change)
    with pytest.raises(StartupError, match=f"^model .*: tokenizer.ggml.{message}") as refused:
        gguf_tokenizer(file)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("kind", ["qwen2", "llama-bpe", "gpt-2"])
def test_other_gguf_pre_tokenizers_equal_the_originals(kind: str) -> None:
    """Compares only the pre-tokenizers with those of transformers; the vocabulary is SmolLM2's."""
    file = GgufFile(locate_model("smollm2").path)
    file.metadata["tokenizer.ggml.pre"] = kind
    del file.metadata["tokenizer.ggml.add_bos_token"]
    ours = gguf_tokenizer(file)
    if kind == "qwen2":
        theirs = transformers.Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    elif kind == "gpt-2":
        theirs = transformers.GPT2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer
    else:
        theirs = Backend(ours.model)
        theirs.pre_tokenizer = PreTokenizers(
            [
                Split(Regex(TikTokenConverter(vocab_file="unused").pattern), behavior="isolated", invert=False),
                ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    # Llama 3 adds BOS by default, the others only if the file sets it
    assert ours.encode("ab").tokens[:1] == (["<|im_start|>"] if kind == "llama-bpe" else ["ab"])
    for text in TEXTS:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text)
