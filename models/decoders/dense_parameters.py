"""The weights of one rank's decoder in the layout of the forward pass: q/k/v in one matrix, gate/up in one matrix.

`slots()` maps parts of checkpoint tensors to parts of ours, so that loading needs no second copy of the model and a
rank reads only its part: its layers, its heads, its columns of the feed-forward layer and its rows of the vocabulary.
"""

from dataclasses import dataclass

import torch

from ...configs.arithmetic import ceil_div
from ...kernels.backends.dispatch import numba_computes
from ...kernels.linear.block_format import BLOCK, BlockScaled, Weight
from ..config.model import ModelConfig
from ..config.sharding import WHOLE, Shard


@dataclass(frozen=True)
class Slot:
    """`target` is filled with the part of a checkpoint tensor of `shape` that begins at index `start`."""

    target: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    block_scaled: BlockScaled | None = None  # if given, its values are `target`, and its scales are filled too

    @staticmethod
    def whole(target: Weight) -> "Slot":
        """Filled with all of a checkpoint tensor."""
        return Slot.part(target, dim=0, start=0, size=len(target))

    @staticmethod
    def part(target: Weight, *, dim: int, start: int, size: int) -> "Slot":
        """Filled with a range of a checkpoint tensor that has `size` elements in dimension `dim`, from `start` on."""
        shape, first = list(target.shape), [0] * len(target.shape)
        shape[dim], first[dim] = size, start
        if isinstance(target, BlockScaled):
            return Slot(target.values, tuple(shape), tuple(first), target)
        return Slot(target, tuple(shape), tuple(first))

    @property
    def nbytes(self) -> int:
        return self.target.nbytes if self.block_scaled is None else self.block_scaled.nbytes

    def fill_scales(self, scales: torch.Tensor) -> None:
        """Fill the scales of a block-scaled target from those of the whole checkpoint tensor."""
        assert self.block_scaled is not None
        row_group, target = self.block_scaled.row_group, self.block_scaled.scales
        rows = (self.start[0] + row_group * torch.arange(len(target), device=scales.device)) // BLOCK
        first = self.start[1] // BLOCK
        blocks = ceil_div(self.target.shape[1], BLOCK)
        target[:, :blocks].copy_(scales[rows, first : first + blocks])

    @property
    def fills_whole(self) -> bool:
        return self.shape == tuple(self.target.shape)


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
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


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

        def tensor(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        def wide(rows: int, columns: int) -> torch.Tensor:
            # stored [in, out] if torch computes on the CPU: up to 1.5 times as fast for few rows
            by_torch = device.type == "cpu" and not (dtype == torch.float32 and numba_computes())
            return tensor(columns, rows).t() if by_torch else tensor(rows, columns)

        def bias(present: bool, size: int) -> torch.Tensor | None:
            return tensor(size) if present else None

        hidden, intermediate = config.hidden_size, len(shard.part("intermediate_size", config.intermediate_size))
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
                gate_up=wide(2 * intermediate, hidden),
                gate_up_bias=bias(config.mlp_bias, 2 * intermediate),
                down=tensor(hidden, intermediate),
                down_bias=bias(config.mlp_bias and adds_bias, hidden),
            )
            for _ in shard.layers(config.num_layers)
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
        inner = shard.part("intermediate_size", config.intermediate_size)
        q_size, kv_size = len(heads) * head_dim, len(kv_heads) * head_dim
        slots = {}
        for name, whole in (
            ("input_layernorm.weight", layer.input_norm),
            ("self_attn.q_norm.weight", layer.q_norm),
            ("self_attn.k_norm.weight", layer.k_norm),
            ("self_attn.o_proj.bias", layer.o_bias),
            ("post_attention_layernorm.weight", layer.mlp_norm),
            ("mlp.down_proj.bias", layer.down_bias),
        ):
            if whole is not None:
                slots[name] = Slot.whole(whole)
        for name, matrix, start, size in (
            ("self_attn.o_proj.weight", layer.o, heads.start * head_dim, config.num_heads * head_dim),
            ("mlp.down_proj.weight", layer.down, inner.start, config.intermediate_size),
        ):
            slots[name] = Slot.part(matrix, dim=1, start=start, size=size)
        for kind, qkv, gate_up in (
            ("weight", layer.qkv, layer.gate_up),
            ("bias", layer.qkv_bias, layer.gate_up_bias),
        ):
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
            if gate_up is not None:
                for name, rows in zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True):
                    slots[f"mlp.{name}.{kind}"] = Slot.part(
                        rows, dim=0, start=inner.start, size=config.intermediate_size
                    )
        return slots
