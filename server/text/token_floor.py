"""Finds a lower bound of the number of tokens of a long text without tokenizing all of it.

Tokenizing a megabyte takes about a second and 200 MB. A text that is too long for the model must not cost that much.
Two bounds are tried, the cheaper one first:

1. The number of bytes divided by the length of the longest token. This needs a tokenizer that puts every byte of the
   text into some token: byte-level BPE, or BPE with byte fallback, with rules that drop nothing.
2. The number of tokens of the first slices, tokenized one by one. A cut between slices may split a word and so add a
   few tokens; these are subtracted.
"""

import math
import unicodedata
from collections.abc import Callable
from functools import cached_property
from typing import Any

import tokenizers

from ...models.formats.byte_level import BYTE_LEVEL
from ...models.formats.token_bytes import steps_of

SMALL_BYTES_PER_TOKEN = 8
"""Text of at most this many bytes per token of the limit is not checked here, because it may fit: ordinary text has
about four bytes per token."""
SLICE_CHARACTERS = 32 << 10
CUT_TOKENS = 16
"""Tokens that are subtracted for each slice: more than a cut can add."""

_KEEPING_NORMALIZERS = frozenset({"NFC", "Prepend"})
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace"})
_KEEPING_IF_NOT_REMOVED = frozenset({"Split", "Punctuation"})
_SPACE_AS_BLOCK = {"pattern": {"String": " "}, "content": "\N{LOWER ONE EIGHTH BLOCK}"}


class TokenFloor:
    """Lower bounds of the number of tokens of a text. `token_bytes` returns the bytes of a token."""

    def __init__(self, backend: tokenizers.Tokenizer, token_bytes: Callable[[int], bytes]) -> None:
        self._backend = backend
        self._token_bytes = token_bytes

    def above(self, text: str, limit: int) -> int | None:
        """Returns a lower bound of the tokens of `text` if the bound is above `limit`; otherwise, and for short text,
        None.
        """
        if len(text.encode(errors="replace")) <= SMALL_BYTES_PER_TOKEN * limit:
            return None
        by_bytes = self._by_bytes(text)
        return by_bytes if by_bytes > limit else self._by_slices(text, limit)

    @cached_property
    def longest_token_bytes(self) -> int | None:
        """The most bytes of text in one token; None when there is no bound."""
        if not _keeps_every_byte(self._backend):
            return None
        return max(len(self._token_bytes(token)) for token in self._backend.get_vocab(with_added_tokens=True).values())

    def _by_bytes(self, text: str) -> int:
        if self.longest_token_bytes is None:
            return 0
        composed = unicodedata.normalize("NFC", text)  # the tokenizer may do this first, which makes some text shorter
        known = composed.encode(errors="replace").translate(None, self._unknown_bytes)
        return math.ceil(len(known) / self.longest_token_bytes)

    @cached_property
    def _unknown_bytes(self) -> bytes:
        """Bytes that no token of a byte-level vocabulary has, such as control characters: the tokenizer drops them."""
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
    """Whether the tokenizer keeps all text and puts a bounded amount of it into each token."""
    return (
        all(_keeps(step, _KEEPING_NORMALIZERS) for step in steps_of(backend.normalizer))
        and all(_keeps(step, _KEEPING_PRE_TOKENIZERS) for step in steps_of(backend.pre_tokenizer))
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        and _is_made_of_bytes(backend)
    )


def _keeps(step: dict[str, Any], keeping: frozenset[str]) -> bool:
    kind = step["type"]
    if kind == "Replace":
        return all(step[name] == value for name, value in _SPACE_AS_BLOCK.items())
    return kind in keeping or (kind in _KEEPING_IF_NOT_REMOVED and step["behavior"] != "Removed")


def _is_made_of_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether unknown characters become byte tokens. Otherwise any number of them could become one unknown token."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False
    if _is_byte_level(backend):
        return True
    vocabulary = backend.get_vocab(with_added_tokens=False)
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    return any(step["type"] == "ByteLevel" for step in steps_of(backend.pre_tokenizer))
