"""Launcher of csrc/moe/norm_route.cu: residual sum, norm, router and selection of very few tokens in one kernel."""

import torch

from ....common.arithmetic import ceil_div
from ...backends.nvrtc import float_bits, load_kernel
from ...backends.occupancy import is_hopper_or_later, shared_memory
from .selection import SelectionRule, empty_selection

_MOST_TOKENS, _MOST_EXPERTS = 4, 1024
_MOST_HIDDEN = 8192
"""A thread keeps its part of all tokens in registers, which limits the hidden size."""
_CLUSTER, _WARPS = 8, 8
_STEP = 64
"""The hidden size is a multiple of this."""
_PAD = 16
"""Bytes after a row in shared memory."""


def suits_norm_route(
    x: torch.Tensor, norm: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, rule: SelectionRule
) -> bool:
    """Whether the kernel supports tokens x [T, hidden] with a router [E, hidden] that selects by softmax."""
    if not x.is_cuda or x.dtype.itemsize != 2 or not is_hopper_or_later(x.device):
        return False
    (tokens, hidden), experts = x.shape, len(router)
    if not 1 <= tokens <= _MOST_TOKENS or hidden % _STEP or hidden > _MOST_HIDDEN or experts > _MOST_EXPERTS:
        return False
    if rule.num_groups > 1 or rule.per_token > min(experts, 32):
        return False
    tensors = x, norm, router, *(() if bias is None else (bias,))
    if not all(each.dtype == x.dtype and each.is_contiguous() and each.data_ptr() % 16 == 0 for each in tensors):
        return False
    return _shared_bytes(experts, hidden) <= shared_memory(x.device)


def add_norm_route(
    x: torch.Tensor,
    y: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    rule: SelectionRule,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x + y and its norm [T, hidden], and the weights and numbers [T, k] of the experts that the router selects for the
    norm; for tensors that `suits_norm_route` accepts.
    """
    if y.shape != x.shape or y.dtype != x.dtype or not y.is_contiguous() or y.data_ptr() % 16:
        raise ValueError(
            f"cannot add {y.dtype} {list(y.shape)} to {x.dtype} {list(x.shape)}: both must be contiguous and aligned"
        )
    total, normed = torch.empty_like(x), torch.empty_like(x)
    weights, experts = empty_selection(x, rule)
    launch_norm_route(x, y, norm, eps, router, bias, rule, total, normed, weights, experts)
    return total, normed, weights, experts


def launch_norm_route(
    x: torch.Tensor,
    y: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    bias: torch.Tensor | None,
    rule: SelectionRule,
    total: torch.Tensor,
    normed: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
) -> None:
    """Fill `total`, `normed`, `weights` and `experts`, for tensors that `suits_norm_route` accepts."""
    constants = (
        ("CLUSTER", _CLUSTER),
        ("WARPS", _WARPS),
        ("HIDDEN", x.shape[1]),
        ("EXPERTS", len(router)),
        ("PER_TOKEN", rule.per_token),
        ("NORMALISED", int(rule.normalised)),
        ("BIAS", int(bias is not None)),
        ("HALF", int(x.dtype == torch.float16)),
    )
    load_kernel("moe/norm_route.cu", "norm_route", x.device, constants, shared_memory(x.device)).launch(
        x.data_ptr(),
        y.data_ptr(),
        norm.data_ptr(),
        router.data_ptr(),
        (router if bias is None else bias).data_ptr(),
        total.data_ptr(),
        normed.data_ptr(),
        weights.data_ptr(),
        experts.data_ptr(),
        len(x),
        float_bits(eps),
        float_bits(rule.scale),
        blocks=_CLUSTER,
        threads=32 * _WARPS,
        shared_bytes=_shared_bytes(len(router), x.shape[1]),
        overlap_previous=True,
    )


def _shared_bytes(experts: int, hidden: int) -> int:
    """Shared memory of a block: the size of `Shared` in the kernel."""
    rows = ceil_div(ceil_div(experts, _CLUSTER), 16) * 16
    lines = (rows + _MOST_TOKENS) * (2 * hidden + _PAD)
    sums = _WARPS * (rows + 1) * _MOST_TOKENS * 4
    return ceil_div(lines + sums + _MOST_TOKENS * experts * 4 + 16, 16) * 16
