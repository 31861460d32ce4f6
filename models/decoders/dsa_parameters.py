"""The weights of one rank of a DeepSeek-V3.2 or GLM DSA decoder, and the checkpoint tensors that fill them.

Tensor parallelism divides attention heads, the width of MLPs and of every expert (or, with expert parallelism,
distributes whole experts), and the vocabulary. Every rank has the parts before the heads (compressions, indexer,
router) whole. With data-parallel attention, every rank has all heads and the whole vocabulary.
"""

from dataclasses import dataclass

import torch

from ..config.dsa import DsaConfig
from ..config.model import ModelConfig
from ..config.sharding import WHOLE, Shard
from ..layers.indexer import IndexerParameters
from ..layers.mla import MlaParameters
from ..layers.moe import MlpParameters, MoeParameters
from .dense_parameters import Slot


@dataclass(frozen=True)
class DsaLayerParameters:
    """One layer. Without an indexer it attends to the selection of the layer before it."""

    input_norm: torch.Tensor  # [hidden]
    attention: MlaParameters
    indexer: IndexerParameters | None
    mlp_norm: torch.Tensor  # [hidden]
    mlp: MlpParameters | MoeParameters


@dataclass(frozen=True)
class DsaParameters:
    """The weights of a rank: `embedding` on the first stage, `norm` and `head` on the last."""

    config: ModelConfig
    shard: Shard
    layers: tuple[DsaLayerParameters, ...]  # of its stage
    embedding: torch.Tensor | None  # [vocabulary rows, hidden]
    norm: torch.Tensor | None  # [hidden]
    head: torch.Tensor | None  # [vocabulary rows, hidden]

    @staticmethod
    def allocate(
        config: ModelConfig, shard: Shard = WHOLE, *, device: torch.device, dtype: torch.dtype
    ) -> "DsaParameters":
        """Uninitialised memory for the weights of `shard`; raises StartupError if the model cannot be divided."""
        memory = _Memory(config, shard, device, dtype)
        rows = shard.attention.vocabulary_rows(config.vocab_size)
        return DsaParameters(
            config,
            shard,
            layers=tuple(memory.layer(index) for index in config.stage_layers(shard)),
            embedding=memory.tensor(rows, config.hidden_size) if shard.first else None,
            norm=memory.tensor(config.hidden_size) if shard.last else None,
            head=memory.tensor(rows, config.hidden_size) if shard.last else None,
        )

    @staticmethod
    def names(config: ModelConfig) -> frozenset[str]:
        """The tensors that a checkpoint of the whole model has."""
        whole = DsaParameters.allocate(config, device=torch.device("meta"), dtype=torch.float32)
        return frozenset(whole.slots())

    @property
    def device(self) -> torch.device:
        return self.layers[0].input_norm.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden state and the cache; the router and the indexer's weights are float32."""
        return self.layers[0].input_norm.dtype

    def slots(self) -> dict[str, Slot]:
        """See DecoderParameters.slots. Padding rows of the vocabulary are not used."""
        slots = {}
        ids = self.shard.attention.vocabulary(self.config.vocab_size)
        for name, matrix in (("model.embed_tokens.weight", self.embedding), ("lm_head.weight", self.head)):
            if matrix is not None:
                slots[name] = Slot.part(matrix[: len(ids)], dim=0, start=ids.start, size=self.config.vocab_size)
        if self.norm is not None:
            slots["model.norm.weight"] = Slot.whole(self.norm)
        for index, layer in zip(self.config.stage_layers(self.shard), self.layers, strict=True):
            parts = {
                "input_layernorm.weight": Slot.whole(layer.input_norm),
                "post_attention_layernorm.weight": Slot.whole(layer.mlp_norm),
                **self._attention_slots(layer),
                **self._mlp_slots(layer.mlp),
            }
            slots.update({f"model.layers.{index}.{name}": slot for name, slot in parts.items()})
        return slots

    @property
    def _dsa(self) -> DsaConfig:
        assert self.config.dsa is not None
        return self.config.dsa

    def _attention_slots(self, layer: DsaLayerParameters) -> dict[str, Slot]:
        """Slots of attention and its indexer, which share the matrices that compress and expand."""
        dsa, num_heads, attention = self._dsa, self.config.num_heads, layer.attention
        heads = self.shard.attention.part("num_attention_heads", num_heads)
        q_dim, kv_dim = dsa.nope_dim + dsa.rope_dim, dsa.nope_dim + dsa.value_dim
        q_a, kv_a, key = _split(attention.compress, dsa.q_rank, dsa.latent_dim)
        q_b, index_query = _split(attention.expand, len(heads) * q_dim)
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
                attention.o, dim=1, start=heads.start * dsa.value_dim, size=num_heads * dsa.value_dim
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

    def _mlp_slots(self, layer: MlpParameters | MoeParameters) -> dict[str, Slot]:
        if isinstance(layer, MlpParameters):
            return self._gated_slots("mlp", layer.gate_up, layer.down)
        slots = {
            "mlp.gate.weight": Slot.whole(layer.router),
            "mlp.gate.e_score_correction_bias": Slot.whole(layer.router_bias),
            **self._gated_slots("mlp.shared_experts", layer.shared.gate_up, layer.shared.down),
        }
        whole = self.shard.whole_experts
        for expert, gate_up, down in zip(layer.experts, layer.gate_up, layer.down, strict=True):
            slots.update(self._gated_slots(f"mlp.experts.{expert}", gate_up, down, whole=whole))
        return slots

    def _gated_slots(
        self, prefix: str, gate_up: torch.Tensor, down: torch.Tensor, *, whole: bool = False
    ) -> dict[str, Slot]:
        """Slots of an MLP of which this rank has a part of the width, or all of it."""
        share = down.shape[1]
        start, size = (0, share) if whole else (self.shard.tp_rank * share, self.shard.tp_size * share)
        gate, up = gate_up.chunk(2)
        return {
            f"{prefix}.gate_proj.weight": Slot.part(gate, dim=0, start=start, size=size),
            f"{prefix}.up_proj.weight": Slot.part(up, dim=0, start=start, size=size),
            f"{prefix}.down_proj.weight": Slot.part(down, dim=1, start=start, size=size),
        }


def _split(matrix: torch.Tensor, *rows: int) -> tuple[torch.Tensor, ...]:
    """Split off parts of these numbers of rows, and the rest."""
    return torch.split_with_sizes(matrix, [*rows, len(matrix) - sum(rows)])


class _Memory:
    """Allocates the layers of one rank."""

    def __init__(self, config: ModelConfig, shard: Shard, device: torch.device, dtype: torch.dtype) -> None:
        assert config.dsa is not None
        self._config, self._dsa, self._shard = config, config.dsa, shard
        self._device, self._dtype = device, dtype

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def layer(self, index: int) -> DsaLayerParameters:
        return DsaLayerParameters(
            input_norm=self.tensor(self._config.hidden_size),
            attention=self._attention(index),
            indexer=self._indexer() if self._dsa.indexed[index] else None,
            mlp_norm=self.tensor(self._config.hidden_size),
            mlp=self._mixture() if self._dsa.mixed[index] else self._dense(),
        )

    def _attention(self, index: int) -> MlaParameters:
        dsa, hidden = self._dsa, self._config.hidden_size
        heads = len(self._shard.attention.part("num_attention_heads", self._config.num_heads))
        index_heads = dsa.index_heads if dsa.indexed[index] else 0
        key_dim = dsa.index_dim if dsa.indexed[index] else 0
        return MlaParameters(
            compress=self.tensor(dsa.q_rank + dsa.latent_dim + key_dim, hidden),
            q_norm=self.tensor(dsa.q_rank),
            kv_norm=self.tensor(dsa.kv_rank),
            expand=self.tensor(heads * (dsa.nope_dim + dsa.rope_dim) + index_heads * dsa.index_dim, dsa.q_rank),
            kv_b=self.tensor(heads, dsa.nope_dim + dsa.value_dim, dsa.kv_rank),
            o=self.tensor(hidden, heads * dsa.value_dim),
        )

    def _indexer(self) -> IndexerParameters:
        dsa = self._dsa
        return IndexerParameters(
            key_norm=self.tensor(dsa.index_dim),
            key_norm_bias=self.tensor(dsa.index_dim),
            weights=self.tensor(dsa.index_heads, self._config.hidden_size, dtype=torch.float32),
        )

    def _dense(self) -> MlpParameters:
        return self._gated(len(self._shard.part("intermediate_size", self._config.intermediate_size)))

    def _mixture(self) -> MoeParameters:
        moe, hidden = self._dsa.moe, self._config.hidden_size
        experts, size = moe.share(self._shard, hidden)
        return MoeParameters(
            router=self.tensor(moe.num_experts, hidden, dtype=torch.float32),
            router_bias=self.tensor(moe.num_experts, dtype=torch.float32),
            experts=experts,
            gate_up=self.tensor(len(experts), 2 * size, hidden),
            down=self.tensor(len(experts), hidden, size),
            shared=self._gated(moe.shared_share(self._shard)),
        )

    def _gated(self, size: int) -> MlpParameters:
        hidden = self._config.hidden_size
        return MlpParameters(gate_up=self.tensor(2 * size, hidden), down=self.tensor(hidden, size))
