"""One rank of eight, alone: its share of the weights, and its steps without the other ranks.

The rank computes what it would compute beside the others. Where it needs their results, it uses its own:

tp8   heads, MLPs and the width of every expert divided by eight. An all-reduce is one pass over the tensor (read and
      write), launched as servers launch theirs; the gathering of logits is a copy of eight parts.
dp8   data-parallel attention: all heads, the whole vocabulary, sequences of its own. The rank holds an eighth of each
      MLP and an eighth of the experts, each whole, and computes the rows of all ranks with them. Rows of the others
      are this rank's rows with their elements in another order, so that they choose other experts. Gathering rows is a
      copy of eight times the rows; returning the results is a sum of eight parts.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Literal

import torch

from benchmarks.gpu_timing import DEVICE
from pdserve.configs.setting_types import KvDtypeSetting
from pdserve.kernels.linear.rms_norm import add_rms_norm
from pdserve.models.config.model import ModelConfig
from pdserve.models.config.moe import MoeConfig
from pdserve.models.config.sharding import Shard
from pdserve.models.layers import stage_mlps
from pdserve.models.layers.moe import MlpParameters, MoeParameters, feed_forward
from pdserve.models.layers.parallel import Parallel
from pdserve.models.loading.catalog import ModelSource
from pdserve.models.loading.weights import usual_format
from pdserve.models.runner import ModelRunner, resolve_dtype, uses_fp8_index

RANKS = 8
LayoutName = Literal["tp8", "dp8"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the rank holds: `config` divided by `shard`. Its MLPs compute `mlp_rows` rows for each of its own."""

    name: LayoutName
    config: ModelConfig
    shard: Shard
    mlp_rows: int

    @property
    def moe(self) -> MoeConfig:
        assert self.config.moe is not None
        return self.config.moe

    @property
    def heads(self) -> int:
        return self.config.num_heads // self.shard.tp_size

    @property
    def source(self) -> ModelSource:
        """A source for the loader of dummy weights, which reads no file."""
        return ModelSource(self.name, Path(self.name), "huggingface", self.config)

    def outline(self, kv_dtype: KvDtypeSetting, device: torch.device) -> ModelRunner:
        """The rank as `device` holds it, without memory."""
        dtype, dsa = resolve_dtype("auto", self.config, device), self.config.dsa
        stored = usual_format(self.config)
        return ModelRunner.outline(
            self.config,
            self.shard,
            dtype=dtype,
            kv_dtype=kv_dtype,
            stored=stored if stored is not None and stored.runs_on(device) else None,
            fp8_index=dsa is not None and uses_fp8_index("auto", device, dtype, dsa.index_dim),
        )

    def exchanged_bytes(self, rows: int, dtype: torch.dtype) -> float:
        """What the rank must send in a layer of a step in which it has so many rows, and receive as well: in two
        all-reduces, or its rows to seven ranks and their results back.
        """
        each = rows * self.config.hidden_size * dtype.itemsize * (RANKS - 1)
        return 2 * each if self.mlp_rows > 1 else 2 * 2 * each / RANKS

    def attention_products(self, tokens: int) -> float:
        """Multiplications of a prompt's attention in all layers, without those of weights."""
        config, dsa, pairs = self.config, self.config.dsa, tokens * (tokens + 1) // 2
        if dsa is None:
            return config.num_layers * pairs * self.heads * 2 * config.head_dim
        selected = sum(min(count, dsa.index_topk) for count in range(1, tokens + 1))
        attention = selected * self.heads * (dsa.latent_dim + dsa.kv_rank)
        return config.num_layers * attention + sum(dsa.indexed) * pairs * dsa.index_heads * dsa.index_dim

    @classmethod
    def of(cls, name: LayoutName, config: ModelConfig) -> "Layout":
        if name == "tp8":
            return cls(name, config, Shard(tp_size=RANKS), 1)
        moe = config.moe
        assert moe is not None
        fields = {field.name: getattr(moe, field.name) for field in dataclasses.fields(moe)}
        own = OneOfEight(**(fields | {"shared_size": moe.shared_size // RANKS}))
        divided = dataclasses.replace(config, intermediate_size=config.intermediate_size // RANKS, moe=own)
        return cls(name, divided, Shard(), RANKS)


class OneOfEight(MoeConfig):
    """Experts of which a rank holds an eighth, each whole."""

    def share(self, shard: Shard, hidden_size: int) -> tuple[range, int]:
        del shard, hidden_size
        return range(self.num_experts // RANKS), self.expert_size


class LocalRank(Parallel):
    """Rank 0 of `shard` without the others: collectives do their local work."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.shard.tp_size == 1 or not tensor.is_cuda:
            return tensor
        from benchmarks.pass_triton import launch_pass  # Triton: only with a GPU

        launch_pass(tensor)
        return tensor

    def gather_last_dim(self, tensor: torch.Tensor, size: int | None = None) -> torch.Tensor | None:
        parts = tensor.repeat(1, self.shard.tp_size)
        return parts if size is None or size == parts.shape[-1] else parts[:, :size].contiguous()

    def broadcast_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def agree_minimum(self, value: int) -> int:
        return value


class Rank:
    """The rank with random weights, made by the loader of servers. All experts are equally likely."""

    def __init__(self, layout: Layout, kv_dtype: KvDtypeSetting, device: torch.device = DEVICE) -> None:
        self.layout = layout
        self.runner = ModelRunner.load(
            layout.source,
            device=device,
            dtype=resolve_dtype("auto", layout.config, device),
            parallel=LocalRank(layout.shard, device=device),
            load_format="dummy",
            kv_dtype=kv_dtype,
        )
        self.decoder = self.runner._decoder
        for layer in self.decoder.parameters.layers:
            if isinstance(layer.mlp, MoeParameters) and layer.mlp.router_bias is not None:
                layer.mlp.router_bias.zero_()
        self.slots = self.decoder.parameters.slots()
        self.token_ids = layout.shard.vocabulary(layout.config.vocab_size)
        """Tensor-parallel ranks embed their part of the vocabulary; other tokens would be zeros."""

    def weights(self) -> Iterator[tuple[str, int]]:
        """Names and bytes of the weights that steps read."""
        for name, slot in self.slots.items():
            if name != "model.embed_tokens.weight":
                yield name, slot.nbytes

    def prompt_floor_ms(self, tokens: int, rate: float, product_rates: dict[torch.dtype, float]) -> float:
        """The least time for a prompt: weights read once at `rate`, or all products (of weights and of attention; with
        an indexer, of its scores and of attention to the selected rows), each at the rate of its dtype.
        """
        moe = self.layout.moe
        in_16_bits, seconds = product_rates[torch.bfloat16], 0.0
        for name, slot in self.slots.items():
            if slot.target.ndim != 2 or name in ("model.embed_tokens.weight", "lm_head.weight"):
                continue
            rows = tokens * (self.layout.mlp_rows if ".mlp." in name else 1.0)
            rows *= moe.experts_per_token / moe.num_experts if ".mlp.experts." in name else 1.0
            seconds += 2 * rows * slot.target.numel() / product_rates.get(slot.target.dtype, in_16_bits)
        seconds += 2 * self.layout.attention_products(tokens) / in_16_bits
        return max(sum(size for _, size in self.weights()) / rate, seconds) * 1e3


@contextmanager
def _rows_of_all_ranks(layout: Layout, device: torch.device) -> Iterator[None]:
    hidden = layout.config.hidden_size
    elements, shifts = (torch.arange(count, device=device) for count in (hidden, RANKS))
    order = ((elements + shifts.unsqueeze(1) * (hidden // RANKS)) % hidden).flatten()

    def over_all_ranks(
        x: torch.Tensor,
        y: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        parameters: MlpParameters | MoeParameters,
        moe: MoeConfig | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, rows = add_rms_norm(x, y, norm, eps)
        gathered = rows.index_select(1, order).view(len(rows), RANKS, hidden).transpose(0, 1)
        parts = feed_forward(gathered.reshape(RANKS * len(rows), hidden), parameters, moe)
        return total, parts.view(RANKS, len(rows), hidden).sum(dim=0)

    name = "add_feed_forward"
    compute = getattr(stage_mlps, name)
    setattr(stage_mlps, name, over_all_ranks)
    try:
        yield
    finally:
        setattr(stage_mlps, name, compute)


def exchanging(layout: Layout, device: torch.device = DEVICE) -> AbstractContextManager[None]:
    """A context in which steps of this layout do only the local part of exchanging rows."""
    return _rows_of_all_ranks(layout, device) if layout.mlp_rows > 1 else nullcontext()
