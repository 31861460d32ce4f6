"""Copy plans from a prefill pool to a decode pool, computed from their two `KvLayout`s. Pure, no sockets.

A sequence's tokens are in pages of both pools. A *segment* is a range of tokens that is inside one page on both sides.
Inside a page the order is `[layer][plane][head][token][bytes]`, so

- a segment that is a whole page of the same size on both sides is one copy when the two sides hold the same heads (any
  shared layer range is contiguous), and one copy per (layer, plane) when they share only some heads;
- any other segment is one copy per (layer, plane, head), because the next head starts at another distance on each side.

Copies that are adjacent on both sides are then merged, so equal pools with adjacent pages need a single copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...common.errors import PdserveError
from ..protocol.layout import KvLayout
from .copy_regions import CopyRegion

Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]


class PlanError(PdserveError):
    """Layouts or index lists that do not match, or a copy outside its pool."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyRuns:
    """Contiguous copies, as three arrays: offsets from the source and the destination pool's base, and bytes."""

    source: Int64s
    destination: Int64s
    length: Int64s

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())

    def split(self, limit_bytes: int) -> "CopyRuns":
        """The same copies, in order, in pieces of at most `limit_bytes`."""
        if not len(self) or int(self.length.max()) <= limit_bytes:
            return self
        pieces = -(-self.length // limit_bytes)
        first = np.cumsum(pieces) - pieces
        shift = (np.arange(int(pieces.sum()), dtype=np.int64) - np.repeat(first, pieces)) * limit_bytes
        return CopyRuns(
            np.repeat(self.source, pieces) + shift,
            np.repeat(self.destination, pieces) + shift,
            np.minimum(np.repeat(self.length, pieces) - shift, limit_bytes),
        )


class _Segments(NamedTuple):
    """Segments, one row each: page and slot on both sides, and the number of tokens."""

    source_page: Int64s
    source_slot: Int64s
    destination_page: Int64s
    destination_slot: Int64s
    tokens: Int64s

    def select(self, mask: Bools) -> "_Segments":
        return _Segments(*(column[mask] for column in self))


def expand_runs(
    source: KvLayout,
    destination: KvLayout,
    source_pages: Sequence[int] | Int64s,
    destination_pages: Sequence[int] | Int64s,
    token_start: int,
    token_end: int,
    region: CopyRegion | None = None,
) -> CopyRuns:
    """Copies of tokens [token_start, token_end) for the layers and heads that both layouts hold, or those of `region`.

    Both page lists start with the page of token `token_start`. With equal page sizes a partly filled last page is
    copied whole: its tail holds no tokens on either side yet, and both pages belong to this request. If the range
    starts inside a page, only its own tokens are copied: those before may belong to a shared prefix. Raises PlanError
    if the lists are too short or the planes differ.
    """
    _check_range(token_start, token_end)
    from_pages = _indices("source_pages", source_pages, _count_pages(source, token_start, token_end))
    to_pages = _indices("destination_pages", destination_pages, _count_pages(destination, token_start, token_end))
    cuts = np.union1d(
        _page_starts(token_start, token_end, source.page_size),
        _page_starts(token_start, token_end, destination.page_size),
    )
    tokens = np.diff(cuts, append=token_end)
    source_slot, destination_slot = cuts % source.page_size, cuts % destination.page_size
    # Equal page sizes divide both sides at the same tokens: slot 0 is slot 0 on both, and only the last page is short.
    same_pages = source.page_size == destination.page_size
    segments = _Segments(
        from_pages[cuts // source.page_size - token_start // source.page_size],
        source_slot,
        to_pages[cuts // destination.page_size - token_start // destination.page_size],
        destination_slot,
        tokens,
    )
    return _copies(_Cells(source, destination, region), segments, (source_slot == 0) & same_pages)


def expand_token_runs(
    source: KvLayout,
    destination: KvLayout,
    source_pages: Sequence[int] | Int64s,
    destination_tokens: Sequence[int] | Int64s,
    token_start: int,
    token_end: int,
    region: CopyRegion | None = None,
) -> CopyRuns:
    """Like expand_runs, with the destination given as one row of the pool per token (granularity "token").

    Row r is slot `r % page_size` of page `r // page_size`. The first row is for token `token_start`. Only the given
    rows are written: the rest of a page may belong to other requests. Rows that form whole pages are copied as pages.
    """
    _check_range(token_start, token_end)
    from_pages = _indices("source_pages", source_pages, _count_pages(source, token_start, token_end))
    rows = _indices("destination_tokens", destination_tokens, token_end - token_start)[: token_end - token_start]
    position = np.arange(token_start, token_end, dtype=np.int64)
    starts = position % source.page_size == 0
    starts |= rows % destination.page_size == 0
    starts[1:] |= np.diff(rows) != 1
    starts[:1] = True
    cuts = position[starts]
    tokens = np.diff(cuts, append=token_end)
    first_row = rows[starts]
    source_slot, destination_slot = cuts % source.page_size, first_row % destination.page_size
    whole = (source_slot == 0) & (destination_slot == 0) & (tokens == source.page_size)
    whole &= source.page_size == destination.page_size
    segments = _Segments(
        from_pages[cuts // source.page_size - token_start // source.page_size],
        source_slot,
        first_row // destination.page_size,
        destination_slot,
        tokens,
    )
    return _copies(_Cells(source, destination, region), segments, whole)


def check_bounds(runs: CopyRuns, source_pool_bytes: int, destination_pool_bytes: int) -> None:
    """Raise PlanError with offset, length and limit unless every copy is inside both pools."""
    if not len(runs):
        return
    if int(runs.length.min()) < 0:
        raise PlanError(f"a copy has a negative length: {int(runs.length.min())} bytes")
    for side, offsets, limit in (
        ("source", runs.source, source_pool_bytes),
        ("destination", runs.destination, destination_pool_bytes),
    ):
        outside = (offsets < 0) | (offsets > limit - runs.length)
        if outside.any():
            worst = int(np.argmax(outside))
            raise PlanError(
                f"a copy exceeds the {side} pool: offset {int(offsets[worst])} with {int(runs.length[worst])} bytes, "
                f"the pool has {limit} bytes"
            )


class _Cells:
    """The global layers and heads to copy, and the layouts of both sides."""

    def __init__(self, source: KvLayout, destination: KvLayout, region: CopyRegion | None) -> None:
        if source.planes != destination.planes:
            raise PlanError(f"planes differ: source has {source.planes}, destination has {destination.planes}")
        self.source = source
        self.destination = destination
        self.layers = _shared(source.layers, destination.layers)
        self.heads = _shared(source.heads, destination.heads)
        if region is not None:
            self.layers = _shared(self.layers, region.layers)
            self.heads = _shared(self.heads, region.heads)

    @property
    def whole_layers(self) -> bool:
        """Whether these are all heads of both sides, so that layers are contiguous."""
        return self.source.heads == self.heads == self.destination.heads


def _copies(cells: _Cells, segments: _Segments, whole: Bools) -> CopyRuns:
    """Convert segments to copies; `whole` marks those that are copied as whole pages (equal page sizes only)."""
    if not (len(cells.layers) and len(cells.heads)):
        return NO_RUNS
    pages = _copy_pages(cells, segments.select(whole))
    rows = _copy_rows(cells, segments.select(~whole))
    return _merge(*(np.concatenate(columns) for columns in zip(pages, rows, strict=True)))


def _copy_pages(cells: _Cells, segments: _Segments) -> tuple[Int64s, Int64s, Int64s]:
    """Whole pages of equal size: one block per page, or per (page, layer, plane) where only some heads are copied."""
    source, destination, layers, heads = cells.source, cells.destination, cells.layers, cells.heads
    if cells.whole_layers:
        from_base = np.array([(layers[0] - source.layer_start) * source.layer_bytes], dtype=np.int64)
        to_base = np.array([(layers[0] - destination.layer_start) * destination.layer_bytes], dtype=np.int64)
        size = np.array([len(layers) * source.layer_bytes], dtype=np.int64)
    else:
        token_bytes = np.array([plane.token_bytes for plane in source.planes], dtype=np.int64)
        from_base = _block_offsets(source, layers, heads[:1])
        to_base = _block_offsets(destination, layers, heads[:1])
        size = np.tile(token_bytes * source.page_size * len(heads), len(layers))
    from_offset = segments.source_page[:, None] * source.page_bytes + from_base
    to_offset = segments.destination_page[:, None] * destination.page_bytes + to_base
    return from_offset.ravel(), to_offset.ravel(), np.tile(size, len(segments.tokens))


def _copy_rows(cells: _Cells, segments: _Segments) -> tuple[Int64s, Int64s, Int64s]:
    """Parts of pages: one block per (segment, layer, plane, head)."""
    plane_bytes = np.array([plane.token_bytes for plane in cells.source.planes], dtype=np.int64)
    token_bytes = np.tile(np.repeat(plane_bytes, len(cells.heads)), len(cells.layers))

    def offsets(layout: KvLayout, page: Int64s, slot: Int64s) -> Int64s:
        blocks = _block_offsets(layout, cells.layers, cells.heads)
        return (page[:, None] * layout.page_bytes + slot[:, None] * token_bytes + blocks).ravel()

    from_offset = offsets(cells.source, segments.source_page, segments.source_slot)
    to_offset = offsets(cells.destination, segments.destination_page, segments.destination_slot)
    return from_offset, to_offset, (segments.tokens[:, None] * token_bytes).ravel()


def _block_offsets(layout: KvLayout, layers: range, heads: range) -> Int64s:
    """Where each (layer, plane, head) block starts inside a page, for global layers and heads, in that order."""
    layer = (np.array(layers, dtype=np.int64) - layout.layer_start) * layout.layer_bytes
    plane = np.array([layout.plane_offset(index) for index in range(len(layout.planes))], dtype=np.int64)
    head_bytes = np.array([plane.token_bytes * layout.page_size for plane in layout.planes], dtype=np.int64)
    head = np.array(heads, dtype=np.int64) - layout.head_start
    return (layer[:, None, None] + plane[None, :, None] + head_bytes[None, :, None] * head[None, None, :]).ravel()


def _shared(left: range, right: range) -> range:
    """The intersection of two contiguous ranges."""
    return range(max(left.start, right.start), min(left.stop, right.stop))


def _merge(source: Int64s, destination: Int64s, length: Int64s) -> CopyRuns:
    """Merge copies that are adjacent on both sides. The result is in source order."""
    if len(source) < 2:
        return CopyRuns(source, destination, length)
    if not (source[1:] > source[:-1]).all():
        order = np.argsort(source, kind="stable")
        source, destination, length = source[order], destination[order], length[order]
    starts = np.ones(len(source), dtype=np.bool_)
    starts[1:] = (source[1:] != source[:-1] + length[:-1]) | (destination[1:] != destination[:-1] + length[:-1])
    first = np.flatnonzero(starts)
    return CopyRuns(source[first], destination[first], np.add.reduceat(length, first))


def _page_starts(token_start: int, token_end: int, page_size: int) -> Int64s:
    """`token_start` and every page boundary after it, below `token_end`; empty for an empty range."""
    if token_start == token_end:
        return _EMPTY
    starts = np.arange(token_start // page_size * page_size, token_end, page_size, dtype=np.int64)
    return np.maximum(starts, token_start)


def _count_pages(layout: KvLayout, token_start: int, token_end: int) -> int:
    """The number of pages that hold these tokens."""
    return layout.pages_for(token_end) - token_start // layout.page_size if token_start < token_end else 0


def _check_range(token_start: int, token_end: int) -> None:
    if not 0 <= token_start <= token_end:
        raise PlanError(f"tokens [{token_start}, {token_end}) are not a range")


def _indices(name: str, values: ArrayLike, needed: int) -> Int64s:
    array = np.asarray(values, dtype=np.int64)
    if array.ndim != 1 or len(array) < needed:
        raise PlanError(f"{name} has shape {array.shape}, these tokens need {needed} entries")
    return array


_EMPTY: Int64s = np.empty(0, dtype=np.int64)
NO_RUNS = CopyRuns(_EMPTY, _EMPTY, _EMPTY)
