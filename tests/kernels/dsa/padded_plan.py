"""The plan of a decode graph: one query per sequence, filled in place before every step."""

import torch

from pdserve.kernels.dsa.index_plan import IndexPlan


def padded_plan(tokens: int, *, max_pages: int, page_size: int, device: torch.device) -> IndexPlan:
    """A plan for up to `tokens` sequences. Row t of the page table belongs to token t. At first no token sees a key."""
    table = torch.zeros(tokens, max_pages, dtype=torch.int32, device=device)
    sequence = torch.arange(tokens, dtype=torch.int32, device=device)
    return IndexPlan(page_size, table, sequence, torch.zeros(tokens, dtype=torch.int32, device=device))
