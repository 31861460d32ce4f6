"""The forward pass of a dense Llama, Qwen2 or Qwen3 decoder over a paged KV pool.

The order of operations and of roundings is that of transformers 5.17, so that greedy tokens agree with it in every
dtype: norms in float32 with the weight applied after the cast back, cos and sin rounded to the model's dtype.
"""

import torch
from torch.nn.functional import embedding

from ..kernels.linear import gated_linear, linear
from ..kernels.paged_attention import paged_attention
from ..kernels.rms_norm import add_rms_norm, rms_norm
from ..kernels.rope_kv_write import rope_kv_write
from ..memory.kv_pool import KvPool
from .batch import ForwardBatch
from .parameters import DecoderParameters
from .rope import Rotary


class Decoder:
    """Weights and the arithmetic over them; holds no state of any sequence."""

    def __init__(self, parameters: DecoderParameters) -> None:
        self.parameters = parameters
        self.config = parameters.config
        self._rotary = Rotary(self.config, parameters.embedding.device, parameters.embedding.dtype)
        self._scale = self.config.head_dim**-0.5

    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Write the KV of all tokens into `pool`; returns float32 logits [B, vocab] of each slice's last token."""
        hidden = self.hidden(batch, pool)
        return self.logits(hidden if batch.last_rows is None else hidden[batch.last_rows])

    def hidden(self, batch: ForwardBatch, pool: KvPool, *, live_rows: torch.Tensor | None = None) -> torch.Tensor:
        """Write the KV of all tokens into `pool`; returns what the last layer leaves, [T, hidden], for `logits`.

        `live_rows` (on the device, one integer) says how many rows of a padded batch are real: the others write
        nothing, and what is returned for them means nothing.
        """
        layers, eps = self.parameters.layers, self.config.norm_eps
        hidden = embedding(batch.token_ids, self.parameters.embedding)
        cos, signed_sin = self._rotary.cos_sin(batch.positions)
        normed = rms_norm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            qkv = linear(normed, layer.qkv, layer.qkv_bias)
            key_pages, value_pages = pool.layer(index)  # as the pool, `index` counts the layers of this rank
            query = rope_kv_write(
                qkv,
                cos,
                signed_sin,
                key_pages,
                value_pages,
                batch.page_ids,
                batch.offsets,
                q_norm=layer.q_norm,
                k_norm=layer.k_norm,
                eps=eps,
                live_rows=live_rows,
            )
            attended = paged_attention(query, key_pages, value_pages, batch.attention, scale=self._scale)
            attended = linear(attended.flatten(1), layer.o, layer.o_bias)
            hidden, normed = add_rms_norm(hidden, attended, layer.mlp_norm, eps)
            gated = gated_linear(normed, layer.gate_up, layer.gate_up_bias)
            update = linear(gated, layer.down, layer.down_bias)
            if index + 1 < len(layers):
                hidden, normed = add_rms_norm(hidden, update, layers[index + 1].input_norm, eps)
        return hidden + update

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The final norm and the head: float32 logits [N, vocab] of any rows of `hidden`, in `out` where given."""
        hidden = rms_norm(hidden, self.parameters.norm, self.config.norm_eps)
        logits = linear(hidden, self.parameters.head)
        return logits.float() if out is None else out.copy_(logits)
