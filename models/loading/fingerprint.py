"""Checksums of a model, equal on two servers if and only if they have the same model. No torch.

Prefill and decode compare them when they pair. A fingerprint covers the configuration, every tensor's name, shape and
type, and 4 KiB from the middle of each tensor: enough to distinguish fine-tunes, with one short read per tensor. Random
weights (dummy_weights.py) follow from the configuration.

The configuration is config.json, or the metadata of a GGUF file, without what no result depends on: fields that are
null, `NOTES` about the file and its training, and of a GGUF file all that is not about its architecture (names,
authors, the tokenizer). A field that nobody knows counts: it may be why two models differ.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import xxhash

from ...common.errors import StartupError
from ...configs.setting_types import LoadFormat
from ..formats.gguf_file import open_gguf
from ..formats.json_fields import Json, bare, read_json
from ..formats.model_files import open_model_file, safetensors_header
from .catalog import ModelSource, safetensors_files
from .protocol3_fingerprint import protocol3_configuration

NOTES = frozenset(
    {
        # where the file comes from, and who wrote it
        "_name_or_path", "_commit_hash", "_source", "auto_map", "model_name", "transformers_version",
        # how to run it: a setting of the server
        "_attn_implementation", "attn_implementation", "use_cache", "use_return_dict", "return_dict", "torchscript",
        "output_attentions", "output_hidden_states", "output_router_logits",
        # tokens that only begin and end texts
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        # training
        "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout", "initializer_range",
        "gradient_checkpointing", "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise", "aux_loss_alpha",
        "seq_aux", "ep_size",
    }
)  # fmt: skip
"""Fields of config.json, at any depth, that no result depends on."""

_SAMPLE_BYTES = 4096

_Offset = Annotated[int, msgspec.Meta(ge=0)]


class _Entry(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[_Offset, _Offset]


TensorRecord = tuple[str, list[int], str, bytes]


@dataclass(frozen=True)
class Fingerprints:
    """Both checksums of a model, as 32 hexadecimal digits. Independent of paths, sharding and the order of tensors."""

    model: str
    """The one to show and to compare."""
    protocol3: str
    """For servers that know no other (protocol3_fingerprint.py)."""


def fingerprints(source: ModelSource, load_format: LoadFormat = "auto") -> Fingerprints:
    """Reads the samples once."""
    model = xxhash.xxh3_128(b"model 1\n" + _configuration(source))
    protocol3 = xxhash.xxh3_128(protocol3_configuration(source.config))
    for part in _parts(source, load_format):
        model.update(part)
        protocol3.update(part)
    return Fingerprints(model.hexdigest(), protocol3.hexdigest())


def _configuration(source: ModelSource) -> bytes:
    if source.format == "gguf":
        file = open_gguf(source.path)
        about = ("general.architecture", f"{file.architecture}.")
        fields: Json = {name: value for name, value in file.metadata.items() if name.startswith(about)}
    else:
        path = source.path / "config.json"
        try:
            fields = _normalised(read_json(path))
        except RecursionError:
            raise StartupError(f"{path}: its values are nested too deep") from None
    return json.dumps(fields, sort_keys=True).encode()


def _normalised(value: Any) -> Any:
    """Without NOTES and nulls; 10000.0 and 10000 are the same number."""
    if isinstance(value, dict):
        return {name: _normalised(part) for name, part in value.items() if part is not None and name not in NOTES}
    if isinstance(value, list):
        return [_normalised(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parts(source: ModelSource, load_format: LoadFormat) -> Iterator[bytes]:
    """What a fingerprint covers of the weights."""
    if load_format == "dummy":
        yield b"dummy"
        return
    records = _gguf_records(source.path) if source.format == "gguf" else _safetensors_records(source.path)
    for name, shape, dtype, sample in sorted(records):
        yield json.dumps([name, shape, dtype, len(sample)]).encode()
        yield sample


def _gguf_records(path: Path) -> Iterator[TensorRecord]:
    file = open_gguf(path)
    for tensor in file.tensors.values():
        sample = file.read_bytes(tensor, tensor.size_bytes // 2, _SAMPLE_BYTES)
        yield tensor.name, list(tensor.shape), tensor.type_name, sample


def _safetensors_records(directory: Path) -> Iterator[TensorRecord]:
    for path in safetensors_files(directory):
        with open_model_file(path) as file:
            try:
                yield from _file_records(path, file)
            except OSError as error:
                raise StartupError(f"model {path}: cannot be read: {error.strerror}") from None


def _file_records(path: Path, file: BinaryIO) -> Iterator[TensorRecord]:
    text = safetensors_header(path, file)
    first, size = file.tell(), os.fstat(file.fileno()).st_size
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StartupError(f"model {path}: the safetensors header is damaged: {bare(error)}") from error
    for name, entry in entries.items():
        start, end = entry.data_offsets
        if not start <= end <= size - first:
            raise StartupError(
                f"model {path}: the safetensors header is damaged: {bare(name)} is at {start} to {end} of "
                f"{size - first} bytes"
            )
        middle = (start + end) // 2
        file.seek(first + middle)
        yield name, entry.shape, entry.dtype, file.read(min(_SAMPLE_BYTES, end - middle))
