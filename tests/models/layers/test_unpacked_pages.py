"""Steps that unpack whole pages against steps that unpack the rows of each query: the same values, so bitwise equal."""

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from pdserve.kernels.dsa import packed_rows
from pdserve.kernels.dsa.index_plan import IndexPlan
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.kv_pool import KvCache
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.graphs.dsa_chunks import DsaChunkStep
from pdserve.models.graphs.steps import ChunkLimits
from pdserve.models.layers import unpacked_pages
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.layers.unpacked_pages import PackedFormat
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from tests.checkpoints import make_dsa_checkpoint
from tests.memory.hisparse.hot_buffer import open_loaded

PAGE, NUM_PAGES, TOP_K, LAYERS, SLOTS, CONTEXT = 8, 96, 16, 4, 4, 256
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> DsaDecoder:
    """The second layer and the last share the selection of the layer before."""
    directory = make_dsa_checkpoint(tmp_path_factory.mktemp("glm"), "glm_moe_dsa", index_topk_pattern="FSFS")
    source = locate_model(str(directory))
    parameters = LatentParameters.allocate(source.config, device=CPU, dtype=torch.float32)
    load_weights(source, parameters.slots(), tensor_names(source.config))
    return DsaDecoder(parameters, packed=True)


class Unpacking:
    """Counts pages that are unpacked as a whole, and rows that are unpacked for a query."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: list[int] = []
        self.rows = 0
        pages, rows = packed_rows.unpack_pages, packed_rows.unpack_rows
        monkeypatch.setattr(unpacked_pages, "unpack_pages", self._counted(pages, self._add_pages))
        monkeypatch.setattr(packed_rows, "unpack_rows", self._counted(rows, self._add_rows))

    def _add_pages(self, _pages: torch.Tensor, sources: torch.Tensor, count: torch.Tensor) -> None:
        assert int(count) <= len(sources)
        self.pages.append(int(count))

    def _add_rows(self, _pages: torch.Tensor, rows: torch.Tensor) -> None:
        self.rows += int((rows >= 0).sum())

    def _counted(self, function: Callable[..., object], add: Callable[..., None]) -> Callable[..., object]:
        def counted(*args: torch.Tensor, **kwargs: object) -> object:
            add(*args)
            return function(*args, **kwargs)

        return counted


@pytest.fixture
def unpacking(monkeypatch: pytest.MonkeyPatch) -> Unpacking:
    return Unpacking(monkeypatch)


def chunks(seed: int) -> Iterator[list[SequenceSlice]]:
    """Three prompts of different lengths, in chunks: alone, together, and beside single tokens."""
    draw = random.Random(seed)
    free = draw.sample(range(NUM_PAGES), NUM_PAGES)
    prompts = [draw.choices(range(256), k=length) for length in (150, 70, 41)]
    pages = [[free.pop() for _ in range(-(-len(prompt) // PAGE))] for prompt in prompts]
    for step in (
        [(0, 0, 60)],
        [(0, 60, 110), (1, 0, 40)],
        [(1, 40, 69), (0, 110, 149), (2, 0, 40)],
        [(2, 40, 41), (0, 149, 150), (1, 69, 70)],
    ):
        yield [SequenceSlice(prompts[at][start:end], start, pages[at], hot_slot=3 - at) for at, start, end in step]


def caches(decoder: DsaDecoder, kind: str) -> list[KvCache]:
    """Two of a kind, full of NaN."""
    made: list[KvCache] = []
    for _ in range(2):
        if kind == "paged":
            made.append(decoder.make_cache(NUM_PAGES, PAGE))
            pools = made[-1].pools
        else:
            hot = decoder.make_hisparse_cache(
                NUM_PAGES, PAGE, hot_pages=64, slots=SLOTS, hot_rows=TOP_K, max_context=CONTEXT
            )
            own = [HotPage(page) for page in hot.own_hot_pages]
            for slot, count in ((3, 20), (2, 10), (1, 7)):
                pages = [own.pop() for _ in range(count)]
                open_loaded(hot, RequestSlot(slot), pages, [KvPage(0)] * count, 0, count * PAGE)
            made.append(hot)
            pools = (*hot.pools, hot.hot)
        for pool in pools:
            pool.data.view(torch.uint8).fill_(255)
    return made


def pages_of(slices: Sequence[SequenceSlice]) -> int:
    return sum(-(-piece.end // PAGE) for piece in slices)


@pytest.mark.parametrize("kind", ["paged", "hot"])
def test_chunks_unpack_each_page_once_with_equal_results(
    decoder: DsaDecoder, kind: str, unpacking: Unpacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(decoder, device=CPU, dtype=torch.float32)
    shared, gathered = caches(decoder, kind)
    for slices in chunks(1):
        tokens = sum(len(piece.token_ids) for piece in slices)
        found = runner.forward_hidden(shared, slices)
        shares = pages_of(slices) * PAGE <= tokens * TOP_K
        assert unpacking.pages == [pages_of(slices)] * (LAYERS if shares else 0)
        assert (unpacking.rows == 0) == shares
        assert shares == (tokens > 3)  # the last step has three queries over 33 pages
        unpacking.pages, unpacking.rows = [], 0
        with monkeypatch.context() as patch:
            patch.setattr(unpacked_pages, "rows_at_once", lambda *_: 0)
            expected = runner.forward_hidden(gathered, slices)
        assert found is not None
        assert expected is not None
        assert not found.isnan().any()
        assert found.equal(expected)
        assert not unpacking.pages
        assert unpacking.rows > 0
        unpacking.rows = 0


@pytest.mark.parametrize("kind", ["paged", "hot"])
def test_padded_step_with_fixed_inputs_shares_pages(decoder: DsaDecoder, kind: str, unpacking: Unpacking) -> None:
    """The size of a graph limits the pages that it unpacks. A step with more pages uses the other kind of graph."""
    ours, theirs = caches(decoder, kind)
    runner = ModelRunner(decoder, device=CPU, dtype=torch.float32)
    step = DsaChunkStep(decoder, ours, ChunkLimits(140, 5, CONTEXT // PAGE, last_only=True))
    kinds = []
    for slices in chunks(2):
        tokens = step.size(slices)
        assert tokens is not None
        size = tokens + 3
        with torch.inference_mode():
            kinds.append(step.fill(slices, size))
            unpacking.pages, unpacking.rows = [], 0
            found = step.hidden(size, kinds[-1])[: len(slices)]
        assert unpacking.pages == [pages_of(slices)] * (LAYERS * kinds[-1])
        assert (unpacking.rows == 0) == (kinds[-1] == 1)
        expected = runner.forward_hidden(theirs, slices)
        assert expected is not None
        ends = torch.tensor([len(piece.token_ids) for piece in slices]).cumsum(0) - 1
        torch.testing.assert_close(found, expected[ends], rtol=0, atol=3e-5)
    assert step.num_kinds(1) == 2
    assert kinds == [1, 1, 1, 0]


def test_padded_step_without_sequences_reads_nothing(decoder: DsaDecoder, unpacking: Unpacking) -> None:
    """As before a capture: the page tables are those of earlier steps."""
    cache, _ = caches(decoder, "paged")
    step = DsaChunkStep(decoder, cache, ChunkLimits(64, 5, CONTEXT // PAGE, last_only=True))
    with torch.inference_mode():
        step.fill(next(chunks(3)), 64)
        assert step.fill([], 64) == 1
        for kind in (0, 1):
            step.hidden(64, kind)
    assert unpacking.pages == [0] * LAYERS
    assert unpacking.rows == 0


def test_shapes_decide_whether_pages_are_shared() -> None:
    packed = PackedFormat(512, 576, torch.bfloat16, 2048)

    def shares(query_lens: list[int], context: int) -> bool:
        pages = [list(range(-(-context // 64)))] * len(query_lens)
        plan = IndexPlan.build(query_lens, [context] * len(query_lens), pages, page_size=64, device=CPU)
        return packed.shares_pages(plan)

    assert shares([2048], 163840)
    assert shares([4], 8192)
    assert not shares([3], 8192)
    assert not shares([1] * 32, 8192)
    assert shares([1024, 1024], 100000)
    assert not shares([1024, 1024], 120000), "more than the workspace has room for"
    unknown = IndexPlan(64, torch.zeros(1, 1), torch.zeros(8), torch.zeros(8))
    assert not packed.shares_pages(unknown)
