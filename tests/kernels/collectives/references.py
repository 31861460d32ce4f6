"""The results of the collectives, computed from the tensors of all ranks in plain torch."""

from collections.abc import Sequence

import torch


def all_reduce_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors of one shape and floating-point dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def gather_reference(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    """[rows, sum of widths] of shares [rows, width]."""
    return torch.cat(list(shares), dim=-1)
