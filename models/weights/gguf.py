"""Weights in the blocks of a GGUF file (kernels/gguf/blocks.py). Matrices stay in blocks on CPUs with Numba if a rank's
columns are whole blocks; others are expanded.
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from ...configs.setting_types import CpuKernelsSetting, DtypeSetting
from ...kernels.backends.dispatch import numba_computes
from ...kernels.gguf.blocks import PACKED_TYPES, GgufBlocks, GgufRows, block_size, fits_blocks
from ...kernels.gguf.gguf_linear import gguf_gated_linear, gguf_linear, gguf_rows
from ...kernels.gguf.interleaved import interleave
from ...kernels.layer_stack.layer_stack import Linear
from ...kernels.linear.swiglu import swiglu
from ...memory.sizing import GIB
from ..formats.gguf_file import GgufFile, GgufTensor, open_gguf
from .format import Format, Matrix
from .slots import Slot
from .weight import Weight

log = logging.getLogger(__name__)


def keeps_blocks(dtype: DtypeSetting, cpu_kernels: CpuKernelsSetting, device: torch.device) -> bool:
    """Whether a server with these settings computes with the blocks of a GGUF file. Only the Numba kernels read blocks,
    and if the user sets a dtype, the weights are converted to it.
    """
    return dtype == "auto" and device.type == "cpu" and numba_computes(cpu_kernels)


class GgufWeight(Weight[GgufBlocks]):
    @property
    def part(self) -> GgufRows:
        """Of a matrix of one type, such as those that one tensor fills."""
        (part,) = self.operand.parts
        return part

    @property
    def values(self) -> torch.Tensor:
        return self.part.blocks

    def expanded(self) -> torch.Tensor:
        return self.operand.expanded()

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return gguf_linear(x, self.operand, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gelu: bool = False) -> torch.Tensor:
        if (gated := gguf_gated_linear(x, self.operand, bias, gelu=gelu)) is not None:
            return gated
        return swiglu(self.linear(x, bias), gelu=gelu)

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        return gguf_rows(self.operand, indices)

    def in_stack(self, bias: torch.Tensor | None) -> Linear | None:
        return Linear(self.operand, bias)


class GgufCheckpoint:
    """A GGUF file with Hugging Face's names. Tensors are dequantised during loading, or copied as blocks."""

    def __init__(self, file: GgufFile, rotated_head: int | None) -> None:
        """`rotated_head` is the size of heads if llama.cpp interleaves the two halves of each q and k head, as it does
        in Llama models: Hugging Face keeps them apart.
        """
        self._file = file
        self._rotated_head = rotated_head
        self._gguf_names = {hf_name(name): name for name in file.tensors if name != "rope_freqs.weight"}
        self.shapes = {name: file.tensors[stored].shape for name, stored in self._gguf_names.items()}
        self.types = {name: file.tensors[stored].type_name for name, stored in self._gguf_names.items()}

    def read_into(self, name: str, slot: Slot) -> None:
        tensor = self._file.tensors[self._gguf_names[name]]
        head_dim = self._rotated_head if _ROTARY.search(name) is not None else None
        if isinstance(slot.weight, GgufWeight):
            self._copy_blocks(tensor, slot, head_dim, interleaved=slot.weight.part.interleaved)
            return
        if slot.target.ndim == 1:
            ((_, row),) = self._file.read_rows(tensor)
            values = torch.from_numpy(row)
            values = values if head_dim is None else _unpermute(values.T, head_dim).T
            slot.target.copy_(values[0, slot.start[0] : slot.start[0] + len(slot.target)])
            return
        first_row, first_column = slot.start
        count, columns = slot.target.shape
        wanted = range(first_row, first_row + count)
        for first, rows in self._file.read_rows(tensor, head_dim or 1, wanted):
            values = torch.from_numpy(rows)
            values = values if head_dim is None else _unpermute(values, head_dim)
            at = first - first_row
            slot.target[at : at + len(rows)].copy_(values[:, first_column : first_column + columns])

    def _copy_blocks(self, tensor: GgufTensor, slot: Slot, head_dim: int | None, *, interleaved: bool) -> None:
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
        if interleaved:
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


class GgufFormat(Format):
    """Its `tensors` have types."""

    label = "GGUF"
    places = ("layer", "vocabulary")
    reason = "shards that begin or end inside a block, or layers with other types"
    on_cpu = True
    tensors: Mapping[str, str]

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def _divides(self, matrix: Matrix) -> bool:
        types = (self.tensors[part.tensor] for part in matrix.parts)
        return all(fits_blocks(each, matrix.columns, matrix.first_column) for each in types)

    def allocate(self, matrix: Matrix) -> GgufWeight:
        types = [(part.rows.size, self.tensors[part.tensor]) for part in matrix.parts]
        # with padding rows, groups of interleaved rows would not begin with a tensor
        blocks = GgufBlocks.allocate(types, matrix.columns, device=matrix.device, interleave=not matrix.padded)
        return GgufWeight(blocks)

    def log_expansion(self, slots: Mapping[str, Slot], device: torch.device, *, keep: bool) -> None:
        """How much stays in blocks, too."""
        kept = {name: slot for name, slot in slots.items() if name in self.tensors and slot.weight is not None}
        if kept:
            types = Counter(self.tensors[name] for name in kept)
            found = ", ".join(f"{count} of {name}" for name, count in types.most_common())
            log.info("GGUF weights: %.2f GiB stay quantized (%s)", sum(s.nbytes for s in kept.values()) / GIB, found)
        super().log_expansion(slots, device, keep=keep)

    def _bits(self, name: str) -> float:
        elements, size_bytes = block_size(self.tensors[name])
        return 8 * size_bytes / elements

    def _missing_kernels(self, device: torch.device) -> str:
        if device.type != "cpu":
            return super()._missing_kernels(device)
        return "they stay quantized with dtype = auto" if numba_computes() else "only the Numba kernels read them"


def open_file(path: Path, rotated_head: int | None) -> GgufCheckpoint:
    return GgufCheckpoint(open_gguf(path), rotated_head)


def stored_in(checkpoint: GgufCheckpoint) -> Format:
    """The format of the matrices in types that can stay as they are."""
    return GgufFormat(None, {name: found for name, found in checkpoint.types.items() if found in PACKED_TYPES})
