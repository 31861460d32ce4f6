"""The weights of one rank's decoder in the layout of the forward pass: q/k/v in one matrix, gate/up in one matrix.

A rank reads only its part of the checkpoint: its layers, its heads, its columns of the feed-forward layer or its
experts, and its rows of the vocabulary.
"""

from dataclasses import dataclass

import torch

from ..weights.slots import Share
from ..weights.weight import AnyWeight
from .rank_memory import AttentionStep, RankMemory
from .rank_parameters import RankParameters
from .stage import StageLayer


@dataclass(frozen=True, kw_only=True)
class LayerParameters(StageLayer):
    """One decoder layer, this rank's part: `heads`, `kv_heads` and `intermediate` are its own.

    Biases and norms are None if the architecture has none. Biases of `o` and `down`, whose results are summed over
    ranks, are None on all ranks but the first.
    """

    qkv: AnyWeight  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: AnyWeight  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    sinks: torch.Tensor | None = None  # [heads] float32
    step: AttentionStep | None = None  # before norms per head


class DenseMemory(RankMemory[LayerParameters]):
    wide = True

    def layer(self, index: int) -> LayerParameters:
        config, name = self.config, f"model.layers.{index}"
        attention, hidden, head_dim = f"{name}.self_attn", config.hidden_size, config.head_dim
        queries, keys = self.query_rows, self.key_rows
        qkv = {f"{attention}.q_proj": queries, f"{attention}.k_proj": keys, f"{attention}.v_proj": keys}
        o = {f"{attention}.o_proj": Share.all(hidden)}
        before_mlp = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        sinks = Share.of(self.heads, config.num_heads)
        return LayerParameters(
            input_norm=self.norm(f"{name}.input_layernorm", hidden) if config.pre_norms else None,
            qkv=self.weight(qkv, hidden, wide=True),
            qkv_bias=self.bias(qkv) if config.qkv_bias else None,
            q_norm=self.norm(f"{attention}.q_norm", head_dim) if config.qk_norm else None,
            k_norm=self.norm(f"{attention}.k_norm", head_dim) if config.qk_norm else None,
            o=self.weight(o, queries),
            o_bias=self.bias(o) if config.o_bias and self.shard.attention.tp_rank == 0 else None,
            mlp_norm=self.norm(f"{name}.{before_mlp}", hidden) if config.pre_norms else None,
            mlp=self.feed_forward(index),
            attention_post_norm=self.norm(f"{name}.post_attention_layernorm", hidden) if config.post_norms else None,
            mlp_post_norm=self.norm(f"{name}.post_feedforward_layernorm", hidden) if config.post_norms else None,
            sinks=self.tensor(f"{attention}.sinks", sinks, dtype=torch.float32) if config.sinks else None,
            step=None if self._step is None else self._step(self, attention),
        )


class DecoderParameters(RankParameters[LayerParameters]):
    """The weights of a rank of a decoder with full or windowed attention."""

    memory_type = DenseMemory
