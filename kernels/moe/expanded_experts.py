"""Experts with 4-bit weights and many tokens: expands the weights to 16 bits for torch's grouped product.

    result[t]  =  round(down[e]) @ gate(round(gate_up[e]) @ rows[t] + gate_up_bias[e])  +  down_bias[e]

Shapes: rows [N, hidden], sorted by expert; ends [E] int32, the end of each expert's rows, from routing.py; gate_up
[E, 2 * size, hidden]; down [E, hidden, size]; biases [E, outputs]; result [N, hidden], in the order of the rows. Rows
from ends[-1] on may have any value, and their results are undefined. The host does not wait for the device.

Expanded weights take at most about 512 MiB at a time. Each part has the weights of some outputs of all experts: as many
outputs as fit, but not fewer than 128 (896 MiB for the 256 experts of DeepSeek-R1). To expand some experts at a time
instead, the host would have to know where the rows of an expert begin.

Lower bound: the products at the rate of the dtype of the rows, plus about 2.5 bytes of traffic per weight to expand it.
So with enough rows per expert, this is faster than packed_experts_triton.py.
"""

import torch
from torch.nn.functional import grouped_mm

from ..backends.dispatch import Impl, launcher, use_triton
from ..packed4.group_format import GroupScaled
from ..packed4.int4_linear import output_parts
from .expert_gate import expert_gate
from .grouped_product import grouped_without_wait

EXPANDED_ROWS = 128
"""Weights are expanded from this many rows per expert on average. On an H200, computed from the times of both products
and of the traffic, both ways take the same time at 140 rows for Qwen3-30B-A3B, 120 for Mixtral-8x7B and 60 for
gpt-oss-20b.
"""
SCRATCH_BYTES = 512 << 20
"""The most memory for expanded weights, unless OUTPUT_STEP outputs of all experts need more."""


def expansion_pays(numbers: int, num_experts: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `num_experts` experts with `numbers` rows in total have enough rows on average for expanded weights to be
    faster, and torch's grouped product does not wait for the device.
    """
    return numbers >= EXPANDED_ROWS * num_experts and device.type == "cuda" and grouped_without_wait(dtype, device)


def expanded_results(
    rows: torch.Tensor,
    ends: torch.Tensor,
    gate_up: GroupScaled,
    down: GroupScaled,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float | None = None,
    *,
    scratch_bytes: int = SCRATCH_BYTES,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Results [N, hidden] of rows that are sorted by expert; see the module docstring."""
    _check(rows, ends, gate_up, down)
    size, hidden = gate_up.shape[1] // 2, down.shape[1]
    gated = rows.new_empty(len(rows), size)
    for part in output_parts(size, 2 * len(gate_up) * gate_up.columns * rows.itemsize, scratch_bytes):
        if limit is None:  # gate, then up
            ranges = [part, slice(size + part.start, size + part.stop)]
        else:  # rows of both alternate
            ranges = [slice(2 * part.start, 2 * part.stop)]
        products = _products(rows, ends, gate_up, ranges, impl)
        expert_gate(products, ends, gate_up_bias, gated, part.start, gated=True, limit=limit, impl=impl)
    parts = list(output_parts(hidden, len(down) * down.columns * rows.itemsize, scratch_bytes))
    if len(parts) == 1:
        results = _products(gated, ends, down, parts, impl)
        if down_bias is not None:
            expert_gate(results, ends, down_bias, results, gated=False, impl=impl)
        return results
    results = torch.empty_like(rows)
    for part in parts:
        products = _products(gated, ends, down, [part], impl)
        expert_gate(products, ends, down_bias, results, part.start, gated=False, impl=impl)
    return results


def _products(
    rows: torch.Tensor, ends: torch.Tensor, weight: GroupScaled, ranges: list[slice], impl: Impl
) -> torch.Tensor:
    """Products with some rows of every expert's matrix. The expanded weights are freed, so the next part reuses their
    memory.
    """
    outputs = sum(each.stop - each.start for each in ranges)
    expanded = rows.new_empty(len(weight), outputs, weight.columns)
    first = 0
    for each in ranges:
        target = expanded[:, first : first + each.stop - each.start]
        if use_triton(impl, rows.device):
            launcher("packed4.expand_triton", "launch_expand")(weight.rows(each), target)
        else:
            target.copy_(weight.rows(each).expanded())
        first += each.stop - each.start
    return grouped_mm(rows, expanded.transpose(1, 2), offs=ends)


def _check(rows: torch.Tensor, ends: torch.Tensor, gate_up: GroupScaled, down: GroupScaled) -> None:
    experts, hidden, size = down.shape
    if gate_up.shape != (experts, 2 * size, hidden) or rows.shape[1:] != (hidden,) or not rows.is_contiguous():
        raise ValueError(
            f"rows {list(rows.shape)} must be contiguous, for experts {list(gate_up.shape)} and {list(down.shape)}"
        )
    if ends.shape != (experts,) or ends.dtype != torch.int32:
        raise ValueError(f"ends {ends.dtype} {list(ends.shape)} must be the int32 ends of {experts} experts")
