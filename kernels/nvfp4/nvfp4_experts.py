"""Experts with weights in NVFP4 (nvfp4.py), by a Triton kernel, which reads the scales of checkpoints. A byte has the
values of two columns that are `half` apart, as in packed4/group_format.py, but here half a block has several groups:

    packed[i, b * half + j]  =  value[i, 2 * b * half + j]  +  16 * value[i, (2 * b + 1) * half + j]

Columns are padded to whole blocks, with scales of 0. Experts are those of moe/experts.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, launcher, use_triton
from ..linear.row_tiles import RowTiles
from ..moe.experts import experts_reference, tile_rows
from ..moe.router.routing import route_tokens
from ..packed4.group_format import E2M1
from .nvfp4 import GROUP

MOST_TILE_ROWS = 64
"""Rows of a tile of tokens."""
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Nvfp4Experts:
    """The matrices of experts, or of one of them. See the module docstring."""

    packed: torch.Tensor  # [..., rows, padded columns / 2] uint8
    scales: torch.Tensor  # [..., blocks, rows, 2 * half / 16] float8_e4m3fn
    factors: torch.Tensor  # [..., rows] float32
    columns: int

    @staticmethod
    def allocate(*shape: int, device: torch.device) -> "Nvfp4Experts":
        """Uninitialised; the padding of the scales is 0."""
        *batch, rows, columns = shape
        half = 128 if columns % 256 == 0 else 64
        blocks = ceil_div(columns, 2 * half)
        packed = torch.empty(*batch, rows, blocks * half, dtype=torch.uint8, device=device)
        scales = torch.empty(*batch, blocks, rows, 2 * half // GROUP, dtype=_FP8, device=device)
        scales.view(torch.uint8)[..., -1:, :, :] = 0
        return Nvfp4Experts(packed, scales, torch.empty(*batch, rows, device=device), columns)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, part: slice) -> "Nvfp4Experts":
        """A range of rows, or of experts."""
        scales = self.scales[:, part] if self.packed.ndim == 2 else self.scales[part]
        return Nvfp4Experts(self.packed[part], scales, self.factors[part], self.columns)

    def experts(self) -> Iterator["Nvfp4Experts"]:
        """The matrix of each expert."""
        for packed, scales, factors in zip(self.packed, self.scales, self.factors, strict=True):
            yield Nvfp4Experts(packed, scales, factors, self.columns)

    @property
    def half(self) -> int:
        return self.scales.shape[-1] * GROUP // 2

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.packed.shape[:-1], self.columns))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + self.factors.nbytes

    def fill(self, values: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | float) -> None:
        """Fill one matrix from values [rows, columns] uint8 and scales [rows, groups] in fp8."""
        padded = torch.nn.functional.pad(values, (0, 2 * self.packed.shape[1] - self.columns))
        low, high = padded.reshape(len(values), -1, 2, self.half).unbind(2)
        self.packed.copy_((low | high << 4).flatten(1))
        missing = self.packed.shape[1] * 2 // GROUP - scales.shape[1]
        stored = torch.nn.functional.pad(scales.view(torch.uint8), (0, missing))
        self.scales.view(torch.uint8).copy_(stored.view(len(values), len(self.scales), -1).transpose(0, 1))
        self.factors.copy_(torch.as_tensor(factor, dtype=torch.float32).to(self.factors.device).expand(len(values)))

    def expanded(self) -> torch.Tensor:
        """The matrices in float32."""
        halves = torch.unflatten(self.packed, -1, (-1, self.half))
        values = torch.stack((halves & 15, halves >> 4), dim=-2).flatten(-3)  # [..., rows, padded columns]
        table = torch.tensor(E2M1, dtype=torch.float32, device=values.device)
        scales = self.scales.float().transpose(-2, -3).flatten(-2)  # [..., rows, groups]
        wide = table[values.int()] * scales.repeat_interleave(GROUP, -1)
        return (wide * self.factors.unsqueeze(-1))[..., : self.columns]


def nvfp4_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Nvfp4Experts,
    down: Nvfp4Experts,
    *,
    first: int = 0,
    num_experts: int | None = None,
    shared: Callable[[], torch.Tensor] | None = None,
    routing: RowTiles | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """The sum over the experts of this rank, plus the result of `shared`: as `grouped_experts` of moe/experts.py."""
    if not use_triton(impl, x.device):
        operands: Any = gate_up, down
        routed = experts_reference(x, weights, experts, *operands, first=first, exact=True)
        return routed if shared is None else routed + shared()
    numbers = experts.numel()
    if routing is None:
        rows = nvfp4_tile_rows(numbers, num_experts or len(gate_up))
        routing = route_tokens(experts, first, len(gate_up), rows, impl=impl)
    launch = launcher("nvfp4.experts_triton", "launch_experts")
    gated, results = x.new_empty(numbers, down.columns), x.new_empty(numbers, x.shape[1])
    launch(x, gate_up, gated, routing, gated=True, gather=True)
    launch(gated, down, results, routing, gated=False, gather=False)
    out = torch.empty_like(x)
    add = launcher("moe.token_rows_triton", "launch_weighted_sum")
    add(results, weights, experts, first, len(gate_up), out, place=None, shared=None if shared is None else shared())
    return out


def nvfp4_tile_rows(numbers: int, num_experts: int) -> int:
    """Rows of a tile of tokens, if `num_experts` experts have `numbers` in total."""
    return min(tile_rows(numbers, num_experts), MOST_TILE_ROWS)
