"""CUDA graphs of the decode step: one launch instead of some 400, whatever the host is doing.

A graph is captured per batch size and kind of step. All it reads that changes from step to step (tokens, positions,
lengths, pages, how the attention is cut) lies in one buffer on the device, which one copy fills before a replay. A
batch runs in the smallest graph that holds it; the rows left over write no KV and are not returned.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from ...configs.progress import ProgressLog
from ...memory.kv_pool import KvCache
from ..decoders.dense import Decoder
from ..decoders.dsa import DsaDecoder
from ..layers.batch import SequenceSlice
from .dense import DenseStep
from .dsa import DsaStep

log = logging.getLogger(__name__)


def graph_batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 128, every 32 beyond, and `max_batch` itself: each takes a moment
    to capture, and padding costs little in a large batch.
    """
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, max_batch, 32))
    return [*(size for size in sizes if size < max_batch), max_batch]


class GraphedStep(Protocol):
    """What depends on the architecture: the inputs of a decode step, at fixed places on the device, and the step.

    Steps are of `kinds` kinds, numbered from 0, that launch different kernels.
    """

    kinds: int

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> int:
        """Bring a batch padded to `size` rows to the device, in stream order; returns the kind of step that it takes.

        Raises ValueError where pages lack.
        """

    def token_ids(self, size: int) -> torch.Tensor:
        """The tokens [size] that the step will run, on the device."""

    def hidden(self, size: int, kind: int, /) -> torch.Tensor:
        """Run the step on what `fill` has left; what padded rows give means nothing. This is what is captured."""


class DecodeGraphs:
    """Decode steps of a decoder of one rank over one cache. Owns the graphs, their memory and their input buffers.

    Not thread-safe. `max_context` bounds the tokens of a sequence; it costs memory for page ids, not time.
    """

    def __init__(self, decoder: Decoder | DsaDecoder, cache: KvCache, *, max_batch: int, max_context: int) -> None:
        self._decoder = decoder
        self._device = cache.device
        self._max_context = max_context
        self._sizes = graph_batch_sizes(max_batch)
        max_pages = -(-max_context // cache.page_size)
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
        """Whether `run` takes this batch: single tokens, not too many, none too far into its sequence."""
        return 0 < len(slices) <= self._sizes[-1] and all(
            len(piece.token_ids) == 1 and piece.end <= self._max_context for piece in slices
        )

    def run(self, slices: Sequence[SequenceSlice], token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Start one step of a batch that fits; returns its float32 logits [len(slices), vocab], in place of the last
        step's. Nothing waits for the device. `token_ids` on the device, where given, stand for those of the slices: the
        step can be started before the host knows the tokens.
        """
        batch_size = next(size for size in self._sizes if size >= len(slices))
        self._last_kind = self._step.fill(slices, batch_size)
        if token_ids is not None:
            self._step.token_ids(batch_size)[: len(slices)].copy_(token_ids)
        self._graphs[batch_size, self._last_kind].replay()
        return self._logits[: len(slices)]

    def replay(self, batch_size: int) -> None:
        """The last step, which was of this batch size, once more on the inputs it left: what a benchmark times."""
        self._graphs[batch_size, self._last_kind].replay()

    @torch.inference_mode()
    def _capture(self) -> None:
        """Largest first: the smaller graphs then live in the memory of the largest."""
        memory = torch.cuda.graph_pool_handle()
        # a step of no sequence: it writes no KV, and compiles every kernel before the capture forbids it
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
