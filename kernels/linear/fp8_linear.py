"""Linear layers with fp8 weights, with a scale per block or per row (fp8_format.py), computed in one of four ways:

    exact       x @ weight.T + bias              activations are not quantised; for few rows
    triton      quantise(x) @ weight.T + bias    fp8 products; sums of 128 columns are scaled and added in float32
    cublas      the same by torch's scaled_mm    for whole blocks of 128 on Hopper, without a bias
    rowwise     quantise(x, by_row) @ ...        by torch's scaled_mm, for weights with a scale per row: activations
                                                 have a scale per token, as these checkpoints intend; bfloat16 only

Shapes: x [rows, in], or QuantisedRows; weight [out, in]; bias [out] or None; result [rows, out] in the dtype of x,
rounded once.

Lower bounds: with few rows, reading the weights once, so exact activations cost no time. At about 100 rows of bf16, the
tensor cores take as long as that. With many rows, 2 * rows * out * in operations at the fp8 rate, twice that of bf16.
"""

from typing import Literal

import torch
from torch.nn.functional import linear as torch_linear

from ..backends.dispatch import Impl, launcher, use_triton
from ..backends.few_rows_cuda import OUTPUT_TILE, ROW_TILE, Format, launch_few_rows
from ..backends.fp8_at_once_cuda import launch_at_once, suits_at_once
from .fp8_format import BLOCK, Fp8Matrix, supports_fp8
from .quantise import QuantisedRows, quantise, quantise_reference, swiglu_quantise
from .swiglu import swiglu, swiglu_reference

Method = Literal["exact", "triton", "cublas", "rowwise"]

FEW_ROWS = 64
"""Up to this many rows, activations are exact."""
CUDA_FORMAT = Format("fp8_linear", OUTPUT_TILE * BLOCK + 4 * OUTPUT_TILE)
_ROWWISE_ALIGNMENT = 16
"""Of the sizes of a matrix for "rowwise", which torch requires."""


def choose_method(rows: int, weight: Fp8Matrix, *, biased: bool = False, dtype: torch.dtype = torch.bfloat16) -> Method:
    """The method for a number of rows in `dtype`. Only this function chooses a method."""
    if rows <= FEW_ROWS:
        return "exact"
    if _fits_rowwise(weight, dtype):
        return "rowwise"
    return "cublas" if _fits_cublas(weight) and not biased else "triton"


def fp8_linear_reference(
    x: torch.Tensor | QuantisedRows, weight: Fp8Matrix, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """In float32, rounded once. Tensors are not quantised."""
    wide = x.expanded() if isinstance(x, QuantisedRows) else x.float()
    return torch_linear(wide, weight.expanded(), None if bias is None else bias.float()).to(x.dtype)


def fp8_linear(
    x: torch.Tensor | QuantisedRows,
    weight: Fp8Matrix,
    bias: torch.Tensor | None = None,
    *,
    method: Method | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """A linear layer; see the module docstring. The method "exact" does not take rows that are already quantised."""
    method = method or _method_for(x, weight, bias)
    _check(x, weight, bias, method)
    if not use_triton(impl, weight.values.device):
        return fp8_linear_reference(_as_computed(x, method), weight, bias)
    if method == "exact":
        assert isinstance(x, torch.Tensor)
        out = x.new_empty(len(x), len(weight))
        _exact(x, weight, bias, out, gated=False)
        return out
    quantised = x if isinstance(x, QuantisedRows) else quantise(x, by_row=method == "rowwise", impl=impl)
    if method in ("cublas", "rowwise"):
        return _scaled_mm(quantised, weight, bias, by_row=method == "rowwise")
    out = torch.empty(quantised.rows, len(weight), dtype=x.dtype, device=weight.values.device)
    launcher("linear.many_rows_triton", "launch_many_rows")(quantised, weight, out, bias=bias)
    return out


def fp8_gated_linear(
    x: torch.Tensor | QuantisedRows,
    weight: Fp8Matrix,
    bias: torch.Tensor | None = None,
    *,
    method: Method | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """swiglu(fp8_linear(x)); the rows of `weight` are those of gate, then those of up."""
    method = method or _method_for(x, weight, bias)
    if method != "exact" or not use_triton(impl, weight.values.device):
        gate_up = fp8_linear(x, weight, bias, method=method, impl=impl)
        return swiglu_reference(gate_up) if impl == "reference" else swiglu(gate_up)
    _check(x, weight, bias, method)
    assert isinstance(x, torch.Tensor)
    out = x.new_empty(len(x), len(weight) // 2)
    _exact(x, weight, bias, out, gated=True)
    return out


def fp8_mlp(
    x: torch.Tensor | QuantisedRows,
    gate_up: Fp8Matrix,
    down: Fp8Matrix,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [rows, in] through a gated MLP; with many rows, the gate also quantises."""
    if _method_for(x, gate_up, gate_up_bias) == "exact":
        return fp8_linear(fp8_gated_linear(x, gate_up, gate_up_bias), down, down_bias)
    both = fp8_linear(x, gate_up, gate_up_bias)
    by_row = choose_method(FEW_ROWS + 1, down, biased=down_bias is not None, dtype=both.dtype) == "rowwise"
    return fp8_linear(swiglu_quantise(both, by_row=by_row), down, down_bias)


def _method_for(x: torch.Tensor | QuantisedRows, weight: Fp8Matrix, bias: torch.Tensor | None) -> Method:
    if isinstance(x, torch.Tensor):
        return choose_method(len(x), weight, biased=bias is not None, dtype=x.dtype)
    chosen = choose_method(max(x.rows, FEW_ROWS + 1), weight, biased=bias is not None, dtype=x.dtype)
    return "triton" if chosen == "rowwise" and not x.by_row else chosen


def _as_computed(x: torch.Tensor | QuantisedRows, method: Method) -> torch.Tensor | QuantisedRows:
    if isinstance(x, QuantisedRows) or method == "exact":
        return x
    return quantise_reference(x, by_row=method == "rowwise")


def _exact(x: torch.Tensor, weight: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, *, gated: bool) -> None:
    """Fill `out`: by csrc/linear/fp8_at_once.cu where it suits, very few rows by csrc/linear/fp8_linear.cu, others by
    Triton.
    """
    values = weight.values
    if suits_at_once(x, values):
        launch_at_once(x, values, weight.scales, bias, out, row_group=weight.row_group, gated=gated)
        return
    whole = values.shape[1] % BLOCK == 0 and values.is_contiguous()
    aligned = values.data_ptr() % 16 == 0 and x.data_ptr() % 16 == 0
    if x.is_cuda and x.itemsize == 2 and len(x) <= ROW_TILE and whole and aligned:
        _launch_cuda(x, weight, bias, out, gated=gated)
    else:
        launcher("linear.few_rows_triton", "launch_few_rows")(x, weight, out, gated=gated, bias=bias)


def _launch_cuda(
    x: torch.Tensor, weight: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, *, gated: bool
) -> None:
    values, scales = weight.values, weight.scales
    launch_few_rows(
        CUDA_FORMAT,
        x,
        (values.data_ptr(), scales.data_ptr()),
        bias,
        out,
        weight.row_group,
        scales.stride(0),
        0 if weight.by_row else 1,
        steps=values.shape[1] // BLOCK,
        gated=gated,
    )


def _fits_cublas(weight: Fp8Matrix) -> bool:
    device = weight.values.device
    whole = weight.row_group == BLOCK and not any(size % BLOCK for size in weight.shape)
    return whole and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _fits_rowwise(weight: Fp8Matrix, dtype: torch.dtype) -> bool:
    aligned = not any(size % _ROWWISE_ALIGNMENT for size in weight.shape)
    return weight.by_row and aligned and dtype == torch.bfloat16 and supports_fp8(weight.values.device)


def _scaled_mm(x: QuantisedRows, weight: Fp8Matrix, bias: torch.Tensor | None, *, by_row: bool) -> torch.Tensor:
    from torch.nn.functional import ScalingType, scaled_mm

    product = scaled_mm(
        x.values,
        weight.values.t(),
        x.scales,
        ScalingType.RowWise if by_row else ScalingType.BlockWise1x128,
        weight.scales.t(),
        ScalingType.RowWise if by_row else ScalingType.BlockWise128x128,
        bias=bias,
        output_dtype=x.dtype,
    )
    return product[: x.rows]


def _check(x: torch.Tensor | QuantisedRows, weight: Fp8Matrix, bias: torch.Tensor | None, method: Method) -> None:
    values = x if isinstance(x, torch.Tensor) else x.values
    if values.ndim != 2 or weight.values.ndim != 2 or values.shape[1] != weight.shape[1] or not values.is_contiguous():
        raise ValueError(
            f"x {list(values.shape)} must be contiguous rows as long as those of weight {list(weight.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must have an element for each row of weight {list(weight.shape)}")
    if bias is not None and method == "cublas":
        raise ValueError("the product by cuBLAS takes no bias")
    if method == "rowwise" and not (weight.by_row and (isinstance(x, torch.Tensor) or x.by_row)):
        raise ValueError("the rowwise product takes weights and activations with a scale per row")
    if method == "exact" and not (isinstance(x, torch.Tensor) and len(x) <= FEW_ROWS):
        raise ValueError(f"the exact product takes at most {FEW_ROWS} rows, not quantized")
