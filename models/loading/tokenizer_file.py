"""Reads the tokenizer of a model. No torch: the frontend uses it too."""

import tokenizers

from ...common.errors import StartupError
from ..formats.gguf_file import open_gguf
from ..formats.gguf_tokenizer import gguf_tokenizer
from ..formats.json_fields import bare
from ..formats.model_files import check_values, read_model_file
from ..formats.tokenizer_settings import MOST_TOKENIZER_BYTES
from .catalog import ModelSource

_MOST_VALUES = 3 << 20


def read_tokenizer(source: ModelSource) -> tokenizers.Tokenizer:
    """The tokenizer of a located model: tokenizer.json, or built from GGUF metadata. Raises StartupError."""
    if source.format == "gguf":
        return gguf_tokenizer(open_gguf(source.path))
    path = source.path / "tokenizer.json"
    text = read_model_file(path, MOST_TOKENIZER_BYTES)
    check_values(path, text, _MOST_VALUES)
    try:
        return tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises bare Exception for everything
        raise StartupError(f"{path}: cannot be read: {bare(error)}") from error
    except BaseException as error:
        if not is_panic(error):
            raise
        raise StartupError(f"{path}: cannot be read: {bare(error)}") from error


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library has panicked; its exception is not an Exception, and has no module to import it from."""
    return type(error).__name__ == "PanicException"
