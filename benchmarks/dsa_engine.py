"""Speed of a sparse-attention model's decode steps on one GPU, with random weights at DeepSeek-V3.2's geometry.

    python -m benchmarks.dsa_engine [--hisparse] [--json results.json]

The model has a few layers with the dense MLP of DeepSeek's first ones, and a small vocabulary, so that layers dominate
the time. `graph` is the GPU time of a step (inputs, replay), `step` the wall time of a serving step without a scheduler
(fill the inputs, replay, take the most likely tokens, read them back). Both are compared with the lower bound: the
weights, the indexer keys of all tokens and the selected rows, over the copy rate measured in the same run. Before
timing, steps in graphs are compared with the same steps without. `--kernels` lists the kernels of a step.

With `--hisparse` latent rows are in host memory and every sequence is evicting. A sequence repeats one token, so that
its selection drifts with the positions (benchmarks/hisparse.py says why); `misses` is how much.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from benchmarks.engine import expected_share, scattered_pages, step_weight_bytes
from benchmarks.gpu_timing import DEVICE, PRODUCT_RATE, copy_rate, gpu_ms, list_kernels
from pdserve.kernels.hisparse.slot_tables import buffer_pages
from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.kv_pool import KvCache, KvPool
from pdserve.memory.pages import pages_for
from pdserve.models.config.dsa import DsaConfig
from pdserve.models.config.model import ModelConfig
from pdserve.models.config.moe import MoeConfig
from pdserve.models.config.rope import RopeConfig
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.graphs.capture import DecodeGraphs
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.runner import ModelRunner

CHECKED_STEPS, WARM_STEPS, TIMED_STEPS = 4, 30, 30
"""Of one sequence; a hot buffer that starts empty is full after twenty steps."""
ALL_STEPS = WARM_STEPS + 2 * TIMED_STEPS
"""Timed by the host, and by the GPU."""


class Forward(Protocol):
    """Runs a step; CUDA graphs, or a stand-in."""

    def run(self, slices: Sequence[SequenceSlice], /) -> torch.Tensor | None: ...


def deepseek_v32(layers: int, mixed_layers: int, *, mlp: int, max_context: int) -> ModelConfig:
    """`layers` layers, the last `mixed_layers` of them with experts, the others with an MLP `mlp` wide."""
    return ModelConfig(
        architecture="deepseek_v32",
        vocab_size=8192,
        hidden_size=7168,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=128,
        num_kv_heads=1,
        head_dim=576,
        context_length=max_context,
        norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        dtype="bfloat16",
        eos_token_ids=(),
        mla=DsaConfig(
            q_rank=1536,
            kv_rank=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            index_heads=64,
            index_dim=128,
            index_topk=2048,
            index_interleaved=False,
            indexed=(True,) * layers,
        ),
        mixed=(False,) * (layers - mixed_layers) + (True,) * mixed_layers,
        moe=MoeConfig(
            num_experts=256,
            experts_per_token=8,
            expert_size=2048,
            shared_size=2048,
            num_groups=8,
            groups_per_token=4,
            normalised=True,
            scale=2.5,
        ),
    )


class CachedSequences:
    """Random sequences in randomly scattered pages of a cache."""

    def __init__(self, cache: KvCache, token_ids: range) -> None:
        self.cache, self._token_ids = cache, token_ids
        self.capacity: int | None = None
        """The longest sequence that is fully resident; None: those that the hot buffers of evicting ones hold."""
        self._random = random.Random(2)

    def sequences(self, batch: int, context: int, steps: int) -> list[SequenceSlice]:
        """The first step of sequences in scattered pages that will have `context` tokens after so many steps."""
        slices = [
            SequenceSlice([token], context - steps, pages, row)
            for row, (token, pages) in enumerate(zip(self.tokens(batch), self.pages([context] * batch), strict=True))
        ]
        self.open(slices)
        return slices

    def pages(self, lengths: list[int]) -> list[list[int]]:
        """Pages for sequences of these lengths, scattered over the pool."""
        return scattered_pages(self._random, lengths, self.cache)

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(self._token_ids, k=count)

    def open(self, slices: Sequence[SequenceSlice]) -> None:
        """Give each sequence an empty hot buffer, under the sequence's number, if the cache has hot buffers."""
        if not isinstance(self.cache, HiSparseCache):
            return
        hot_rows, page_size = self.cache.tables.hot_rows, self.cache.page_size
        capacity = self.capacity or hot_rows
        each = pages_for(capacity, page_size) if self.capacity else buffer_pages(hot_rows, page_size)
        for piece in slices:
            assert piece.hot_slot is not None
            hot_pages = [HotPage(page) for page in self.cache.own_hot_pages[piece.hot_slot * each :][:each]]
            slot = RequestSlot(piece.hot_slot)
            self.cache.open(slot, hot_pages, piece.start, capacity)
            if piece.start <= capacity:
                self.cache.load_rows(hot_pages, [KvPage(page) for page in piece.pages], piece.start)

    def lookups(self) -> tuple[int, int]:
        """Hits and misses so far."""
        if not isinstance(self.cache, HiSparseCache):
            return 0, 0
        hits, misses = self.cache.tables.lookups.sum(dim=0).tolist()
        return hits, misses


class SteppedEngine(CachedSequences, ABC):
    """Sequences whose decode steps are timed."""

    @abstractmethod
    def floor_bytes(self, batch: int, context: int) -> float:
        """What a step must read."""


class EagerEngine(SteppedEngine):
    """A stepped engine that also runs steps without graphs."""

    @abstractmethod
    def eager(self, slices: list[SequenceSlice]) -> torch.Tensor:
        """The logits of a step."""


class Engine(EagerEngine):
    """A random model and a cache of randomly scattered pages, for `sequences` sequences of up to `max_context` tokens:
    on the GPU, or with `hot_rows` in host memory.
    """

    def __init__(
        self, config: ModelConfig, *, sequences: int, page_size: int, hot_rows: int | None, fp8_index: bool = True
    ) -> None:
        assert config.dsa is not None
        assert config.moe is not None
        self.config, self.dsa, self.moe = config, config.dsa, config.moe
        self.parameters = LatentParameters.allocate(config, device=DEVICE, dtype=torch.bfloat16)
        fill_with_noise(self.parameters.slots())
        self.decoder = DsaDecoder(self.parameters, fp8_index=fp8_index)
        num_pages = sequences * pages_for(config.context_length, page_size)
        cache: KvCache
        if hot_rows is None:
            cache = self.decoder.make_cache(num_pages, page_size)
        else:
            cache = self.decoder.make_hisparse_cache(
                num_pages,
                page_size,
                hot_pages=sequences * buffer_pages(hot_rows, page_size),
                slots=sequences,
                hot_rows=hot_rows,
                max_context=config.context_length,
            )
        super().__init__(cache, range(config.vocab_size))
        for pool in cache.pools:
            fill_pool(pool)
        self.runner = ModelRunner(self.decoder, device=DEVICE, dtype=torch.bfloat16)

    def eager(self, slices: list[SequenceSlice]) -> torch.Tensor:
        logits = self.runner.forward(self.cache, slices)
        assert logits is not None
        return logits

    def floor_bytes(self, batch: int, context: int) -> float:
        """What a step must read: weights (of experts, the expected number of distinct ones), keys, selected rows."""
        weights = step_weight_bytes(self.parameters.slots(), expected_share(self.moe, batch))
        latent, keys = self.cache.pools
        rows = context * sum(keys.plane_token_bytes) + min(context, self.dsa.index_topk) * latent.head_token_bytes
        return weights + self.config.num_layers * batch * rows

    def prompt_floor_ms(self, tokens: int, cached: int, rate: float) -> float:
        """The least time for `tokens` tokens after `cached` ones: weights read once at `rate`, or all products (of
        weights, of index scores, of attention to the selected rows), whichever is longer.
        """
        weight_bytes, products = 0, 0.0
        active = self.moe.experts_per_token / self.moe.num_experts
        for name, slot in self.parameters.slots().items():
            if name == "model.embed_tokens.weight":
                continue
            weight_bytes += slot.nbytes
            if slot.target.ndim == 2 and name != "lm_head.weight":
                products += tokens * slot.target.numel() * (active if ".mlp.experts." in name else 1.0)
        visible = range(cached + 1, cached + tokens + 1)
        products += sum(self.dsa.indexed) * sum(visible) * self.dsa.index_heads * self.dsa.index_dim
        selected = sum(min(count, self.dsa.index_topk) for count in visible)
        head = self.dsa.latent_dim + self.dsa.kv_rank
        products += self.config.num_layers * selected * self.config.num_heads * head
        return max(weight_bytes / rate, 2 * products / PRODUCT_RATE) * 1e3


def fill_pool(pool: KvPool) -> None:
    """Fill the pool with noise from the GPU, wherever the pool is: the GPU makes random numbers faster."""
    if pool.scale_plane is not None:
        for layer in range(pool.num_layers):
            rows, scales = pool.layer(layer)
            rows.copy_(torch.randn(rows.shape, device=DEVICE))
            scales.fill_(1.0)
        return
    for start in range(0, pool.num_pages, pool.pages_per_chunk):
        for pages in torch.split(pool.data[start : start + pool.pages_per_chunk], 64):
            pages.copy_(torch.randn(pages.shape, dtype=pages.dtype, device=DEVICE))


def following(slices: Sequence[SequenceSlice]) -> list[SequenceSlice]:
    """The next step of the same sequences, with the same tokens once more."""
    return [msgspec.structs.replace(piece, start=piece.start + 1) for piece in slices]


def check_graphs(engine: EagerEngine, graphs: DecodeGraphs, batches: Sequence[int], context: int) -> None:
    """As many rows as a graph has: the same kernels on the same shapes and, with hot buffers of the same history, the
    same logits.
    """
    for batch in batches:
        first = engine.sequences(batch, context, CHECKED_STEPS)
        found: list[list[torch.Tensor]] = []
        for forward in (engine.eager, graphs.run):
            engine.open(first)
            slices = first
            found.append([])
            for _ in range(CHECKED_STEPS):
                logits = forward(slices)
                assert logits is not None
                found[-1].append(logits.clone())
                slices = following(slices)
        for expected, captured in zip(*found, strict=True):
            if not expected.isfinite().all() or not captured.equal(expected):
                raise SystemExit(f"a step of {batch} in a graph differs from the same step without")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    batch: int
    context: int
    graph_ms: float
    step_ms: float
    floor_ms: float
    miss_share: float

    @property
    def ratio(self) -> float:
        return self.graph_ms / self.floor_ms

    def __str__(self) -> str:
        return (
            f"{self.batch:5}  {self.context:7}  {self.graph_ms:8.3f}  {self.step_ms:7.3f}  {self.floor_ms:8.3f}  "
            f"{self.ratio:5.2f}  {self.miss_share:6.1%}"
        )


class Steps:
    """Sequences that are decoded from step to step, up to `context` tokens."""

    def __init__(self, engine: CachedSequences, graphs: Forward, batch: int, context: int) -> None:
        self._graphs = graphs
        self._slices = engine.sequences(batch, context, ALL_STEPS)
        for _ in range(WARM_STEPS):
            self.run()

    def run(self) -> torch.Tensor:
        logits = self._graphs.run(self._slices)
        assert logits is not None
        self._slices = following(self._slices)
        return logits


def time_step(engine: SteppedEngine, graphs: Forward, batch: int, context: int, rate: float) -> Row:
    steps, walls = Steps(engine, graphs, batch, context), []
    hits, misses = engine.lookups()
    for _ in range(TIMED_STEPS):
        begun = time.perf_counter()
        steps.run().argmax(dim=-1).tolist()
        walls.append((time.perf_counter() - begun) * 1e3)
    graph_ms = gpu_ms(steps.run, TIMED_STEPS)
    all_hits, all_misses = engine.lookups()
    return Row(
        batch,
        context,
        graph_ms,
        statistics.median(walls),
        engine.floor_bytes(batch, context) / rate * 1e3,
        (all_misses - misses) / max(all_hits + all_misses - hits - misses, 1),
    )


def list_step_kernels(engine: CachedSequences, graphs: Forward, batch: int, context: int) -> None:
    list_kernels(f"a step of {batch} x {context}", Steps(engine, graphs, batch, context).run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mixed-layers", type=int, default=0, help="layers with experts, 22 GB each (default: 0)")
    parser.add_argument("--mlp", type=int, default=18432, help="MLP width of the other layers (default: 18432)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--index-dtype", choices=["model", "fp8_e4m3"], default="fp8_e4m3", help="type of indexer keys")
    parser.add_argument("--hisparse", action="store_true", help="keep latent rows in host memory")
    parser.add_argument("--hot-rows", type=int, default=4096, help="rows of a sequence's hot buffer (default: 4096)")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step")
    options = parser.parse_args()
    max_batch, max_context = max(options.batch), max(options.context)
    if options.hisparse and min(options.context) - ALL_STEPS <= options.hot_rows:
        parser.error(
            f"contexts must be longer than the hot buffer: {min(options.context) - ALL_STEPS} of {ALL_STEPS} steps ago"
        )

    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rate / 1e12:.2f} TB/s")
    config = deepseek_v32(options.layers, options.mixed_layers, mlp=options.mlp, max_context=max_context)
    hot_rows = options.hot_rows if options.hisparse else None
    fp8_index = options.index_dtype == "fp8_e4m3"
    engine = Engine(config, sequences=max_batch, page_size=options.page_size, hot_rows=hot_rows, fp8_index=fp8_index)
    begun = time.perf_counter()
    graphs = DecodeGraphs(engine.decoder, engine.cache, max_batch=max_batch, max_context=max_context)
    capture_s = time.perf_counter() - begun
    print(f"captured decode graphs up to batch {max_batch} in {capture_s:.1f} s")
    check_graphs(engine, graphs, sorted({1, max_batch}), max_context)
    print("graphs: equal to eager steps")

    print(
        f"\n{options.layers} layers, {options.mixed_layers} of them with experts, hot rows: {hot_rows or 'all'}, "
        f"index keys: {options.index_dtype}"
    )
    print("batch  context  graph ms  step ms  floor ms  ratio  misses")
    rows = []
    for context in options.context:
        for batch in options.batch:
            rows.append(time_step(engine, graphs, batch, context, rate))
            print(rows[-1], flush=True)
    if options.kernels:
        for batch in sorted({min(options.batch), max_batch}):
            list_step_kernels(engine, graphs, batch, max_context)
    if options.json is not None:
        results: dict[str, Any] = {
            "copy_rate": rate,
            "capture_s": capture_s,
            "layers": options.layers,
            "mixed_layers": options.mixed_layers,
            "mlp": options.mlp,
            "hot_rows": hot_rows,
            "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
