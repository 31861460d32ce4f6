"""MLPs of data-parallel ranks: every rank computes its experts, or its part of a dense MLP, for the tokens of all.

    gather   rank i sends its rows to every rank: all have the rows of all ranks, in the order of the ranks
    reduce   rank i sends rank j its partial results of j's rows: j adds them up

Both are an all-to-all. All ranks know the numbers of rows before the step (RankTokens); these may differ and be zero,
and the host does not wait for the device. Sending a row only to the ranks of its experts would take fewer bytes, but
the numbers of rows would depend on the router, and the host would have to wait for them in every layer.
"""

from collections.abc import Callable, Sequence

import torch

from .parallel import Parallel


def over_all_ranks(
    compute: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor, counts: Sequence[int], parallel: Parallel
) -> torch.Tensor:
    """The sum over all ranks of the results of `compute` for these rows, [T, hidden]. `counts` are the numbers of rows
    of all ranks. Every rank makes this call, even without rows.
    """
    own, size = len(rows), len(counts)
    if counts[parallel.shard.tp_rank] != own:
        raise ValueError(f"rank {parallel.shard.rank} has {own} rows, but all ranks expect {list(counts)}")
    if size == 1:
        return compute(rows)
    gathered = parallel.exchange_rows(rows.repeat(size, 1), [own] * size, counts)
    parts = parallel.exchange_rows(compute(gathered), counts, [own] * size)
    return parts.view(size, *rows.shape).sum(dim=0)
