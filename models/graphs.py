"""CUDA graphs of the decode step: one launch instead of some 400, whatever the host is doing.

A graph is captured per batch size. All it reads that changes from step to step (tokens, positions, lengths, pages, how
the attention is cut) lies in one buffer on the device, which one copy fills before a replay. A batch runs in the
smallest graph that holds it; the rows left over write no KV and are not returned.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from ..kernels.attention_plan import IntArray, WorkPlan, cut_decode, num_pieces
from ..memory.kv_pool import KvCache, KvPool
from .batch import ForwardBatch, SequenceSlice
from .decoder import Decoder


def graph_batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to `max_batch`, and `max_batch` itself."""
    sizes = [size for size in (1, 2, 4) if size < max_batch]
    return [*sizes, *range(8, max_batch, 8), max_batch]


class DecodeGraphs:
    """Decode steps of a decoder of one rank over one cache. Owns the graphs, their memory and their input buffers.

    Not thread-safe. `max_context` bounds the tokens of a sequence; it costs memory for page ids, not time.
    """

    def __init__(self, decoder: Decoder, cache: KvCache, *, max_batch: int, max_context: int) -> None:
        self._decoder = decoder
        self._cache = cache
        self._max_context = max_context
        self._sizes = graph_batch_sizes(max_batch)
        (pool,) = cache.pools
        self._inputs = _Inputs(pool, max_batch, -(-max_context // cache.page_size))
        self._logits = torch.empty(max_batch, decoder.config.vocab_size, dtype=torch.float32, device=cache.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
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
        self._inputs.fill(slices, batch_size)
        if token_ids is not None:
            self._inputs.batch(batch_size).token_ids[: len(slices)].copy_(token_ids)
        self._graphs[batch_size].replay()
        return self._logits[: len(slices)]

    def replay(self, batch_size: int) -> None:
        """The last step of this batch size once more, on the inputs it left: what a benchmark times."""
        self._graphs[batch_size].replay()

    @torch.inference_mode()
    def _capture(self) -> None:
        """Largest first: the smaller graphs then live in the memory of the largest."""
        memory = torch.cuda.graph_pool_handle()
        # a step of no sequence: it writes no KV, and compiles every kernel before the capture forbids it
        for size in reversed(self._sizes):
            self._inputs.fill([], size)
            self._step(size)
        torch.cuda.synchronize(self._cache.device)
        for size in reversed(self._sizes):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                self._step(size)
            self._graphs[size] = graph

    def _step(self, batch_size: int) -> None:
        hidden = self._decoder.hidden(self._inputs.batch(batch_size), self._cache, live_rows=self._inputs.live_rows)
        self._decoder.logits(hidden, out=self._logits[:batch_size])


class _Inputs:
    """What a step reads, as sections of one int32 buffer: on the device, and pinned on the host to be filled."""

    def __init__(self, pool: KvPool, max_batch: int, max_pages: int) -> None:
        device = pool.data.device
        self._pool = pool
        self._most_pieces = num_pieces(max_batch, pool.num_heads, device)
        sections = {
            "live_rows": 1,
            "token_ids": max_batch,
            "positions": max_batch,
            "page_ids": max_batch,
            "offsets": max_batch,
            "kv_lens": max_batch,
            "page_starts": max_batch,
            "piece_starts": max_batch + 1,
            "pieces": 4 * self._most_pieces,
            "pages": max_batch * max_pages,  # last: only as much as is in use is copied
        }
        sizes = list(sections.values())
        self._staged = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=True)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._fixed_size = sum(sizes[:-1])
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        names = list(sections)
        self._host: dict[str, IntArray] = {
            name: part.numpy() for name, part in zip(names, torch.split_with_sizes(self._staged, sizes), strict=True)
        }
        self._parts = dict(zip(names, torch.split_with_sizes(self._device, sizes), strict=True))
        self._ones = torch.ones(max_batch, dtype=torch.int32, device=device)
        self._rows = torch.arange(max_batch, dtype=torch.int32, device=device)
        self._none = torch.empty(2, 0, dtype=torch.int32, device=device)
        self._empty = np.zeros(0, dtype=np.int32)

    @property
    def live_rows(self) -> torch.Tensor:
        return self._parts["live_rows"]

    def batch(self, size: int) -> ForwardBatch:
        """The first `size` rows as a batch of single tokens."""
        parts = self._parts
        pieces = parts["pieces"].view(4, -1)[:, : num_pieces(size, self._pool.num_heads, self._device.device)]
        plan = WorkPlan(
            tokens=size,
            page_size=self._pool.page_size,
            num_kv_heads=self._pool.num_heads,
            pages=parts["pages"],
            page_starts=parts["page_starts"][:size],
            kv_lens=parts["kv_lens"][:size],
            query_lens=self._ones[:size],
            row_starts=self._rows[:size],
            pieces=pieces,
            piece_starts=parts["piece_starts"][: size + 1],
            tiles=self._none,
            copied_tokens=0,
            copies=self._none,
            copy_starts=self._rows[:size],
        )
        return ForwardBatch(
            slices=(),
            token_ids=parts["token_ids"][:size],
            positions=parts["positions"][:size],
            page_ids=parts["page_ids"][:size],
            offsets=parts["offsets"][:size],
            last_rows=None,
            attention=plan,
        )

    def fill(self, slices: Sequence[SequenceSlice], size: int) -> None:
        """Bring a batch padded to `size` rows to the device, in stream order. Padded rows have no keys, so no piece."""
        host, page_size, live = self._host, self._pool.page_size, len(slices)
        starts = np.fromiter((piece.start for piece in slices), dtype=np.int32, count=live)
        used = [-(-piece.end // page_size) for piece in slices]
        pages = np.fromiter(
            chain.from_iterable(piece.pages[:count] for piece, count in zip(slices, used, strict=True)), dtype=np.int32
        )
        if len(pages) != sum(used):
            raise ValueError(f"{live} sequences have {len(pages)} pages of {page_size} tokens and need {sum(used)}")
        ends = np.cumsum(used, dtype=np.int32) if live else self._empty
        kv_lens = np.zeros(size, dtype=np.int32)
        kv_lens[:live] = starts + 1
        pieces, piece_starts = cut_decode(kv_lens, num_pieces(size, self._pool.num_heads, self._device.device))

        self._copied.synchronize()  # the copy of the step before may still be reading
        host["live_rows"][0] = live
        host["token_ids"][:live] = [piece.token_ids[0] for piece in slices]
        host["positions"][:live] = starts
        host["page_ids"][:live] = pages[ends - 1]
        host["offsets"][:live] = starts % page_size
        for name in ("token_ids", "positions", "page_ids", "offsets"):
            host[name][live:size] = 0
        host["kv_lens"][:size] = kv_lens
        host["page_starts"][:live] = ends - used
        host["page_starts"][live:size] = 0
        host["piece_starts"][: size + 1] = piece_starts
        table = host["pieces"].reshape(4, -1)
        table[:, : pieces.shape[1]] = pieces
        table[:, pieces.shape[1] :] = 0
        host["pages"][: len(pages)] = pages
        length = self._fixed_size + len(pages)
        self._device[:length].copy_(self._staged[:length], non_blocking=True)
        self._copied.record()
