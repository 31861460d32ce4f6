"""Checkpoints in fp8 with a scale per row or per matrix: compressed-tensors (float-quantized), fbgemm_fp8, and fp8
without a block size. They are read or expanded.

    weight[i, j]  =  stored[i, j] * scale[i]  or  stored[i, j] * scale

A matrix `NAME` has a companion `NAME_scale` or `NAME_scale_inv`, of one element or one per row. Scales and limits of
activations are not used, whether static or dynamic: products of few rows do not quantise activations, and products of
many rows compute the scale of each token (kernels/linear/block_scaled.py).
"""

from math import prod

import torch

from ...configs.errors import StartupError
from ..decoders.slots import Slot
from .checkpoint import Checkpoint

_SCALES = ("_scale", "_scale_inv")
_WEIGHT = ".weight"
_UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale")


class RowScaledCheckpoint:
    """Wraps a checkpoint. See the module docstring."""

    def __init__(self, files: Checkpoint) -> None:
        self._files = files
        self._scale_of = {
            name: name + suffix
            for name in files.shapes
            if name.endswith(_WEIGHT)
            for suffix in _SCALES
            if name + suffix in files.shapes
        }
        parts = {name.removesuffix(_WEIGHT) + part for name in self._scale_of for part in _UNUSED}
        parts |= set(self._scale_of.values())
        self.shapes = {name: shape for name, shape in files.shapes.items() if name not in parts}

    @property
    def fp8(self) -> frozenset[str]:
        """The tensors in fp8."""
        return frozenset(self._scale_of)

    def read_into(self, name: str, slot: Slot) -> None:
        """See `Checkpoint`; raises StartupError if the number of scales is neither 1 nor that of the rows."""
        if name not in self._scale_of:
            self._files.read_into(name, slot)
            return
        scales = self._read_scales(self._scale_of[name], slot.shape[0])
        if slot.block_scaled is not None:
            self._files.read_into(name, Slot(slot.target, slot.shape, slot.start))
            slot.fill_scales(scales)
            return
        values = torch.empty(slot.target.shape, dtype=torch.float32, device=slot.target.device)
        self._files.read_into(name, Slot(values, slot.shape, slot.start))
        slot.target.copy_(values.mul_(scales[slot.start[0] : slot.start[0] + len(values)].to(values.device)))

    def _read_scales(self, name: str, rows: int) -> torch.Tensor:
        """Scales [rows, 1]."""
        shape = self._files.shapes[name]
        if prod(shape) not in (1, rows):
            raise StartupError(
                f"tensor {name!r} has shape {list(shape)}; a matrix of {rows} rows takes 1 or {rows} scales"
            )
        scales = torch.empty(shape, dtype=torch.float32)
        self._files.read_into(name, Slot(scales, shape, (0,) * len(shape)))
        return scales.reshape(-1, 1).expand(rows, 1)
