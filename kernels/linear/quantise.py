"""Quantises activations for fp8 products: a scale per row and group of 128 columns or, with `by_row`, per row.

    quantise(x)         =  q, s      with  s[t, g] = max |x[t, 128 g : 128 g + 128]| / 448,  q = fp8(x / s)
    by_row                           with  s[t, 0] = max |x[t]| / 448
    swiglu_quantise(x)  =  quantise(swiglu(x))     in one pass; swiglu is rounded to the dtype of x first

Shapes: x [rows, columns] (for swiglu_quantise [rows, 2 * columns]), contiguous. q and s are padded with rows of zeros
to a multiple of 4 rows, which cuBLAS needs; s is stored column by column. A group of zeros has the smallest scale.
Checkpoints with `scale_fmt` ue8m0 are treated in the same way: on Hopper, scales of activations are not rounded to
powers of two.

Lower bound: x read and q written once.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ...common.arithmetic import ceil_div, round_up
from ..backends.dispatch import Impl, launcher, use_triton
from .fp8_format import BLOCK, FP8, LARGEST
from .swiglu import swiglu_reference

SMALLEST_SCALE = 1e-12
_ROW_ALIGNMENT = 4


@dataclass(frozen=True)
class QuantisedRows:
    """Rows in fp8; the result of `quantise`."""

    values: torch.Tensor  # [padded rows, columns] float8_e4m3fn
    scales: torch.Tensor  # [padded rows, groups, or 1] float32, strides (1, padded rows)
    rows: int
    dtype: torch.dtype  # of the rows before they were quantised, and of products

    @property
    def by_row(self) -> bool:
        """Whether each row has one scale."""
        return self.scales.shape[1] == 1

    def expanded(self) -> torch.Tensor:
        """The rows in float32."""
        if self.by_row:
            return self.values[: self.rows].float() * self.scales[: self.rows]
        scales = self.scales[: self.rows].repeat_interleave(BLOCK, 1)[:, : self.values.shape[1]]
        return self.values[: self.rows].float() * scales


def quantise_reference(x: torch.Tensor, *, by_row: bool = False) -> QuantisedRows:
    rows, columns = x.shape
    group = columns if by_row else BLOCK
    groups = pad(x.float(), (0, -columns % group, 0, -rows % _ROW_ALIGNMENT)).view(
        rows + -rows % _ROW_ALIGNMENT, -1, group
    )
    scales = groups.abs().amax(dim=2).div(LARGEST).clamp_(min=SMALLEST_SCALE)
    values = (groups / scales.unsqueeze(2)).to(FP8).flatten(1)[:, :columns].contiguous()
    return QuantisedRows(values, scales.t().contiguous().t(), rows, x.dtype)


def swiglu_quantise_reference(gate_up: torch.Tensor, *, by_row: bool = False) -> QuantisedRows:
    return quantise_reference(swiglu_reference(gate_up), by_row=by_row)


def quantise(x: torch.Tensor, *, by_row: bool = False, impl: Impl = "auto") -> QuantisedRows:
    """Quantise each row; see the module docstring."""
    if not use_triton(impl, x.device):
        return quantise_reference(x, by_row=by_row)
    return _launch(x, x.shape[1], gated=False, by_row=by_row)


def swiglu_quantise(
    gate_up: torch.Tensor, *, by_row: bool = False, live_rows: torch.Tensor | None = None, impl: Impl = "auto"
) -> QuantisedRows:
    """Gate and quantise each row; see the module docstring. `live_rows` is an integer on the device (not with
    `by_row`): rows from this number on are not read, and their results are undefined.
    """
    assert live_rows is None or not by_row, "experts have a scale per group"
    if not use_triton(impl, gate_up.device):
        return swiglu_quantise_reference(gate_up, by_row=by_row)
    return _launch(gate_up, gate_up.shape[1] // 2, gated=True, by_row=by_row, live_rows=live_rows)


def _launch(
    x: torch.Tensor, columns: int, *, gated: bool, by_row: bool, live_rows: torch.Tensor | None = None
) -> QuantisedRows:
    if x.ndim != 2 or not x.is_contiguous() or (gated and x.shape[1] % 2):
        raise ValueError(f"x {list(x.shape)} must be contiguous rows, and for a gated layer of an even size")
    padded = round_up(len(x), _ROW_ALIGNMENT)
    values = torch.empty(padded, columns, dtype=FP8, device=x.device)
    if by_row:
        scales = torch.empty(padded, 1, dtype=torch.float32, device=x.device)
        launcher("linear.quantise_triton", "launch_quantise_rows")(x, values, scales, gated=gated)
        return QuantisedRows(values, scales, len(x), x.dtype)
    scales = torch.empty(ceil_div(columns, BLOCK), padded, dtype=torch.float32, device=x.device).t()
    launcher("linear.quantise_triton", "launch_quantise")(x, values, scales, live_rows, gated=gated)
    return QuantisedRows(values, scales, len(x), x.dtype)
