"""Sums and gathers between processes that share a real GPU."""

import time
from typing import Any

import pytest
import torch

from pdserve.kernels.collectives.ipc_collectives import HALF_BYTES, CollectiveTimeoutError, IpcCollectives
from tests.kernels.collectives.rank_group import DEVICE, GONE, run_ranks, vanish
from tests.kernels.collectives.references import all_reduce_reference, gather_reference

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (1, 7, 8, 64, 4096, 4099, 3 * 7168, 64 * 7168, 300_001, 1_500_000, HALF_BYTES // 2 + 12345)
"""Elements: less than a vector, uneven ends, one shot, two shots, and more than one launch."""
REPLAYS = 1000
TIMEOUT_S = 2.0


def of_rank(rank: int, seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random values of a rank, which all ranks can generate. Magnitudes differ between ranks, so the order of a sum
    matters.
    """
    generator = torch.Generator(DEVICE).manual_seed(1000 * seed + rank)
    values = torch.randn(shape, generator=generator, device=DEVICE)
    return (values * 10.0 ** (rank % 3)).to(dtype)


def sums_and_gathers(ipc: IpcCollectives, rank: int, ranks: int) -> list[str]:
    """The cases whose results are not bitwise equal to the references."""
    wrong = []
    for seed, (size, dtype) in enumerate((size, dtype) for size in SIZES for dtype in DTYPES):
        parts = [of_rank(each, seed, (size,), dtype) for each in range(ranks)]
        found = parts[rank].clone()
        ipc.all_reduce(found)
        if not found.equal(all_reduce_reference(parts)):
            wrong.append(f"sum of {size} {dtype}")
        offset = torch.cat([parts[rank][:1], parts[rank]])[1:]  # not aligned
        ipc.all_reduce(offset)
        if not offset.equal(found):
            wrong.append(f"sum of {size} {dtype} at an odd address")
    for seed, (rows, width) in enumerate(((1, 1), (3, 161), (5, 75968), (64, 32001), (700, 4096))):
        shares = [of_rank(each, seed, (rows, width), torch.bfloat16) for each in range(ranks)]
        gathered = ipc.gather(shares[rank])
        if (gathered is None) == (rank == 0) or (gathered is not None and not gathered.equal(gather_reference(shares))):
            wrong.append(f"gather of {rows} x {width}")
    for count in (1, 2, 33, 3_000_000):
        tokens = torch.arange(count, device=DEVICE) * (rank + 1)
        ipc.broadcast(tokens)
        if not tokens.equal(torch.arange(count, device=DEVICE)):
            wrong.append(f"broadcast of {count}")
    ipc.check()
    return wrong


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_and_gathers_equal_their_references(ranks: int) -> None:
    assert run_ranks(ranks, sums_and_gathers, ranks) == [[]] * ranks


def replayed(ipc: IpcCollectives, rank: int, ranks: int) -> int:
    """The number of wrong elements in a graph whose inputs change with every replay. All values are small integers, so
    sums are exact.
    """
    counter, wrong = torch.zeros((), device=DEVICE), torch.zeros((), dtype=torch.long, device=DEVICE)
    parts: list[Any] = []
    for seed, (shape, dtype) in enumerate((((8, 4096), torch.bfloat16), ((900, 1024), torch.float32))):
        generators = [torch.Generator(DEVICE).manual_seed(10 * seed + each) for each in range(ranks)]
        values = [torch.randint(-8, 8, shape, generator=each, device=DEVICE).to(dtype) for each in generators]
        parts.append((values[rank], torch.stack(values).sum(0)))

    def step() -> None:
        counter.add_(1)
        change = counter % 7
        for own, total in parts:
            found = own + change.to(own.dtype)
            ipc.all_reduce(found)
            wrong.add_((found != total + ranks * change.to(own.dtype)).sum())
        share = counter.expand(3, 5).contiguous() * (rank + 1)
        gathered = ipc.gather(share)
        if gathered is not None:
            expected = torch.cat([counter.expand(3, 5) * (each + 1) for each in range(ranks)], dim=1)
            wrong.add_((gathered != expected).sum())

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    ipc.check()
    assert counter.item() == REPLAYS + 1
    return int(wrong)


@pytest.mark.parametrize("ranks", [2, 4])
def test_graph_replays_equal_the_sums(ranks: int) -> None:
    assert run_ranks(ranks, replayed, ranks) == [0] * ranks


def wait_for_lost_rank(ipc: IpcCollectives, rank: int) -> tuple[float, str]:
    ipc.set_timeout(TIMEOUT_S)
    tensor = torch.ones(4096, device=DEVICE)
    ipc.all_reduce(tensor)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(0.5)  # the other rank may still read the memory of this one
        vanish()
    time.sleep(1.5)
    started = time.monotonic()
    for _ in range(50):  # as in a graph; only the first one waits
        ipc.all_reduce(tensor)
    torch.cuda.synchronize()
    waited_s = time.monotonic() - started
    try:
        ipc.check()
    except CollectiveTimeoutError as error:
        return waited_s, str(error)
    return waited_s, "no error"


def test_rank_that_waits_for_a_lost_one_reports_it_by_name() -> None:
    (waited_s, error), gone = run_ranks(2, wait_for_lost_rank)
    assert gone == GONE
    assert error.startswith(f"rank 0 waited {TIMEOUT_S:g} s for rank 1 in collective 2")
    assert TIMEOUT_S <= waited_s < TIMEOUT_S + 2.0
