"""ForwardBatch: tensors of a pass from slices of sequences."""

from typing import cast

import pytest
import torch

from pdserve.models.layers.batch import ForwardBatch, SequenceSlice

CPU = torch.device("cpu")
PAGE_SIZE = 4


def build(*slices: SequenceSlice) -> ForwardBatch:
    return ForwardBatch.build(slices, page_size=PAGE_SIZE, num_kv_heads=None, device=CPU)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (1,), (5, 1, 9), (8,)], ids=str)
@pytest.mark.parametrize("start", [0, 3, 4, 21])
def test_every_token_has_its_position_and_page(lengths: tuple[int, ...], start: int) -> None:
    pages = [[100 * row + page for page in (9, 3, 7, 0, 5, 1, 8, 2)] for row in range(len(lengths))]
    slices = [SequenceSlice([7 * row + at for at in range(n)], start, pages[row]) for row, n in enumerate(lengths)]
    batch = build(*slices)
    expected = [
        (7 * row + at, start + at, pages[row][(start + at) // PAGE_SIZE], (start + at) % PAGE_SIZE)
        for row, length in enumerate(lengths)
        for at in range(length)
    ]
    found = torch.stack((batch.token_ids, batch.positions, batch.page_ids, batch.offsets), dim=1)
    assert found.tolist() == [list(place) for place in expected]
    ends = [sum(lengths[: row + 1]) - 1 for row in range(len(lengths))]
    last_rows = list(range(len(lengths))) if batch.last_rows is None else batch.last_rows.tolist()
    assert last_rows == ends


@pytest.mark.parametrize("length", [1, 3])
def test_pages_that_a_pass_does_not_write_are_not_read(length: int) -> None:
    """A step of long sequences would otherwise spend most of its time on them."""
    pages = cast(list[int], [None] * 1000 + [5])
    batch = build(SequenceSlice([1] * length, 1000 * PAGE_SIZE, pages))
    assert batch.page_ids.tolist() == [5] * length


def test_invalid_arguments_are_refused() -> None:
    for piece in (SequenceSlice([], 0, [1]), SequenceSlice([1], 4, [1]), SequenceSlice([1] * 5, 0, [1])):
        with pytest.raises(ValueError, match="do not fit 1 pages"):
            build(piece)
