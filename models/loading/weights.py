"""Loads checkpoint files into a model's memory, one tensor at a time, without a second copy of the model."""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...configs.errors import StartupError
from ...configs.progress import ProgressLog
from ...kernels.gguf.blocks import block_size
from ...kernels.gguf.interleaved import interleave
from ...memory.sizing import GIB
from ..config.model import ModelConfig
from ..decoders.rank_parameters import EMBEDDING, HEAD
from ..decoders.slots import Slot
from ..formats.gguf_file import GgufFile, GgufTensor, open_gguf
from ..formats.json_fields import shown
from ..formats.model_files import open_model_file, safetensors_header
from .block_scaled_checkpoint import BlockScaledCheckpoint
from .catalog import WEIGHT_FILE, WEIGHT_INDEX, ModelSource, indexed_tensors, safetensors_files
from .checkpoint import Checkpoint
from .int4_checkpoint import Int4Checkpoint
from .mxfp4_checkpoint import Mxfp4Checkpoint
from .row_scaled_checkpoint import RowScaledCheckpoint

log = logging.getLogger(__name__)

_ROWS_COMPARED = 4096


def load_weights(source: ModelSource, slots: Mapping[str, Slot], names: Collection[str] | None = None) -> None:
    """Fill every slot (dense_parameters.py); raises StartupError naming a missing, extra or misshapen tensor.

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
    if isinstance(checkpoint, Int4Checkpoint):
        unexpected = [name for name in unexpected if not checkpoint.is_zero_bias(name)]
    if source.config.tied_embeddings and HEAD in unexpected:
        _check_tied_head(SafetensorsCheckpoint(source.path))
        unexpected.remove(HEAD)  # some tools save the tied matrix twice
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
    quantised = any(name.startswith(f"{HEAD}_") for name in files.shapes)
    if HEAD in files.shapes and not quantised and not files.are_equal(HEAD, EMBEDDING):
        raise StartupError(
            f"model {files.directory}: tensor {HEAD!r} is not the same as {EMBEDDING!r}, and config.json says "
            "tie_word_embeddings: set that to false to use both"
        )


# Derived from the configuration; old checkpoints saved it.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


def open_checkpoint(source: ModelSource) -> Checkpoint:
    if source.format == "gguf":
        return GgufCheckpoint(open_gguf(source.path), source.config)
    files: Checkpoint = SafetensorsCheckpoint(source.path)
    if source.config.int4 is not None:
        files = int4_checkpoint(source)
    if source.config.row_scaled_fp8:
        files = RowScaledCheckpoint(files)
    if source.config.mxfp4_experts:
        return Mxfp4Checkpoint(files)
    plain = source.config.mla is None and source.config.weight_block is None
    return files if plain else BlockScaledCheckpoint(files, source.config)


def int4_checkpoint(source: ModelSource) -> Int4Checkpoint:
    assert source.config.int4 is not None
    return Int4Checkpoint(SafetensorsCheckpoint(source.path), source.config.int4)


class SafetensorsCheckpoint:
    """One or several memory-mapped safetensors files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
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
                if name in self.shapes:
                    if placed is None and (directory / WEIGHT_INDEX).is_file():
                        placed = indexed_tensors(directory / WEIGHT_INDEX, f"model {directory}")
                    if (own := (placed or {}).get(name)) is None:
                        raise StartupError(
                            f"model {directory}: several files have the tensor {shown(name)}, and no {WEIGHT_INDEX} "
                            f"says which counts: keep the files of one format, or call the one to use {WEIGHT_FILE}"
                        )
                    if directory / own != path:
                        continue
                self.shapes[name] = tuple(file.get_slice(name).get_shape())
                self._file_of[name] = file

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


class GgufCheckpoint:
    """A GGUF file with Hugging Face's names. Tensors are dequantised during loading, or copied as blocks."""

    def __init__(self, file: GgufFile, config: ModelConfig) -> None:
        self._file = file
        self._config = config
        self._gguf_names = {hf_name(name): name for name in file.tensors if name != "rope_freqs.weight"}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._gguf_names.items()}
        self.types = {name: file.tensors[stored].type_name for name, stored in self._gguf_names.items()}

    def read_into(self, name: str, slot: Slot) -> None:
        tensor = self._file.tensors[self._gguf_names[name]]
        # llama.cpp interleaves the two halves of each q and k head of Llama models; Hugging Face keeps them apart
        permuted = self._config.architecture == "llama" and _ROTARY.search(name) is not None
        head_dim = self._config.head_dim
        if slot.gguf is not None:
            self._copy_blocks(tensor, slot, head_dim if permuted else None)
            return
        if slot.target.ndim == 1:
            ((_, row),) = self._file.read_rows(tensor)
            values = torch.from_numpy(row)
            values = _unpermute(values.T, head_dim).T if permuted else values
            slot.target.copy_(values[0, slot.start[0] : slot.start[0] + len(slot.target)])
            return
        first_row, first_column = slot.start
        count, columns = slot.target.shape
        wanted = range(first_row, first_row + count)
        for first, rows in self._file.read_rows(tensor, head_dim if permuted else 1, wanted):
            values = torch.from_numpy(rows)
            values = _unpermute(values, head_dim) if permuted else values
            at = first - first_row
            slot.target[at : at + len(rows)].copy_(values[:, first_column : first_column + columns])

    def _copy_blocks(self, tensor: GgufTensor, slot: Slot, head_dim: int | None) -> None:
        """The rows of permuted heads are put in order (`head_dim`); their blocks stay as they are."""
        (first_row, first_column), (rows, row_bytes) = slot.start, slot.target.shape
        elements, size_bytes = block_size(tensor.type_name)
        first_byte = first_column // elements * size_bytes
        stored = self._file.stored_rows(tensor)
        wanted = stored[first_row : first_row + rows, first_byte : first_byte + row_bytes]
        target = slot.target.numpy()
        if head_dim is None:
            target[:] = wanted
        else:
            pairs = wanted.reshape(-1, head_dim // 2, 2, row_bytes)
            target.reshape(-1, 2, head_dim // 2, row_bytes)[:] = pairs.transpose(0, 2, 1, 3)
        if slot.gguf is not None and slot.gguf.interleaved:
            interleave(slot.target, tensor.type_name)


_ROTARY = re.compile(r"self_attn\.[qk]_proj\.(weight|bias)$")


def _unpermute(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows 0, 2, 4, ... of each head first, then rows 1, 3, 5, ..."""
    return rows.view(-1, head_dim // 2, 2, rows.shape[-1]).transpose(1, 2).reshape(rows.shape)


_GGUF_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(gguf_name: str) -> str:
    """`blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`; unknown names stay as they are."""
    module, _, kind = gguf_name.rpartition(".")
    prefix = ""
    if (block := re.fullmatch(r"blk\.(\d+)\.(\w+)", module)) is not None:
        prefix, module = f"model.layers.{block[1]}.", block[2]
    return f"{prefix}{_GGUF_MODULES[module]}.{kind}" if module in _GGUF_MODULES else gguf_name
