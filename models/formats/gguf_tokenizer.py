"""The tokenizer of a GGUF file, built from its metadata like the model's own tokenizer.json.

GGUF names a pre-tokenizer but does not contain its rules, so only known names are accepted: a wrong split would only
show as slightly worse text.
"""

from collections.abc import Sequence
from typing import cast

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC, Normalizer
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.processors import TemplateProcessing

from ...common.errors import StartupError
from .gguf_file import GgufFile
from .json_fields import shown

_CONTROL, _USER_DEFINED = 3, 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ROLES = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Build it; raises StartupError for unsupported kinds and for damaged metadata."""
    model = file.metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise StartupError(
            f"model {file.path}: its tokenizer is of kind {shown(model)}; of GGUF files only byte-level BPE ('gpt2') "
            "is supported: give --model the Hugging Face directory instead"
        )
    kind = str(file.metadata.get("tokenizer.ggml.pre", "missing"))
    tokens = _strings(file, "tokenizer.ggml.tokens")
    merges = [_merge(file, merge) for merge in _strings(file, "tokenizer.ggml.merges")]
    normalizer, pre_tokenizer, ignore_merges = _rules(file, kind)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges))
    except Exception as error:  # the library raises bare Exception for everything
        raise StartupError(f"model {file.path}: tokenizer.ggml.merges is damaged: {error}") from error
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = ByteLevelDecoder()
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise StartupError(
            f"model {file.path}: tokenizer.ggml.token_type is damaged: must be a list, got {shown(types)}"
        )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=token_type == _CONTROL, normalized=False)
            for token, token_type in zip(tokens, types, strict=False)
            if token_type in (_CONTROL, _USER_DEFINED)
        ]
    )
    bos = gguf_special_tokens(file).get("bos_token")
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", kind == "llama-bpe"):
        tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return tokenizer


def gguf_special_tokens(file: GgufFile) -> dict[str, str]:
    """Texts of the special tokens by Hugging Face's role names."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    ids = {role: file.metadata.get(key) for role, key in _ROLES.items()}
    return {role: tokens[index] for role, index in ids.items() if isinstance(index, int) and 0 <= index < len(tokens)}


def _rules(file: GgufFile, kind: str) -> tuple[Normalizer | None, PreTokenizer, bool]:
    """Normaliser, pre-tokenizer, and whether a word that is a token skips the merges."""
    match kind:
        case "smollm":
            return None, PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]), False
        case "gpt-2":
            return None, ByteLevel(add_prefix_space=False), False
        case "qwen2":
            return NFC(), _split_then_bytes(_WORDS % ""), False
        case "llama-bpe":
            return None, _split_then_bytes(_WORDS % "{1,3}"), True
    raise StartupError(
        f"model {file.path}: pre-tokenizer {shown(kind)} is not supported (supported are smollm, gpt-2, qwen2, "
        "llama-bpe); give --model the Hugging Face directory instead"
    )


def _split_then_bytes(pattern: str) -> PreTokenizer:
    split = Split(Regex(pattern), behavior="isolated", invert=False)
    return PreTokenizers([split, ByteLevel(add_prefix_space=False, use_regex=False)])


def _merge(file: GgufFile, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise StartupError(
            f"model {file.path}: tokenizer.ggml.merges is damaged: {merge[:80]!r} is not two parts with a space between"
        )
    return left, right


def _strings(file: GgufFile, key: str) -> Sequence[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise StartupError(f"model {file.path}: {key} is missing")
    for index, text in enumerate(value):
        if not isinstance(text, str):
            raise StartupError(f"model {file.path}: {key} is damaged: entry {index} must be text, got {shown(text)}")
    return cast("list[str]", value)
