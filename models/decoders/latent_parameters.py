"""The weights of one rank of a decoder with latent attention (MLA), and the checkpoint tensors that fill them.

Tensor parallelism divides attention heads, MLPs and experts (mlp_parameters.py) and the vocabulary. Every rank has the
parts before the heads (compressions, indexer) whole. With data-parallel attention, every rank has all heads and the
whole vocabulary. MLA's absorbed matrices are always
expanded.
"""

from dataclasses import dataclass

import torch

from ..config.dsa import DsaConfig
from ..config.mla import MlaConfig
from ..layers.indexer import IndexerParameters
from ..layers.mla import MlaParameters
from ..layers.moe import MlpParameters, MoeParameters
from ..weights.format import Part
from ..weights.slots import Slot
from ..weights.weight import AnyWeight
from .mlp_parameters import mlp_slots, split_rows
from .rank_parameters import LayerMemory, RankParameters


@dataclass(frozen=True)
class LatentLayerParameters:
    """One layer. Without an indexer, a layer of a sparse model attends to the selection of the layer before it."""

    input_norm: torch.Tensor  # [hidden]
    attention: MlaParameters
    indexer: IndexerParameters | None
    mlp_norm: torch.Tensor  # [hidden]
    mlp: MlpParameters | MoeParameters


class _Memory(LayerMemory[LatentLayerParameters]):
    """Allocates the layers of one rank."""

    @property
    def _mla(self) -> MlaConfig:
        assert self.config.mla is not None
        return self.config.mla

    def layer(self, index: int) -> LatentLayerParameters:
        prefix = f"model.layers.{index}"
        return LatentLayerParameters(
            input_norm=self.tensor(self.config.hidden_size),
            attention=self._attention(index, f"{prefix}.self_attn"),
            indexer=None if (indexer := self._indexer_of(index)) is None else self._indexer(indexer),
            mlp_norm=self.tensor(self.config.hidden_size),
            mlp=self.mlp(prefix) if (moe := self.config.moe_of(index)) is None else self.mixture(prefix, moe),
        )

    def _attention(self, index: int, prefix: str) -> MlaParameters:
        mla, hidden, indexer = self._mla, self.config.hidden_size, self._indexer_of(index)
        heads = self.shard.attention.part("num_attention_heads", self.config.num_heads)
        q_dim = mla.nope_dim + mla.rope_dim
        q_size, compressed = len(heads) * q_dim, mla.q_rank + mla.latent_dim
        to_compress = [
            Part(f"{prefix}.q_a_proj.weight", mla.q_rank),
            Part(f"{prefix}.kv_a_proj_with_mqa.weight", mla.latent_dim, mla.q_rank),
        ]
        to_expand = [Part(f"{prefix}.q_b_proj.weight", q_size, 0, heads.start * q_dim)]
        if indexer is not None:
            queries = indexer.index_heads * indexer.index_dim
            to_compress.append(Part(f"{prefix}.indexer.wk.weight", indexer.index_dim, compressed))
            to_expand.append(Part(f"{prefix}.indexer.wq_b.weight", queries, q_size))
        return MlaParameters(
            compress=self._latent(to_compress, hidden),
            q_norm=self.tensor(mla.q_rank),
            kv_norm=self.tensor(mla.kv_rank),
            expand=self._latent(to_expand, mla.q_rank),
            kv_b=self.tensor(len(heads), mla.nope_dim + mla.value_dim, mla.kv_rank),
            o=self._latent(
                [Part(f"{prefix}.o_proj.weight", hidden)], len(heads) * mla.value_dim, heads.start * mla.value_dim
            ),
        )

    def _latent(self, parts: list[Part], columns: int, first_column: int = 0) -> AnyWeight:
        rows = sum(part.rows for part in parts)
        return self.weight(rows, columns, parts=parts, first_column=first_column, place="latent")

    def _indexer_of(self, index: int) -> DsaConfig | None:
        """The indexer of a layer, if it has one."""
        dsa = self.config.dsa
        return dsa if dsa is not None and dsa.indexed[index] else None

    def _indexer(self, dsa: DsaConfig) -> IndexerParameters:
        return IndexerParameters(
            key_norm=self.tensor(dsa.index_dim),
            key_norm_bias=self.tensor(dsa.index_dim),
            weights=self.tensor(dsa.index_heads, self.config.hidden_size, dtype=torch.float32),
        )


class LatentParameters(RankParameters[LatentLayerParameters]):
    """The weights of a rank of a decoder with latent attention; the router and the indexer's weights are float32."""

    memory = _Memory

    def layer_slots(self, layer: LatentLayerParameters) -> dict[str, Slot]:
        return {
            "input_layernorm.weight": Slot.whole(layer.input_norm),
            "post_attention_layernorm.weight": Slot.whole(layer.mlp_norm),
            **self._attention_slots(layer),
            **mlp_slots(layer.mlp, self.config, self.shard),
        }

    @property
    def _mla(self) -> MlaConfig:
        assert self.config.mla is not None
        return self.config.mla

    def _attention_slots(self, layer: LatentLayerParameters) -> dict[str, Slot]:
        """Slots of attention and its indexer, which share the matrices that compress and expand."""
        mla, num_heads, attention = self._mla, self.config.num_heads, layer.attention
        heads = self.shard.attention.part("num_attention_heads", num_heads)
        q_dim, kv_dim = mla.nope_dim + mla.rope_dim, mla.nope_dim + mla.value_dim
        q_a, kv_a, key = split_rows(attention.compress, mla.q_rank, mla.latent_dim)
        q_b, index_query = split_rows(attention.expand, len(heads) * q_dim)
        slots = {
            "q_a_proj.weight": Slot.whole(q_a),
            "q_a_layernorm.weight": Slot.whole(attention.q_norm),
            "q_b_proj.weight": Slot.part(q_b, dim=0, start=heads.start * q_dim, size=num_heads * q_dim),
            "kv_a_proj_with_mqa.weight": Slot.whole(kv_a),
            "kv_a_layernorm.weight": Slot.whole(attention.kv_norm),
            "kv_b_proj.weight": Slot.part(
                attention.kv_b.flatten(0, 1), dim=0, start=heads.start * kv_dim, size=num_heads * kv_dim
            ),
            "o_proj.weight": Slot.part(
                attention.o, dim=1, start=heads.start * mla.value_dim, size=num_heads * mla.value_dim
            ),
        }
        if layer.indexer is not None:
            slots |= {
                "indexer.wq_b.weight": Slot.whole(index_query),
                "indexer.wk.weight": Slot.whole(key),
                "indexer.k_norm.weight": Slot.whole(layer.indexer.key_norm),
                "indexer.k_norm.bias": Slot.whole(layer.indexer.key_norm_bias),
                "indexer.weights_proj.weight": Slot.whole(layer.indexer.weights),
            }
        return {f"self_attn.{name}": slot for name, slot in slots.items()}
