"""Device selection per rank."""

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.memory.device import resolve_device


def with_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_rank_gets_its_own_gpu_or_the_server_does_not_start(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    assert [resolve_device(name, rank, 2) for rank in range(2)] == [torch.device("cuda", 0), torch.device("cuda", 1)]
    with pytest.raises(StartupError, match=rf"device {name}: 4 ranks .* this machine has 2; .*--device cuda:0"):
        resolve_device(name, 0, 4)


def test_named_gpu_is_used_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 2)
    assert {resolve_device("cuda:1", rank, 4) for rank in range(4)} == {torch.device("cuda", 1)}
    with pytest.raises(StartupError, match="device cuda:2: this machine has 2 CUDA devices"):
        resolve_device("cuda:2", 0, 4)


def test_auto_is_cpu_and_cuda_is_refused_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(monkeypatch, 0)
    assert {resolve_device(name, rank, 4) for rank in range(4) for name in ("auto", "cpu")} == {torch.device("cpu")}
    for name in ("cuda", "cuda:0"):
        with pytest.raises(StartupError, match=f"device {name}: this machine has no usable CUDA device"):
            resolve_device(name)
