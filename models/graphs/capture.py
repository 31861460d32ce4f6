"""CUDA graphs of whole steps: one launch instead of about 400.

A graph is captured per size and kind of step. All inputs that change from step to step (tokens, positions, lengths,
pages, the attention plan) are in one device buffer, which one copy fills before a replay. A step runs in the smallest
graph that holds it; padded rows write no KV and are not returned.

With tensor parallelism a graph includes the collectives of the stage. All ranks of the stage capture and replay the
same graphs in the same order. With pipeline parallelism each stage has its own graphs; hidden states are sent between
replays.
"""

import bisect
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from ...common.progress import ProgressLog
from ...memory.kv_pool import KvCache
from ...memory.pages import pages_for
from ..decoders.dense import Decoder
from ..decoders.dsa import DsaDecoder
from ..decoders.mla import MlaDecoder
from ..layers.batch import SequenceSlice
from ..layers.parallel import ALONE, Parallel
from .chunks import ChunkStep
from .dense import DenseStep
from .dsa import DsaStep
from .dsa_chunks import LARGEST_STEP, DsaChunkStep
from .mla import MlaChunkStep, MlaStep
from .steps import ChunkLimits

log = logging.getLogger(__name__)

AnyDecoder = Decoder | DsaDecoder | MlaDecoder
"""One rank's share of a model of any family."""


def graph_batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 128, every 32 beyond, and `max_batch` itself: each size takes time
    to capture, and padding costs little in a large batch.
    """
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_batch, 32))
    return [*(size for size in sizes if size < max_batch), max_batch]


def graph_token_counts(max_tokens: int) -> list[int]:
    """16, 32, 64, then every 128, and `max_tokens` itself: matrix products compute tiles of 128 rows, and with few rows
    the time is that of reading the weights.
    """
    sizes = (16, 32, 64, *range(128, max_tokens, 128))
    return [*(size for size in sizes if size < max_tokens), max_tokens]


class GraphedStep(Protocol):
    """The part that depends on the architecture: the inputs of a step, at fixed addresses, and the step.

    A size may have several kinds of steps, numbered from 0, which launch different kernels.
    """

    def num_kinds(self, size: int, /) -> int:
        """The number of kinds of steps of this size."""

    def size(self, slices: Sequence[SequenceSlice]) -> int | None:
        """The least size of a graph for this batch, in rows of the forward pass; None if no graph can run it."""

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Upload a batch padded to `size` rows, in stream order; returns its kind of step.

        Raises ValueError if a sequence has too few pages.
        """

    def replace_tokens(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor) -> None:
        """Use `token_ids` (on the device, one per slice) for the slices of a single token."""

    def hidden(self, size: int, kind: int, received: torch.Tensor | None, /) -> torch.Tensor:
        """Run the step on the inputs of `fill` and, in all stages but the first, on the `received` hidden states of
        `size` rows. This is what is captured. Returns the input of `logits`, a row per slice and undefined rows of
        padding; in all stages but the last, hidden states for the next one, `size` rows.
        """


class StepGraphs:
    """Steps of one rank's decoder over one cache. Owns the graphs, their memory and their input buffers.

    Not thread-safe.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        step: GraphedStep,
        device: torch.device,
        sizes: list[int],
        max_slices: int,
        *,
        always_logits: bool,
        parallel: Parallel = ALONE,
    ) -> None:
        """With `always_logits`, logits are part of every graph. Otherwise they have separate graphs: only the last
        chunk of a prompt needs logits.
        """
        self._decoder = decoder
        self._step = step
        self._device = device
        self._sizes = sizes
        self._parallel = parallel
        shard, vocabulary = parallel.shard, decoder.config.vocab_size
        width, dtype = decoder.config.hidden_size, decoder.parameters.dtype
        rows = sizes[-1] if not shard.last else 0 if always_logits else max_slices
        self._hidden = torch.empty(rows, width, dtype=dtype, device=device)
        """Rows for the next stage, or for the graph of logits."""
        self._received = None if shard.first else torch.zeros(sizes[-1], width, dtype=dtype, device=device)
        """Rows of the previous stage."""
        self._logits = torch.empty(max_slices if shard.samples else 0, vocabulary, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._always_logits = always_logits
        self._logits_sizes = graph_batch_sizes(max_slices) if shard.last and not always_logits else []
        self._logits_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        """By rows."""
        self._last_kind = self._last_rows = 0
        self._capture()

    def size_for(self, slices: Sequence[SequenceSlice]) -> int | None:
        """The size of the graph that runs this batch; None if there is none."""
        needed = self._step.size(slices)
        if needed is None or not 0 < needed <= self._sizes[-1]:
            return None
        return self._sizes[bisect.bisect_left(self._sizes, needed)]

    def run(
        self,
        slices: Sequence[SequenceSlice],
        token_ids: torch.Tensor | None = None,
        *,
        logits: bool = True,
        size: int | None = None,
    ) -> torch.Tensor | None:
        """Start one step of a batch that `size_for` accepts. On the sampling rank, returns float32 logits
        [len(slices), vocab], which overwrite those of the last step; on other ranks, None. Does not wait for the
        device, but may wait for the previous stage.

        `token_ids` on the device, if given, replace those of slices of a single token, so that the step can start
        before the host knows the tokens. Without `logits` the result is [0, vocab]. `size` is the result of `size_for`,
        if the caller has it.
        """
        size = size or self.size_for(slices)
        assert size is not None, "the batch fits"
        self._last_kind = self._step.fill(slices, size)
        if token_ids is not None:
            self._step.replace_tokens(slices, token_ids)
        tokens = sum(len(piece.token_ids) for piece in slices)
        if self._received is not None:
            width, dtype = self._received.shape[1], self._received.dtype
            self._received[:tokens].copy_(self._parallel.receive_hidden(tokens, width, dtype))
        self._graphs[size, self._last_kind].replay()
        shard, self._last_rows = self._parallel.shard, len(slices)
        if not shard.last:
            self._parallel.send_hidden(self._hidden[:tokens].clone())  # the next replay overwrites them
        elif logits:
            self._replay_logits()
        return self._logits[: len(slices) if logits else 0] if shard.samples else None

    def replay(self, size: int) -> None:
        """Repeat the last step, which had this size, on the same inputs: for benchmarks."""
        self._graphs[size, self._last_kind].replay()
        self._replay_logits()

    def _replay_logits(self) -> None:
        if self._logits_sizes:
            self._logits_graphs[self._logits_sizes[bisect.bisect_left(self._logits_sizes, self._last_rows)]].replay()

    @torch.inference_mode()
    def _capture(self) -> None:
        """Largest first: the smaller graphs then share the memory of the largest."""
        memory = torch.cuda.graph_pool_handle()
        # a step without sequences, which writes no KV: it compiles every kernel, which is not allowed during a capture
        for size in reversed(self._sizes):
            self._step.fill([], size)
            for kind in range(self._step.num_kinds(size)):
                self._run_step(size, kind)
        for rows in self._logits_sizes:
            self._run_logits(rows)
        torch.cuda.synchronize(self._device)
        steps = [(size, kind) for size in reversed(self._sizes) for kind in range(self._step.num_kinds(size))]
        progress = ProgressLog(log, "CUDA graphs: %d of %d are captured", len(steps))
        for size, kind in steps:
            with torch.cuda.graph(self._graphs.setdefault((size, kind), torch.cuda.CUDAGraph()), pool=memory):
                self._run_step(size, kind)
            progress.add(1)
        for rows in reversed(self._logits_sizes):
            with torch.cuda.graph(self._logits_graphs.setdefault(rows, torch.cuda.CUDAGraph()), pool=memory):
                self._run_logits(rows)
        # the first replay uploads a graph to the device, which takes milliseconds
        for size in reversed(self._sizes):
            self._step.fill([], size)
            for kind in range(self._step.num_kinds(size)):
                self._graphs[size, kind].replay()
        for graph in self._logits_graphs.values():
            graph.replay()
        torch.cuda.synchronize(self._device)

    def _run_step(self, size: int, kind: int) -> None:
        hidden = self._step.hidden(size, kind, None if self._received is None else self._received[:size])
        if self._always_logits and self._parallel.shard.last:
            self._decoder.logits(hidden, out=self._logits[: len(hidden)])
        else:
            self._hidden[: len(hidden)].copy_(hidden)

    def _run_logits(self, rows: int) -> None:
        self._decoder.logits(self._hidden[:rows], out=self._logits[:rows])


class DecodeGraphs(StepGraphs):
    """Steps of one token per sequence. `max_context` limits the tokens of a sequence; it costs memory for page ids, not
    time.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        cache: KvCache,
        *,
        max_batch: int,
        max_context: int,
        parallel: Parallel = ALONE,
    ) -> None:
        max_pages = pages_for(max_context, cache.page_size)
        step: GraphedStep
        if isinstance(decoder, DsaDecoder):
            step = DsaStep(decoder, cache, max_batch=max_batch, max_pages=max_pages)
        elif isinstance(decoder, MlaDecoder):
            step = MlaStep(decoder, cache, max_batch=max_batch, max_pages=max_pages)
        else:
            step = DenseStep(decoder, cache, max_batch=max_batch, max_pages=max_pages)
        sizes = graph_batch_sizes(max_batch)
        super().__init__(decoder, step, cache.device, sizes, max_batch, always_logits=True, parallel=parallel)


class ChunkGraphs(StepGraphs):
    """Steps of prompt chunks, of `max_tokens` tokens and `max_slices` sequences together at most.

    With `decode_rows`, the decode kernel of dense models computes slices of a single token: for steps with decode
    tokens and chunks.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        cache: KvCache,
        *,
        max_tokens: int,
        max_slices: int,
        max_context: int,
        decode_rows: bool = False,
        parallel: Parallel = ALONE,
    ) -> None:
        if not isinstance(decoder, Decoder):
            max_tokens = min(max_tokens, LARGEST_STEP)
        max_pages = pages_for(max_context, cache.page_size)
        limits = ChunkLimits(max_tokens, max_slices, max_pages, last_only=parallel.shard.last)
        step: GraphedStep
        if isinstance(decoder, DsaDecoder):
            step = DsaChunkStep(decoder, cache, limits)
        elif isinstance(decoder, MlaDecoder):
            step = MlaChunkStep(decoder, cache, limits)
        else:
            step = ChunkStep(decoder, cache, limits, decode_rows=decode_rows)
        sizes = graph_token_counts(max_tokens)
        super().__init__(decoder, step, cache.device, sizes, max_slices, always_logits=False, parallel=parallel)
