"""What a Hugging Face directory has about its tokenizer beside tokenizer.json: special tokens, templates. No torch."""

from pathlib import Path
from typing import Any

import msgspec

from ...common.errors import StartupError
from .json_fields import read_json
from .model_files import read_model_file

MOST_TOKENIZER_BYTES = 64 << 20
"""The largest tokenizer.json, twice that of the largest known vocabularies."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    """The part of tokenizer.json that is decoded: vocabularies have megabytes."""

    added_tokens: list[_AddedToken] = []


def read_tokenizer_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json over special_tokens_map.json; both are optional. Raises StartupError."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            settings.update(read_json(path))
    return settings


def special_token_text(value: object) -> str | None:
    """Special tokens are strings, or objects that describe one."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def tokenizer_end_token(directory: Path) -> int | None:
    """The id of the tokenizer's own end token, which fine-tuned models may have beside that of their configuration.
    None if there is none, or if tokenizer.json cannot be read: then it is refused when it is loaded.
    """
    text = special_token_text(read_tokenizer_settings(directory).get("eos_token"))
    path = directory / "tokenizer.json"
    if text is None or not path.is_file():
        return None
    try:
        content = read_model_file(path, MOST_TOKENIZER_BYTES)
        added = msgspec.json.decode(content, type=_TokenizerFile).added_tokens
    except (StartupError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return next((token.id for token in added if token.content == text and token.id >= 0), None)
