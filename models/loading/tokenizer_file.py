"""Reads the tokenizer of a model. No torch: the frontend uses it too."""

import tokenizers

from ...configs.errors import StartupError
from ..formats.gguf_file import open_gguf
from ..formats.gguf_tokenizer import gguf_tokenizer
from .catalog import ModelSource


def read_tokenizer(source: ModelSource) -> tokenizers.Tokenizer:
    """The tokenizer of a located model: tokenizer.json, or built from GGUF metadata. Raises StartupError."""
    if source.format == "gguf":
        return gguf_tokenizer(open_gguf(source.path))
    path = source.path / "tokenizer.json"
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for everything
        raise StartupError(f"{path}: cannot be read: {error}") from error
