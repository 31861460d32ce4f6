"""Adds biases and applies the gate after a product of rows that are sorted by expert.

    out[t, first + i]  =  gate(products[t] + bias[e])[i]       with  e = the expert of row t: ends[e - 1] <= t < ends[e]

The gate is that of swiglu.py or, with `limit`, that of clamped_gate.py; without `gated` only the bias is added. The
products may cover only some of the outputs, from output `first` on; `out` and `bias` have all of them.

Shapes: products [rows, width], gated [rows, 2 * width]; ends [experts] int32; bias [experts, size], gated
[experts, 2 * size]; out [rows, size]. Rows from ends[-1] on are undefined. `out` may be `products` if not gated.

Lower bound: products read and results written once.
"""

import torch

from ..backends.dispatch import Impl, launcher, use_triton
from ..linear.swiglu import swiglu_reference
from .clamped_gate import clamped_gate


def expert_gate_reference(
    products: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    first: int = 0,
    *,
    gated: bool,
    limit: float | None = None,
) -> None:
    width = products.shape[1] // 2 if gated else products.shape[1]
    if bias is not None:
        rows = torch.arange(len(products), dtype=torch.int32, device=ends.device)
        expert = torch.searchsorted(ends, rows, right=True).clamp_(max=len(ends) - 1)
        number = torch.arange(first, first + width, device=bias.device)
        if gated:
            pairs = torch.stack((2 * number, 2 * number + 1), 1).flatten()
            number = torch.cat((number, out.shape[1] + number)) if limit is None else pairs
        products = (products.float() + bias[:, number].float()[expert]).to(products.dtype)
    if gated:
        products = swiglu_reference(products) if limit is None else clamped_gate(products, limit)
    out[:, first : first + width] = products


def expert_gate(
    products: torch.Tensor,
    ends: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    first: int = 0,
    *,
    gated: bool,
    limit: float | None = None,
    impl: Impl = "auto",
) -> None:
    """Fill columns of `out` from `first` on; see the module docstring."""
    if not all(each is None or each.is_contiguous() for each in (products, ends, bias, out)):
        raise ValueError("products, ends, bias and out must be contiguous")
    if not use_triton(impl, out.device):
        expert_gate_reference(products, ends, bias, out, first, gated=gated, limit=limit)
        return
    launch = launcher("moe.expert_gate_triton", "launch_expert_gate")
    launch(products, ends, bias, out, first, gated=gated, limit=limit)
