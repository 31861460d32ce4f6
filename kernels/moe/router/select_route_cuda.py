"""Launcher of csrc/moe/select_route.cu: selects the experts of few tokens and sorts the tokens, in one kernel."""

import torch

from ...backends.few_rows_cuda import can_run
from ...backends.nvrtc import float_bits, load_kernel
from ...linear.row_tiles import RowTiles
from .selection import SelectionRule

MOST_TOKENS = 64
_LEAST_THREADS, _MOST_EXPERTS = 256, 1024
_CLUSTER = 8
"""Thread blocks on Hopper: a single multiprocessor would take longer for all tokens."""


def suits_select_route(logits: torch.Tensor, rule: SelectionRule) -> bool:
    """Whether the kernel supports these rows of logits."""
    tokens, experts = logits.shape
    if not logits.is_cuda or not can_run(logits.device) or not 1 <= tokens <= MOST_TOKENS:
        return False
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16) or experts % 32 or experts > _MOST_EXPERTS:
        return False
    groups, allowed = rule.num_groups, experts // rule.num_groups * rule.groups_per_token
    return 32 % groups == 0 and experts >= 2 * groups and rule.per_token <= min(allowed, 32)


def launch_select_route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    experts: torch.Tensor,
    tiles: RowTiles,
    rule: SelectionRule,
    *,
    first: int,
) -> None:
    """Fill `weights` and `experts` [T, k] and all tensors of `tiles`, for logits that `suits_select_route` accepts."""
    cluster = _CLUSTER if torch.cuda.get_device_capability(logits.device) >= (9, 0) else 1
    constants = (
        ("CLUSTER", cluster),
        ("EXPERTS", logits.shape[1]),
        ("GROUPS", rule.num_groups),
        ("GROUPS_PER_TOKEN", rule.groups_per_token),
        ("PER_TOKEN", rule.per_token),
        ("NORMALISED", int(rule.normalised)),
        ("SOFTMAX", int(bias is None)),
        ("TILE_ROWS", tiles.rows),
        ("FLOAT", int(logits.dtype == torch.float32)),
        ("HALF", int(logits.dtype == torch.float16)),
    )
    load_kernel("moe/select_route.cu", "select_route", logits.device, constants).launch(
        logits.data_ptr(),
        (weights if bias is None else bias).data_ptr(),  # not read without a bias
        weights.data_ptr(),
        experts.data_ptr(),
        tiles.order.data_ptr(),
        tiles.place.data_ptr(),
        tiles.ends.data_ptr(),
        tiles.expert.data_ptr(),
        tiles.first.data_ptr(),
        tiles.counts.data_ptr(),
        len(logits),
        first,
        len(tiles.ends),
        len(tiles.expert),
        float_bits(rule.scale),
        blocks=cluster,
        threads=max(logits.shape[1], _LEAST_THREADS),
        overlap_previous=True,
    )
