"""What a rank builds: a KV pool in its share of the free memory, beside the memory of staged transfers."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.kernels.hisparse.slot_tables import table_bytes
from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.hisparse.sizing import hisparse_size
from pdserve.memory.ring_memory import RING_TOKENS, ring_bytes
from pdserve.models.config.sharding import Shard
from pdserve.models.layers.parallel import ALONE, Parallel
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.scheduler.ranks.builder import RankBuilder
from pdserve.scheduler.ranks.cache_size import STAGED_RANKS
from pdserve.scheduler.ranks.executor import Executor
from tests.checkpoints import make_checkpoint, make_dsa_checkpoint

FREE_BYTES = 256 << 20
CPU = torch.device("cpu")
ROLES: list[type[AnyServerConfig]] = [PrefillConfig, DecodeConfig]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A model with a context so long that memory limits the size of every pool."""
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", max_position_embeddings=1 << 20)
    return locate_model(str(directory))


@pytest.fixture(autouse=True)
def free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("scheduler.ranks.builder", "memory.sizing"):
        monkeypatch.setattr(f"pdserve.{module}.free_memory_bytes", lambda _: FREE_BYTES)


def build(role: type[AnyServerConfig], source: ModelSource, **settings: Any) -> Executor:
    """The executor of a whole model; other ranks may share its memory."""
    config = role.model_validate({"device": "cpu", "kv_memory_fraction": 0.5, "page_size": 4, **settings})
    return RankBuilder(config, source, ALONE, CPU).build()


def token_bytes(executor: Executor) -> int:
    return executor.cache.size_bytes // executor.cache.num_pages // 4


@pytest.mark.parametrize("role", ROLES)
def test_ranks_that_share_memory_take_equal_shares(role: type[AnyServerConfig], dense: ModelSource) -> None:
    alone, of_four = (build(role, dense, staging="off", tp=tp) for tp in (1, 4))
    page_bytes = 4 * token_bytes(alone)
    assert alone.cache.num_pages == FREE_BYTES // 2 // page_bytes
    assert of_four.cache.num_pages == FREE_BYTES // 4 // 2 // page_bytes


@pytest.mark.parametrize(("device", "share"), [("cuda:0", 4), ("cuda", 1)])
def test_ranks_share_the_memory_of_an_explicit_gpu(dense: ModelSource, device: str, share: int) -> None:
    config = DecodeConfig(device=device, tp=4, max_running_requests=8)
    assert RankBuilder(config, dense, ALONE, torch.device("cuda", 0))._free_bytes() == FREE_BYTES // share


def test_decode_pool_leaves_memory_for_the_ring(dense: ModelSource) -> None:
    executor = build(DecodeConfig, dense)
    ring = ring_bytes(DecodeConfig(), token_bytes(executor))
    assert 0 < ring < FREE_BYTES
    assert executor.cache.num_pages == (FREE_BYTES - ring) // 2 // (4 * token_bytes(executor))


def test_prefill_pool_leaves_memory_for_two_parts_per_decode_rank(dense: ModelSource) -> None:
    executor = build(PrefillConfig, dense)
    buffers = STAGED_RANKS * 2 * RING_TOKENS * token_bytes(executor)
    assert 0 < buffers < FREE_BYTES
    assert executor.cache.num_pages == (FREE_BYTES - buffers) // 2 // (4 * token_bytes(executor))


@pytest.mark.parametrize("role", ROLES)
def test_kv_without_heads_reserves_no_memory_for_staging(
    role: type[AnyServerConfig], tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    source = locate_model(str(make_dsa_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v32")))
    caplog.set_level("INFO")
    settings = {"kv_memory_fraction": 0.001}  # so little that memory limits the pool
    pages = [build(role, source, **settings, staging=staging).cache.num_pages for staging in ("on", "off")]
    assert pages[0] == pages[1]
    assert "staging" not in caplog.text


class Stage(Parallel):
    """A stage whose peers agree to every value."""

    def agree_minimum(self, value: int) -> int:
        return value


@pytest.mark.parametrize(("stage", "indexers"), [(0, 1), (1, 3)])
def test_slot_tables_of_a_stage_have_the_planned_size(
    stage: int, indexers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One table for each indexer of the stage."""
    model = make_dsa_checkpoint(tmp_path, "glm_moe_dsa", num_hidden_layers=8, index_topk_pattern="FSSSFFSF")
    plan = Mock(wraps=hisparse_size)
    monkeypatch.setattr("pdserve.scheduler.ranks.cache_size.hisparse_size", plan)
    sizes = {"kv_tokens": 1024, "hot_rows": 16, "max_running_requests": 3}
    config = DecodeConfig(device="cpu", pp=2, page_size=4, enable_hisparse=True, **sizes)
    rank = RankBuilder(config, locate_model(str(model)), Stage(Shard(stage=stage, stages=2)), CPU)
    cache = rank.build().cache
    assert isinstance(cache, HiSparseCache)
    asked = plan.call_args.kwargs
    assert (len(cache.group_tables), asked["index_groups"]) == (indexers, indexers)
    context = asked["context_length"]
    planned = table_bytes(groups=indexers, requests=3, hot_rows=16, max_context=context, page_size=4)
    assert cache.tables.size_bytes == planned


@pytest.mark.parametrize(
    ("role", "said"),
    [
        (
            PrefillConfig,
            r"staging buffers: up to .* MiB \(for each of 8 decode ranks two parts of 4096 tokens",
        ),
        (DecodeConfig, r"staging ring: .* MiB \(staging_ring_mib; by default twice the KV of 4096 tokens, at most"),
    ],
)
def test_staging_memory_is_logged_at_start(
    role: type[AnyServerConfig], said: str, dense: ModelSource, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    build(role, dense, staging="off")
    assert "staging" not in caplog.text
    build(role, dense)
    (line,) = (record.getMessage() for record in caplog.records if "staging" in record.getMessage())
    assert re.search(said, line), line
