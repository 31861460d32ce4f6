"""Logits and greedy tokens of models with latent attention, most of them sparse, against transformers."""

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.kernels.dsa.index_plan import IndexPlan
from pdserve.memory.kv_pool import KvCache
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.layers.batch import ForwardBatch, SequenceSlice
from pdserve.models.layers.latent_rows import RowPlaces, new_token_rows
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import is_reference_greedy, load_reference, make_dsa_checkpoint, reference_logits
from tests.kernels.dsa.padded_plan import padded_plan

# The logits are of order 1; float32 sums in another order differ by some 1e-6. With these seeds, the scores of selected
# and other tokens or experts differ by more than 1e-5, so rounding does not change a selection.
TOLERANCE = 3e-5

CPU = torch.device("cpu")
TOPK = 16

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", {"rope_parameters": YARN}),
    "deepseek": ("deepseek_v32", {}),
    "deepseek-yarn": ("deepseek_v32", {"rope_parameters": YARN}),
    "deepseek-groups": ("deepseek_v32", {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}),
    "deepseek-dense": ("deepseek_v32", {"first_k_dense_replace": 4}),
    "glm": ("glm_moe_dsa", {}),
    "glm-unnormalised-weights": ("glm_moe_dsa", {"norm_topk_prob": False, "first_k_dense_replace": 0}),
    "glm-shared": ("glm_moe_dsa", {"num_hidden_layers": 5, "index_topk_freq": 3}),
    "glm-pattern": ("glm_moe_dsa", {"index_topk_pattern": "FSFS"}),
}


def load(directory: Path) -> ModelRunner:
    return ModelRunner.load(locate_model(str(directory)), device=CPU, dtype=torch.float32)


def poisoned_cache(runner: ModelRunner, num_pages: int, page_size: int) -> KvCache:
    """Full of large stale values: a read of an unwritten row spoils the result."""
    cache = runner.make_cache(num_pages, page_size)
    for pool in cache.pools:
        pool.data.fill_(50.0)
    return cache


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def run(runner: ModelRunner, cache: KvCache, slices: list[SequenceSlice]) -> torch.Tensor:
    logits = runner.forward(cache, slices)
    assert logits is not None
    return logits


def greedy(runner: ModelRunner, cache: KvCache, token_ids: list[int], pages: list[int], new_tokens: int) -> list[int]:
    out: list[int] = []
    piece, start = token_ids, 0
    while len(out) < new_tokens:
        logits = run(runner, cache, [SequenceSlice(piece, start, pages)])
        start += len(piece)
        piece = [int(logits[0].argmax())]
        out += piece
    return out


@pytest.fixture(scope="module", params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    architecture, overrides = MODELS[request.param]
    directory = make_dsa_checkpoint(tmp_path_factory.mktemp(request.param), architecture, **overrides)
    return load(directory), load_reference(directory)


@pytest.mark.parametrize("length", [9, TOPK, TOPK + 1, 70])
def test_logits_and_greedy_tokens_equal_transformers(model: tuple[ModelRunner, Any], length: int) -> None:
    runner, reference = model
    token_ids = prompt(length, length)
    cache = poisoned_cache(runner, 32, 8)
    pages = random.Random(length).sample(range(32), 12)

    whole = run(runner, cache, [SequenceSlice(token_ids, 0, pages)])
    expected = reference_logits(reference, token_ids)
    assert float(expected.std()) > 0.3
    torch.testing.assert_close(whole[0], expected[-1], rtol=0, atol=TOLERANCE)

    fresh = poisoned_cache(runner, 32, 8)
    assert is_reference_greedy(reference, token_ids, greedy(runner, fresh, token_ids, pages, 12))


@pytest.mark.parametrize(
    ("page_size", "chunks"), [(1, [70]), (8, [16, 16, 38]), (5, [1, 15, 1, 16, 37]), (16, [69, 1])]
)
def test_chunks_compute_logits_of_every_token(
    model: tuple[ModelRunner, Any], page_size: int, chunks: list[int]
) -> None:
    """Every token of a chunk sees, or selects among, the tokens up to itself."""
    runner, reference = model
    token_ids = prompt(3, 70)
    cache = poisoned_cache(runner, 80, page_size)
    pages = random.Random(4).sample(range(80), -(-70 // page_size))
    rows, start = [], 0
    for length in chunks:
        hidden = runner.forward_hidden(cache, [SequenceSlice(token_ids[start : start + length], start, pages)])
        assert hidden is not None
        logits = runner.logits(hidden)
        assert logits is not None
        rows.append(logits)
        start += length
    torch.testing.assert_close(torch.cat(rows), reference_logits(reference, token_ids), rtol=0, atol=TOLERANCE)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    """With layers that select and layers that share a selection."""
    directory = make_dsa_checkpoint(tmp_path_factory.mktemp("glm"), "glm_moe_dsa", index_topk_pattern="FFSS")
    return load(directory), load_reference(directory)


def test_mixed_batch_computes_every_sequence_correctly(glm: tuple[ModelRunner, Any]) -> None:
    """Whole prompts, a later chunk, single-token prompts and decode steps of very different lengths in one pass."""
    runner, reference = glm
    page_size, cache_pages = 4, 256
    cache = poisoned_cache(runner, cache_pages, page_size)
    free = random.Random(5).sample(range(cache_pages), cache_pages)
    slices, expected = [], []
    for number, (length, start) in enumerate([(70, 69), (9, 0), (33, 20), (1, 0), (130, 129), (17, 16), (67, 4)]):
        token_ids = prompt(10 + number, length)
        pages = [free.pop() for _ in range(-(-length // page_size))]
        if start:
            run(runner, cache, [SequenceSlice(token_ids[:start], 0, pages)])
        slices.append(SequenceSlice(token_ids[start:], start, pages))
        expected.append(reference_logits(reference, token_ids)[-1])
    torch.testing.assert_close(run(runner, cache, slices), torch.stack(expected), rtol=0, atol=TOLERANCE)


def test_only_rows_of_the_slice_are_written(glm: tuple[ModelRunner, Any]) -> None:
    runner, _ = glm
    cache = poisoned_cache(runner, 8, 4)
    run(runner, cache, [SequenceSlice(prompt(6, 6), 0, [5, 2, 7])])
    expected = torch.zeros(8, 4, dtype=torch.bool)
    expected[5, :] = True
    expected[2, :2] = True
    for pool in cache.pools:
        written = (pool.data[:, :, 0, 0] != 50.0).any(dim=-1)  # [page, layer, token]
        assert all(written[:, layer].equal(expected) for layer in range(pool.num_layers))


def test_kv_token_bytes_equals_the_size_of_both_pools(glm: tuple[ModelRunner, Any]) -> None:
    """Two of four layers have an indexer: keys of the others would never be written or read."""
    runner, _ = glm
    cache = runner.make_cache(7, 4)
    assert [(pool.planes, pool.layers, pool.num_heads, pool.head_dim) for pool in cache.pools] == [
        (("latent",), range(4), 1, 48 + 16),
        (("indexer",), range(2), 1, 32),
    ]
    assert runner.kv_token_bytes == 4 * (4 * (48 + 16) + 2 * 32)
    assert cache.size_bytes == 7 * 4 * runner.kv_token_bytes


@pytest.mark.parametrize("live", [0, 2])
def test_padded_rows_write_nothing_and_change_no_result(glm: tuple[ModelRunner, Any], live: int) -> None:
    """Like a CUDA graph: static shapes, a plan that is filled in place, the number of valid rows in device memory."""
    runner, reference = glm
    cache = poisoned_cache(runner, 16, 4)
    sequences = [(prompt(20, 30), [3, 1, 4, 15, 9, 2, 6, 5]), (prompt(21, 7), [8, 0])]
    for token_ids, pages in sequences:
        run(runner, cache, [SequenceSlice(token_ids[:-1], 0, pages)])
    before = [pool.data.clone() for pool in cache.pools]

    plan = padded_plan(5, max_pages=8, page_size=4, device=CPU)
    fields = torch.zeros(4, 5, dtype=torch.int32)
    for row, (token_ids, pages) in enumerate(sequences[:live]):
        last = len(token_ids) - 1
        fields[:, row] = torch.tensor([token_ids[-1], last, pages[last // 4], last % 4])
        plan.page_table[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        plan.visible[row] = len(token_ids)
    decoder = runner._decoder
    assert isinstance(decoder, DsaDecoder)
    batch = ForwardBatch.build([SequenceSlice([0], 0, [0])] * 5, page_size=4, num_kv_heads=1, device=CPU)
    token_ids, positions, page_ids, offsets = fields
    padded = dataclasses.replace(
        batch, slices=(), token_ids=token_ids, positions=positions, page_ids=page_ids, offsets=offsets
    )
    live_rows = torch.tensor([live], dtype=torch.int32)
    with torch.inference_mode():
        logits = decoder.logits(decoder.hidden(padded, cache, live_rows=live_rows, plan=plan))
    assert logits is not None
    for row, (token_ids, _) in enumerate(sequences[:live]):
        torch.testing.assert_close(logits[row], reference_logits(reference, token_ids)[-1], rtol=0, atol=TOLERANCE)
    for pool, old in zip(cache.pools, before, strict=True):
        changed = (pool.data != old).any(dim=-1).sum(dim=(1, 2, 3))  # [page, token]
        layers = 4 if pool is cache.pools[0] else 2
        expected = torch.zeros(16, 4, dtype=torch.long)
        for token_ids, pages in sequences[:live]:
            last = len(token_ids) - 1
            expected[pages[last // 4], last % 4] = layers
        assert changed.equal(expected)


class SeparateRows:
    """Latent rows in memory of their own, with another order and page size, like a hot buffer.

    Row r of the cache is row `order[r]` here.
    """

    rows_of: IndexPlan | None = None

    def __init__(
        self, layers: int, row_size: int, plan: IndexPlan, new_rows: torch.Tensor, order: torch.Tensor
    ) -> None:
        self._pages = torch.full((layers, len(order), 1, row_size), torch.nan)
        self._plan, self._new_rows, self._order = plan, new_rows, order
        self.finished = False

    def place(self, layer: int) -> RowPlaces:
        return RowPlaces(self._pages[layer], self._order[self._new_rows.long()].int())

    def select(self, _layer: int, tokens: torch.Tensor, /) -> None:
        rows = self._plan.flat_rows(tokens)
        self._selected = torch.where(rows < 0, rows, self._order[rows.clamp(min=0).long()].int())

    def selected(self, layer: int) -> RowPlaces:
        return RowPlaces(self._pages[layer], self._selected)

    def finish(self) -> None:
        self.finished = True


def test_decoder_reads_latent_rows_through_the_interface(glm: tuple[ModelRunner, Any]) -> None:
    runner, reference = glm
    decoder = runner._decoder
    assert isinstance(decoder, DsaDecoder)
    cache = poisoned_cache(runner, 16, 4)
    latent_pool, _ = cache.pools
    before = latent_pool.data.clone()
    token_ids, pages = prompt(30, 40), random.Random(30).sample(range(16), 10)
    piece = SequenceSlice(token_ids, 0, pages)
    batch = ForwardBatch.build([piece], page_size=4, num_kv_heads=1, device=CPU)
    plan = IndexPlan.build([40], [40], [pages], page_size=4, device=CPU)
    rows = SeparateRows(4, 64, plan, new_token_rows(batch, 4, None), torch.randperm(64))
    with torch.inference_mode():
        logits = decoder.logits(decoder.hidden(batch, cache, rows=rows))
    assert logits is not None
    torch.testing.assert_close(logits, reference_logits(reference, token_ids), rtol=0, atol=TOLERANCE)
    assert latent_pool.data.equal(before)
    assert rows.finished
