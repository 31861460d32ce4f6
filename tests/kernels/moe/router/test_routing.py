"""Sorting tokens by expert: `order` has the numbers (token * k + choice) of each expert in a row, in tiles."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.moe.router.routing import most_tiles, route_tokens
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

here = each_of(("reference", "cpu"), ("triton", "cpu"), ("reference", "cuda"), ("triton", "cuda"))


@pytest.mark.parametrize(
    ("tokens", "per_token", "experts", "here_only", "rows"),
    [
        (1, 8, 256, range(256), 16),
        (5, 3, 8, range(8), 16),
        (70, 8, 16, range(4, 12), 16),  # some experts are on other ranks
        (40, 6, 8, range(7, 8), 64),
        (300, 4, 6, range(6), 64),  # several chunks
        (200, 8, 64, range(32, 64), 128),
        (3, 2, 8, range(6, 8), 16),
    ],
)
def test_numbers_are_sorted_and_tiled(
    here: tuple[Impl, torch.device], tokens: int, per_token: int, experts: int, here_only: range, rows: int
) -> None:
    impl, device = here
    generator = torch.Generator().manual_seed(tokens)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])
    chosen[:, 0] = chosen[:, 0] // 3 * 3 if tokens % 2 else chosen[:, 0]  # some experts get more
    with poisoned(impl):
        routing = route_tokens(chosen.to(device), here_only.start, len(here_only), rows, impl=impl)
    order, place, start = routing.order.tolist(), routing.place.tolist(), 0
    tiles = []
    for expert, end in zip(here_only, routing.ends.tolist(), strict=True):
        assert order[start:end] == (chosen.flatten() == expert).nonzero().flatten().tolist()
        assert [place[number] for number in order[start:end]] == list(range(start, end))
        tiles += [(expert - here_only.start, begin) for begin in range(start, end, rows)]
        start = end
    found = list(zip(routing.expert.tolist(), routing.first.tolist(), strict=True))
    assert found[: len(tiles)] == tiles
    assert all(expert == -1 for expert, _ in found[len(tiles) :])
    assert routing.counts.tolist() == [len(tiles), 0, 0]
    assert len(found) == most_tiles(tokens * per_token, len(here_only), rows)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_most_tiles_suffices_for_any_distribution(rows: int) -> None:
    def needed(sizes: tuple[int, ...]) -> int:
        return sum(-(-size // rows) for size in sizes)

    for numbers in range(12):
        for count in (1, 2, 3):
            worst = max(needed(sizes) for sizes in _distributions(numbers, count))
            assert worst <= most_tiles(numbers, count, rows) <= worst + 1


def _distributions(numbers: int, count: int) -> list[tuple[int, ...]]:
    if count == 1:
        return [(numbers,)]
    return [(size, *rest) for size in range(numbers + 1) for rest in _distributions(numbers - size, count - 1)]


def test_experts_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous rows of int64"):
        route_tokens(torch.zeros(2, 2, dtype=torch.int32), 0, 4, 16)
