"""Weights in fp8 with float32 scales.

    weight[i, j]  =  values[i, j] * scales[i // row_group, j // 128]       a scale per block: DeepSeek-V3.2 and GLM-5
    weight[i, j]  =  values[i, j] * scales[i, 0]                           a scale per row: compressed-tensors, fbgemm

In a checkpoint, blocks have 128 rows. `row_group` is smaller if the parts of a fused matrix do not begin at multiples
of 128 rows; then the scales of a block are repeated. Blocks of columns are always those of the checkpoint. With a scale
per row, `row_group` is 1. If a checkpoint has one scale for a whole matrix, that scale is repeated for every row.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from ...common.arithmetic import ceil_div, round_up
from ..gguf.blocks import GgufBlocks
from ..packed4.group_format import GroupScaled

FP8 = torch.float8_e4m3fn
BLOCK = 128
"""Rows and columns of a block, and columns of a group of activations that share a scale."""
LARGEST = 448.0
"""The largest number of e4m3."""
_SCALE_ALIGNMENT = 4
"""cuBLAS needs a multiple of four scales per row of blocks; those after the last block are 0."""


@dataclass(frozen=True)
class Fp8Matrix:
    """One matrix, or one per expert. See the module docstring."""

    values: torch.Tensor  # [..., rows, columns] float8_e4m3fn
    scales: torch.Tensor  # [..., groups of rows, blocks of columns padded to a multiple of 4, or 1] float32
    row_group: int = BLOCK

    @staticmethod
    def allocate(*shape: int, row_group: int = BLOCK, device: torch.device) -> "Fp8Matrix":
        """Uninitialised values and scales; the padding of the scales is 0."""
        *batch, rows, columns = shape
        blocks = ceil_div(columns, BLOCK)
        scales = torch.empty(
            *batch, ceil_div(rows, row_group), round_up(blocks, _SCALE_ALIGNMENT), dtype=torch.float32, device=device
        )
        scales[..., blocks:] = 0
        return Fp8Matrix(torch.empty(shape, dtype=FP8, device=device), scales, row_group)

    @staticmethod
    def allocate_by_row(*shape: int, device: torch.device) -> "Fp8Matrix":
        """Uninitialised values, and a scale per row."""
        scales = torch.empty(*shape[:-1], 1, dtype=torch.float32, device=device)
        return Fp8Matrix(torch.empty(shape, dtype=FP8, device=device), scales, row_group=1)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> "Fp8Matrix":
        """A range of rows that begins at a multiple of `row_group`, or of experts."""
        start, stop, _ = part.indices(len(self))
        if self.values.ndim > 2:
            return Fp8Matrix(self.values[start:stop], self.scales[start:stop], self.row_group)
        assert start >= stop or start % self.row_group == 0, f"row {start} is inside a block of {self.row_group}"
        scales = self.scales[start // self.row_group : ceil_div(stop, self.row_group)]
        return Fp8Matrix(self.values[start:stop], scales, self.row_group)

    def experts(self) -> Iterator["Fp8Matrix"]:
        """The matrix of each expert."""
        for values, scales in zip(self.values, self.scales, strict=True):
            yield Fp8Matrix(values, scales, self.row_group)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale."""
        return self.scales.shape[-1] == 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def expanded(self) -> torch.Tensor:
        """The matrix in float32."""
        if self.by_row:
            return self.values.float() * self.scales
        *_, rows, columns = self.shape
        scales = self.scales.repeat_interleave(self.row_group, -2)[..., :rows, :]
        return self.values.float() * scales.repeat_interleave(BLOCK, -1)[..., :columns]


Weight = torch.Tensor | Fp8Matrix | GroupScaled | GgufBlocks


def common_row_group(first_rows: Iterable[int]) -> int:
    """The largest group of rows that never crosses a block, if parts of a matrix begin at these rows."""
    return math.gcd(BLOCK, *first_rows)


def supports_fp8(device: torch.device) -> bool:
    """Whether kernels read fp8 there: GPUs of compute capability 8.9 and later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)
