"""Slot tables: which tokens are in the hot buffer of each request. Swap-in plans with them.

A request has pages of a GPU pool, of S rows each; their rows in order are its slots. A sequence of up to `capacity`
tokens is fully resident: token p is in slot p, without a lookup. A longer sequence is evicting: it uses B + 1 slots, B
under LRU replacement and one for its newest token:

    capacity        [requests] int32               the longest sequence that is fully resident
    hot_pages       [requests, width] int32        its pages of the hot pool
    slot_tokens     [requests, B + 1] int32        the token in each slot, -1 for none
    token_slots     [requests, max_context] int16  its inverse: the slot of each token, -1 for none
    eviction_order  [requests, B + 1] int16        all slots: the next to evict first, the one reserved for the next
                                                   step's token last
    lookups         [2] int64                      hits and misses of all steps so far, without newest tokens

Layers that select the same tokens (an index group) share one set of the last four. Slot s of a request is row
`hot_pages[s // S] * S + s % S` of the hot pool of each layer: a flat row.

While a sequence is fully resident its tables stay as `admit` left them: tokens 0 to B - 1 in slots 0 to B - 1. So it
can become evicting at any time, by lowering the capacity to B: no row has to move.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

import numpy as np
import torch

from ...common.arithmetic import ceil_div
from ..backends.dispatch import Impl, use_triton
from ..backends.occupancy import shared_memory
from ..backends.uploads import upload_array

KvRows = NewType("KvRows", torch.Tensor)
"""Flat rows of a pool with the pages of sequences, such as the one in host memory: int32, -1 for none."""
HotRows = NewType("HotRows", torch.Tensor)
"""Flat rows of the hot pool: int32, -1 for none."""

MAX_HOT_ROWS = 2**15 - 1  # slots 0 to B are int16
MAX_ROWS = 2**31 - 1  # flat rows are int32


def buffer_pages(hot_rows: int, page_size: int) -> int:
    """Pages that hold B rows and the newest row."""
    return hot_rows // page_size + 1


def plan_shared_bytes(top_k: int, hot_rows: int, page_size: int) -> int:
    """Shared memory of one planning block: `Shared` in csrc/hisparse/swap_in.cu."""
    words = (1 << bucket_bits(top_k)) + top_k + 3 * 32 + 32 * 32 + buffer_pages(hot_rows, page_size)
    return 4 * words + 2 * top_k + hot_rows + 1 + 3


def bucket_bits(top_k: int) -> int:
    """log2 of the hash buckets for the misses of one row: a power of two, at most half of them used."""
    return max(1, (2 * top_k - 1).bit_length())


def check_geometry(
    *,
    top_k: int,
    hot_rows: int,
    requests: int,
    max_context: int,
    page_size: int,
    row_bytes: int,
    host_rows: int,
    hot_pool_rows: int,
    device: torch.device,
) -> None:
    """Raise ValueError, with field, limit and value, for a geometry that swap-in does not support on this device."""
    for field, value, low, high in (
        ("top_k", top_k, 1, hot_rows),
        ("hot_rows", hot_rows, 1, MAX_HOT_ROWS),
        ("requests", requests, 1, MAX_ROWS),
        ("max_context", max_context, 1, MAX_ROWS),
        ("page_size", page_size, 1, MAX_ROWS),
        ("row_bytes", row_bytes, 1, MAX_ROWS),
        ("host_rows", host_rows, 1, MAX_ROWS),
        ("hot_pool_rows", hot_pool_rows, hot_rows + 1, MAX_ROWS),
    ):
        if not low <= value <= high:
            raise ValueError(f"{field} must be in [{low}, {high}], got {value}")
    if device.type == "cuda":
        limit = shared_memory(device)
        needed = plan_shared_bytes(top_k, hot_rows, page_size)
        if needed > limit:
            raise ValueError(
                f"top_k {top_k} with hot_rows {hot_rows} needs {needed} bytes of shared memory per block, "
                f"{device} has {limit}"
            )


def table_bytes(*, groups: int, requests: int, hot_rows: int, max_context: int, page_size: int) -> int:
    """Device memory that `SlotTables.allocate` takes."""
    of_group = 16 + requests * ((4 + 2) * (hot_rows + 1) + 2 * max_context)
    return groups * of_group + requests * 4 * (1 + _table_pages(hot_rows, max_context, page_size))


def _table_pages(hot_rows: int, max_context: int, page_size: int) -> int:
    """Maximum hot pages of a request: those of its buffer, or of all its tokens."""
    return max(buffer_pages(hot_rows, page_size), ceil_div(max_context, page_size))


@dataclass(frozen=True)
class SlotTables:
    """The tables of all index groups, or of one: `group(i)`. `swap_in` changes them on the GPU.

    `admit` and `set_pages` are enqueued too: they take effect in order, for later steps.
    """

    page_size: int
    capacity: torch.Tensor
    hot_pages: torch.Tensor
    slot_tokens: torch.Tensor
    token_slots: torch.Tensor
    eviction_order: torch.Tensor
    lookups: torch.Tensor

    @classmethod
    def allocate(
        cls, *, groups: int, requests: int, hot_rows: int, max_context: int, page_size: int, device: torch.device
    ) -> "SlotTables":
        """Tables of empty hot buffers."""
        slots = torch.arange(hot_rows + 1, dtype=torch.int16, device=device)
        width = _table_pages(hot_rows, max_context, page_size)
        return cls(
            page_size=page_size,
            capacity=torch.full((requests,), hot_rows, dtype=torch.int32, device=device),
            hot_pages=torch.zeros((requests, width), dtype=torch.int32, device=device),
            slot_tokens=torch.full((groups, requests, hot_rows + 1), -1, dtype=torch.int32, device=device),
            token_slots=torch.full((groups, requests, max_context), -1, dtype=torch.int16, device=device),
            eviction_order=slots.repeat(groups, requests, 1),
            lookups=torch.zeros((groups, 2), dtype=torch.int64, device=device),
        )

    def group(self, index: int) -> "SlotTables":
        """A view of the tables of one index group, as swap_in takes it."""
        return SlotTables(
            self.page_size,
            self.capacity,
            self.hot_pages,
            self.slot_tokens[index],
            self.token_slots[index],
            self.eviction_order[index],
            self.lookups[index],
        )

    @property
    def size_bytes(self) -> int:
        tables = (self.capacity, self.hot_pages, self.slot_tokens, self.token_slots, self.eviction_order, self.lookups)
        return sum(table.nbytes for table in tables)

    @property
    def hot_rows(self) -> int:
        return self.slot_tokens.shape[-1] - 1

    @property
    def max_context(self) -> int:
        return self.token_slots.shape[-1]

    def admit(self, request: int, *, resident: bool) -> None:
        """Start a request whose tokens so far are in host memory.

        If it is `resident`, its rows must also be in the hot pool, token p in slot p, before its first step. Otherwise
        the hot buffer starts empty.
        """
        slots = torch.arange(self.hot_rows + 1, dtype=torch.int16, device=self.slot_tokens.device)
        self.slot_tokens[..., request, :] = -1
        self.token_slots[..., request, :] = -1
        self.eviction_order[..., request, :] = slots
        if resident:  # these entries are first read when the sequence has more tokens than its capacity
            first = slots[: min(self.hot_rows, self.max_context)]
            self.slot_tokens[..., request, : len(first)] = first.int()
            self.token_slots[..., request, : len(first)] = first

    def set_pages(self, request: int, hot_pages: Sequence[int], capacity: int) -> None:
        """Assign these pages of the hot pool to a request, at least as many as its tokens or its buffer need.

        The capacity is at least B. It may be raised only while the sequence is within the old one.
        """
        if capacity < self.hot_rows or len(hot_pages) > self.hot_pages.shape[1]:
            raise ValueError(
                f"capacity {capacity} with {len(hot_pages)} pages: a buffer has at least {self.hot_rows} rows "
                f"and at most {self.hot_pages.shape[1]} pages"
            )
        values = upload_array(np.array([capacity, *hot_pages], dtype=np.int32), self.capacity.device)
        self.capacity[request] = values[0]
        self.hot_pages[request, : len(hot_pages)] = values[1:]

    def flat_rows(self, requests: torch.Tensor, slots: torch.Tensor) -> HotRows:
        """Flat hot rows, int32, of slots [..., batch] of these requests [batch]."""
        pages = self.hot_pages[requests.long(), (slots // self.page_size).long()]
        return HotRows(pages * self.page_size + slots % self.page_size)

    def newest_rows(self, requests: torch.Tensor, seq_lens: torch.Tensor, *, impl: Impl = "auto") -> HotRows:
        """The flat hot rows for this step's tokens: [groups, batch] int32, of one group [batch].

        Call it before the step's swap_in. `seq_lens` include the new token, which stays in its row when it is no longer
        the newest; padding, of length 0, gets -1. Both are int32.
        """
        if use_triton(impl, self.capacity.device):
            from .newest_rows_triton import launch_newest_rows

            order = self.eviction_order.view(-1, *self.eviction_order.shape[-2:])
            rows = torch.empty(len(order), len(requests), dtype=torch.int32, device=requests.device)
            launch_newest_rows(order, self.capacity, self.hot_pages, requests, seq_lens, rows, page_size=self.page_size)
            return HotRows(rows.view(*self.eviction_order.shape[:-2], len(requests)))
        reserved = self.eviction_order[..., requests.long(), self.hot_rows].int()
        slots = torch.where(seq_lens <= self.capacity[requests.long()], seq_lens - 1, reserved).clamp_(min=0)
        return HotRows(torch.where(seq_lens > 0, self.flat_rows(requests, slots), -1))
