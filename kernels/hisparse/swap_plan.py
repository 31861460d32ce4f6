"""What a swap-in decides, in memory that stays in place for CUDA graphs."""

from dataclasses import dataclass

import torch

from .slot_tables import HotRows, KvRows


@dataclass(frozen=True)
class SwapPlan:
    """What swap_in decides, in memory that stays in place for CUDA graphs; see the module docstring.

    One stream at a time uses it. `signals` [batch + 2] are the kernels' own: zero between calls.
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
        """Its first rows: a plan for a smaller batch, in the same memory."""
        return SwapPlan(
            HotRows(self.rows[:batch]),
            KvRows(self.miss_sources[:batch]),
            HotRows(self.miss_rows[:batch]),
            self.miss_counts[:batch],
            self.signals[: batch + 2],
        )
