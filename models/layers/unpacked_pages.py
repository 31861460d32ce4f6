"""Packed latent rows for a step whose queries share them: all pages of its sequences are unpacked once per layer.

In a chunk of a prompt, neighbouring queries select mostly the same rows. Unpacking the rows of each query separately,
as kernels/dsa/packed_rows.py does, takes as long as attention. So whole pages are unpacked, if these have no more rows
than all queries select, and fit in the same memory.
"""

from typing import NamedTuple

import torch

from ...kernels.dsa.index_plan import IndexPlan
from ...kernels.dsa.packed_rows import rows_at_once, unpack_pages


class PackedFormat(NamedTuple):
    """How rows are packed, and the `dtype` and number of those that a query selects."""

    kv_rank: int
    dim: int
    dtype: torch.dtype
    top_k: int

    def most_shared_rows(self, tokens: int) -> int:
        """A step of `tokens` tokens unpacks whole pages if the pages of its sequences have at most this many rows: no
        more than its tokens select, and no more than fit in the workspace.
        """
        return min(tokens * self.top_k, rows_at_once(self.dim, self.dtype))

    def shares_pages(self, plan: IndexPlan) -> bool:
        """Whether a step unpacks whole pages. Depends only on shapes, so that a CUDA graph can capture either way."""
        return plan.num_pages is not None and plan.num_pages * plan.page_size <= self.most_shared_rows(plan.tokens)


class UnpackedPages:
    """Unpacked copies of the pages of a step's sequences, one layer at a time. The pages in use are numbered across
    sequences, on the device.
    """

    def __init__(self, plan: IndexPlan, page_table: torch.Tensor, packed: PackedFormat) -> None:
        """`page_table` [B, any] int32 has the pages of the plan's sequences. All sequences together must not have more
        than `plan.num_pages` pages.
        """
        assert plan.num_pages is not None, "only a step that knows its number of pages shares them"
        self._packed = packed
        used = (plan.largest(plan.visible) + plan.page_size - 1) // plan.page_size  # [B]
        ends = used.cumsum(0, dtype=torch.int32)
        number = torch.arange(page_table.shape[1], dtype=torch.int32, device=used.device)
        copies = (ends - used).unsqueeze(1) + number
        self.plan = IndexPlan(plan.page_size, copies, plan.sequence, plan.visible)
        """What the step's tokens see, in the copies."""
        self._count = ends[-1:]
        # unused pages are written to one extra element, which is then cut off
        target = copies.masked_fill(number >= used.unsqueeze(1), plan.num_pages).flatten().long()
        sources = torch.zeros(plan.num_pages + 1, dtype=torch.int32, device=used.device)
        self._sources = sources.scatter_(0, target, page_table.flatten())[:-1]

    def of_layer(self, pages: torch.Tensor) -> torch.Tensor:
        """[num_pages, page_size, dim]: the copies of packed `pages`."""
        return unpack_pages(pages, self._sources, self._count, kv_rank=self._packed.kv_rank, dtype=self._packed.dtype)
