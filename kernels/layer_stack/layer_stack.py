"""All layers of a Llama-style decoder in one call, for a decode step of few sequences on the CPU.

    for each layer:   hidden += o(attention(rope(qkv(rms_norm(hidden)))))
                      hidden += down(swiglu(gate_up(rms_norm(hidden))))

The operations are those of ../linear/, ../gguf/gguf_linear.py and ../attention/, which are also the reference: a
decoder computes the same with a call for each of them. In a model of 30 small layers these 300 calls, and the threads
that wake up and wait for each other in each, take as long as the arithmetic.

Weights are interleaved GGUF blocks. Shapes: hidden [rows, hidden size] float32, one row for each sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..attention.gather_plan import GatherPlan
from ..backends.dispatch import launcher, numba_computes
from ..gguf.blocks import GgufBlocks, ggml_number
from ..gguf.gguf_linear import FEW_ROWS


@dataclass(frozen=True)
class Linear:
    """The weight and the bias of a linear layer."""

    weight: GgufBlocks
    bias: torch.Tensor | None

    @property
    def fits(self) -> bool:
        """Whether the kernel can read it."""
        return len(self.weight.parts) == 1 and self.weight.parts[0].interleaved

    def fields(self) -> list[int]:
        (rows,) = self.weight.parts
        return [rows.blocks.data_ptr(), ggml_number(rows.type_name), rows.blocks.shape[1], _address(self.bias)]


@dataclass(frozen=True)
class Layer:
    """The parameters of a layer; `gate_up` has the rows of gate, then those of up."""

    input_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: Linear
    o: Linear
    gate_up: Linear
    down: Linear

    @property
    def matrices(self) -> tuple[Linear, ...]:
        return self.qkv, self.o, self.gate_up, self.down

    def fields(self) -> list[int]:
        norms = [_address(norm) for norm in (self.input_norm, self.mlp_norm, self.q_norm, self.k_norm)]
        return norms + [field for matrix in self.matrices for field in matrix.fields()]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class LayerStack:
    """The layers of a decoder; holds their weights."""

    def __init__(self, layers: Sequence[Layer], *, eps: float, scale: float) -> None:
        """`scale` is that of attention scores."""
        self._layers = layers  # the table below has addresses in them
        self.table = torch.tensor([layer.fields() for layer in layers])
        self.hidden_size, self.mlp_size = layers[0].down.weight.shape
        self.query_size = layers[0].o.weight.columns  # all heads
        self.eps, self.scale = eps, scale

    @staticmethod
    def fits(layers: Sequence[Layer]) -> bool:
        """Whether the kernel takes these layers."""
        return numba_computes() and all(matrix.fits for layer in layers for matrix in layer.matrices)

    def computes(self, plan: object) -> bool:
        """Whether the kernel takes a batch: up to 32 sequences of one token."""
        return isinstance(plan, GatherPlan) and not plan.prefill and len(plan.decoding) <= FEW_ROWS and numba_computes()

    def run(
        self,
        hidden: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        pages: Sequence[tuple[torch.Tensor, ...]],
        page_ids: torch.Tensor,
        offsets: torch.Tensor,
        plan: GatherPlan,
    ) -> torch.Tensor:
        """Write the KV of all rows into `pages`, keys and values of each layer of one float32 pool; returns the new
        hidden state. `angles` are cos and signed sin (rope_kv_write.py).
        """
        hidden = hidden.clone()
        launcher("numba.layer_stack", "launch_layers")(self, hidden, angles, pages, page_ids, offsets, plan.decode_rows)
        return hidden
