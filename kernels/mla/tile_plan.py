"""The work of dense latent attention in one step, as device arrays: planned once, used by every layer.

A tile is a few consecutive queries of one sequence with all heads. If few tiles see many keys, the keys of a tile are
cut into pieces, whose results are combined (split-K). All lengths are in device memory, and only the sizes of these
arrays determine a launch: a captured CUDA graph computes what the arrays hold when it is replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...common.arithmetic import ceil_div, round_up
from ..attention.used_pages import used_pages
from ..backends.occupancy import multiprocessors
from ..backends.uploads import upload_arrays

IntArray = npt.NDArray[np.int32]

TILE_ROWS = 64
"""Rows of the matrix products of a program: heads of one or several queries."""
BLOCK_KEYS = 64
"""Keys that a program processes at a time; pieces start at multiples of it."""
LEAST_PIECE_KEYS = 128
"""The fewest keys of a piece: with fewer, combining the results would cost more than the division saves."""
MOST_ROUNDS = 4
"""A step has at most one piece for every tile, plus this many pieces for each tile that the GPU processes at once."""
PIECE_COST_KEYS = 192
"""The fixed cost of a program (its queries, its partial result), in keys."""
REFERENCE_TILE_TOKENS = 512
"""Queries of a tile on the CPU, where a tile is one product of torch."""
PIECE_FIELDS, SPLIT_FIELDS = 7, 4


@dataclass(frozen=True)
class TilePlan:
    """A ragged batch; arrays are int32, on the device.

    A piece without tokens is unused. A piece without keys belongs to padded rows, and its result is zeros.
    """

    tokens: int
    page_size: int
    tile_tokens: int  # queries of a tile at most
    pages: torch.Tensor  # page ids of all sequences
    pieces: torch.Tensor
    """[7, N]: where the sequence's ids start in `pages`; first query, number of queries; keys that the first query
    sees; first key, end of keys; number of the partial result, -1 if the tile has one piece.
    """
    splits: torch.Tensor  # [4, S]: first query, number of queries, first partial result, end of them
    num_partials: int  # room for partial results


def tiles_at_once(heads: int, device: torch.device) -> int:
    """Tiles that a GPU processes at the same time; 0 elsewhere, where tiles are large and not cut."""
    if device.type != "cuda":
        return 0
    return max(multiprocessors(device) // ceil_div(heads, TILE_ROWS), 1)


def tile_tokens(heads: int, *, decode_only: bool, at_once: int) -> int:
    """Queries of a tile: as many as fill the rows of a program. A decode step has one query for each sequence."""
    if decode_only:
        return 1
    return max(TILE_ROWS // heads, 1) if at_once else REFERENCE_TILE_TOKENS


def most_pieces(tiles: int, at_once: int) -> int:
    """The most pieces of `tiles` tiles."""
    return tiles + _rounds(tiles, at_once) * at_once


def most_splits(tiles: int, at_once: int) -> int:
    """Tiles of several pieces, at most."""
    return min(tiles, _rounds(tiles, at_once) * at_once)


def most_partials(tiles: int, at_once: int) -> int:
    """Partial results at most: those of all pieces of split tiles."""
    return most_splits(tiles, at_once) + _rounds(tiles, at_once) * at_once


def _rounds(tiles: int, at_once: int) -> int:
    """The most rounds in which pieces are processed."""
    return min(ceil_div(tiles, at_once) + 1, MOST_ROUNDS) if at_once else 0


def cut_tiles(
    query_lens: IntArray, kv_lens: IntArray, page_starts: IntArray, *, tile_tokens: int, at_once: int
) -> tuple[IntArray, IntArray]:
    """Pieces [7, n], longest first, and splits [4, s] of sequences, whose queries follow each other. A sequence without
    keys is padding.
    """
    tiles = -(-query_lens // tile_tokens)
    sequence = np.repeat(np.arange(len(query_lens)), tiles)
    offset = (np.arange(len(sequence)) - (np.cumsum(tiles) - tiles)[sequence]) * tile_tokens
    row = (np.cumsum(query_lens) - query_lens)[sequence] + offset
    count = np.minimum(query_lens[sequence] - offset, tile_tokens)
    padding = kv_lens[sequence] == 0
    visible = np.where(padding, 0, kv_lens[sequence] - query_lens[sequence] + offset + 1)
    keys = np.where(padding, 0, visible + count - 1)

    length = _piece_length(keys, at_once)
    parts = np.maximum(-(-keys // length), 1)
    tile = np.repeat(np.arange(len(keys)), parts)
    start = (np.arange(len(tile)) - (np.cumsum(parts) - parts)[tile]) * length
    end = np.minimum(start + length, keys[tile])
    split = parts > 1
    partials = np.where(split, parts, 0)
    first_partial = np.cumsum(partials) - partials
    partial = np.where(split[tile], first_partial[tile] + start // length, -1)
    pieces = np.stack((page_starts[sequence][tile], row[tile], count[tile], visible[tile], start, end, partial))
    splits = np.stack((row, count, first_partial, first_partial + parts))[:, split]
    return pieces[:, np.argsort(start - end, kind="stable")].astype(np.int32), splits.astype(np.int32)


def _piece_length(keys: IntArray, at_once: int) -> int:
    """The keys of a piece with the lowest estimated cost, among divisions into one or more rounds of programs. With few
    pieces there are few partial results; with many pieces the work is divided evenly.
    """
    longest, total = int(keys.max(initial=0)), int(keys.sum())
    best, least_cost = max(longest, 1), np.inf
    for rounds in range(1, _rounds(len(keys), at_once) + 1):
        length = round_up(max(ceil_div(total, rounds * at_once), LEAST_PIECE_KEYS), BLOCK_KEYS)
        piece = max(min(length, longest), 1)
        whole, rest = np.divmod(keys, piece)
        long_pieces = int(whole.sum() + (2 * rest > piece).sum())
        busy = max(ceil_div(long_pieces, at_once) * piece, ceil_div(total, at_once))
        cost = busy + ceil_div(int(whole.sum() + (rest > 0).sum()), at_once) * PIECE_COST_KEYS
        if cost < least_cost:
            best, least_cost = length, cost
    return best


def plan_tiles(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    pages: Sequence[Sequence[int]],
    *,
    page_size: int,
    heads: int,
    device: torch.device,
    at_once: int | None = None,
) -> TilePlan:
    """Plan a batch and upload the plan in one copy. The last query_lens[i] tokens of sequence i are queries. `pages[i]`
    may be longer than kv_lens[i] needs. `at_once` replaces `tiles_at_once`.
    """
    used = used_pages(query_lens, kv_lens, pages, page_size)
    lengths = [len(ids) for ids in used]
    page_starts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)
    at_once = tiles_at_once(heads, device) if at_once is None else at_once
    size = tile_tokens(heads, decode_only=max(query_lens) == 1, at_once=at_once)
    pieces, splits = cut_tiles(
        np.array(query_lens, np.int32), np.array(kv_lens, np.int32), page_starts, tile_tokens=size, at_once=at_once
    )
    flat_pages = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in used])
    flat_pieces, flat_splits, page_ids = upload_arrays([pieces.reshape(-1), splits.reshape(-1), flat_pages], device)
    return TilePlan(
        tokens=sum(query_lens),
        page_size=page_size,
        tile_tokens=size,
        pages=page_ids,
        pieces=flat_pieces.view(PIECE_FIELDS, -1),
        splits=flat_splits.view(SPLIT_FIELDS, -1),
        num_partials=int((pieces[6] >= 0).sum()),
    )
