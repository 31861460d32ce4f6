"""The weights of one rank of a DeepSeek-V3.2 or GLM DSA decoder, and the checkpoint tensors that fill them.

Tensor parallelism divides attention heads, the width of MLPs and of every expert (or, with expert parallelism,
distributes whole experts), and the vocabulary. Every rank has the parts before the heads (compressions, indexer,
router) whole. With data-parallel attention, every rank has all heads and the whole vocabulary.

Matrices that a checkpoint stores in fp8 stay fp8 with their scales (kernels/linear/block_format.py), except MLA's
absorbed ones and those of which a rank's columns begin or end inside a block: they are expanded.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ...kernels.linear.block_format import BLOCK, BlockScaled, Weight, common_row_group
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
        config: ModelConfig,
        shard: Shard = WHOLE,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8: Collection[str] = frozenset(),
    ) -> "DsaParameters":
        """Uninitialised memory for the weights of `shard`; raises StartupError if the model cannot be divided. `fp8`
        are the checkpoint tensors to keep in block-scaled fp8 where possible.
        """
        memory = _Memory(config, shard, device, dtype, fp8)
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
        for expert, gate_up, down in zip(layer.experts, _each(layer.gate_up), _each(layer.down), strict=True):
            slots.update(self._gated_slots(f"mlp.experts.{expert}", gate_up, down, whole=whole))
        return slots

    def _gated_slots(self, prefix: str, gate_up: Weight, down: Weight, *, whole: bool = False) -> dict[str, Slot]:
        """Slots of an MLP of which this rank has a part of the width, or all of it."""
        share = down.shape[1]
        start, size = (0, share) if whole else (self.shard.tp_rank * share, self.shard.tp_size * share)
        gate, up = _split(gate_up, share)
        return {
            f"{prefix}.gate_proj.weight": Slot.part(gate, dim=0, start=start, size=size),
            f"{prefix}.up_proj.weight": Slot.part(up, dim=0, start=start, size=size),
            f"{prefix}.down_proj.weight": Slot.part(down, dim=1, start=start, size=size),
        }


def _split(matrix: Weight, *rows: int) -> tuple[Weight, ...]:
    """Split off parts of these numbers of rows, and the rest, which may be empty."""
    ends = list(accumulate(rows))
    return tuple(matrix[start:end] for start, end in zip([0, *ends], [*ends, len(matrix)], strict=True))


def _each(experts: Weight) -> Iterator[Weight]:
    """The matrix of each expert."""
    if isinstance(experts, BlockScaled):
        for values, scales in zip(experts.values, experts.scales, strict=True):
            yield BlockScaled(values, scales, experts.row_group)
    else:
        yield from experts


class _Memory:
    """Allocates the layers of one rank."""

    def __init__(
        self, config: ModelConfig, shard: Shard, device: torch.device, dtype: torch.dtype, fp8: Collection[str]
    ) -> None:
        assert config.dsa is not None
        self._config, self._dsa, self._shard = config, config.dsa, shard
        self._device, self._dtype = device, dtype
        self._fp8 = fp8

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self._dtype, device=self._device)

    def weight(
        self, *shape: int, names: Sequence[str], first_rows: Sequence[int] = (), first_column: int = 0
    ) -> Weight:
        """A matrix, or one per expert, that is filled from the tensors `names`: in fp8 if all of them are.

        `first_rows` are the rows where parts begin, in the matrix and in the checkpoint; its columns are those of the
        checkpoint from `first_column` on.
        """
        offset, columns = first_column % BLOCK, shape[-1]
        on_blocks = offset == 0 or offset + columns <= BLOCK
        if not on_blocks or not all(name in self._fp8 for name in names):
            return self.tensor(*shape)
        return BlockScaled.allocate(*shape, row_group=common_row_group(first_rows), device=self._device)

    def layer(self, index: int) -> DsaLayerParameters:
        prefix = f"model.layers.{index}"
        return DsaLayerParameters(
            input_norm=self.tensor(self._config.hidden_size),
            attention=self._attention(index, f"{prefix}.self_attn"),
            indexer=self._indexer() if self._dsa.indexed[index] else None,
            mlp_norm=self.tensor(self._config.hidden_size),
            mlp=self._mixture(f"{prefix}.mlp") if self._dsa.mixed[index] else self._dense(f"{prefix}.mlp"),
        )

    def _attention(self, index: int, prefix: str) -> MlaParameters:
        dsa, hidden = self._dsa, self._config.hidden_size
        heads = self._shard.attention.part("num_attention_heads", self._config.num_heads)
        q_dim, indexed = dsa.nope_dim + dsa.rope_dim, dsa.indexed[index]
        q_size, compressed = len(heads) * q_dim, dsa.q_rank + dsa.latent_dim
        to_compress, to_expand = ["q_a_proj", "kv_a_proj_with_mqa"], ["q_b_proj"]
        if indexed:
            to_compress.append("indexer.wk")
            to_expand.append("indexer.wq_b")
        return MlaParameters(
            compress=self.weight(
                compressed + (dsa.index_dim if indexed else 0),
                hidden,
                names=[f"{prefix}.{name}.weight" for name in to_compress],
                first_rows=(dsa.q_rank, compressed),
            ),
            q_norm=self.tensor(dsa.q_rank),
            kv_norm=self.tensor(dsa.kv_rank),
            expand=self.weight(
                q_size + (dsa.index_heads * dsa.index_dim if indexed else 0),
                dsa.q_rank,
                names=[f"{prefix}.{name}.weight" for name in to_expand],
                first_rows=(heads.start * q_dim, q_size),
            ),
            kv_b=self.tensor(len(heads), dsa.nope_dim + dsa.value_dim, dsa.kv_rank),
            o=self.weight(
                hidden,
                len(heads) * dsa.value_dim,
                names=[f"{prefix}.o_proj.weight"],
                first_column=heads.start * dsa.value_dim,
            ),
        )

    def _indexer(self) -> IndexerParameters:
        dsa = self._dsa
        return IndexerParameters(
            key_norm=self.tensor(dsa.index_dim),
            key_norm_bias=self.tensor(dsa.index_dim),
            weights=self.tensor(dsa.index_heads, self._config.hidden_size, dtype=torch.float32),
        )

    def _dense(self, prefix: str) -> MlpParameters:
        size = len(self._shard.part("intermediate_size", self._config.intermediate_size))
        return MlpParameters(*self._gated([prefix], size))

    def _mixture(self, prefix: str) -> MoeParameters:
        moe, hidden = self._dsa.moe, self._config.hidden_size
        experts, size = moe.share(self._shard, hidden)
        gate_up, down = self._gated(
            [f"{prefix}.experts.{expert}" for expert in experts],
            size,
            len(experts),
            whole=self._shard.whole_experts,
        )
        return MoeParameters(
            router=self.tensor(moe.num_experts, hidden, dtype=torch.float32),
            router_bias=self.tensor(moe.num_experts, dtype=torch.float32),
            experts=experts,
            gate_up=gate_up,
            down=down,
            shared=MlpParameters(*self._gated([f"{prefix}.shared_experts"], moe.shared_share(self._shard))),
        )

    def _gated(self, prefixes: Sequence[str], size: int, *experts: int, whole: bool = False) -> tuple[Weight, Weight]:
        """The matrices of an MLP, or of several experts: a part of the width, `size` elements, or all of it."""
        hidden, start = self._config.hidden_size, 0 if whole else self._shard.tp_rank * size
        gate_up = self.weight(
            *experts,
            2 * size,
            hidden,
            names=[f"{prefix}.{part}_proj.weight" for prefix in prefixes for part in ("gate", "up")],
            first_rows=(size, start),
        )
        names = [f"{prefix}.down_proj.weight" for prefix in prefixes]
        return gate_up, self.weight(*experts, hidden, size, names=names, first_column=start)
