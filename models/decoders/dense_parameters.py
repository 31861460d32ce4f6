"""The weights of one rank's decoder in the layout of the forward pass: q/k/v in one matrix, gate/up in one matrix.

`slots()` maps parts of checkpoint tensors to parts of ours (slots.py), so that loading needs no second copy of the
model and a rank reads only its part: its layers, its heads, its columns of the feed-forward layer or its experts, and
its rows of the vocabulary.
"""

from dataclasses import dataclass

import torch

from ...kernels.backends.dispatch import numba_computes
from ..config.model import ModelConfig
from ..config.sharding import WHOLE, Shard
from ..layers.moe import MlpParameters, MoeParameters
from .mlp_parameters import WeightMemory, mlp_slots
from .slots import Slot


@dataclass(frozen=True)
class LayerParameters:
    """One decoder layer, this rank's part: `heads`, `kv_heads` and `intermediate` are its own.

    Biases and q/k norms are None if the architecture has none. Those of `o` and `down`, whose results are summed over
    ranks, are None on all ranks but the first.
    """

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    o: torch.Tensor  # [hidden, heads * head_dim]
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    mlp: MlpParameters | MoeParameters


@dataclass(frozen=True)
class DecoderParameters:
    """The weights of a rank. `head` is `embedding` itself if the checkpoint ties them and one stage has both."""

    config: ModelConfig
    shard: Shard
    layers: tuple[LayerParameters, ...]  # of its stage
    embedding: torch.Tensor | None  # [vocabulary rows, hidden] on the first stage
    norm: torch.Tensor | None  # [hidden] on the last stage
    head: torch.Tensor | None  # [vocabulary rows, hidden] on the last stage

    @staticmethod
    def allocate(
        config: ModelConfig, shard: Shard = WHOLE, *, device: torch.device, dtype: torch.dtype
    ) -> "DecoderParameters":
        """Uninitialised memory for the weights of `shard`; raises StartupError if the model cannot be divided."""

        memory = WeightMemory(config, shard, device=device, dtype=dtype)
        tensor = memory.tensor

        def wide(rows: int, columns: int) -> torch.Tensor:
            # stored [in, out] if torch computes on the CPU: up to 1.5 times as fast for few rows
            by_torch = device.type == "cpu" and not (dtype == torch.float32 and numba_computes())
            return tensor(columns, rows).t() if by_torch else tensor(rows, columns)

        def bias(present: bool, size: int) -> torch.Tensor | None:
            return tensor(size) if present else None

        def mlp() -> MlpParameters:
            size = len(shard.part("intermediate_size", config.intermediate_size))
            return MlpParameters(
                gate_up=wide(2 * size, hidden),
                down=tensor(hidden, size),
                gate_up_bias=bias(config.mlp_bias, 2 * size),
                down_bias=bias(config.mlp_bias and adds_bias, hidden),
            )

        hidden = config.hidden_size
        q_size = len(shard.part("num_attention_heads", config.num_heads)) * config.head_dim
        qkv_size = q_size + 2 * len(shard.kv_heads(config.num_kv_heads)) * config.head_dim
        adds_bias = shard.tp_rank == 0
        layers = tuple(
            LayerParameters(
                input_norm=tensor(hidden),
                qkv=wide(qkv_size, hidden),
                qkv_bias=bias(config.qkv_bias, qkv_size),
                q_norm=bias(config.qk_norm, config.head_dim),
                k_norm=bias(config.qk_norm, config.head_dim),
                o=tensor(hidden, q_size),
                o_bias=bias(config.o_bias and adds_bias, hidden),
                mlp_norm=tensor(hidden),
                mlp=mlp() if (moe := config.moe_of(index)) is None else memory.mixture(f"model.layers.{index}", moe),
            )
            for index in shard.layers(config.num_layers)
        )
        rows = shard.vocabulary_rows(config.vocab_size)
        norm, head = (tensor(hidden), wide(rows, hidden)) if shard.last else (None, None)
        embedding = None
        if shard.first:
            embedding = head if config.tied_embeddings and head is not None else tensor(rows, hidden)
        return DecoderParameters(config, shard, layers, embedding, norm, head)

    @staticmethod
    def names(config: ModelConfig) -> frozenset[str]:
        """The tensors that a checkpoint of the whole model has."""
        whole = DecoderParameters.allocate(config, device=torch.device("meta"), dtype=torch.float32)
        return frozenset(whole.slots())

    @property
    def layer_range(self) -> range:
        """The global layers of `layers`."""
        return self.shard.layers(self.config.num_layers)

    @property
    def kv_heads(self) -> range:
        """The global KV heads of this rank."""
        return self.shard.kv_heads(self.config.num_kv_heads)

    @property
    def device(self) -> torch.device:
        return self.layers[0].input_norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0].input_norm.dtype

    def slots(self) -> dict[str, Slot]:
        """Hugging Face tensor name to the slot that it fills. Together the slots cover every used element once; the
        padding rows of the vocabulary are not used.
        """
        config, shard = self.config, self.shard
        slots = {}
        ids = shard.vocabulary(config.vocab_size)
        head_name = "model.embed_tokens.weight" if config.tied_embeddings else "lm_head.weight"
        for name, matrix in ((head_name, self.head), ("model.embed_tokens.weight", self.embedding)):
            if matrix is not None:
                slots[name] = Slot.part(matrix[: len(ids)], dim=0, start=ids.start, size=config.vocab_size)
        if self.norm is not None:
            slots["model.norm.weight"] = Slot.whole(self.norm)
        for index, layer in zip(self.layer_range, self.layers, strict=True):
            for name, slot in self._layer_slots(layer).items():
                slots[f"model.layers.{index}.{name}"] = slot
        return slots

    def _layer_slots(self, layer: LayerParameters) -> dict[str, Slot]:
        config, shard, head_dim = self.config, self.shard, self.config.head_dim
        heads, kv_heads = shard.part("num_attention_heads", config.num_heads), self.kv_heads
        q_size, kv_size = len(heads) * head_dim, len(kv_heads) * head_dim
        slots = mlp_slots(layer.mlp, config, shard)
        for name, whole in (
            ("input_layernorm.weight", layer.input_norm),
            ("self_attn.q_norm.weight", layer.q_norm),
            ("self_attn.k_norm.weight", layer.k_norm),
            ("self_attn.o_proj.bias", layer.o_bias),
            ("post_attention_layernorm.weight", layer.mlp_norm),
        ):
            if whole is not None:
                slots[name] = Slot.whole(whole)
        slots["self_attn.o_proj.weight"] = Slot.part(
            layer.o, dim=1, start=heads.start * head_dim, size=config.num_heads * head_dim
        )
        for kind, qkv in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if qkv is not None:
                q, k, v = torch.split_with_sizes(qkv, (q_size, kv_size, kv_size))
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
