"""The weights of one rank of a decoder with latent attention (MLA), and the checkpoint tensors that fill them.

Tensor parallelism divides attention heads, MLPs and experts (rank_memory.py) and the vocabulary. Every rank has the
parts before the heads (compressions, indexer) whole. With data-parallel attention, every rank has all heads and the
whole vocabulary. MLA's absorbed matrices are always expanded. The router and the indexer's weights are float32.
"""

from dataclasses import dataclass

import torch

from ..layers.indexer import IndexerParameters
from ..layers.mla import MlaParameters
from ..weights.slots import Share
from .rank_memory import RankMemory
from .rank_parameters import RankParameters
from .stage import StageLayer


@dataclass(frozen=True, kw_only=True)
class LatentLayerParameters(StageLayer):
    """One layer. Without an indexer, a layer of a sparse model attends to the selection of the layer before it."""

    attention: MlaParameters
    indexer: IndexerParameters | None


class LatentMemory(RankMemory[LatentLayerParameters]):
    def layer(self, index: int) -> LatentLayerParameters:
        name, hidden = f"model.layers.{index}", self.config.hidden_size
        attention, indexer = self._attention(index, f"{name}.self_attn")
        return LatentLayerParameters(
            input_norm=self.norm(f"{name}.input_layernorm", hidden),
            attention=attention,
            indexer=indexer,
            mlp_norm=self.norm(f"{name}.post_attention_layernorm", hidden),
            mlp=self.feed_forward(index),
        )

    def _attention(self, index: int, name: str) -> tuple[MlaParameters, IndexerParameters | None]:
        """Attention and its indexer, which share the matrices that compress and expand."""
        mla, dsa, hidden, num_heads = self.config.mla, self.config.dsa, self.config.hidden_size, self.config.num_heads
        assert mla is not None
        heads, kv_dim = self.heads, mla.nope_dim + mla.value_dim
        compress = {
            f"{name}.q_a_proj": Share.all(mla.q_rank),
            f"{name}.kv_a_proj_with_mqa": Share.all(mla.latent_dim),
        }
        expand = {f"{name}.q_b_proj": Share.of(heads, num_heads, mla.nope_dim + mla.rope_dim)}
        indexer = None
        if dsa is not None and dsa.indexed[index]:
            compress[f"{name}.indexer.wk"] = Share.all(dsa.index_dim)
            expand[f"{name}.indexer.wq_b"] = Share.all(dsa.index_heads * dsa.index_dim)
            weights = f"{name}.indexer.weights_proj.weight"
            indexer = IndexerParameters(
                key_norm=self.tensor(f"{name}.indexer.k_norm.weight", dsa.index_dim),
                key_norm_bias=self.tensor(f"{name}.indexer.k_norm.bias", dsa.index_dim),
                weights=self.tensor(weights, dsa.index_heads, hidden, dtype=torch.float32),
            )
        kv_b = self.tensor(f"{name}.kv_b_proj.weight", Share.of(heads, num_heads, kv_dim), mla.kv_rank)
        attention = MlaParameters(
            compress=self.weight(compress, hidden, place="latent"),
            q_norm=self.norm(f"{name}.q_a_layernorm", mla.q_rank),
            kv_norm=self.norm(f"{name}.kv_a_layernorm", mla.kv_rank),
            expand=self.weight(expand, mla.q_rank, place="latent"),
            kv_b=kv_b.view(len(heads), kv_dim, mla.kv_rank),
            o=self.weight(
                {f"{name}.o_proj": Share.all(hidden)}, Share.of(heads, num_heads, mla.value_dim), place="latent"
            ),
        )
        return attention, indexer


class LatentParameters(RankParameters[LatentLayerParameters]):
    """The weights of a rank of a decoder with latent attention."""

    memory_type = LatentMemory
