"""CUDA graphs of the decode step: one launch instead of about 400.

A graph is captured per batch size and kind of step. All inputs that change from step to step (tokens, positions,
lengths, pages, the attention plan) are in one device buffer, which one copy fills before a replay. A batch runs in the
smallest graph that holds it; padded rows write no KV and are not returned.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from ...configs.progress import ProgressLog
from ...memory.kv_pool import KvCache
from ...memory.pages import pages_for
from ..decoders.dense import Decoder
from ..decoders.dsa import DsaDecoder
from ..layers.batch import SequenceSlice
from .dense import DenseStep
from .dsa import DsaStep

log = logging.getLogger(__name__)


def graph_batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 128, every 32 beyond, and `max_batch` itself: each size takes time
    to capture, and padding costs little in a large batch.
    """
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_batch, 32))
    return [*(size for size in sizes if size < max_batch), max_batch]


class GraphedStep(Protocol):
    """The part that depends on the architecture: the inputs of a decode step, at fixed addresses, and the step.

    Steps have `kinds` kinds, numbered from 0, which launch different kernels.
    """

    kinds: int

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Upload a batch padded to `size` rows, in stream order; returns its kind of step.

        Raises ValueError if a sequence has too few pages.
        """

    def token_ids(self, size: int) -> torch.Tensor:
        """The tokens [size] that the step will run, on the device."""

    def hidden(self, size: int, kind: int, /) -> torch.Tensor:
        """Run the step on the inputs of `fill`; results of padded rows are undefined. This is what is captured."""


class DecodeGraphs:
    """Decode steps of one rank's decoder over one cache. Owns the graphs, their memory and their input buffers.

    Not thread-safe. `max_context` limits the tokens of a sequence; it costs memory for page ids, not time.
    """

    def __init__(self, decoder: Decoder | DsaDecoder, cache: KvCache, *, max_batch: int, max_context: int) -> None:
        self._decoder = decoder
        self._device = cache.device
        self._max_context = max_context
        self._sizes = graph_batch_sizes(max_batch)
        max_pages = pages_for(max_context, cache.page_size)
        self._step: GraphedStep
        if isinstance(decoder, DsaDecoder):
            self._step = DsaStep(decoder, cache, max_batch=max_batch, max_pages=max_pages)
        else:
            self._step = DenseStep(decoder, cache, max_batch=max_batch, max_pages=max_pages)
        self._logits = torch.empty(max_batch, decoder.config.vocab_size, dtype=torch.float32, device=cache.device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._last_kind = 0
        self._capture()

    def fits(self, slices: Sequence[SequenceSlice]) -> bool:
        """Whether `run` accepts this batch: single tokens, not too many, all within `max_context`."""
        return 0 < len(slices) <= self._sizes[-1] and all(
            len(piece.token_ids) == 1 and piece.end <= self._max_context for piece in slices
        )

    def run(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Start one step of a batch that `fits`; returns its float32 logits [len(slices), vocab], which overwrite those
        of the last step. Does not wait for the device. `token_ids` on the device replace those of the slices, if given:
        the step can start before the host knows the tokens.
        """
        batch_size = next(size for size in self._sizes if size >= len(slices))
        self._last_kind = self._step.fill(slices, batch_size)
        if token_ids is not None:
            self._step.token_ids(batch_size)[: len(slices)].copy_(token_ids)
        self._graphs[batch_size, self._last_kind].replay()
        return self._logits[: len(slices)]

    def replay(self, batch_size: int) -> None:
        """Repeat the last step, which had this batch size, on the same inputs: for benchmarks."""
        self._graphs[batch_size, self._last_kind].replay()

    @torch.inference_mode()
    def _capture(self) -> None:
        """Largest first: the smaller graphs then share the memory of the largest."""
        memory = torch.cuda.graph_pool_handle()
        # a step without sequences: it writes no KV, and compiles every kernel, which a capture would forbid
        for size in reversed(self._sizes):
            self._step.fill([], size)
            for kind in range(self._step.kinds):
                self._run_step(size, kind)
        torch.cuda.synchronize(self._device)
        progress = ProgressLog(log, "CUDA graphs: %d of %d are captured", len(self._sizes) * self._step.kinds)
        for size, kind in itertools.product(reversed(self._sizes), range(self._step.kinds)):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._run_step(size, kind)
            self._graphs[size, kind] = graph
            progress.add(1)

    def _run_step(self, batch_size: int, kind: int) -> None:
        self._decoder.logits(self._step.hidden(batch_size, kind), out=self._logits[:batch_size])
