"""Loads checkpoint files into a model's memory, one tensor at a time, without a second copy of the model."""

import logging
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...common.errors import StartupError
from ...common.progress import ProgressLog
from ...configs.setting_types import LoadFormat
from ...memory.sizing import GIB
from ..config.model import ModelConfig
from ..config.sharding import WHOLE, Shard
from ..decoders.dense_parameters import DecoderParameters
from ..decoders.latent_parameters import LatentParameters
from ..decoders.rank_parameters import EMBEDDING, HEAD
from ..formats.json_fields import shown
from ..formats.model_files import open_model_file, safetensors_header
from ..registry import family_of
from ..weights import gguf
from ..weights.format import Checkpoint, Format, StoredCheckpoint, format_of
from ..weights.slots import Slot
from .catalog import WEIGHT_FILE, WEIGHT_INDEX, ModelSource, indexed_tensors, safetensors_files

log = logging.getLogger(__name__)

_HEAD, _EMBEDDING = f"{HEAD}.weight", f"{EMBEDDING}.weight"
_ROWS_COMPARED = 4096


def allocate_parameters(
    config: ModelConfig,
    shard: Shard = WHOLE,
    *,
    device: torch.device,
    dtype: torch.dtype,
    stored: Format | None = None,
) -> DecoderParameters | LatentParameters:
    """Uninitialised weights of the architecture; raises StartupError if the model cannot be divided like this. `stored`
    has the tensors to keep as they are stored where possible.
    """
    config.check_shares(shard)
    kind = DecoderParameters if config.mla is None else LatentParameters
    step = family_of(config).attention_step
    return kind.allocate(config, shard, device=device, dtype=dtype, stored=stored, step=step)


def tensor_names(config: ModelConfig) -> Collection[str]:
    """The tensors that a checkpoint of the whole model has."""
    return allocate_parameters(config, device=torch.device("meta"), dtype=torch.float32).slots().keys()


def load_weights(source: ModelSource, slots: Mapping[str, Slot], names: Collection[str] | None = None) -> None:
    """Fill every slot (slots.py); raises StartupError naming a missing, extra or misshapen tensor.

    `names` are the tensors of the whole model, if the slots are only those of a rank.
    """
    checkpoint = open_checkpoint(source)
    for name, slot in slots.items():
        shape = checkpoint.shapes.get(name)
        if shape is None:
            raise StartupError(f"model {source.path}: tensor {name!r} is missing; expected shape {list(slot.shape)}")
        if shape != slot.shape:
            raise StartupError(
                f"model {source.path}: tensor {name!r} has shape {list(shape)}, "
                f"the configuration expects {list(slot.shape)}"
            )
    known = set(slots if names is None else names)
    unexpected = sorted(name for name in checkpoint.shapes.keys() - known if not _IGNORED.search(name))
    if isinstance(checkpoint, StoredCheckpoint):
        unexpected = [name for name in unexpected if not checkpoint.is_filler(name)]
    if source.config.tied_embeddings and _HEAD in unexpected:
        _check_tied_head(SafetensorsCheckpoint(source.path, source.config))
        unexpected.remove(_HEAD)  # some tools save the tied matrix twice
    if unexpected:
        raise StartupError(
            f"model {source.path}: tensor {unexpected[0]!r} is not part of {source.config.architecture}"
            + (f", nor are {len(unexpected) - 1} others" if len(unexpected) > 1 else "")
        )
    total_bytes = sum(slot.nbytes for slot in slots.values())
    progress = ProgressLog(log, "weights: %.1f of %.1f GiB are loaded", total_bytes / GIB)
    for name, slot in slots.items():
        checkpoint.read_into(name, slot)
        if slot.offset:
            slot.target.add_(slot.offset)
        progress.add(slot.nbytes / GIB)


def _check_tied_head(files: "SafetensorsCheckpoint") -> None:
    """Raise StartupError if the head is not the embedding: transformers would not tie them. A quantised copy differs
    only by rounding.
    """
    quantised = any(name.startswith(f"{_HEAD}_") for name in files.shapes)
    if _HEAD in files.shapes and not quantised and not files.are_equal(_HEAD, _EMBEDDING):
        raise StartupError(
            f"model {files.directory}: tensor {_HEAD!r} is not the same as {_EMBEDDING!r}, and config.json says "
            "tie_word_embeddings: set that to false to use both"
        )


# Derived from the configuration; old checkpoints saved it.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def open_checkpoint(source: ModelSource) -> Checkpoint:
    if source.format == "gguf":
        return gguf.open_file(source.path, _rotated_head(source.config))
    files, scheme = SafetensorsCheckpoint(source.path, source.config), source.config.scheme
    return files if scheme is None else format_of(scheme).open(scheme, files)


def _rotated_head(config: ModelConfig) -> int | None:
    return config.head_dim if family_of(config).gguf_interleaved else None


def stored_format(source: ModelSource, load_format: LoadFormat) -> Format | None:
    """The format of the checkpoint, with the tensors in it that kernels can read somewhere; with dummy weights, those
    that such a checkpoint usually has. None if there are none.
    """
    if source.format == "gguf":
        if load_format == "dummy":
            return None
        return gguf.stored_in(gguf.open_file(source.path, _rotated_head(source.config)))
    if load_format == "dummy":
        return usual_format(source.config)
    scheme = source.config.scheme
    if scheme is None or not (found := format_of(scheme)).keeps(scheme):
        return None
    return found(scheme, found.open(scheme, SafetensorsCheckpoint(source.path, source.config)).tensors)


@lru_cache(maxsize=4)
def usual_format(config: ModelConfig) -> Format | None:
    """The format of a model, with the tensors that checkpoints usually have in it.

    Cached, because plans ask for the same model with several layouts, and each call takes a second for a model with
    many experts.
    """
    scheme = config.scheme
    if scheme is None or not (found := format_of(scheme)).keeps(scheme):
        return None
    slots = allocate_parameters(config, device=torch.device("meta"), dtype=torch.bfloat16).slots()
    return found(scheme, found.usual({name: slot.shape for name, slot in slots.items()}))


class SafetensorsCheckpoint:
    """One or several memory-mapped safetensors files, without tensors that nothing uses."""

    def __init__(self, directory: Path, config: ModelConfig) -> None:
        self.directory = directory
        shapes: dict[str, tuple[int, ...]] = {}
        placed: dict[str, str] | None = None
        self._file_of: dict[str, Any] = {}  # safe_open is an extension type without annotations
        for path in safetensors_files(directory):
            with open_model_file(path) as opened:
                safetensors_header(path, opened)
            try:
                file: Any = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise StartupError(f"model {path}: not a readable safetensors file: {error}") from error
            for name in file.keys():  # noqa: SIM118 - not a dict, only .keys() exists
                if name in shapes:
                    if placed is None and (directory / WEIGHT_INDEX).is_file():
                        placed = indexed_tensors(directory / WEIGHT_INDEX, f"model {directory}")
                    if (own := (placed or {}).get(name)) is None:
                        raise StartupError(
                            f"model {directory}: several files have the tensor {shown(name)}, and no {WEIGHT_INDEX} "
                            f"says which counts: keep the files of one format, or call the one to use {WEIGHT_FILE}"
                        )
                    if directory / own != path:
                        continue
                shapes[name] = tuple(file.get_slice(name).get_shape())
                self._file_of[name] = file
        family = family_of(config)
        self.shapes = {name: shape for name, shape in shapes.items() if not family.is_unused(name, config)}

    def read_into(self, name: str, slot: Slot) -> None:
        if slot.fills_whole:
            slot.target.copy_(self._file_of[name].get_tensor(name))
            return
        wanted = tuple(slice(start, start + size) for start, size in zip(slot.start, slot.target.shape, strict=True))
        slot.target.copy_(self._file_of[name].get_slice(name)[wanted])

    def are_equal(self, first: str, second: str) -> bool:
        """Whether two matrices have the same values. They are read in pieces."""
        if self.shapes[first] != self.shapes[second]:
            return False
        parts = [self._file_of[name].get_slice(name) for name in (first, second)]
        return all(
            torch.equal(*(part[start : start + _ROWS_COMPARED].float() for part in parts))
            for start in range(0, self.shapes[first][0], _ROWS_COMPARED)
        )
