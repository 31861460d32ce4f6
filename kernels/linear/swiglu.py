"""The gate of a Llama-style MLP.

    out[t, i] = round(silu(gate[t, i])) * up[t, i]      with  gate, up = the two halves of gate_up[t]

Shapes: gate_up [rows, 2 * size], contiguous; out [rows, size]. silu is rounded to the model's dtype before the product,
as in transformers. Lower bound: 3 * rows * size elements moved.
"""

import torch
from torch.nn.functional import silu

from ..backends.dispatch import Impl, launcher, use_numba, use_triton


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def swiglu(gate_up: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """Gate each row; see the module docstring."""
    if use_numba(impl, gate_up):
        launch = launcher("numba.swiglu", "launch_swiglu")
    elif use_triton(impl, gate_up.device):
        launch = launcher("linear.swiglu_triton", "launch_swiglu")
    else:
        return swiglu_reference(gate_up)
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate_up {list(gate_up.shape)} must be contiguous rows of an even size")
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    launch(gate_up, out)
    return out
