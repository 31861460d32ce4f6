"""Inputs of CUDA graphs that change from step to step, uploaded in one copy."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import torch

from ...kernels.attention.attention_plan import IntArray
from ...kernels.attention.paged_attention import AttentionPlan
from ...memory.pages import pages_for
from ..layers.batch import ForwardBatch, SequenceSlice, token_rows


class InputBuffer:
    """Named sections of one int32 buffer, on the device and on the host (pinned if the device is a GPU)."""

    def __init__(self, sections: Mapping[str, int], device: torch.device) -> None:
        """`sections`: name to number of elements. Only the used part of the last one is copied."""
        names, sizes = list(sections), list(sections.values())
        on_gpu = device.type == "cuda"
        self._staged = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
        self._on_device = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._last_start = sum(sizes[:-1])
        self._copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
        staged = torch.split_with_sizes(self._staged, sizes)
        self.host: dict[str, IntArray] = {name: part.numpy() for name, part in zip(names, staged, strict=True)}
        self.device = dict(zip(names, torch.split_with_sizes(self._on_device, sizes), strict=True))

    def wait(self) -> None:
        """Wait until `host` may be changed: the copy of the previous step may still read it."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, last_used: int) -> None:
        """Copy `host` to `device` in stream order; of the last section, `last_used` elements."""
        length = self._last_start + last_used
        self._on_device[:length].copy_(self._staged[:length], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class KnownPages:
    """The first pages of the sequence in one row of a batch, as an array that is rebuilt only when they change.

    A long sequence has thousands of pages and seldom gets a new one, at the end of its owner's list.
    """

    NONE: Final[IntArray] = np.empty(0, dtype=np.int32)

    def __init__(self) -> None:
        self.array = self.NONE
        self._source: Sequence[int] = ()

    def update(self, pages: Sequence[int], count: int) -> bool:
        """Set the first `count` of `pages`; returns whether the array changed.

        Page lists only grow at the end, so the same list with the same count has the same pages.
        """
        if pages is self._source and count == len(self.array):
            return False
        array = np.fromiter(pages[:count], dtype=np.int32, count=count)
        self._source = pages
        if np.array_equal(array, self.array):
            return False
        self.array = array
        return True


class PageTable:
    """A section of an input buffer with the page ids of the sequences of a decode batch, `width` for each row."""

    def __init__(self, section: IntArray, rows: int, width: int) -> None:
        self._table = section.reshape(rows, width)
        self._known = [KnownPages() for _ in range(rows)]
        """The pages that each row of the table starts with, on the host and on the device."""

    def fill(self, slices: Sequence[SequenceSlice], used: Sequence[int]) -> int:
        """Set the first pages of each sequence, `used` of them. Returns the elements to upload: up to the last row that
        changed.
        """
        changed_rows = 0
        for row, (piece, count) in enumerate(zip(slices, used, strict=True)):
            if self._known[row].update(piece.pages, count):
                self._table[row, :count] = self._known[row].array
                changed_rows = row + 1
        return changed_rows * self._table.shape[1]


TOKEN_SECTIONS = ("token_ids", "positions", "page_ids", "offsets")
"""Sections with one element per row of the batch, for every architecture."""


def token_batch(
    parts: Mapping[str, torch.Tensor],
    size: int,
    *,
    last_rows: torch.Tensor | None = None,
    attention: AttentionPlan | None = None,
    windowed: AttentionPlan | None = None,
    hot_slots: torch.Tensor | None = None,
    all_resident: bool = False,
) -> ForwardBatch:
    """The first `size` rows of TOKEN_SECTIONS as a batch."""
    return ForwardBatch(
        slices=(),
        token_ids=parts["token_ids"][:size],
        positions=parts["positions"][:size],
        page_ids=parts["page_ids"][:size],
        offsets=parts["offsets"][:size],
        last_rows=last_rows,
        attention=attention,
        windowed=windowed,
        hot_slots=hot_slots,
        all_resident=all_resident,
    )


def fill_tokens(host: Mapping[str, IntArray], slices: Sequence[SequenceSlice], size: int, page_size: int) -> None:
    """Fill TOKEN_SECTIONS for a batch of single tokens padded to `size` rows."""
    live = len(slices)
    host["token_ids"][:live] = [piece.token_ids[0] for piece in slices]
    host["positions"][:live] = [piece.start for piece in slices]
    host["page_ids"][:live] = [piece.pages[piece.start // page_size] for piece in slices]
    host["offsets"][:live] = [piece.start % page_size for piece in slices]
    for name in TOKEN_SECTIONS:
        host[name][live:size] = 0


SLICE_SECTIONS = ("row_starts", "query_lens", "last_rows")
"""Sections with one element per slice of a batch of chunks."""


def fill_chunks(host: Mapping[str, IntArray], slices: Sequence[SequenceSlice], size: int, page_size: int) -> None:
    """Fill `live_rows`, TOKEN_SECTIONS for slices of any length, padded to `size` rows, and SLICE_SECTIONS."""
    lengths = [len(piece.token_ids) for piece in slices]
    starts = list(accumulate(lengths, initial=0))
    rows = token_rows(slices, page_size) if slices else np.empty((3, 0), dtype=np.int64)
    total, live = starts[-1], len(slices)
    host["live_rows"][0] = total
    for name in TOKEN_SECTIONS:
        host[name][total:size] = 0
    host["token_ids"][:total], host["positions"][:total], host["page_ids"][:total] = rows
    host["offsets"][:total] = rows[1] % page_size
    for name, values in zip(SLICE_SECTIONS, (starts[:-1], lengths, [start - 1 for start in starts[1:]]), strict=True):
        host[name][:live] = values
        host[name][live:] = 0


def fill_table(section: IntArray, entries: IntArray) -> None:
    """Set the first columns of a section that is a table with the rows of `entries`; the other columns become 0."""
    table = section.reshape(len(entries), -1)
    table[:, : entries.shape[1]] = entries
    table[:, entries.shape[1] :] = 0


def pages_in_use(slices: Sequence[SequenceSlice], page_size: int) -> list[int]:
    """Pages of each sequence up to the end of its slice; raises ValueError if one has fewer."""
    used = [pages_for(piece.end, page_size) for piece in slices]
    if any(len(piece.pages) < count for piece, count in zip(slices, used, strict=True)):
        present = sum(min(len(piece.pages), count) for piece, count in zip(slices, used, strict=True))
        raise ValueError(f"{len(slices)} sequences have {present} pages of {page_size} tokens and need {sum(used)}")
    return used
