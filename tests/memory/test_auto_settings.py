"""Automatic settings: two servers fit on one GPU in any starting order, and a single server uses most of it."""

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.memory.auto_settings import CONTEXT_BYTES, auto_chunk_size, auto_kv_share, auto_running_requests
from pdserve.memory.sizing import GIB

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TOTAL = 139 * GIB


class Gpu:
    """A fake GPU: the memory that each process has allocated, and the process that measures free memory."""

    def __init__(self) -> None:
        self.used = {"prefill": 0, "decode": 0}
        self.asking = "decode"

    @property
    def free(self) -> int:
        return TOTAL - sum(self.used.values())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    properties = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (made.free, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: made.used[made.asking] - CONTEXT_BYTES)
    return made


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


@pytest.mark.parametrize(
    ("parameters", "tokens"),
    [(135e6, 8192), (1.7e9, 8192), (4e9, 4096), (7e9, 2048), (8.2e9, 2048), (32e9, 1024), (405e9, 1024)],
)
def test_chunks_on_a_gpu_take_about_50_ms(parameters: float, tokens: int) -> None:
    assert auto_chunk_size(PrefillConfig(), GPU, int(parameters)) == tokens


def test_chunk_size_is_whole_pages_and_an_explicit_one_is_kept() -> None:
    assert auto_chunk_size(PrefillConfig(), CPU, 10**9) == 512
    assert auto_chunk_size(PrefillConfig(page_size=48), CPU, 10**9) == 528
    assert auto_chunk_size(PrefillConfig(chunk_size=64), GPU, 10**9) == 64


@pytest.mark.usefixtures("gpu")
def test_batches_are_larger_on_a_gpu_unless_tables_are_too_large() -> None:
    assert auto_running_requests(DecodeConfig(), CPU, 0) == 32
    assert auto_running_requests(DecodeConfig(), GPU, 0) == 256
    assert auto_running_requests(DecodeConfig(), GPU, 20 << 20) == 256, "DeepSeek-V3.2 on one GPU"
    assert auto_running_requests(DecodeConfig(), GPU, 60 << 20) == 118
    assert auto_running_requests(DecodeConfig(), GPU, GIB) == 32
    assert auto_running_requests(DecodeConfig(max_running_requests=3), GPU, 0) == 3


def test_server_that_shares_its_gpu_with_no_other_takes_most_of_it(gpu: Gpu, listener: socket.socket) -> None:
    gpu.used["decode"] = 16 * GIB
    for prefill in ((), ("10.9.8.7:8998",), (f"127.0.0.1:{listener.getsockname()[1]}",)):
        share = auto_kv_share(DecodeConfig(prefill=prefill), GPU, 15 * GIB)
        assert (share.fraction, share.left_bytes) == (0.9, 0)
    other = auto_kv_share(DecodeConfig(prefill=(f"127.0.0.1:{unused_port()}",)), torch.device("cuda", 1), 15 * GIB)
    assert other.fraction == 0.9, "prefill servers start on the first GPU"
    assert auto_kv_share(DecodeConfig(kv_memory_fraction=0.3), GPU, 15 * GIB).fraction == 0.3
    assert auto_kv_share(DecodeConfig(), CPU, 15 * GIB).fraction == 0.25


@pytest.mark.parametrize("config", [PrefillConfig(), DecodeConfig(prefill=("127.0.0.1:1",))])
def test_no_memory_is_kept_free_if_a_second_server_does_not_fit(gpu: Gpu, config: PrefillConfig | DecodeConfig) -> None:
    gpu.used["decode"] = 80 * GIB
    share = auto_kv_share(config, GPU, 79 * GIB)
    assert (share.fraction, share.left_bytes) == (0.9, 0)


@pytest.mark.parametrize("weights_gib", [1, 15, 40])
@pytest.mark.parametrize("order", ["prefill first", "decode first", "both measure, then both allocate"])
def test_two_servers_fit_on_one_gpu_in_any_order(gpu: Gpu, weights_gib: int, order: str) -> None:
    """At least 5 % of the memory beside the weights stays free, for steps and graphs."""
    weights = weights_gib * GIB
    config = {
        "prefill": PrefillConfig(),
        "decode": DecodeConfig(prefill=(f"127.0.0.1:{unused_port()}",)),
    }

    def load(role: str) -> None:
        gpu.used[role] = weights + CONTEXT_BYTES

    def pool_bytes(role: str) -> int:
        gpu.asking = role
        share = auto_kv_share(config[role], GPU, weights)  # type: ignore[arg-type]
        return int(share.fraction * (gpu.free - share.left_bytes))

    pools = {}
    for role in ("decode", "prefill") if order == "decode first" else ("prefill", "decode"):
        load(role)
        pools[role] = pool_bytes(role)
        if not order.startswith("both"):
            gpu.used[role] += pools[role]
    if order.startswith("both"):
        for role, size in pools.items():
            gpu.used[role] += size
    left = TOTAL - 2 * weights
    assert gpu.free > 0.05 * left
    assert pools["decode"] > 0.3 * left
    assert pools["prefill"] > 0.17 * left
