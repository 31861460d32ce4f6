"""Weights in 4 bits with a scale per group of columns: the layout in memory for AWQ, GPTQ and compressed-tensors
checkpoints, and for the MXFP4 experts of gpt-oss.

    weight[i, j]  =  (value[i, j] - zeros[g, i]) * scales[g, i]      with  g = j // group
    weight[i, j]  =  E2M1[value[i, j]] * 2 ** (scales[g, i] - 127)   MXFP4: groups of 32, no zeros, scales in a byte

Values are 0 to 15. A byte has the values of two columns that are `group` apart:

    packed[i, b * group + j]  =  value[i, 2 * b * group + j]  +  16 * value[i, (2 * b + 1) * group + j]

So the low halves of `group` adjacent bytes are one whole group, and the high halves are the next group. A kernel
unpacks both without moving values between threads, and scales sums instead of weights. An odd number of groups is
padded with a group whose scales are 0.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ...common.arithmetic import ceil_div, round_up

LARGEST_GROUP, SMALLEST_GROUP = 128, 32
"""Columns of a group in memory. A checkpoint's larger groups are divided, and their scales repeated."""
MXFP4_GROUP, MXFP4_BIAS = 32, 127
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))
"""The values of MXFP4."""


@dataclass(frozen=True)
class GroupScaled:
    """One matrix, or one per expert. See the module docstring."""

    packed: torch.Tensor  # [..., rows, columns / 2] uint8, columns rounded up to pairs of groups
    scales: (
        torch.Tensor
    )  # [..., groups, rows] in the dtype of the model or, of MXFP4, uint8; groups rounded up to pairs
    zeros: torch.Tensor | None  # [..., groups, rows] in the dtype of the model: 0 to 16; None: MXFP4
    columns: int
    group: int = LARGEST_GROUP

    @staticmethod
    def allocate(*shape: int, group: int = LARGEST_GROUP, dtype: torch.dtype, device: torch.device) -> "GroupScaled":
        """Uninitialised; the padding of scales and zeros is 0."""
        packed, scales = _allocate(*shape, group=group, dtype=dtype, device=device)
        zeros = torch.empty_like(scales)
        if 2 * packed.shape[-1] != shape[-1]:
            zeros[..., -1, :] = 0
        return GroupScaled(packed, scales, zeros, shape[-1], group)

    @staticmethod
    def allocate_mxfp4(*shape: int, device: torch.device) -> "GroupScaled":
        """The same for MXFP4."""
        packed, scales = _allocate(*shape, group=MXFP4_GROUP, dtype=torch.uint8, device=device)
        return GroupScaled(packed, scales, None, shape[-1], MXFP4_GROUP)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, part: slice) -> "GroupScaled":
        """A range of rows, or of experts."""
        if self.packed.ndim == 2:
            return self.rows(part)
        zeros = None if self.zeros is None else self.zeros[part]
        return GroupScaled(self.packed[part], self.scales[part], zeros, self.columns, self.group)

    def rows(self, part: slice) -> "GroupScaled":
        """A range of rows of the matrix, or of each expert's."""
        zeros = None if self.zeros is None else self.zeros[..., part]
        return GroupScaled(self.packed[..., part, :], self.scales[..., part], zeros, self.columns, self.group)

    def experts(self) -> Iterator["GroupScaled"]:
        """The matrix of each expert."""
        for index, packed in enumerate(self.packed):
            zeros = None if self.zeros is None else self.zeros[index]
            yield GroupScaled(packed, self.scales[index], zeros, self.columns, self.group)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.columns))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    def fill(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> None:
        """Fill one matrix from values [rows, columns] uint8, and scales and zeros [rows, groups]."""
        padded = torch.nn.functional.pad(values, (0, 2 * self.packed.shape[1] - self.columns))
        low, high = padded.reshape(len(values), -1, 2, self.group).unbind(2)
        self.packed.copy_((low | high << 4).flatten(1))
        groups = scales.shape[1]
        self.scales[:groups].copy_(scales.t())
        if self.zeros is not None:
            assert zeros is not None
            self.zeros[:groups].copy_(zeros.t())

    def expanded(self) -> torch.Tensor:
        """The matrices in float32."""
        halves = self.packed.reshape(*self.packed.shape[:-1], -1, self.group)
        values = torch.stack((halves & 15, halves >> 4), dim=-2)  # [..., rows, pairs of groups, 2, group]
        scales = self._by_group(self.scales)
        if self.zeros is None:
            table = torch.tensor(E2M1, dtype=torch.float32, device=values.device)
            expanded = torch.ldexp(table[values.int()], scales.int() - MXFP4_BIAS)
        else:
            expanded = (values.float() - self._by_group(self.zeros).float()) * scales.float()
        return expanded.flatten(-3)[..., : self.columns]

    def _by_group(self, part: torch.Tensor) -> torch.Tensor:
        """Scales or zeros as [..., rows, pairs of groups, 2, 1]."""
        by_row = part.transpose(-1, -2)
        return by_row.reshape(*by_row.shape[:-1], -1, 2, 1)


def _allocate(*shape: int, group: int, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales."""
    *batch, rows, columns = shape
    groups = round_up(ceil_div(columns, group), 2)
    packed = torch.empty(*batch, rows, groups * group // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(*batch, groups, rows, dtype=dtype, device=device)
    if groups * group != columns:
        scales[..., -1, :] = 0
    return packed, scales


def supports_int4(device: torch.device) -> bool:
    """Whether kernels read 4-bit weights there: GPUs of compute capability 8.0 and later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def group_in_memory(group: int, columns: int, first_column: int = 0) -> int | None:
    """Columns of a group in memory, for a rank that has `columns` columns from `first_column` on of a checkpoint with
    groups of `group` columns; None if its part does not begin and end at multiples of at least 32 columns.
    """
    found = math.gcd(group, columns, first_column, LARGEST_GROUP)
    return found if found >= SMALLEST_GROUP else None
