"""Which collectives the ranks of a stage use, and NCCL in a CUDA graph."""

import logging
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pdserve.kernels.backends.streams import use_own_stream
from pdserve.kernels.collectives.ipc_memory import IpcError
from pdserve.models.config.sharding import Shard
from pdserve.models.layers import stage_collectives
from pdserve.models.layers.stage_collectives import SMALL_BYTES, GroupCollectives, IpcStage, choose_collectives

GPU = torch.device("cuda", 0)
SHARD = Shard(tp_rank=1, tp_size=2, stage=1, stages=2)


class RecordedIpc:
    """Replaces IpcCollectives, and records calls."""

    def __init__(self, rank: int, ranks: int, device: torch.device, _exchange: Any, **options: Any) -> None:
        assert (rank, ranks, device, options["first_rank"]) == (1, 2, GPU, 2)
        self.timeouts_s = [options["timeout_s"]]
        self.summed: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.summed.append(tensor.nbytes)

    def set_timeout(self, timeout_s: float) -> None:
        self.timeouts_s.append(timeout_s)


def refuse(*_: Any, **__: Any) -> None:
    raise IpcError("the ranks are on several machines")


@pytest.mark.parametrize("nccl", [False, True])
def test_ranks_of_one_machine_use_ipc_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nccl: bool
) -> None:
    monkeypatch.setattr(stage_collectives, "IpcCollectives", RecordedIpc)
    by_group: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: by_group.append(tensor.nbytes))
    with caplog.at_level(logging.INFO):
        chosen = choose_collectives(None, SHARD, GPU, nccl=nccl)
    assert isinstance(chosen, IpcStage)
    assert chosen.on_device
    assert f"communicate over CUDA IPC memory{' up to 1 MiB, then NCCL' if nccl else ''}\n" in caplog.text
    for size in (SMALL_BYTES, SMALL_BYTES + 1):
        chosen.all_reduce(torch.empty(size, dtype=torch.uint8))
    ipc: Any = chosen._ipc
    assert ipc.summed == ([SMALL_BYTES] if nccl else [SMALL_BYTES, SMALL_BYTES + 1])
    assert by_group == ([SMALL_BYTES + 1] if nccl else [])
    chosen.start_serving()
    assert ipc.timeouts_s == [600.0, 30.0]


@pytest.mark.parametrize(
    ("nccl", "tp_size", "expected"),
    [
        (True, 2, "over NCCL (no CUDA IPC memory: the ranks are on several machines)\n"),
        (False, 2, "over gloo (no CUDA IPC memory: the ranks are on several machines), which blocks the host; no CUDA"),
        (True, 16, "over NCCL (no CUDA IPC memory: it takes at most 8 ranks)\n"),
    ],
)
def test_ranks_without_ipc_memory_use_their_process_group(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nccl: bool, tp_size: int, expected: str
) -> None:
    monkeypatch.setattr(stage_collectives, "IpcCollectives", refuse)
    with caplog.at_level(logging.INFO):
        chosen = choose_collectives(None, Shard(tp_size=tp_size), GPU, nccl=nccl)
    assert isinstance(chosen, GroupCollectives)
    assert chosen.on_device == nccl
    assert expected in caplog.text


def test_ranks_on_cpus_use_gloo(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(stage_collectives, "IpcCollectives", refuse)
    with caplog.at_level(logging.INFO):
        chosen = choose_collectives(None, SHARD, torch.device("cpu"), nccl=False)
    assert not chosen.on_device
    assert "communicate over gloo, which blocks the host\n" in caplog.text


def nccl_in_a_graph(store: str, pipe: Any) -> None:
    """Sums, gathers and broadcasts of a world of one, replayed with other inputs."""
    torch.cuda.set_device(GPU)
    use_own_stream(GPU)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1, device_id=GPU)
    collectives = GroupCollectives(None, 0, 1, 0, "NCCL")
    source = torch.zeros(4, 256, device=GPU)
    results = [torch.empty_like(source) for _ in range(3)]

    def step() -> None:
        summed, sent = source + 1, source + 3
        collectives.all_reduce(summed)
        gathered = collectives.gather(source + 2)
        assert gathered is not None
        collectives.broadcast(sent)
        for result, value in zip(results, (summed, gathered, sent), strict=True):
            result.copy_(value)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found = []
    for value in range(100):
        source.fill_(value)
        graph.replay()
        found.append([sorted(set(result.flatten().tolist())) for result in results])
    pipe.send(found)
    del graph  # before the communicator that it uses
    dist.destroy_process_group()


@pytest.mark.gpu
def test_nccl_is_captured_and_replayed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=nccl_in_a_graph, args=(str(tmp_path / "store"), theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(60), "the process does not answer"
        assert ours.recv() == [[[value + 1.0], [value + 2.0], [value + 3.0]] for value in range(100)]
        process.join(30)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
