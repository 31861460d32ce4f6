"""Sizes of a HiSparse cache: host pages, their index on the device, hot pages, and the errors."""

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.configs.schema import DecodeConfig
from pdserve.kernels.hisparse.slot_tables import table_bytes
from pdserve.memory.auto_settings import auto_kv_share
from pdserve.memory.hisparse.hot_buffer_size import resolve_hot_rows
from pdserve.memory.hisparse.sizing import HiSparseSize, hisparse_size
from pdserve.memory.sizing import GIB

LATENT, INDEXER = 61 * 1152, 61 * 256


def size(host_gib: float = 100, device_gib: float = 40, **settings: object) -> HiSparseSize:
    config = DecodeConfig(page_size=64, enable_hisparse=True, **settings)
    return hisparse_size(
        config,
        latent_token_bytes=LATENT,
        indexer_token_bytes=INDEXER,
        hot_rows=4096,
        index_groups=61,
        context_length=131072,
        slots=config.max_running_requests or 32,
        share=auto_kv_share(config, torch.device("cpu"), 0),
        host_bytes=int(host_gib * GIB),
        device_bytes=int(device_gib * GIB),
    )


def test_host_memory_sets_pages_and_the_index_uses_the_device_budget() -> None:
    found = size(kv_memory_gib=30, host_memory_gib=50, max_running_requests=8)
    assert found.num_pages == 50 * GIB // (64 * LATENT)
    assert found.hot_pages == 30 * GIB // (64 * LATENT) - index_pages(found)


def index_pages(found: HiSparseSize) -> int:
    """Hot pages that overlap the index."""
    return -(-found.num_pages * INDEXER // LATENT)


def test_index_leaves_half_of_the_budget_to_hot_pages() -> None:
    found = size(host_gib=1000, kv_memory_gib=10, host_memory_gib=900, max_running_requests=128)
    assert abs(found.num_pages * 64 * INDEXER - 5 * GIB) < 64 * LATENT
    assert found.hot_pages == 10 * GIB // (64 * LATENT) - index_pages(found)


@pytest.mark.parametrize("budget_gib", [9.5, 10, 10.001, 10.002])
def test_index_leaves_a_hot_buffer_for_every_request(budget_gib: float) -> None:
    """Exact to the page, because the index takes whole hot pages."""
    found = size(host_gib=1000, kv_memory_gib=budget_gib, host_memory_gib=900, max_running_requests=13)
    assert found.hot_pages == 13 * 65


@pytest.mark.parametrize(("mode", "hot_pages"), [("auto", 16 * 65), ("always", 131072 // 64 + 1)])
def test_index_leaves_hot_pages_for_the_longest_prompt_if_this_server_computes_all(mode: str, hot_pages: int) -> None:
    settings = {"kv_memory_gib": 20, "host_memory_gib": 900, "max_running_requests": 16, "local_prefill": mode}
    assert size(host_gib=1000, device_gib=60, **settings).hot_pages == hot_pages


def test_pages_are_capped_at_running_requests_plus_two() -> None:
    found = size(host_gib=1000, device_gib=60, kv_memory_gib=50, host_memory_gib=900, max_running_requests=3)
    assert found.num_pages == 5 * 131072 // 64
    assert found.hot_pages == 50 * GIB // (64 * LATENT) - index_pages(found)


def test_hot_pages_are_capped_at_what_requests_can_use() -> None:
    found = size(kv_tokens=6400, kv_memory_gib=20, max_running_requests=2)
    assert found == HiSparseSize(100, 100 + 2 * 65)


def test_tables_count_against_device_memory() -> None:
    tables = table_bytes(groups=61, requests=32, hot_rows=4096, max_context=131072, page_size=64)
    with pytest.raises(StartupError, match=r"kv_memory_gib = 40\.0 asks for 40\.00 GiB"):
        size(kv_memory_gib=40)
    assert size(device_gib=40.01 + tables / GIB, kv_memory_gib=40).hot_pages > 0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"host_memory_gib": 200}, r"host_memory_gib = 200\.0 asks for more than the 100\.00 GiB"),
        ({"host_memory_gib": 1, "kv_tokens": 1_000_000}, r"kv_tokens = 1000000 takes 65\.4\d GiB of host memory"),
        ({"kv_memory_gib": 0.1}, r"does not hold the index of \d+ pages .* and one hot buffer of hot_rows = 4096"),
        ({"host_memory_gib": 0.001}, r"host_memory_gib = 0\.001 is less than one page of 4497408 bytes"),
    ],
)
def test_impossible_sizes_are_refused(settings: dict[str, float], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        size(**settings)


def test_hot_rows_must_hold_what_a_step_reads() -> None:
    assert resolve_hot_rows(DecodeConfig(page_size=64), 2048) == 3072
    assert resolve_hot_rows(DecodeConfig(page_size=48), 20) == 48
    with pytest.raises(StartupError, match="hot_rows = 64 is below the model's index_topk = 2048"):
        resolve_hot_rows(DecodeConfig(page_size=64, hot_rows=64), 2048)
    with pytest.raises(StartupError, match="hot_rows = 2100 must be a multiple of page_size = 64"):
        resolve_hot_rows(DecodeConfig(page_size=64, hot_rows=2100), 2048)
