"""The plan of a decode graph: one query per sequence, filled in place before every step."""

import torch

from pdserve.kernels.mla.index_plan import IndexPlan


def padded_plan(tokens: int, *, max_pages: int, page_size: int, device: torch.device) -> IndexPlan:
    """Memory for up to `tokens` sequences; row t of the page table belongs to token t. Initially no token sees any."""
    table = torch.zeros(tokens, max_pages, dtype=torch.int32, device=device)
    sequence = torch.arange(tokens, dtype=torch.int32, device=device)
    return IndexPlan(page_size, table, sequence, torch.zeros(tokens, dtype=torch.int32, device=device))
