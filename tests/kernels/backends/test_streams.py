"""beside_if_few: when the products of few and of many rows are computed."""

import torch

from pdserve.kernels.backends.streams import beside_if_few


def test_few_rows_are_computed_at_once_and_many_when_they_are_requested() -> None:
    """Large products are enqueued after the copies of sparse attention's rows, so that both overlap."""
    done: list[int] = []

    def compute(rows: int) -> int:
        done.append(rows)
        return rows

    few = beside_if_few(torch.empty(128, 4), lambda: compute(128))
    many = beside_if_few(torch.empty(129, 4), lambda: compute(129))
    assert done == [128]
    assert (many(), few()) == (129, 128)
    assert done == [128, 129]
