"""Weights in 4 bits with a scale and a zero point per group of columns: the layout in memory for AWQ, GPTQ and
compressed-tensors checkpoints.

    weight[i, j]  =  (value[i, j] - zeros[g, i]) * scales[g, i]      with  g = j // group

Values are 0 to 15. A byte has the values of two columns that are `group` apart:

    packed[i, b * group + j]  =  value[i, 2 * b * group + j]  +  16 * value[i, (2 * b + 1) * group + j]

So the low halves of `group` adjacent bytes are one whole group and the high halves are the next one: a kernel takes
both apart without moving values between threads, and scales sums instead of weights. An odd number of groups is padded
with one whose scales are 0.
"""

import math
from dataclasses import dataclass

import torch

from ...configs.arithmetic import ceil_div, round_up

LARGEST_GROUP, SMALLEST_GROUP = 128, 32
"""Columns of a group in memory. A checkpoint's larger groups are divided, and their scales repeated."""


@dataclass(frozen=True)
class GroupScaled:
    """One matrix. See the module docstring."""

    packed: torch.Tensor  # [rows, columns / 2] uint8, columns rounded up to pairs of groups
    scales: torch.Tensor  # [groups, rows] in the dtype of the model, groups rounded up to pairs
    zeros: torch.Tensor  # the same: 0 to 16
    columns: int
    group: int = LARGEST_GROUP

    @staticmethod
    def allocate(
        rows: int, columns: int, *, group: int = LARGEST_GROUP, dtype: torch.dtype, device: torch.device
    ) -> "GroupScaled":
        """Uninitialised; the padding of scales and zeros is 0."""
        groups = round_up(ceil_div(columns, group), 2)
        packed = torch.empty(rows, groups * group // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(groups, rows, dtype=dtype, device=device)
        zeros = torch.empty_like(scales)
        if groups * group != columns:
            scales[-1] = 0
            zeros[-1] = 0
        return GroupScaled(packed, scales, zeros, columns, group)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, part: slice) -> "GroupScaled":
        """A range of rows."""
        return GroupScaled(self.packed[part], self.scales[:, part], self.zeros[:, part], self.columns, self.group)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.packed), self.columns))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + self.zeros.nbytes

    def fill(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> None:
        """Fill from values [rows, columns] uint8, and scales and zeros [rows, groups]."""
        padded = torch.nn.functional.pad(values, (0, 2 * self.packed.shape[1] - self.columns))
        low, high = padded.reshape(len(values), -1, 2, self.group).unbind(2)
        self.packed.copy_((low | high << 4).flatten(1))
        groups = scales.shape[1]
        self.scales[:groups].copy_(scales.t())
        self.zeros[:groups].copy_(zeros.t())

    def expanded(self) -> torch.Tensor:
        """The matrix in float32."""
        halves = self.packed.view(len(self), -1, self.group)
        values = torch.stack((halves & 15, halves >> 4), dim=2).float()  # [rows, pairs of groups, 2, group]
        scales, zeros = (part.t().reshape(len(self), -1, 2, 1).float() for part in (self.scales, self.zeros))
        return ((values - zeros) * scales).flatten(1)[:, : self.columns]


def supports_int4(device: torch.device) -> bool:
    """Whether kernels read 4-bit weights there: GPUs of compute capability 8.0 and later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def group_in_memory(group: int, columns: int, first_column: int = 0) -> int | None:
    """Columns that share a scale in memory, for the columns of a rank in a checkpoint with groups of `group` columns;
    None if its part begins or ends where no group in memory can: at a multiple of fewer than 32 columns.
    """
    found = math.gcd(group, columns, first_column, LARGEST_GROUP)
    return found if found >= SMALLEST_GROUP else None
