"""A checksum of a model, equal on two hosts if and only if they have the same files. No torch.

Prefill and decode compare it when they pair. It covers the configuration, every tensor's name, shape and type, and
4 KiB from the middle of each tensor: enough to distinguish fine-tunes, with one short read per tensor. Random weights
(dummy_weights.py) follow from the configuration.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import xxhash

from ...configs.errors import StartupError
from ...configs.setting_types import LoadFormat
from ..formats.gguf_file import open_gguf
from .catalog import ModelSource, safetensors_files

_SAMPLE_BYTES = 4096
_MAX_HEADER_BYTES = 100 << 20  # the safetensors format's own limit

_MAX_TENSOR_BYTES = 1 << 50

_Offset = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[_Offset, _Offset]


TensorRecord = tuple[str, list[int], str, bytes]


def fingerprint(source: ModelSource, load_format: LoadFormat = "auto") -> str:
    """32 hexadecimal digits. Independent of paths, sharding, the order of tensors and the stop tokens."""
    config = dataclasses.asdict(source.config)
    del config["eos_token_ids"]
    for field in dataclasses.fields(source.config):  # the fingerprint is older than fields with a default
        if field.default is not dataclasses.MISSING and field.name != "mla" and not config[field.name]:
            del config[field.name]
    for name in ("biases", "limit"):
        if config.get("moe") and not config["moe"][name]:
            del config["moe"][name]
    digest = xxhash.xxh3_128(json.dumps(config, sort_keys=True).encode())
    if load_format == "dummy":
        digest.update(b"dummy")
        return digest.hexdigest()
    records = _gguf_records(source.path) if source.format == "gguf" else _safetensors_records(source.path)
    for name, shape, dtype, sample in sorted(records):
        digest.update(json.dumps([name, shape, dtype, len(sample)]).encode())
        digest.update(sample)
    return digest.hexdigest()


def _gguf_records(path: Path) -> Iterator[TensorRecord]:
    file = open_gguf(path)
    for tensor in file.tensors.values():
        sample = file.read_bytes(tensor, tensor.size_bytes // 2, _SAMPLE_BYTES)
        yield tensor.name, list(tensor.shape), tensor.type_name, sample


def _safetensors_records(directory: Path) -> Iterator[TensorRecord]:
    for path in safetensors_files(directory):
        try:
            with path.open("rb") as file:
                yield from _file_records(path, file)
        except OSError as error:
            raise StartupError(f"model {path}: cannot be read: {error.strerror}") from None


def _file_records(path: Path, file: BinaryIO) -> Iterator[TensorRecord]:
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise StartupError(f"model {path}: not a safetensors file (a header of {header_bytes} bytes)")
    try:
        header = msgspec.json.decode(file.read(header_bytes), type=dict[str, Any])
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"model {path}: the safetensors header is damaged: {error}") from error
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if not start <= end <= _MAX_TENSOR_BYTES:
            raise StartupError(f"model {path}: the safetensors header is damaged: {name} is at {start} to {end}")
        middle = (start + end) // 2
        file.seek(8 + header_bytes + middle)
        yield name, entry.shape, entry.dtype, file.read(min(_SAMPLE_BYTES, end - middle))
