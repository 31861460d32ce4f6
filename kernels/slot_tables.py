"""Which tokens are in a request's hot buffer: the tables that swap-in plans with, for all request slots of a server.

A request has B + 1 rows (slots) of a GPU pool: B under LRU replacement and one for its newest token. A sequence of up
to B tokens is resident, token p in slot p, and needs no table. Of a longer one:

    slot_tokens     [requests, B + 1] int32        the token in each slot, -1 for none
    token_slots     [requests, max_context] int16  its inverse: the slot of each token, -1 for none
    eviction_order  [requests, B + 1] int16        all slots: the next to evict first, the one reserved for the next
                                                   step's token last

Layers that select the same tokens (an index group) share one set of tables. A flat row of a layer's hot pool is
`request * (B + 1) + slot`.
"""

from dataclasses import dataclass

import torch

MAX_HOT_ROWS = 2**15 - 1  # slots 0 to B are int16
MAX_ROWS = 2**31 - 1  # flat rows are int32


def plan_shared_bytes(top_k: int, hot_rows: int) -> int:
    """Shared memory of one planning block: `Shared` in csrc/swap_in.cu."""
    return (4 << bucket_bits(top_k)) + 4 * top_k + 2 * 4 * 32 + 2 * top_k + hot_rows + 1 + 3


def bucket_bits(top_k: int) -> int:
    """log2 of the hash buckets for the misses of one row: a power of two, at most half of them used."""
    return max(1, (2 * top_k - 1).bit_length())


def check_geometry(
    *,
    top_k: int,
    hot_rows: int,
    requests: int,
    max_context: int,
    row_bytes: int,
    host_rows: int,
    device: torch.device,
) -> None:
    """Raises ValueError, naming field, limit and value, for a geometry that swap-in cannot serve on this device."""
    for field, value, low, high in (
        ("top_k", top_k, 1, hot_rows),
        ("hot_rows", hot_rows, 1, MAX_HOT_ROWS),
        ("requests", requests, 1, MAX_ROWS // (hot_rows + 1)),
        ("max_context", max_context, 1, MAX_ROWS),
        ("row_bytes", row_bytes, 1, MAX_ROWS),
        ("host_rows", host_rows, 1, MAX_ROWS),
    ):
        if not low <= value <= high:
            raise ValueError(f"{field} must be in [{low}, {high}], got {value}")
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
        needed = plan_shared_bytes(top_k, hot_rows)
        if needed > limit:
            raise ValueError(
                f"top_k {top_k} with hot_rows {hot_rows} needs {needed} bytes of shared memory per block, "
                f"{device} has {limit}"
            )


@dataclass(frozen=True)
class SlotTables:
    """The tables of all index groups, or those of one: `group(i)`. `swap_in` changes them, on the GPU's time."""

    slot_tokens: torch.Tensor
    token_slots: torch.Tensor
    eviction_order: torch.Tensor

    @classmethod
    def allocate(
        cls, *, groups: int, requests: int, hot_rows: int, max_context: int, device: torch.device
    ) -> "SlotTables":
        """Tables of empty hot buffers: 2 * max_context + 6 * (hot_rows + 1) bytes per group and request."""
        slots = torch.arange(hot_rows + 1, dtype=torch.int16, device=device)
        return cls(
            slot_tokens=torch.full((groups, requests, hot_rows + 1), -1, dtype=torch.int32, device=device),
            token_slots=torch.full((groups, requests, max_context), -1, dtype=torch.int16, device=device),
            eviction_order=slots.repeat(groups, requests, 1),
        )

    def group(self, index: int) -> "SlotTables":
        """A view of the tables of one index group: what swap_in takes."""
        return SlotTables(self.slot_tokens[index], self.token_slots[index], self.eviction_order[index])

    @property
    def requests(self) -> int:
        return self.slot_tokens.shape[-2]

    @property
    def hot_rows(self) -> int:
        return self.slot_tokens.shape[-1] - 1

    @property
    def max_context(self) -> int:
        return self.token_slots.shape[-1]

    def admit(self, request: int, cached_tokens: int) -> None:
        """Start a request whose first `cached_tokens` tokens are in host memory.

        Where they are at most B, they must also be in the hot pool, token p in slot p, before the request's first step.
        Otherwise the hot buffer starts empty.
        """
        if not 0 <= cached_tokens < self.max_context:
            raise ValueError(f"cached_tokens must be in [0, {self.max_context - 1}], got {cached_tokens}")
        slots = torch.arange(self.hot_rows + 1, dtype=torch.int16, device=self.slot_tokens.device)
        self.slot_tokens[..., request, :] = -1
        self.token_slots[..., request, :] = -1
        self.eviction_order[..., request, :] = slots
        if cached_tokens <= self.hot_rows:  # these entries are first read when the sequence has more than B tokens
            resident = slots[: min(self.hot_rows, self.max_context)]
            self.slot_tokens[..., request, : len(resident)] = resident.int()
            self.token_slots[..., request, : len(resident)] = resident

    def newest_rows(self, requests: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """The flat hot rows where this step's tokens go: [groups, batch] int32, of one group [batch].

        To be read before the step's swap_in. `seq_lens` count the new token. It stays in its row when it is no
        longer the newest.
        """
        reserved = self.eviction_order[..., requests.long(), self.hot_rows].int()
        slots = torch.where(seq_lens <= self.hot_rows, seq_lens - 1, reserved)
        return requests * (self.hot_rows + 1) + slots


def host_rows(host_pages: torch.Tensor, page_size: int, requests: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Rows of the host pool, `page * page_size + offset`, of one token of each request: [batch] int32.

    `host_pages` [requests, pages] int32 has the pages of every request's tokens.
    """
    tokens = tokens.long()
    return host_pages[requests.long(), tokens // page_size] * page_size + (tokens % page_size).int()
