"""Size of the KV pool: explicit, automatic, and too large."""

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.configs.schema import PrefillConfig
from pdserve.memory.auto_settings import auto_kv_share
from pdserve.memory.sizing import GIB, check_weights_fit, peak_bytes, pool_pages

TOKEN_BYTES = 1024


def pages(free_bytes: int = 4 * GIB, most_useful_tokens: int = 1 << 40, **settings: float) -> int:
    config = PrefillConfig.model_validate({"page_size": 16, **settings})
    return pool_pages(
        config,
        token_bytes=TOKEN_BYTES,
        most_useful_tokens=most_useful_tokens,
        free_bytes=free_bytes,
        share=auto_kv_share(config, torch.device("cpu"), 0),
    )


def test_explicit_size_is_used() -> None:
    assert pages(kv_tokens=33) == 3
    assert pages(kv_memory_gib=1) == GIB // (16 * TOKEN_BYTES)


def test_automatic_size_is_a_share_of_free_memory_capped_at_useful_tokens() -> None:
    assert pages(kv_memory_fraction=0.5) == 2 * GIB // (16 * TOKEN_BYTES)
    assert pages(kv_memory_fraction=0.5, most_useful_tokens=50) == 4


def test_pool_larger_than_free_memory_is_refused() -> None:
    assert pages(free_bytes=GIB, kv_memory_gib=1) == GIB // (16 * TOKEN_BYTES)
    with pytest.raises(
        StartupError, match=r"kv_memory_gib = 1\.0 asks for .* 1\.00 GiB, 1\.00 GiB are free after weights"
    ):
        pages(free_bytes=GIB - 1, kv_memory_gib=1)
    with pytest.raises(StartupError, match=r"kv_tokens = 1048577 asks for"):
        pages(free_bytes=GIB, kv_tokens=(1 << 20) + 1)


def test_less_than_a_page_is_refused() -> None:
    with pytest.raises(StartupError, match=r"less than one page: a page of 16 tokens takes 16384 bytes"):
        pages(kv_memory_gib=1e-6)
    with pytest.raises(StartupError, match=r"kv_memory_fraction = 0\.25 is less than one page"):
        pages(free_bytes=-GIB)


def test_weights_of_all_ranks_on_a_device_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.memory.sizing.free_memory_bytes", lambda _: 4 * GIB)
    cpu = torch.device("cpu")
    check_weights_fit(4 * GIB, cpu)
    check_weights_fit(2 * GIB, cpu, sharers=2)
    with pytest.raises(StartupError, match=r"need 5\.0 GiB and cpu has 4\.0 GiB free"):
        check_weights_fit(5 * GIB, cpu)
    with pytest.raises(StartupError, match=r"need 6\.0 GiB for 2 ranks and cpu has 4\.0 GiB free"):
        check_weights_fit(3 * GIB, cpu, sharers=2)


def test_peak_bytes_runs_nothing_on_the_cpu() -> None:
    ran: list[bool] = []
    assert peak_bytes(torch.device("cpu"), lambda: ran.append(True)) == 0
    assert not ran


@pytest.mark.gpu
def test_peak_bytes_is_the_most_allocated_at_once() -> None:
    device = torch.device("cuda")

    def work() -> None:
        held = torch.empty(96 << 20, dtype=torch.uint8, device=device)
        torch.empty_like(held[: 64 << 20])

    assert peak_bytes(device, work) == 160 << 20
