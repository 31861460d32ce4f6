"""The weights of one rank's decoder in the layout of the forward pass: q/k/v in one matrix, gate/up in one matrix.

`slots()` maps parts of checkpoint tensors to parts of ours (slots.py), so that loading needs no second copy of the
model and a rank reads only its part: its layers, its heads, its columns of the feed-forward layer or its experts, and
its rows of the vocabulary.
"""

from dataclasses import dataclass, replace

import torch

from ..layers.moe import MlpParameters, MoeParameters
from ..weights.format import Part
from ..weights.slots import Slot
from ..weights.weight import AnyWeight
from .mlp_parameters import mlp_slots, split_rows
from .rank_parameters import LayerMemory, RankParameters


@dataclass(frozen=True)
class LayerParameters:
    """One decoder layer, this rank's part: `heads`, `kv_heads` and `intermediate` are its own.

    Biases and q/k norms are None if the architecture has none. Those of `o` and `down`, whose results are summed over
    ranks, are None on all ranks but the first.
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: AnyWeight  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: AnyWeight  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    mlp: MlpParameters | MoeParameters
    attention_post_norm: torch.Tensor | None = None  # [hidden], of the result of attention ...
    mlp_post_norm: torch.Tensor | None = None  # [hidden], ... and of the MLP
    sinks: torch.Tensor | None = None  # [heads] float32


class DenseMemory(LayerMemory[LayerParameters]):
    """Allocates the layers of one rank."""

    wide = True

    def layer(self, index: int) -> LayerParameters:
        config, shard, head_dim = self.config, self.shard.attention, self.config.head_dim
        hidden = config.hidden_size
        heads, kv_heads = shard.part("num_attention_heads", config.num_heads), shard.kv_heads(config.num_kv_heads)
        q_size, kv_size = len(heads) * head_dim, len(kv_heads) * head_dim
        prefix, moe = f"model.layers.{index}", config.moe_of(index)
        return LayerParameters(
            input_norm=self.norm(hidden),
            qkv=self._qkv(f"{prefix}.self_attn", heads, kv_heads),
            qkv_bias=self._optional(config.qkv_bias, q_size + 2 * kv_size),
            q_norm=self.norm(head_dim) if config.qk_norm else None,
            k_norm=self.norm(head_dim) if config.qk_norm else None,
            o=self.weight(
                hidden,
                q_size,
                parts=[Part(f"{prefix}.self_attn.o_proj.weight", hidden)],
                first_column=heads.start * head_dim,
            ),
            o_bias=self._optional(config.o_bias and shard.tp_rank == 0, hidden),
            mlp_norm=self.norm(hidden),
            mlp=self.mlp(prefix) if moe is None else self.mixture(prefix, moe),
            attention_post_norm=self.norm(hidden) if config.post_norms else None,
            mlp_post_norm=self.norm(hidden) if config.post_norms else None,
            sinks=self.tensor(len(heads), dtype=torch.float32) if config.sinks else None,
        )

    def _qkv(self, prefix: str, heads: range, kv_heads: range) -> AnyWeight:
        head_dim, parts, rows = self.config.head_dim, [], 0
        for name, held in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            size = len(held) * head_dim
            parts.append(Part(f"{prefix}.{name}_proj.weight", size, rows, held.start * head_dim))
            rows += size
        return self.weight(rows, self.config.hidden_size, parts=parts, wide=True)

    def mlp(self, layer: str) -> MlpParameters:
        config, parameters = self.config, super().mlp(layer)
        return replace(
            parameters,
            gate_up_bias=self._optional(config.mlp_bias, len(parameters.gate_up)),
            down_bias=self._optional(config.mlp_bias and self.shard.tp_rank == 0, config.hidden_size),
            gelu=config.gelu,
        )

    def _optional(self, present: bool, size: int) -> torch.Tensor | None:
        return self.tensor(size) if present else None


class DecoderParameters(RankParameters[LayerParameters]):
    """The weights of a rank of a decoder with full or windowed attention."""

    memory = DenseMemory

    @property
    def heads(self) -> range:
        """The global query heads of this rank."""
        return self.shard.attention.part("num_attention_heads", self.config.num_heads)

    @property
    def kv_heads(self) -> range:
        """The global KV heads of this rank."""
        return self.shard.attention.kv_heads(self.config.num_kv_heads)

    def layer_slots(self, layer: LayerParameters) -> dict[str, Slot]:
        config, shard, head_dim = self.config, self.shard, self.config.head_dim
        heads, kv_heads = self.heads, self.kv_heads
        q_size, kv_size = len(heads) * head_dim, len(kv_heads) * head_dim
        slots = mlp_slots(layer.mlp, config, shard)
        for name, norm in (
            ("input_layernorm", layer.input_norm),
            ("self_attn.q_norm", layer.q_norm),
            ("self_attn.k_norm", layer.k_norm),
            ("pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm", layer.mlp_norm),
            ("post_attention_layernorm", layer.attention_post_norm),
            ("post_feedforward_layernorm", layer.mlp_post_norm),
        ):
            if norm is not None:
                slots[f"{name}.weight"] = Slot.whole(norm, config.norm_offset)
        if layer.sinks is not None:
            slots["self_attn.sinks"] = Slot.part(layer.sinks, dim=0, start=heads.start, size=config.num_heads)
        if layer.o_bias is not None:
            slots["self_attn.o_proj.bias"] = Slot.whole(layer.o_bias)
        slots["self_attn.o_proj.weight"] = Slot.part(
            layer.o, dim=1, start=heads.start * head_dim, size=config.num_heads * head_dim
        )
        for kind, qkv in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if qkv is not None:
                q, k, v = split_rows(qkv, q_size, kv_size)
                for name, rows, held, count in (
                    ("q_proj", q, heads, config.num_heads),
                    ("k_proj", k, kv_heads, config.num_kv_heads),
                    ("v_proj", v, kv_heads, config.num_kv_heads),
                ):
                    slots[f"self_attn.{name}.{kind}"] = Slot.part(
                        rows, dim=0, start=held.start * head_dim, size=count * head_dim
                    )
        if isinstance(layer.mlp, MlpParameters):
            slots |= self._mlp_bias_slots(layer.mlp)
        return slots

    def _mlp_bias_slots(self, layer: MlpParameters) -> dict[str, Slot]:
        slots = {}
        if layer.gate_up_bias is not None:
            size = self.config.intermediate_size
            start = self.shard.part("intermediate_size", size).start
            for name, part in zip(("gate_proj", "up_proj"), layer.gate_up_bias.chunk(2), strict=True):
                slots[f"mlp.{name}.bias"] = Slot.part(part, dim=0, start=start, size=size)
        if layer.down_bias is not None:
            slots["mlp.down_proj.bias"] = Slot.whole(layer.down_bias)
        return slots
