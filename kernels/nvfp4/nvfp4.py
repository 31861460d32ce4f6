"""Linear layers with weights in NVFP4; nvfp4_experts.py has experts.

    weight[i, j]  =  E2M1[value[i, j]] * scale[i, j // 16] * factors[i]

Values have 4 bits (packed4/group_format.py has E2M1), scales are numbers of fp8 (e4m3), factors float32. A checkpoint
has one factor per matrix, which is repeated for every row: parts of a fused matrix differ. The products of a value and
its scale are exact in 16 bits.

In memory, a word of 4 bytes has the values of 8 adjacent columns. Its bits are placed so that a pair of values is where
a pair of bfloat16 has them after one shift (`_PLACES`). In every 128 columns, groups of 16 are in the order 0, 4, 1, 5,
2, 6, 3, 7, so that a thread of the CUDA kernel, which copies 16 bytes, has whole groups, and the threads that share a
row of x read adjacent columns of it. Columns are padded to whole steps of the kernel, of 256 or 128 columns. Of group
4 * c + j of a step, the scale is stored at j, c. It is a byte: the exponent and the upper 3 bits of the mantissa of
float16(64 * scale). Values of a group whose scale is 0 are 0.

Shapes: x [rows, in]; weight [out, in]; bias [out] or None; result [rows, out] in the dtype of x, rounded once. With
`gated`, swiglu is applied: `weight` has the rows of gate, then those of up, and the result is [rows, out / 2]. On CUDA,
a CUDA kernel computes few rows; more rows are multiplied by cuBLAS, with weights that Triton expands some rows at a
time.

Lower bound: with few rows, the packed weights read once, 4.5 bits each: 0.92 ms for the layers of Qwen3-8B on an H200.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, launcher, use_triton
from ..backends.few_rows_cuda import OUTPUT_TILE, ROW_TILE, Format, Tiles, launch_few_rows
from ..linear.swiglu import swiglu, swiglu_reference
from ..packed4.group_format import E2M1
from ..packed4.int4_linear import SCRATCH_BYTES, Method, output_parts

GROUP, WORD = 16, 8
"""Columns that share a scale, and columns of a word of 4 bytes."""
SCALE_SHIFT = 64
"""The largest scale times this is a float16."""
CUDA_ROWS = 128
"""Up to this many rows, the CUDA kernel is used where it can run. With 128 rows, the linear layers of a decoder layer
of Qwen3-8B take 262 us with it and 272 us with expanded weights (H200).
"""
_PLACES = ((6, 7, 8, 15), (0, 1, 2, 9), (10, 11, 12, 19), (4, 5, 14, 13))
"""Bits of a word: mantissa, exponent (two bits), and sign of columns 0, 2, 4 and 6. Those of the next column are 16
higher, modulo 32.
"""


@dataclass(frozen=True)
class Nvfp4Matrix:
    """See the module docstring."""

    packed: torch.Tensor  # [rows, padded columns / 2] uint8
    scales: torch.Tensor  # [steps, rows, columns of a step / 16] uint8
    factors: torch.Tensor  # [rows] float32
    columns: int

    @staticmethod
    def allocate(rows: int, columns: int, *, device: torch.device) -> "Nvfp4Matrix":
        """Uninitialised."""
        step = 256 if columns % 256 == 0 else 128
        steps = ceil_div(columns, step)
        packed = torch.empty(rows, steps * step // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(steps, rows, step // GROUP, dtype=torch.uint8, device=device)
        return Nvfp4Matrix(packed, scales, torch.empty(rows, device=device), columns)

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, part: slice) -> "Nvfp4Matrix":
        """A range of rows."""
        return Nvfp4Matrix(self.packed[part], self.scales[:, part], self.factors[part], self.columns)

    @property
    def step(self) -> int:
        """Columns of a step."""
        return self.scales.shape[-1] * GROUP

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.packed), self.columns))

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales.nbytes + self.factors.nbytes

    def fill(self, values: torch.Tensor, scales: torch.Tensor, factor: torch.Tensor | float) -> None:
        """From values [rows, columns] uint8 and scales [rows, groups] in fp8."""
        rows, padded = len(values), 2 * self.packed.shape[1]
        shifted = pad(scales.to(torch.float16) * SCALE_SHIFT, (0, padded // GROUP - scales.shape[1]))
        codes = (shifted.abs().view(torch.int16) >> 7).to(torch.uint8)
        signs = (shifted < 0).to(torch.uint8) << 3
        groups = pad(values, (0, padded - values.shape[1])).view(rows, -1, GROUP) ^ signs.unsqueeze(2)
        groups *= (codes > 0).unsqueeze(2)
        columns = groups.view(rows, -1, 2, 4, GROUP // WORD, WORD).transpose(2, 3)
        words = torch.zeros(columns.shape[:-1], dtype=torch.int32, device=values.device)
        for column, bit, place in _bits():
            words |= (columns[..., column] >> bit & 1).to(torch.int32) << place
        self.packed.copy_(words.view(rows, -1).view(torch.uint8))
        by_step = codes.view(rows, len(self.scales), -1, 4).transpose(2, 3)
        self.scales.copy_(by_step.flatten(2).transpose(0, 1))
        self.factors.copy_(torch.as_tensor(factor, dtype=torch.float32).to(self.factors.device).expand(rows))

    def expanded(self) -> torch.Tensor:
        """The matrix in float32."""
        rows, words = len(self.packed), self.packed.view(torch.int32)
        values = torch.zeros(*words.shape, WORD, dtype=torch.int32, device=words.device)
        for column, bit, place in _bits():
            values[..., column] |= (words >> place & 1) << bit
        groups = values.view(rows, -1, 4, 2, GROUP).transpose(2, 3).reshape(rows, -1, GROUP)
        by_row = self.scales.transpose(0, 1).reshape(rows, len(self.scales), 4, -1)
        codes = by_row.transpose(2, 3).reshape(rows, -1)
        scales = (codes.to(torch.int16) << 7).view(torch.float16).float() / SCALE_SHIFT
        table = torch.tensor(E2M1, dtype=torch.float32, device=words.device)
        wide = (table[groups] * scales.unsqueeze(-1)).flatten(1) * self.factors.unsqueeze(-1)
        return wide[:, : self.columns]


def _bits() -> Iterator[tuple[int, int, int]]:
    """Column, bit of its value, and bit of the word."""
    for column in range(WORD):
        for bit, place in enumerate(_PLACES[column // 2]):
            yield column, bit, (place + 16 * (column % 2)) % 32


def supports_nvfp4(device: torch.device) -> bool:
    """Whether the kernels read NVFP4 there: GPUs of compute capability 8.0 and later."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def choose_method(x: torch.Tensor, weight: Nvfp4Matrix) -> Method:
    """The method for these tensors."""
    return "cuda" if len(x) <= CUDA_ROWS and suits_cuda(x, weight) else "expand"


def suits_cuda(x: torch.Tensor, weight: Nvfp4Matrix) -> bool:
    """Whether the CUDA kernel can multiply them. It copies 16 bytes at a time."""
    if not x.is_cuda or x.itemsize != 2 or len(weight) % 16 or weight.columns % GROUP:
        return False
    return all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight.packed, weight.scales))


def nvfp4_linear(
    x: torch.Tensor,
    weight: Nvfp4Matrix,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    method: Method | None = None,
    tiles: Tiles | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """A linear layer; see the module docstring."""
    _check(x, weight, bias)
    if not use_triton(impl, x.device):
        wide = None if bias is None else bias.float()
        both = torch_linear(x.float(), weight.expanded(), wide).to(x.dtype)
        return swiglu_reference(both) if gated else both
    if (method or choose_method(x, weight)) == "cuda":
        out = x.new_empty(len(x), len(weight) // (2 if gated else 1))
        _launch_cuda(x, weight, bias, out, gated=gated, tiles=tiles)
        return out
    out = x.new_empty(len(x), len(weight))
    for part in output_parts(len(weight), weight.columns * x.itemsize, SCRATCH_BYTES):
        expanded = x.new_empty(part.stop - part.start, weight.columns)
        launcher("nvfp4.expand_triton", "launch_expand")(weight[part], expanded)
        if bias is None:
            torch.mm(x, expanded.t(), out=out[:, part])
        else:
            torch.addmm(bias[part], x, expanded.t(), out=out[:, part])
    return swiglu(out) if gated else out


def _launch_cuda(
    x: torch.Tensor,
    weight: Nvfp4Matrix,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    gated: bool,
    tiles: Tiles | None = None,
) -> None:
    """Fill `out` [rows, outputs] by csrc/nvfp4/nvfp4_linear.cu."""
    row_bytes, step, few = weight.packed.shape[1], weight.step, len(x) <= ROW_TILE
    launch_few_rows(
        Format(
            "nvfp4_linear",
            OUTPUT_TILE * (step // 2 + step // GROUP),
            # more row tiles take more registers, and so fewer warps
            warps=(16, 8, 8) if few else (8, 4, 4),
            stages=(5, 2, 2) if few else (3, 3, 3),
            constants=(("STEP", step), ("WHOLE", int(weight.columns == 2 * row_bytes))),
            folder="nvfp4",
        ),
        x,
        (weight.packed.data_ptr(), weight.scales.data_ptr(), weight.factors.data_ptr()),
        bias,
        out,
        row_bytes,
        weight.scales.stride(0),
        steps=2 * row_bytes // step,
        gated=gated,
        tiles=tiles,
    )


def _check(x: torch.Tensor, weight: Nvfp4Matrix, bias: torch.Tensor | None) -> None:
    if x.ndim != 2 or x.shape[1] != weight.columns or weight.packed.ndim != 2 or not x.is_contiguous():
        raise ValueError(f"x {list(x.shape)} must be contiguous rows as long as those of weight {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must have an element for each row of weight {list(weight.shape)}")
