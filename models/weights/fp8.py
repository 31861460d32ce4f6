"""Weights in fp8, with a scale per block of rows and columns (DeepSeek, GLM, compressed-tensors), per row or per matrix
(compressed-tensors, fbgemm_fp8, fp8 without a block size).

    weight[i, j]  =  stored[i, j] * scale[i // block rows, j // block columns]
    weight[i, j]  =  stored[i, j] * scale[i]  or  stored[i, j] * scale

A matrix `NAME` has a companion `NAME_scale_inv` or `NAME_scale`. Scales and limits of activations are not used, whether
static or dynamic: products of few rows do not quantise activations, and products of many rows compute the scale of each
token (kernels/linear/fp8_linear.py).

A matrix with a scale per block of 128 x 128, per row or per matrix stays in fp8 where GPUs multiply it. With a scale
per block, it is expanded if a rank's columns begin or end inside a block.
"""

from collections.abc import Iterator
from math import prod

import torch

from ...common.arithmetic import ceil_div
from ...common.errors import StartupError
from ...kernels.linear.fp8_format import BLOCK, FP8, LARGEST, Fp8Matrix, common_row_group, supports_fp8
from ...kernels.linear.fp8_linear import fp8_gated_linear, fp8_linear, fp8_mlp
from .format import Checkpoint, Matrix, SafetensorsFormat, StoredCheckpoint
from .noise import draw_rows, generator
from .schemes import Fp8Scheme
from .slots import Slot
from .weight import AnyWeight, Weight

_WEIGHT, _SCALES = ".weight", ("_scale_inv", "_scale")
_UNUSED = (".input_scale", ".input_scale_ub", ".activation_scale")
_SPREAD = 64.0
"""Standard deviation of random fp8 values; the largest number is at 7 of them."""


class Fp8Weight(Weight[Fp8Matrix]):
    @property
    def values(self) -> torch.Tensor:
        return self.operand.values

    def expanded(self) -> torch.Tensor:
        return self.operand.expanded()

    def each(self) -> Iterator["Fp8Weight"]:
        return map(Fp8Weight, self.operand.experts())

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return fp8_linear(x, self.operand, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gelu: bool = False) -> torch.Tensor:
        assert not gelu, "GELU is not supported for fp8 weights"
        return fp8_gated_linear(x, self.operand, bias)

    def mlp(
        self,
        x: torch.Tensor,
        down: AnyWeight,
        bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        *,
        gelu: bool,
    ) -> torch.Tensor:
        if not isinstance(down, Fp8Weight):
            return super().mlp(x, down, bias, down_bias, gelu=gelu)
        return fp8_mlp(x, self.operand, down.operand, bias, down_bias)

    def fill_scales(self, scales: torch.Tensor, start: tuple[int, ...]) -> None:
        """From those of the whole checkpoint tensor, of blocks or [rows, 1], for its part from index `start` on."""
        target, row_group = self.operand.scales, self.operand.row_group
        if self.operand.by_row:
            target.copy_(scales[start[0] : start[0] + len(target)])
            return
        rows = (start[0] + row_group * torch.arange(len(target), device=scales.device)) // BLOCK
        first, blocks = start[1] // BLOCK, ceil_div(self.shape[1], BLOCK)
        target[:, :blocks].copy_(scales[rows, first : first + blocks])


class Fp8Checkpoint(StoredCheckpoint):
    def __init__(self, scheme: Fp8Scheme, files: Checkpoint) -> None:
        super().__init__(files)
        self._block = scheme.block
        self._scale_of = {
            name: name + suffix
            for name, shape in files.shapes.items()
            if name.endswith(_WEIGHT) and len(shape) == 2
            for suffix in _SCALES
            if name + suffix in files.shapes
        }
        parts = {name.removesuffix(_WEIGHT) + part for name in self._scale_of for part in _UNUSED}
        parts |= set(self._scale_of.values())
        self.shapes = {name: shape for name, shape in files.shapes.items() if name not in parts}
        self.tensors = frozenset(self._scale_of)
        for name, scale in self._scale_of.items():
            self._check(scale, files.shapes[name])

    def _read_stored(self, name: str, slot: Slot) -> None:
        scales = self._read_scales(self._scale_of[name], slot.shape)
        if isinstance(slot.weight, Fp8Weight):
            self._files.read_into(name, Slot(slot.target, slot.shape, slot.start))
            slot.weight.fill_scales(scales, slot.start)
            return
        values = torch.empty(slot.target.shape, dtype=torch.float32, device=slot.target.device)
        self._files.read_into(name, Slot(values, slot.shape, slot.start))
        slot.target.copy_(_scale(values, scales.to(values.device), slot.start, self._block))

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise StartupError if these are not the scales of a matrix of this shape."""
        found = self._files.shapes[name]
        if self._block is not None:
            expected = tuple(ceil_div(size, block) for size, block in zip(shape, self._block, strict=True))
            if found != expected:
                raise StartupError(
                    f"tensor {name!r} has shape {list(found)}; {list(shape)} in blocks of {list(self._block)} takes "
                    f"{list(expected)}"
                )
        elif prod(found) not in (1, rows := shape[0]):
            raise StartupError(
                f"tensor {name!r} has shape {list(found)}; a matrix of {rows} rows takes 1 or {rows} scales"
            )

    def _read_scales(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Those of blocks, or [rows, 1]."""
        scales = self._read(name, torch.float32)
        return scales if self._block is not None else scales.reshape(-1, 1).expand(shape[0], 1)


class Fp8Format(SafetensorsFormat):
    label = "fp8"
    places = ("layer", "latent")
    reason = "kv_b_proj, and shards that begin or end inside a block of columns"
    needs_fp8 = True
    open = Fp8Checkpoint

    @classmethod
    def keeps(cls, scheme: Fp8Scheme) -> bool:
        return scheme.block in (None, (BLOCK, BLOCK))

    def runs_on(self, device: torch.device) -> bool:
        return supports_fp8(device)

    def _divides(self, matrix: Matrix) -> bool:
        offset = matrix.first_column % BLOCK
        return self.scheme.block is None or not offset or offset + matrix.columns <= BLOCK

    def allocate(self, matrix: Matrix) -> Fp8Weight:
        if self.scheme.block is None:
            return Fp8Weight(Fp8Matrix.allocate_by_row(*matrix.shape, device=matrix.device))
        row_group = common_row_group(row for part in matrix.parts for row in (part.at, part.rows.start))
        return Fp8Weight(Fp8Matrix.allocate(*matrix.shape, row_group=row_group, device=matrix.device))

    def draw(self, name: str, slot: Slot, spread: float) -> None:
        device, block = slot.target.device, self.scheme.block or (1, slot.shape[1])
        groups = [ceil_div(size, of_block) for size, of_block in zip(slot.shape, block, strict=True)]
        scales = torch.empty(groups, dtype=torch.float32, device=device)
        scales.uniform_(0.75 * spread / _SPREAD, 1.25 * spread / _SPREAD, generator=generator(name, "s", device))
        if isinstance(slot.weight, Fp8Weight):
            slot.weight.fill_scales(scales, slot.start)
        for held, first_row, drawn in draw_rows(name, slot, 0.0, _SPREAD):
            values = drawn.clamp_(-LARGEST, LARGEST).to(FP8)
            if slot.weight is None:
                slot.target[held].copy_(_scale(values.float(), scales, (first_row, slot.start[1]), self.scheme.block))
            else:
                slot.target[held].copy_(values)


def _scale(
    values: torch.Tensor, scales: torch.Tensor, start: tuple[int, ...], block: tuple[int, int] | None
) -> torch.Tensor:
    """Multiply `values` [rows, columns] of a tensor from index `start` on with their scales, in place."""
    if block is None:
        return values.mul_(scales[start[0] : start[0] + len(values)])
    rows, columns = (
        torch.arange(first, first + size, device=values.device) // of_block
        for first, size, of_block in zip(start, values.shape, block, strict=True)
    )
    return values.mul_(scales[rows][:, columns])


FORMAT = Fp8Format
