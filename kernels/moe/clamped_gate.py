"""The gate of the experts of gpt-oss.

    gate, up  =  gate_up[t, 0::2], gate_up[t, 1::2]          the rows of both matrices alternate
    gate, up  =  min(gate, limit), clamp(up, -limit, limit)
    out[t]    =  (up + 1) * gate * sigmoid(1.702 * gate)

Shapes: gate_up [rows, 2 * size]; out [rows, size].
"""

import torch

ALPHA = 1.702


def clamped_gate(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(gate * ALPHA))
