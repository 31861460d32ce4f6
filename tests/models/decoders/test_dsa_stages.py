"""Transfers between servers with different pipeline stages, for a model whose layers share indexers; in one process."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

from pdserve.kernels.hisparse.slot_tables import buffer_pages
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.kv_pool import KvCache, KvPool
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.layers.batch import ForwardBatch, SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.scheduler.ranks.transfers.announcement import layout_of
from pdserve.transfer.plan.copy_regions import plan_regions
from pdserve.transfer.plan.copy_runs import expand_runs
from pdserve.transfer.plan.pairing import check_pair
from pdserve.transfer.protocol.messages import Hello, InstanceId, Pool, Rank, Welcome
from tests.checkpoints import load_reference, make_dsa_checkpoint, reference_greedy
from tests.memory.hisparse.hot_buffer import open_loaded

CPU = torch.device("cpu")
PATTERN = "FSSSFFSF"
"""F: a layer with an indexer. Two stages have 1 of 4 and 3 of 4 such layers; four stages one each, of 4, 1, 2 and 1."""
TOP_K = 16
PROMPT = [(7 * at * at + 3 * at) % 256 for at in range(61)]
NEW_TOKENS = 10
PREFILL_PAGE, DECODE_PAGE = 16, 4
PAGES = 64
"""Pages of either server; the prompt and its tokens take few of them."""


class Stages:
    """The decoders of a server's pipeline stages."""

    def __init__(self, model: Path, stages: int) -> None:
        source = locate_model(str(model))
        self.decoders = []
        for stage in range(stages):
            shard = Shard(stage=stage, stages=stages)
            parameters = LatentParameters.allocate(source.config, shard, device=CPU, dtype=torch.float32)
            load_weights(source, parameters.slots(), tensor_names(source.config))
            self.decoders.append(DsaDecoder(parameters))

    def next_token(self, caches: Sequence[KvCache], piece: SequenceSlice) -> int:
        batch = ForwardBatch.build([piece], page_size=caches[0].page_size, num_kv_heads=None, device=CPU)
        hidden = None
        with torch.inference_mode():
            for decoder, cache in zip(self.decoders, caches, strict=True):
                hidden = decoder.hidden(batch, cache, hidden=hidden)
            assert hidden is not None
            logits = self.decoders[-1].logits(hidden[-1:])
        assert logits is not None
        return int(logits.argmax())


class Model(NamedTuple):
    """Decoders by the number of stages, and the output of transformers for the prompt."""

    stages: dict[int, Stages]
    expected: list[int]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    directory = make_dsa_checkpoint(
        tmp_path_factory.mktemp("glm"),
        "glm_moe_dsa",
        num_hidden_layers=len(PATTERN),
        index_topk_pattern=PATTERN,
        index_topk=TOP_K,
    )
    stages = {count: Stages(directory, count) for count in range(1, 5)}
    return Model(stages, reference_greedy(load_reference(directory), PROMPT, NEW_TOKENS))


def poisoned(cache: KvCache) -> KvCache:
    """Fill a cache with large values, so that a read of an unwritten row changes the result."""
    for pool in cache.pools:
        pool.data.fill_(50.0)
    return cache


def prefill(stages: Stages, pages: Sequence[int]) -> tuple[list[KvCache], int]:
    """Caches with the prompt computed into these pages, and the first token."""
    caches = [poisoned(decoder.make_cache(PAGES, PREFILL_PAGE)) for decoder in stages.decoders]
    return caches, stages.next_token(caches, SequenceSlice(PROMPT, 0, pages))


def transfer(
    sources: Sequence[KvCache], targets: Sequence[KvCache], pages: Sequence[int], to_pages: Sequence[int]
) -> int:
    """Copy what prefill ranks would write to decode ranks; returns the number of bytes."""
    sent = 0
    for kind in range(2):
        ours, theirs = [cache.pools[kind] for cache in sources], [cache.pools[kind] for cache in targets]
        layouts, their_layouts = [layout_of(pool) for pool in ours], [layout_of(pool) for pool in theirs]
        for region in plan_regions(layouts, their_layouts):
            source, target = ours[region.source], theirs[region.destination]
            runs = expand_runs(
                layouts[region.source], their_layouts[region.destination], pages, to_pages, 0, len(PROMPT), region
            )
            for start, to, length in zip(runs.source, runs.destination, runs.length, strict=True):
                as_bytes(target)[to : to + length] = as_bytes(source)[start : start + length]
            sent += runs.total_bytes
    return sent


def as_bytes(pool: KvPool) -> torch.Tensor:
    return pool.data.view(torch.uint8).view(-1)


def decode(
    stages: Stages, caches: Sequence[KvCache], pages: Sequence[int], first: int, *, slot: int | None = None
) -> list[int]:
    tokens = [first]
    while len(tokens) < NEW_TOKENS:
        start = len(PROMPT) + len(tokens) - 1
        tokens.append(stages.next_token(caches, SequenceSlice(tokens[-1:], start, pages, hot_slot=slot)))
    return tokens


@pytest.mark.parametrize(("from_stages", "to_stages"), [(1, 4), (2, 2), (2, 3), (3, 2), (4, 1)])
def test_keys_are_sent_to_the_layers_that_read_them(model: Model, from_stages: int, to_stages: int) -> None:
    caches, first = prefill(model.stages[from_stages], pages=[9, 4, 33, 2])
    stages, pages = model.stages[to_stages], list(range(60, 40, -1))
    targets = [poisoned(decoder.make_cache(PAGES, DECODE_PAGE)) for decoder in stages.decoders]
    assert transfer(caches, targets, [9, 4, 33, 2], pages) == 4 * len(PROMPT) * (8 * 64 + 4 * 32)
    assert decode(stages, targets, pages, first) == model.expected


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_lent_pages_overlap_no_keys_in_use_on_any_stage(model: Model, stages: int) -> None:
    """The pages of the request are scattered over the pool, and the units between them are lent to its hot buffer. If a
    stage mapped one of these units to other memory, hot rows would overwrite keys.
    """
    caches, first = prefill(model.stages[2], pages=[0, 1, 2, 3])
    needed = -(-(len(PROMPT) + NEW_TOKENS) // DECODE_PAGE)
    buffer = buffer_pages(TOP_K, DECODE_PAGE)
    targets = [
        decoder.make_hisparse_cache(
            16 * needed, DECODE_PAGE, hot_pages=buffer, slots=1, hot_rows=TOP_K, max_context=len(PROMPT) + NEW_TOKENS
        )
        for decoder in model.stages[stages].decoders
    ]
    (overlay,) = {cache.overlay for cache in targets}
    (own,) = {cache.own_hot_pages for cache in targets}
    pages = [KvPage(16 * at + 5) for at in range(needed)]
    transfer(caches, targets, [0, 1, 2, 3], pages)
    used = {page // overlay.kv_pages for page in pages}
    free = [unit for unit in range(overlay.count) if unit not in used]
    lent = [KvPage(unit * overlay.kv_pages + at) for unit in free for at in range(overlay.kv_pages)]
    hot_pages = [*(HotPage(page) for page in own), *overlay.hot_pages_under(lent)][:needed]
    assert (len(own), len(hot_pages)) == (buffer, needed)
    for cache in targets:
        open_loaded(cache, RequestSlot(0), hot_pages, pages, len(PROMPT), needed * DECODE_PAGE)
    assert decode(model.stages[stages], targets, pages, first, slot=0) == model.expected


@pytest.mark.parametrize("stages", [1, 2])
def test_server_with_keys_for_all_layers_is_refused(model: Model, stages: int) -> None:
    """Earlier versions stored keys for all layers."""
    ranks: list[Rank] = []
    old_ranks: list[Rank] = []
    for number, decoder in enumerate(model.stages[stages].decoders):
        latent, keys = (layout_of(pool) for pool in decoder.make_cache(PAGES, DECODE_PAGE).pools)
        of_layers = msgspec.structs.replace(keys, layer_start=latent.layer_start, layer_end=latent.layer_end)
        for found, kinds in ((ranks, (latent, keys)), (old_ranks, (latent, of_layers))):
            found.append(Rank(number, "10.0.0.1:1", tuple(Pool(kv, 1 << 20, kv.size_bytes) for kv in kinds)))
    hello = Hello(2, InstanceId("decode"), "abc", "glm", tuple(ranks))
    assert check_pair(hello, Welcome(2, InstanceId("prefill"), "abc", "glm", tuple(ranks))) is None
    reason = check_pair(hello, Welcome(2, InstanceId("prefill"), "abc", "glm", tuple(old_ranks)))
    assert reason == "layers of indexer differ: prefill holds [0, 8), decode holds [0, 4)"
