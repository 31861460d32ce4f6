"""Weights in NVFP4: linear layers and experts.

    weight[i, j]  =  E2M1[value[i, j]] * scales[i, j // 16] * factors[i]

Values have 4 bits (packed4/group_format.py has E2M1), scales are numbers of fp8 (e4m3), factors float32. A checkpoint
has one factor per matrix, which is repeated for every row: parts of a fused matrix differ. A byte has the values of
two columns that are `half` apart, as in packed4/group_format.py, but here half a block has several groups:

    packed[i, b * half + j]  =  value[i, 2 * b * half + j]  +  16 * value[i, (2 * b + 1) * half + j]

Columns are padded to whole blocks, with scales of 0. The products of a value and its scale are exact in 16 bits.

Shapes: x [rows, in]; weight [out, in]; bias [out] or None; result [rows, out] in the dtype of x, rounded once. With
`gated`, swiglu is applied: `weight` has the rows of gate, then those of up, and the result is [rows, out / 2]. Experts
are those of moe/experts.py. On CUDA, a Triton kernel computes few rows and all experts; more rows are multiplied by
cuBLAS, with weights that are expanded some rows at a time.

Lower bound: with few rows, the packed weights read once, 4.5 bits each: 0.92 ms for the layers of Qwen3-8B on an H200.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, launcher, use_triton
from ..linear.row_tiles import RowTiles
from ..linear.swiglu import swiglu, swiglu_reference
from ..moe.experts import experts_reference, tile_rows
from ..moe.router.routing import route_tokens
from ..packed4.group_format import E2M1
from ..packed4.int4_linear import SCRATCH_BYTES, output_parts

GROUP = 16
"""Columns that share a scale."""
FEW_ROWS = 64
"""Up to this many rows, weights are not expanded."""
_FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Nvfp4Matrix:
    """One matrix, or one per expert. See the module docstring."""

    packed: torch.Tensor  # [..., rows, padded columns / 2] uint8
    scales: torch.Tensor  # [..., blocks, rows, 2 * half / 16] float8_e4m3fn
    factors: torch.Tensor  # [..., rows] float32
    columns: int

    @staticmethod
    def allocate(*shape: int, device: torch.device) -> "Nvfp4Matrix":
        """Uninitialised; the padding of the scales is 0."""
        *batch, rows, columns = shape
        half = 128 if columns % 256 == 0 else 64
        blocks = ceil_div(columns, 2 * half)
        packed = torch.empty(*batch, rows, blocks * half, dtype=torch.uint8, device=device)
        scales = torch.empty(*batch, blocks, rows, 2 * half // GROUP, dtype=_FP8, device=device)
        scales.view(torch.uint8)[..., -1:, :, :] = 0
        return Nvfp4Matrix(packed, scales, torch.empty(*batch, rows, device=device), columns)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, part: slice) -> "Nvfp4Matrix":
        """A range of rows, or of experts."""
        scales = self.scales[:, part] if self.packed.ndim == 2 else self.scales[part]
        return Nvfp4Matrix(self.packed[part], scales, self.factors[part], self.columns)

    def experts(self) -> Iterator["Nvfp4Matrix"]:
        """The matrix of each expert."""
        for packed, scales, factors in zip(self.packed, self.scales, self.factors, strict=True):
            yield Nvfp4Matrix(packed, scales, factors, self.columns)

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


def supports_nvfp4(device: torch.device) -> bool:
    """Whether the kernels read NVFP4 there: GPUs of compute capability 8.0 and later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def nvfp4_linear(
    x: torch.Tensor,
    weight: Nvfp4Matrix,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    impl: Impl = "auto",
) -> torch.Tensor:
    """A linear layer; see the module docstring."""
    _check(x, weight, bias)
    if not use_triton(impl, x.device):
        wide = None if bias is None else bias.float()
        both = torch_linear(x.float(), weight.expanded(), wide).to(x.dtype)
        return swiglu_reference(both) if gated else both
    if len(x) <= FEW_ROWS:
        out = x.new_empty(len(x), len(weight) // (2 if gated else 1))
        launcher("nvfp4.nvfp4_triton", "launch_nvfp4")(x, weight, bias, out, gated=gated)
        return out
    out = x.new_empty(len(x), len(weight))
    for part in output_parts(len(weight), weight.columns * x.itemsize, SCRATCH_BYTES):
        expanded = x.new_empty(part.stop - part.start, weight.columns)
        launcher("nvfp4.nvfp4_triton", "launch_expand")(weight[part], expanded)
        if bias is None:
            torch.mm(x, expanded.t(), out=out[:, part])
        else:
            torch.addmm(bias[part], x, expanded.t(), out=out[:, part])
    return swiglu(out) if gated else out


def nvfp4_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Nvfp4Matrix,
    down: Nvfp4Matrix,
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
    launch = launcher("nvfp4.nvfp4_triton", "launch_nvfp4")
    gated, results = x.new_empty(numbers, down.columns), x.new_empty(numbers, x.shape[1])
    launch(x, gate_up, None, gated, gated=True, tiles=routing, gather=True)
    launch(gated, down, None, results, gated=False, tiles=routing, gather=False)
    out = torch.empty_like(x)
    add = launcher("moe.token_rows_triton", "launch_weighted_sum")
    add(results, weights, experts, first, len(gate_up), out, place=None, shared=None if shared is None else shared())
    return out


def nvfp4_tile_rows(numbers: int, num_experts: int) -> int:
    """Rows of a tile of tokens, if `num_experts` experts have `numbers` in total."""
    return min(tile_rows(numbers, num_experts), FEW_ROWS)


def _check(x: torch.Tensor, weight: Nvfp4Matrix, bias: torch.Tensor | None) -> None:
    if x.ndim != 2 or x.shape[1] != weight.columns or weight.packed.ndim != 2 or not x.is_contiguous():
        raise ValueError(f"x {list(x.shape)} must be contiguous rows as long as those of weight {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must have an element for each row of weight {list(weight.shape)}")
