"""Launcher of csrc/linear/token_experts.cu: the experts of very few tokens, in two kernels.

With so few tokens, sorting them by expert gains nothing, and a third kernel that adds the results of experts would only
wait for the previous one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from ...common.arithmetic import ceil_div
from ..backends.few_rows_cuda import OUTPUT_TILE, Format, can_run, launch_tiles
from ..linear.fp8_format import BLOCK, Fp8Matrix, Weight
from ..linear.fp8_linear import CUDA_FORMAT as FP8_FORMAT
from ..linear.linear import CUDA_COLUMNS, CUDA_FORMAT
from ..packed4.group_format import GroupScaled
from ..packed4.int4_linear_cuda import cuda_format, integer_bytes

MOST_TOKENS, MOST_CHOICES = 4, 32
"""Limits of the kernels. Of more tokens, many choose the same experts, whose weights would be read several times."""
_PLAIN_FORMAT = replace(CUDA_FORMAT, warps=(16, 16, 8), stages=(4, 5, 4))
"""With these sizes, three thread blocks of `expert_gates` fit on a multiprocessor of Hopper. For one token, a block of
`expert_sums` also fits beside the last of them, so that it copies its first weights while `expert_gates` ends.
"""


class _Matrices(NamedTuple):
    """The matrices of all experts, as arguments of the kernels."""

    form: Format
    number: int  # of the format
    addresses: tuple[int, ...]  # values, scales and zeros; those that a format does not have are not read
    sizes: tuple[int, int, int]
    steps: int  # of a row


def suits_token_experts(x: torch.Tensor, per_token: int, gate_up: Weight, down: Weight) -> bool:
    """Whether the kernels support these tensors, and the number of tokens in x with `per_token` experts each."""
    if not x.is_cuda or x.dtype.itemsize != 2 or not can_run(x.device):
        return False
    if not 1 <= len(x) <= MOST_TOKENS or len(x) * per_token > MOST_CHOICES:
        return False
    if not x.is_contiguous() or x.data_ptr() % 16:
        return False
    return all(_suits(weight, x.dtype) for weight in (gate_up, down)) and type(gate_up) is type(down)


def _suits(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether rows are whole steps and can be copied 16 bytes at a time; of 4-bit weights, also 8 scales at a time."""
    rows, columns = weight.shape[-2:]
    if isinstance(weight, torch.Tensor):
        return weight.dtype == dtype and columns % CUDA_COLUMNS == 0 and _aligned(weight)
    if isinstance(weight, Fp8Matrix):
        return columns % BLOCK == 0 and _aligned(weight.values, weight.scales)
    if isinstance(weight, GroupScaled):
        if rows % 16 or weight.zeros is None or weight.scales.dtype != dtype:
            return False
        return _aligned(weight.packed, weight.scales, weight.zeros)
    return False


def _aligned(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors)


def _matrices(weight: Weight, rows: int) -> _Matrices:
    """The matrices, for a kernel that reads `rows` rows of x."""
    if isinstance(weight, Fp8Matrix):
        values, scales = weight.values, weight.scales
        sizes = weight.row_group, scales.stride(-2), 0 if weight.by_row else 1
        return _Matrices(FP8_FORMAT, 1, (values.data_ptr(), *[scales.data_ptr()] * 2), sizes, values.shape[-1] // BLOCK)
    if isinstance(weight, GroupScaled):
        assert weight.zeros is not None
        addresses = weight.packed.data_ptr(), weight.scales.data_ptr(), weight.zeros.data_ptr()
        row_bytes = weight.packed.shape[-1]
        sizes = row_bytes, weight.scales.stride(-2), 0
        steps = row_bytes // weight.group
        return _Matrices(
            cuda_format(weight.group, integer_bytes(weight.group, steps, rows)), 2, addresses, sizes, steps
        )
    assert isinstance(weight, torch.Tensor)
    return _Matrices(_PLAIN_FORMAT, 0, (weight.data_ptr(),) * 3, (0, 0, 0), weight.shape[-1] // CUDA_COLUMNS)


def launch_token_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    out: torch.Tensor,
    *,
    first: int,
    shared: Callable[[], torch.Tensor] | None,
) -> None:
    """Fill `out` [tokens, hidden]; for tensors that `suits_token_experts` accepts. `shared` returns a tensor of the
    same shape, which is added.
    """
    gated = x.new_empty(experts.numel(), down.shape[-1])
    numbers = experts.data_ptr()
    _launch("expert_gates", x, gate_up, (numbers, gated.data_ptr()), experts, gated.shape[1], first, bias=0)
    added = out if shared is None else shared()
    pointers = numbers, weights.data_ptr(), added.data_ptr(), out.data_ptr()
    _launch("expert_sums", gated, down, pointers, experts, out.shape[1], first, bias=0 if shared is None else 2)


def _launch(
    name: str,
    x: torch.Tensor,
    weight: Weight,
    pointers: tuple[int, ...],
    experts: torch.Tensor,
    outputs: int,
    first: int,
    *,
    bias: int,
) -> None:
    (tokens, per_token), gated, matrices = experts.shape, name == "expert_gates", _matrices(weight, len(x))
    assert weight[:1].nbytes < 1 << 32, "the kernels count the bytes of an expert in 32 bits"
    count = ceil_div(outputs, OUTPUT_TILE // 2) * experts.numel() if gated else ceil_div(outputs, OUTPUT_TILE) * tokens
    launch_tiles(
        "linear/token_experts.cu",
        name,
        matrices.form,
        x,
        (*matrices.addresses, *pointers, tokens, outputs, x.shape[1], first, len(weight), *matrices.sizes),
        (("FORMAT", matrices.number), ("PER_TOKEN", per_token)),
        count=count,
        steps=matrices.steps * (1 if gated else per_token),
        gated=gated,
        bias=bias,
    )
