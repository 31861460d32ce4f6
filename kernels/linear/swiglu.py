"""The gate of a Llama-style MLP.

    out[t, i] = round(silu(gate[t, i])) * up[t, i]      with  gate, up = the two halves of gate_up[t]

With `gelu`, as in Gemma models, the tanh approximation of GELU replaces silu. Both are x * sigmoid(g(x)):

    silu:  g(x) = x          gelu:  g(x) = sqrt(8 / pi) * (x + 0.044715 * x^3)

Shapes: gate_up [rows, 2 * size], contiguous; out [rows, size]. silu is rounded to the model's dtype before the product,
as in transformers. Lower bound: 3 * rows * size elements moved.
"""

import math

import torch
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import silu

from ..backends.dispatch import Impl, launcher, use_numba, use_triton

GELU_FACTOR, GELU_CUBIC = math.sqrt(8 / math.pi), 0.044715


def swiglu_reference(gate_up: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch_gelu(gate, approximate="tanh") if gelu else silu(gate)) * up


def swiglu(gate_up: torch.Tensor, *, gelu: bool = False, impl: Impl = "auto") -> torch.Tensor:
    """Gate each row; see the module docstring."""
    if use_numba(impl, gate_up):
        launch = launcher("numba.swiglu", "launch_swiglu")
    elif use_triton(impl, gate_up.device):
        launch = launcher("linear.swiglu_triton", "launch_swiglu")
    else:
        return swiglu_reference(gate_up, gelu=gelu)
    if gate_up.ndim != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate_up {list(gate_up.shape)} must be contiguous rows of an even size")
    out = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    launch(gate_up, out, gelu=gelu)
    return out
