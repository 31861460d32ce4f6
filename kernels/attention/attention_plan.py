"""The work of one attention call over a paged cache, as device arrays: planned once per step, used by every layer.

Sequences with one query are split into pieces of their keys, sequences with several into tiles of their queries. All
lengths are in device memory, and only the sizes of these arrays determine a launch: a captured CUDA graph computes what
the arrays hold when it is replayed.

With a sliding window W, the query at position p sees the keys (p - W, p]. Pieces, tiles and copies then leave out the
keys that no query sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from ...common.arithmetic import ceil_div, round_up
from ..backends.occupancy import multiprocessors
from ..backends.uploads import upload_arrays

IntArray = npt.NDArray[np.int32]

PIECE_TOKENS = 64
"""Piece lengths are multiples of this: the keys that the decode kernel processes at a time."""

TILE_QUERIES = 128
"""Queries of one sequence in a tile."""

LEAST_PART_BLOCKS = 8
"""The fewest blocks of keys of a part: with fewer, combining the results would cost more than the division saves."""

COPY_TOKENS = 128
"""Sequences that are copied out of their pages start at multiples of this, zero-padded."""

FEW_KEYS = 8192
"""If every sequence has at most this many keys, one kernel computes few sequences (rope_attention.py)."""

PIECES_PER_SM = 4
"""Enough to hide latency and to balance the last wave; more only adds partial results."""


@dataclass(frozen=True)
class Tiles:
    """Tiles of queries, all int32. If few queries see many keys, the keys of a tile are divided among several entries,
    its parts, whose results are combined (split-K).
    """

    tiles: torch.Tensor  # [5, M]: sequence, first query, first block of keys, end of its blocks, part (-1: alone)
    splits: torch.Tensor  # [4, S], divided tiles: sequence, first query, first part, end of its parts
    counts: torch.Tensor  # [2]: entries of both in use; in a CUDA graph the arrays are longer


@dataclass(frozen=True)
class WorkPlan:
    """A ragged batch of B sequences on the device, all int32. Empty pieces are ignored."""

    tokens: int
    page_size: int
    num_kv_heads: int
    pages: torch.Tensor  # the sequences' page ids one after another; those of i start at page_starts[i]
    page_starts: torch.Tensor  # [B]
    kv_lens: torch.Tensor  # [B]
    query_lens: torch.Tensor  # [B]
    row_starts: torch.Tensor  # [B], each sequence's first row of `query`
    pieces: torch.Tensor  # [4, N]: sequence, first key, end of keys, index of its partial result
    piece_starts: torch.Tensor  # [B + 1], each sequence's first partial result
    tiles: Tiles  # of sequences that are copied out of their pages
    last_tiles: Tiles  # only those with the last query of a sequence
    copied_tokens: int  # room for the sequences in tiles, whose keys and values are copied out of their pages
    copies: torch.Tensor  # [2, K]: sequence, and the first of its tokens in a block of COPY_TOKENS
    copy_starts: torch.Tensor  # [B], each sequence's first row in the copy
    most_parts: int  # of all tiles
    num_copies: torch.Tensor  # [1]: copies in use; in a CUDA graph the array is longer
    copied: torch.Tensor | None = None  # [2, Hkv * copied_tokens, D], memory for the copy; None: allocated per call
    allow_cuda: bool = True  # whether tiles may be computed by the CUDA kernel, if it supports the geometry
    window: int | None = None  # the sliding window; None: queries see all keys before them
    few_keys: bool = False  # every sequence has one query, which sees at most FEW_KEYS keys; CUDA kernels are allowed


def num_pieces(batch: int, num_kv_heads: int, device: torch.device) -> int:
    """Maximum number of pieces of a batch of `batch` sequences. Every KV head works on every piece."""
    if device.type != "cuda":
        return batch + PIECES_PER_SM
    return batch + ceil_div(PIECES_PER_SM * multiprocessors(device), num_kv_heads)


def cut_decode(kv_lens: IntArray, most: int, window: int | None = None) -> tuple[IntArray, IntArray]:
    """Split sequences into at most `most` (> their number) pieces of about equal length, longest sequences first. With
    a `window`, only its keys are in pieces.

    Returns pieces [4, n] and piece_starts [B + 1] of WorkPlan. A sequence of length 0 has no piece.
    """
    batch = len(kv_lens)
    visible = kv_lens if window is None else np.minimum(kv_lens, window)
    share = ceil_div(int(visible.sum()), most - batch)  # sum(ceil(len / share)) < batch + sum(len) / share <= most
    length = max(round_up(share, PIECE_TOKENS), PIECE_TOKENS)
    counts = -(-visible // length)
    piece_starts = np.zeros(batch + 1, dtype=np.int32)
    np.cumsum(counts, out=piece_starts[1:])
    sequence = np.repeat(np.arange(batch, dtype=np.int32), counts)
    number = np.arange(len(sequence), dtype=np.int32)
    start = (kv_lens - visible)[sequence] + (number - piece_starts[sequence]) * length
    end = np.minimum(start + length, kv_lens[sequence])
    pieces = np.stack((sequence, start, end, number)).astype(np.int32)
    return pieces[:, np.argsort(start - end, kind="stable")], piece_starts


def has_few_keys(kv_len: int, window: int | None) -> bool:
    """Whether the last query of a sequence of this length sees at most FEW_KEYS keys."""
    return min(kv_len, window or kv_len) <= FEW_KEYS


def num_parts(num_heads: int, device: torch.device) -> int:
    """Maximum number of parts of all tiles: as many as the GPU runs at the same time with `num_heads` query heads."""
    return multiprocessors(device) // num_heads if device.type == "cuda" else 4


def cut_copies(query_lens: IntArray, kv_lens: IntArray, window: int | None = None) -> tuple[IntArray, IntArray]:
    """Copies [2, k] and copy_starts [B] of sequences of these lengths. Sequences without queries are not copied, and
    neither are blocks before the window of the first query. `copy_starts` does not depend on the window.
    """
    padded = _padded(query_lens, kv_lens)
    copies = _blocks(padded, COPY_TOKENS)
    if window is not None:
        sequence, first = copies
        copies = copies[:, first + COPY_TOKENS > (kv_lens - query_lens - window + 1)[sequence]]
    return copies, (np.cumsum(padded) - padded).astype(np.int32)


def _padded(query_lens: IntArray, kv_lens: IntArray) -> IntArray:
    """Rows of each sequence in the copy, whether they are copied or not."""
    return np.where(query_lens > 0, -(-kv_lens // COPY_TOKENS) * COPY_TOKENS, 0).astype(np.int32)


def cut_tiles(
    query_lens: IntArray, kv_lens: IntArray, most_parts: int, *, last_only: bool = False, window: int | None = None
) -> tuple[IntArray, IntArray]:
    """Tiles [5, m] and splits [4, s] of the queries, tiles with the most visible keys first; with `last_only`, the tile
    of each sequence's last query. Sequences without queries have none. Tiles leave out blocks of keys that are before
    the `window` of all their queries.
    """
    if last_only:
        (sequence,) = query_lens.nonzero()
        first = (query_lens[sequence] - 1) // TILE_QUERIES * TILE_QUERIES
    else:
        sequence, first = _blocks(query_lens, TILE_QUERIES)
    positions = kv_lens[sequence] - query_lens[sequence] + first
    end_block = -(-np.minimum(positions + TILE_QUERIES, kv_lens[sequence]) // COPY_TOKENS)
    first_block = np.zeros_like(end_block) if window is None else np.maximum(positions - window + 1, 0) // COPY_TOKENS
    blocks = end_block - first_block
    parts = np.minimum(blocks // LEAST_PART_BLOCKS, most_parts // max(1, len(blocks)))
    parts = np.where(parts > 1, parts, 1)
    tile = np.repeat(np.arange(len(blocks)), parts)
    first_entry = np.cumsum(parts) - parts
    number = np.arange(len(tile)) - first_entry[tile]
    divided = parts > 1
    first_part = np.cumsum(np.where(divided, parts, 0)) - np.where(divided, parts, 0)
    entries = np.stack(
        (
            sequence[tile],
            first[tile],
            first_block[tile] + number * blocks[tile] // parts[tile],
            first_block[tile] + (number + 1) * blocks[tile] // parts[tile],
            np.where(divided[tile], first_part[tile] + number, -1),
        )
    ).astype(np.int32)
    splits = np.stack((sequence, first, first_part, first_part + parts))[:, divided].astype(np.int32)
    return entries[:, np.argsort(entries[2] - entries[3], kind="stable")], splits


def _blocks(lengths: IntArray, size: int) -> IntArray:
    """[2, n]: sequence and first token of every block of `size` tokens of sequences of these lengths."""
    counts = -(-lengths // size)
    sequence = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    starts = np.cumsum(counts) - counts
    first = (np.arange(len(sequence), dtype=np.int32) - starts[sequence]) * size
    return np.stack((sequence, first)).astype(np.int32)


def make_work_plan(
    query_lens: Sequence[int],
    kv_lens: Sequence[int],
    pages: Sequence[Sequence[int]],
    *,
    page_size: int,
    num_kv_heads: int,
    num_heads: int,
    device: torch.device,
    allow_cuda: bool = True,
    window: int | None = None,
) -> WorkPlan:
    """Plan a batch and upload the plan to `device` in one copy. `pages[i]` holds exactly the pages of kv_lens[i].
    `num_heads` are the query heads.
    """
    batch = len(query_lens)
    queries, keys = np.array(query_lens, dtype=np.int32), np.array(kv_lens, dtype=np.int32)
    page_counts = [len(ids) for ids in pages]
    most_pieces = num_pieces(batch, num_kv_heads, device)
    pieces, piece_starts = cut_decode(np.where(queries == 1, keys, 0), most_pieces, window)
    tiled = np.where(queries > 1, queries, 0)
    copies, copy_starts = cut_copies(tiled, keys, window)
    most_parts = num_parts(num_heads, device)
    tiles, splits = cut_tiles(tiled, keys, most_parts, window=window)
    last, last_splits = cut_tiles(tiled, keys, most_parts, last_only=True, window=window)
    arrays: dict[str, IntArray] = {
        "pages": np.fromiter(chain.from_iterable(pages), dtype=np.int32, count=sum(page_counts)),
        "page_starts": np.cumsum([0, *page_counts[:-1]], dtype=np.int32),
        "kv_lens": keys,
        "query_lens": queries,
        "row_starts": np.cumsum([0, *query_lens[:-1]], dtype=np.int32),
        "pieces": pieces.reshape(-1),
        "piece_starts": piece_starts,
        "copies": copies.reshape(-1),
        "copy_starts": copy_starts,
        "num_copies": np.array([copies.shape[1]], dtype=np.int32),
        "tiles": tiles.reshape(-1),
        "splits": splits.reshape(-1),
        "tile_counts": np.array([tiles.shape[1], splits.shape[1]], dtype=np.int32),
        "last_tiles": last.reshape(-1),
        "last_splits": last_splits.reshape(-1),
        "last_counts": np.array([last.shape[1], last_splits.shape[1]], dtype=np.int32),
    }
    parts = dict(zip(arrays, upload_arrays([*arrays.values()], device), strict=True))
    return WorkPlan(
        tokens=sum(query_lens),
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        pages=parts["pages"],
        page_starts=parts["page_starts"],
        kv_lens=parts["kv_lens"],
        query_lens=parts["query_lens"],
        row_starts=parts["row_starts"],
        pieces=parts["pieces"].view(4, -1),
        piece_starts=parts["piece_starts"],
        tiles=Tiles(parts["tiles"].view(5, -1), parts["splits"].view(4, -1), parts["tile_counts"]),
        last_tiles=Tiles(parts["last_tiles"].view(5, -1), parts["last_splits"].view(4, -1), parts["last_counts"]),
        copied_tokens=_padded(tiled, keys).sum().item(),
        copies=parts["copies"].view(2, -1),
        copy_starts=parts["copy_starts"],
        most_parts=most_parts,
        num_copies=parts["num_copies"],
        allow_cuda=allow_cuda,
        window=window,
        few_keys=allow_cuda and bool((queries == 1).all()) and has_few_keys(int(keys.max(initial=0)), window),
    )
