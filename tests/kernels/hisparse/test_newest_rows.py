"""SlotTables.newest_rows against the definition of the tables, for all implementations."""

import random

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.hisparse.slot_tables import SlotTables
from tests.kernels.places import each_of

REQUESTS, HOT_ROWS, PAGE, MAX_CONTEXT = 9, 24, 8, 80

where = each_of(
    ("auto", "cpu"),
    ("triton", "cpu"),
    ("reference", "cuda"),
    ("triton", "cuda"),
)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("batch", [1, 7, 200])
def test_newest_token_gets_its_own_slot_if_resident_else_the_reserved_one(
    where: tuple[Impl, torch.device], groups: int, batch: int
) -> None:
    impl, device = where
    draw = random.Random(batch)
    tables = SlotTables.allocate(
        groups=groups,
        requests=REQUESTS,
        hot_rows=HOT_ROWS,
        max_context=MAX_CONTEXT,
        page_size=PAGE,
        device=device,
    )
    hot_pages = [draw.sample(range(1000), MAX_CONTEXT // PAGE) for _ in range(REQUESTS)]
    capacities = [draw.choice((HOT_ROWS, 40, MAX_CONTEXT)) for _ in range(REQUESTS)]
    orders = [[draw.sample(range(HOT_ROWS + 1), HOT_ROWS + 1) for _ in range(REQUESTS)] for _ in range(groups)]
    for number in range(REQUESTS):
        tables.set_pages(number, hot_pages[number], capacities[number])
    tables.eviction_order.copy_(torch.tensor(orders, dtype=torch.int16))

    requests = [draw.randrange(REQUESTS) for _ in range(batch)]
    lengths = [draw.choice((0, 1, HOT_ROWS, HOT_ROWS + 1, 40, 41, MAX_CONTEXT)) for _ in range(batch)]
    numbers = (torch.tensor(values, dtype=torch.int32, device=device) for values in (requests, lengths))
    found = tables.newest_rows(*numbers, impl=impl)

    def expected(group: int, request: int, length: int) -> int:
        if length == 0:
            return -1
        slot = length - 1 if length <= capacities[request] else orders[group][request][-1]
        return hot_pages[request][slot // PAGE] * PAGE + slot % PAGE

    assert found.dtype == torch.int32
    assert found.tolist() == [
        [expected(group, *row) for row in zip(requests, lengths, strict=True)] for group in range(groups)
    ]


def test_tables_of_one_group_give_one_row_per_request(where: tuple[Impl, torch.device]) -> None:
    impl, device = where
    tables = SlotTables.allocate(
        groups=2, requests=1, hot_rows=HOT_ROWS, max_context=MAX_CONTEXT, page_size=PAGE, device=device
    )
    tables.set_pages(0, [5, 6, 7, 8], HOT_ROWS)
    requests, lengths = (torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 0], [9, 0]))
    assert tables.group(1).newest_rows(requests, lengths, impl=impl).tolist() == [6 * PAGE, -1]
