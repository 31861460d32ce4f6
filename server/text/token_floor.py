"""How many tokens a long text has at least, found without tokenizing all of it.

To tokenize a megabyte takes about a second and 200 MB. A text that is too long for the model must not cost that much.
Two questions come first, the cheaper one before the other:

1. Has it more bytes than so many of the longest tokens? Then it has more tokens. This needs a tokenizer in which every
   byte of the text is in some token: byte-level BPE, or BPE that falls back to bytes, with rules that drop nothing.
2. How many tokens have its first slices, tokenized one by one? A cut may split a word and add a few tokens, which are
   not counted.
"""

import json
import math
import unicodedata
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import tokenizers

from .byte_level import BYTE_LEVEL

SMALL_BYTES_PER_TOKEN = 8
"""Text of fewer bytes per token that fits is not looked at here. Ordinary text has about four."""
SLICE_CHARACTERS = 32 << 10
CUT_TOKENS = 16
"""More than a cut between two slices adds."""

_KEEPING_NORMALIZERS = frozenset({"NFC", "Prepend"})
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
_KEEPING_IF_NOT_REMOVED = frozenset({"Split", "Punctuation"})
_SPACE_AS_BLOCK = {"pattern": {"String": " "}, "content": "\N{LOWER ONE EIGHTH BLOCK}"}


class TokenFloor:
    """Lower bounds of the number of tokens of a text. `token_bytes` gives the text that a token stands for."""

    def __init__(self, backend: tokenizers.Tokenizer, token_bytes: Callable[[int], bytes]) -> None:
        self._backend = backend
        self._token_bytes = token_bytes

    def above(self, text: str, limit: int) -> int | None:
        """A number of tokens above `limit` that `text` has at least; None when it may have fewer, or is short."""
        if len(text.encode(errors="replace")) <= SMALL_BYTES_PER_TOKEN * limit:
            return None
        by_bytes = self._by_bytes(text)
        return by_bytes if by_bytes > limit else self._by_slices(text, limit)

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of text that one token stands for; None where there is no such bound."""
        if not _keeps_every_byte(self._backend):
            return None
        return max(len(self._token_bytes(token)) for token in self._backend.get_vocab(with_added_tokens=True).values())

    def _by_bytes(self, text: str) -> int:
        if self.longest_token_bytes is None:
            return 0
        composed = unicodedata.normalize("NFC", text)  # what a tokenizer may do first; it makes some text shorter
        known = composed.encode(errors="replace").translate(None, self._unknown_bytes)
        return math.ceil(len(known) / self.longest_token_bytes)

    @cached_property
    def _unknown_bytes(self) -> bytes:
        """Bytes that are in no token of a byte-level vocabulary, such as control characters: they are left out."""
        if not _is_byte_level(self._backend):
            return b""
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        return b"".join(byte for symbol, byte in BYTE_LEVEL.items() if symbol not in vocabulary)

    def _by_slices(self, text: str, limit: int) -> int | None:
        counted = 0
        for start in range(0, len(text), SLICE_CHARACTERS):
            piece = text[start : start + SLICE_CHARACTERS]
            (encoding,) = self._backend.encode_batch_fast([piece], add_special_tokens=False)
            counted += max(0, len(encoding) - CUT_TOKENS)
            if counted > limit:
                return counted
        return None


def _keeps_every_byte(backend: tokenizers.Tokenizer) -> bool:
    """Whether no rule of the tokenizer drops text that the model knows, or puts any amount of it into one token."""
    return (
        all(_keeps(step, _KEEPING_NORMALIZERS) for step in _steps(backend.normalizer))
        and all(_keeps(step, _KEEPING_PRE_TOKENIZERS) for step in _steps(backend.pre_tokenizer))
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        and _is_made_of_bytes(backend)
    )


def _keeps(step: dict[str, Any], keeping: frozenset[str]) -> bool:
    kind = step["type"]
    if kind == "Replace":
        return all(step[name] == value for name, value in _SPACE_AS_BLOCK.items())
    return kind in keeping or (kind in _KEEPING_IF_NOT_REMOVED and step["behavior"] != "Removed")


def _is_made_of_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether characters that are no tokens are made of tokens that are bytes. Others would run together into one token
    for all that is unknown.
    """
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if _is_byte_level(backend):
        return True
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return any(step["type"] == "ByteLevel" for step in _steps(backend.pre_tokenizer))


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The single steps of a normalizer or pre-tokenizer; only its pickled state, which is JSON, names them."""
    if component is not None:
        yield from _flattened(json.loads(component.__getstate__()))


def _flattened(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
    for step in (*state.get("normalizers", ()), *state.get("pretokenizers", ())):
        yield from _flattened(step)
