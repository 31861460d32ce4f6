"""The bytes of each token of a Hugging Face tokenizer. No torch."""

import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

from .byte_level import BYTE_LEVEL

_BYTE_LEVEL_CHARACTERS = frozenset(BYTE_LEVEL)
_BYTES_AS_CHARACTERS = {ord(character): byte[0] for character, byte in BYTE_LEVEL.items()}
_FALLBACK_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class TokenBytes:
    """`find` returns the bytes that a token adds to a text. `special` are the tokens that are not text. `byte_tokens`
    are those of single bytes, by byte, of a tokenizer that has one for each (byte fallback); otherwise empty.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._decoder_kinds = {step["type"] for step in steps_of(backend.decoder)}
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        # those of Gemma are pieces of text, with a block for each space like all others
        as_they_are = added if "ByteLevel" in self._decoder_kinds else self.special
        self._added = {token_id: added[token_id].content for token_id in as_they_are}
        found = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        has_all = "ByteFallback" in self._decoder_kinds and None not in found.values()
        self.byte_tokens = {byte: token for byte, token in found.items() if has_all and token is not None}

    def find(self, token_id: int) -> bytes:
        """May be a part of a character; none for an unknown id."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoder_kinds:
            if _BYTE_LEVEL_CHARACTERS.issuperset(piece):  # nearly all: ten times faster than one by one
                return str(piece).translate(_BYTES_AS_CHARACTERS).encode("latin-1")
            return b"".join(BYTE_LEVEL.get(character) or character.encode() for character in piece)
        if "ByteFallback" in self._decoder_kinds and _FALLBACK_BYTE.fullmatch(piece):
            return bytes([int(piece[3:-1], 16)])
        if self._decoder_kinds & {"ByteFallback", "Metaspace"}:
            return str(piece).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()


def steps_of(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer, pre-tokenizer or decoder. Only its pickled state, which is JSON, lists them."""
    if component is not None:
        yield from _flattened(json.loads(component.__getstate__()))


def _flattened(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
    for step in (*state.get("normalizers", ()), *state.get("pretokenizers", ()), *state.get("decoders", ())):
        yield from _flattened(step)
