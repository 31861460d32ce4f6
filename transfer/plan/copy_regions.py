"""Which prefill rank writes which layers and heads to which decode rank, for any sharding of the two sides. Pure.

A rank's layout is a rectangle of (layer, head) cells; pipeline parallelism divides it by layers, tensor parallelism by
heads, and replicas (more ranks than KV heads, latent rows) hold the same one. A *copy region* is a rectangle that one
prefill rank writes to one decode rank. `plan_regions` covers every cell of every decode rank exactly once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...common.errors import PdserveError
from ..protocol.layout import KvLayout


class CoverageError(PdserveError):
    """A decode rank needs KV that no prefill rank holds."""


@dataclass(frozen=True, slots=True)
class CopyRegion:
    """Prefill rank `source` writes these global layers and heads to decode rank `destination`."""

    source: int
    destination: int
    layers: range
    heads: range


def plan_regions(prefill: Sequence[KvLayout], decode: Sequence[KvLayout], *, first: int = 0) -> tuple[CopyRegion, ...]:
    """The regions for one kind of pool. Rank i of each side has the i-th layout. Raises CoverageError.

    Decode ranks are served in order. Each takes the prefill rank that holds most of its missing cells, which yields
    few, large rectangles, and a single one where a prefill rank holds all of them. Among equals (replicas) it takes the
    rank with the least load so far, and then the next one from rank `first` on: a different `first` for each decode
    server balances replicas where every server has fewer ranks than there are replicas.
    """
    load = [0] * len(prefill)
    turns = [(first + rank) % len(prefill) for rank in range(len(prefill))]
    regions: list[CopyRegion] = []
    for destination, wanted in enumerate(decode):
        overlaps = {rank: _overlap(prefill[rank], wanted.layers, wanted.heads) for rank in turns}
        holders = [rank for rank in turns if _holds_any(overlaps[rank])]
        missing = np.ones((wanted.num_layers, wanted.num_heads), dtype=np.bool_)
        while missing.any():
            shares = {rank: int(np.count_nonzero(missing[overlaps[rank]])) for rank in holders}
            source = min(holders, key=lambda rank: (-shares[rank], load[rank]), default=None)
            if source is None or not shares[source]:
                layer, head = np.argwhere(missing)[0].tolist()
                raise CoverageError(
                    f"decode rank {destination} needs layer {wanted.layers[layer]}, head {wanted.heads[head]} of "
                    f"{'+'.join(wanted.kind)}, which no prefill rank holds"
                )
            load[source] += shares[source]
            taken = np.zeros_like(missing)
            taken[overlaps[source]] = missing[overlaps[source]]
            missing[overlaps[source]] = False
            regions.extend(
                CopyRegion(source, destination, wanted.layers[layers], wanted.heads[heads])
                for layers, heads in _rectangles(taken)
            )
    return tuple(regions)


def find_hole(layouts: Sequence[KvLayout], layers: range, heads: range) -> tuple[int, int] | None:
    """A (layer, head) of this rectangle that no layout holds; None if they cover it."""
    missing = np.ones((len(layers), len(heads)), dtype=np.bool_)
    for held in layouts:
        missing[_overlap(held, layers, heads)] = False
    if not missing.any():
        return None
    layer, head = np.argwhere(missing)[0].tolist()
    return layers[layer], heads[head]


def _overlap(held: KvLayout, layers: range, heads: range) -> tuple[slice, slice]:
    """The part of a rectangle that `held` covers, as indices into the rectangle."""
    return _part(held.layers, layers), _part(held.heads, heads)


def _part(held: range, wanted: range) -> slice:
    start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
    return slice(start - wanted.start, max(start, stop) - wanted.start)


def _holds_any(overlap: tuple[slice, slice]) -> bool:
    return all(part.start < part.stop for part in overlap)


def _rectangles(cells: NDArray[np.bool_]) -> Iterator[tuple[slice, slice]]:
    """Divide the marked cells into rectangles, each as wide and then as high as possible. Clears `cells`."""
    while cells.any():
        top, left = np.argwhere(cells)[0].tolist()
        right = left + _leading(cells[top, left:])
        bottom = top + _leading(np.logical_and.reduce(cells[top:, left:right], axis=1))
        cells[top:bottom, left:right] = False
        yield slice(top, bottom), slice(left, right)


def _leading(marks: NDArray[np.bool_]) -> int:
    """The number of leading entries that are set."""
    return len(marks) if marks.all() else int(np.argmin(marks))
