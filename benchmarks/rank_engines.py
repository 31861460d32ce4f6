"""Decode steps of one rank of eight (one_rank.py), with HiSparse or with all KV on the GPU."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import cast

import torch

from benchmarks.dsa_engine import Forward, SteppedEngine
from benchmarks.one_rank import Rank
from pdserve.kernels.hisparse.slot_tables import buffer_pages
from pdserve.memory.kv_pool import KvCache, KvPool
from pdserve.memory.pages import pages_for
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.graphs.capture import GraphedStep, StepGraphs
from pdserve.models.graphs.dense import DenseStep
from pdserve.models.graphs.dsa import DsaStep
from pdserve.models.layers.batch import SequenceSlice


class RankEngine(SteppedEngine):
    """Decode steps of a rank over `cache`, for sequences of up to `max_context` tokens."""

    def __init__(self, rank: Rank, cache: KvCache, max_context: int) -> None:
        super().__init__(cache, rank.token_ids)
        self._rank, self._max_context = rank, max_context

    @abstractmethod
    def kv_bytes(self, batch: int, context: int) -> float:
        """What a step must read of the cache."""

    @abstractmethod
    def _step(self, max_batch: int, max_pages: int) -> GraphedStep:
        """The step that graphs capture."""

    def floor_bytes(self, batch: int, context: int) -> float:
        """Weights (of experts, the expected number of distinct ones), and KV."""
        layout = self._rank.layout
        moe = layout.moe
        chosen = 1 - (1 - moe.experts_per_token / moe.num_experts) ** (batch * layout.mlp_rows)
        weights = sum(size * (chosen if ".mlp.experts." in name else 1.0) for name, size in self._rank.weights())
        return weights + self.kv_bytes(batch, context)

    def graphs(self, sizes: list[int]) -> Forward:
        """CUDA graphs of decode steps of these sizes; without a GPU, steps without graphs."""
        if self.cache.device.type != "cuda":
            return EagerSteps(self._rank, self.cache)
        step = self._step(max(sizes), pages_for(self._max_context, self.cache.page_size))
        return StepGraphs(self._rank.decoder, step, self.cache.device, sorted(sizes), max(sizes), always_logits=True)


class HiSparseEngine(RankEngine):
    """A HiSparse cache for `sequences` sequences. The hot buffers of `residents` of them can hold all rows.

    Indexer keys are random; latent rows in host memory are zeros.
    """

    def __init__(
        self, rank: Rank, *, sequences: int, residents: int, max_context: int, page_size: int, hot_rows: int
    ) -> None:
        cache = rank.runner.make_hisparse_cache(
            sequences * pages_for(max_context, page_size),
            page_size,
            hot_pages=max(sequences * buffer_pages(hot_rows, page_size), residents * pages_for(max_context, page_size)),
            slots=sequences,
            hot_rows=hot_rows,
            max_context=max_context,
        )
        super().__init__(rank, cache, max_context)
        fill_layers(cache.pools[1])

    def kv_bytes(self, batch: int, context: int) -> float:
        """Keys of all tokens, and selected rows."""
        keys = self.cache.pools[1]
        return batch * context * keys.page_bytes / self.cache.page_size + self.selected_bytes(batch, context)

    def selected_bytes(self, batch: int, context: int) -> float:
        """The rows that a step selects, in all layers."""
        rows, dsa = self.cache.pools[0], self._rank.layout.config.dsa
        assert dsa is not None
        return batch * min(context, dsa.index_topk) * rows.page_bytes / self.cache.page_size

    def _step(self, max_batch: int, max_pages: int) -> GraphedStep:
        return DsaStep(cast(DsaDecoder, self._rank.decoder), self.cache, max_batch=max_batch, max_pages=max_pages)


class PagedEngine(RankEngine):
    """A cache on the GPU, with random KV."""

    def __init__(self, rank: Rank, *, sequences: int, max_context: int, page_size: int) -> None:
        cache = rank.runner.make_cache(sequences * pages_for(max_context, page_size), page_size)
        super().__init__(rank, cache, max_context)
        for pool in cache.pools:
            fill_layers(pool)

    def kv_bytes(self, batch: int, context: int) -> float:
        return batch * context * self._rank.runner.kv_token_bytes

    def _step(self, max_batch: int, max_pages: int) -> GraphedStep:
        return DenseStep(cast(Decoder, self._rank.decoder), self.cache, max_batch=max_batch, max_pages=max_pages)


class EagerSteps:
    """Steps without CUDA graphs."""

    def __init__(self, rank: Rank, cache: KvCache) -> None:
        self._rank, self._cache = rank, cache

    def run(self, slices: Sequence[SequenceSlice], /) -> torch.Tensor:
        logits = self._rank.runner.forward(self._cache, slices)
        assert logits is not None
        return logits


def fill_layers(pool: KvPool) -> None:
    """Fill the pool with noise, layer by layer."""
    for index in range(pool.num_layers):
        for plane in pool.layer(index):
            plane.copy_(torch.randn(plane.shape, device=plane.device))
