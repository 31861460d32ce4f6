"""The result of a swap-in's planning, at fixed addresses for CUDA graphs."""

from dataclasses import dataclass

import torch

from .slot_tables import HotRows, KvRows


@dataclass(frozen=True)
class SwapPlan:
    """The result of swap_in's planning, at fixed addresses for CUDA graphs; see swap_in.py.

    Used by one stream at a time. `signals` [batch + 2] are internal to the kernels: zero between calls.
    """

    rows: HotRows
    miss_sources: KvRows
    miss_rows: HotRows
    miss_counts: torch.Tensor
    signals: torch.Tensor

    @classmethod
    def allocate(cls, batch: int, top_k: int, device: torch.device) -> "SwapPlan":
        rows, sources, destinations = torch.full((3, batch, top_k), -1, dtype=torch.int32, device=device)
        counts, signals = (torch.zeros(size, dtype=torch.int32, device=device) for size in (batch, batch + 2))
        return cls(HotRows(rows), KvRows(sources), HotRows(destinations), counts, signals)

    def first(self, batch: int) -> "SwapPlan":
        """A plan for a smaller batch: the first rows, in the same memory."""
        return SwapPlan(
            HotRows(self.rows[:batch]),
            KvRows(self.miss_sources[:batch]),
            HotRows(self.miss_rows[:batch]),
            self.miss_counts[:batch],
            self.signals[: batch + 2],
        )
