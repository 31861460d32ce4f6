"""What the collectives of a stage compute, from the tensors of all ranks; ipc_collectives.py does it between processes.

    all_reduce    parts[0] + parts[1] + ...      in float32, in the order of the ranks, rounded once
    gather        the shares of all ranks side by side, along the last dimension

The order of the sum does not depend on the rank, the size or the algorithm: all ranks get the same bits.
"""

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
