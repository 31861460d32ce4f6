"""Launches of collectives and the exchange of handles, without a GPU."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdserve.kernels.backends.streams import use_own_stream
from pdserve.kernels.collectives import ipc_collectives, ipc_memory
from pdserve.kernels.collectives.ipc_collectives import HALF_BYTES, CollectiveTimeoutError, IpcCollectives
from pdserve.kernels.collectives.ipc_memory import IpcError, IpcMemory
from tests.kernels import cuda_sources
from tests.kernels.collectives.references import all_reduce_reference, gather_reference
from tests.kernels.interpreter import INTERPRETED
from tests.models.pretend_gpu import DEVICE, PretendGpu
from tests.models.pretend_ipc import PretendIpcMemory

RANKS = 4
Launch = tuple[str, dict[str, int], tuple[int, ...], int]


def test_reference_adds_in_the_order_of_the_ranks_and_rounds_once() -> None:
    large, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert all_reduce_reference([large, small, -large]).tolist() == [0.0]
    assert all_reduce_reference([large, -large, small]).tolist() == [1.0]
    parts = [torch.tensor([256.0], dtype=torch.bfloat16), *[torch.tensor([0.6], dtype=torch.bfloat16)] * 3]
    assert all_reduce_reference(parts).tolist() == [258.0]  # 257.8; rounded after each addition it would be 256


def test_reference_gathers_shares_side_by_side() -> None:
    shares = [torch.full((2, 3), float(rank)) for rank in range(2)]
    assert gather_reference(shares).tolist() == [[0.0] * 3 + [1.0] * 3] * 2


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The launches on a simulated GPU: kernel, constants, arguments without addresses, and number of blocks."""
    found: list[Launch] = []

    def load_kernel(source: str, name: str, device: torch.device, constants: tuple[tuple[str, int], ...]) -> Any:
        with cuda_sources.compiling():
            kernel = cuda_sources.load_kernel(source, name, device, constants)

        def launch(*args: int, blocks: int, threads: int, overlap_previous: bool) -> None:
            kernel.launch(*args, blocks=blocks, threads=threads, overlap_previous=overlap_previous)
            kinds = cuda_sources.parameters(source, name)
            sizes = tuple(arg for arg, kind in zip(args, kinds, strict=True) if not kind.endswith("*"))
            found.append((name, dict(constants), sizes, blocks))

        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(ipc_collectives, "load_kernel", load_kernel)
    monkeypatch.setattr(ipc_collectives, "device_address", torch.Tensor.data_ptr)
    monkeypatch.setattr(ipc_collectives, "IpcMemory", PretendIpcMemory)
    with PretendGpu():
        use_own_stream(DEVICE)
        yield found


def collectives(rank: int, ranks: int = RANKS) -> IpcCollectives:
    return IpcCollectives(
        rank, ranks, DEVICE, lambda _: [bytes([at]) for at in range(ranks)], timeout_s=5.0, first_rank=RANKS
    )


def offset(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A contiguous tensor whose address is not a multiple of 16."""
    size = torch.Size(shape).numel()
    return torch.zeros(size + 1, dtype=dtype, device=DEVICE)[1:].view(shape)


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
class TestLaunches:
    def test_larger_sums_take_two_shots_and_then_several_launches(self, launches: list[Launch]) -> None:
        ipc = collectives(1)
        for rows in (1, 64, 128, 2048):
            ipc.all_reduce(torch.zeros(rows, 4096, dtype=torch.bfloat16, device=DEVICE))
        assert [(constants["TWO_SHOT"], *sizes, blocks) for _, constants, sizes, blocks in launches] == [
            (0, 8192, 1),
            (0, 64 * 8192, 32),
            (1, 128 * 8192, 32),
            (1, HALF_BYTES, 32),
            (1, HALF_BYTES, 32),
        ]
        assert launches[0][1] | {"ELEMENT": 0, "RANKS": RANKS, "RANK": 1} == launches[0][1]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    def test_all_ranks_divide_the_work_in_the_same_way(self, launches: list[Launch], dtype: torch.dtype) -> None:
        """A block synchronises with the blocks of the same index on other ranks, so the division must not depend on
        addresses.
        """
        for size in (1, 33, 5000):
            collectives(0).all_reduce(torch.zeros(size, dtype=dtype, device=DEVICE))
            collectives(3).all_reduce(offset(size, dtype=dtype))
            share = torch.zeros(3, size, dtype=dtype, device=DEVICE)
            assert collectives(0).gather(share) is not None
            assert collectives(3).gather(offset(3, size, dtype=dtype)) is None
            collectives(0).broadcast(torch.zeros(size, dtype=dtype, device=DEVICE))
            collectives(3).broadcast(offset(size, dtype=dtype))
        for first, last in zip(launches[::2], launches[1::2], strict=True):
            assert first[1] | {"RANK": 3} == last[1]
            assert (first[0], first[2][:3], first[3]) == (last[0], last[2][:3], last[3])

    def test_only_the_root_gets_shares_and_only_the_others_a_broadcast(self, launches: list[Launch]) -> None:
        for rank in (0, 2):
            collectives(rank).gather(torch.zeros(3, 10, dtype=torch.bfloat16, device=DEVICE))
            collectives(rank).broadcast(torch.zeros(6, dtype=torch.int64, device=DEVICE))
        units = [(constants["UNIT_BYTES"], sizes) for _, constants, sizes, _ in launches]
        assert units == [  # rows, units of a row, units of a row of the result, first and end rank
            (4, (3, 5, 20, 0, 4)),
            (16, (1, 3, 3, 0, 0)),
            (4, (3, 5, 20, 0, 0)),
            (16, (1, 3, 3, 0, 1)),
        ]

    def test_large_gathers_take_several_launches(self, launches: list[Launch]) -> None:
        collectives(0).gather(torch.zeros(100, 75968, dtype=torch.bfloat16, device=DEVICE))
        assert [sizes[0] for _, _, sizes, _ in launches] == [55, 45]

    def test_empty_tensors_are_not_launched(self, launches: list[Launch]) -> None:
        ipc = collectives(0)
        ipc.all_reduce(torch.zeros(0, 64, device=DEVICE))
        ipc.broadcast(torch.zeros(0, device=DEVICE))
        gathered = ipc.gather(torch.zeros(0, 8, device=DEVICE))
        assert gathered is not None
        assert gathered.shape == (0, 32)
        assert launches == []

    def test_wrong_tensors_are_refused(self, launches: list[Launch]) -> None:
        ipc = collectives(0)
        with pytest.raises(ValueError, match=r"got torch\.int64"):
            ipc.all_reduce(torch.zeros(8, dtype=torch.int64, device=DEVICE))
        with pytest.raises(ValueError, match="contiguous tensors on cuda:0"):
            ipc.all_reduce(torch.zeros(8, 8, device=DEVICE).t())
        with pytest.raises(ValueError, match="on cpu"):
            ipc.broadcast(torch.zeros(8))
        with pytest.raises(ValueError, match="rows of at most"):
            ipc.gather(torch.zeros(1, HALF_BYTES // 4 + 1, device=DEVICE))
        assert launches == []

    def test_timeout_names_both_ranks_as_the_server_numbers_them(self, launches: list[Launch]) -> None:
        ipc = collectives(1)
        ipc.set_timeout(0.5)
        assert ipc._state.tolist() == [0] * 32 + [500_000_000, 0]
        ipc.check()
        ipc._report.copy_(torch.tensor([1 + 3, 17]))  # as the device writes it
        with pytest.raises(CollectiveTimeoutError, match=r"rank 5 waited 0\.5 s for rank 7 in collective 17"):
            ipc.check()
        ipc.close()
        assert launches == []


class FakeDriver:
    """The driver's functions for IPC. The function named by `fails` returns an error."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)
    CUipcMemHandle = SimpleNamespace

    def __init__(self, fails: str) -> None:
        self._fails = fails
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        results = {
            "cuMemAlloc": 0x1000,
            "cuIpcGetMemHandle": SimpleNamespace(reserved=bytes([7] * 64)),
            "cuIpcOpenMemHandle": 0x2000,
        }

        def call(*args: Any) -> tuple[Any, ...]:
            self.calls.append((name, *args))
            return (700,) if name == self._fails else (0, results.get(name))

        return call


OTHER = bytes([9] * 64)


def shared_memory(
    monkeypatch: pytest.MonkeyPatch,
    *,
    fails: str = "",
    machine: bytes | None = None,
    handle: bytes = OTHER,
    ok: int = 1,
) -> tuple[FakeDriver, IpcMemory | None, str]:
    """The memory of rank 0 of two. The other rank sends `machine` and `handle`, and then whether it succeeded."""
    driver = FakeDriver(fails)
    core = SimpleNamespace(Device=lambda _: SimpleNamespace(set_current=lambda: None))
    monkeypatch.setattr(ipc_memory, "cuda_packages", lambda: (core, driver))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    answers: list[Callable[[bytes], bytes]] = [lambda own: (machine or own[:-64]) + handle, lambda _: bytes([ok])]

    def exchange(own: bytes) -> list[bytes]:
        return [own, answers.pop(0)(own)]

    try:
        return driver, IpcMemory(4096, 0, torch.device("cuda", 0), exchange), ""
    except IpcError as error:
        assert not answers, "a rank that skips an exchange blocks the others"
        return driver, None, str(error)


def test_memory_of_the_other_rank_is_mapped_and_unmapped(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, memory, _ = shared_memory(monkeypatch)
    assert memory is not None
    assert memory.addresses == [0x1000, 0x2000]
    opened = next(call for call in driver.calls if call[0] == "cuIpcOpenMemHandle")
    assert (opened[1].reserved, opened[2]) == (OTHER, 1)
    assert ("cuMemAlloc", 2 << 20) in driver.calls
    assert ("cuMemsetD8", 0x1000, 0, 2 << 20) in driver.calls
    memory.close()
    assert driver.calls[-2:] == [("cuIpcCloseMemHandle", 0x2000), ("cuMemFree", 0x1000)]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"fails": "cuMemAlloc"}, "cuMemAlloc failed: 700"),
        ({"fails": "cuIpcOpenMemHandle"}, "cuIpcOpenMemHandle failed: 700"),
        ({"machine": b"elsewhere" * 4}, "the ranks are on several machines"),
        ({"handle": bytes(64), "ok": 0}, "another rank cannot map the memory of its peers"),
        ({"ok": 0}, "another rank cannot map the memory of its peers"),
    ],
)
def test_failure_of_one_rank_fails_all_and_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch, case: dict[str, Any], message: str
) -> None:
    driver, memory, error = shared_memory(monkeypatch, **case)
    assert memory is None
    assert error == message
    allocated = case.get("fails") != "cuMemAlloc"
    assert (("cuMemFree", 0x1000) in driver.calls) == allocated


def test_missing_cuda_packages_raise_an_ipc_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeError("cuda-core is not here")

    monkeypatch.setattr(ipc_memory, "cuda_packages", missing)
    with pytest.raises(IpcError, match="cuda-core is not here"):
        IpcMemory(4096, 0, torch.device("cuda", 0), lambda own: [own, own])
