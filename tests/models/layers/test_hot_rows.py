"""Decoding over a HiSparse cache against decoding over a plain one: the same rows, so bitwise equal logits."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pdserve.kernels.hisparse.swap_in import copy_misses, swap_in
from pdserve.kernels.hisparse.write_back import write_back
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.kv_pool import KvCache
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.layers import hot_rows
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import DsaArchitecture, is_reference_greedy, load_reference, make_dsa_checkpoint
from tests.memory.hisparse.hot_buffer import open_loaded

TOP_K = 16
PAGE_SIZE = 8
NUM_PAGES, SLOTS, MAX_CONTEXT = 128, 4, 256

CPU = torch.device("cpu")
MODELS: dict[str, tuple[DsaArchitecture, dict[str, Any]]] = {
    "deepseek": ("deepseek_v32", {}),
    "glm-shared": ("glm_moe_dsa", {"index_topk_pattern": "FSSF"}),
    "glm-one-indexer": ("glm_moe_dsa", {"index_topk_pattern": "FSSS"}),
}


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def poison(memory: torch.Tensor) -> None:
    """Fill with NaN, in every dtype of rows."""
    memory.view(torch.uint8).fill_(255)


class Twin:
    """One model, a plain cache and a HiSparse cache with the same initial KV. `step` runs both and compares.

    Sequences have the same pages in both caches; hot buffers have pages of their own, from a pool that is just large
    enough. All unwritten memory is NaN.
    """

    def __init__(self, runner: ModelRunner, *, hot_rows: int, hot_pages: int = 60) -> None:
        self.runner, self.hot_rows = runner, hot_rows
        decoder = runner._decoder
        assert isinstance(decoder, DsaDecoder)
        self.plain = decoder.make_cache(NUM_PAGES, PAGE_SIZE)
        self.cache = decoder.make_hisparse_cache(
            NUM_PAGES, PAGE_SIZE, hot_pages=hot_pages, slots=SLOTS, hot_rows=hot_rows, max_context=MAX_CONTEXT
        )
        for pool in (*self.plain.pools, *self.cache.pools, self.cache.hot):
            poison(pool.data)
        self.free = [KvPage(page) for page in random.Random(1).sample(range(NUM_PAGES), NUM_PAGES)]
        self.free_hot = [HotPage(page) for page in random.Random(2).sample(self.cache.own_hot_pages, hot_pages)]
        self.tokens: dict[int, list[int]] = {}
        self.pages: dict[int, list[KvPage]] = {}
        self.hot: dict[int, list[HotPage]] = {}
        self.written = 0

    @property
    def buffer_pages(self) -> int:
        return self.hot_rows // PAGE_SIZE + 1

    def prefill(self, slot: int, token_ids: Sequence[int]) -> None:
        """Compute a prompt over the plain cache, and copy its KV to the HiSparse cache, like a transfer."""
        self.tokens[slot] = list(token_ids)
        self.pages[slot] = [self.free.pop() for _ in range(-(-len(token_ids) // PAGE_SIZE))]
        logits = self.forward(self.plain, [SequenceSlice(token_ids, 0, self.pages[slot])])
        for source, target in zip(self.plain.pools, self.cache.pools, strict=True):
            target.data[self.pages[slot]] = source.data[self.pages[slot]].to(target.data.device)
        self.tokens[slot].append(int(logits[0].argmax()))

    def open(self, slot: int, capacity: int | None = None) -> None:
        """Admit a request; it is fully resident if its tokens fit `capacity`, by default that of the buffer."""
        tokens = len(self.tokens[slot]) - 1
        capacity = self.hot_rows if capacity is None else capacity
        self.hot[slot] = []
        self._hold(slot, max(self.buffer_pages, -(-capacity // PAGE_SIZE)))
        open_loaded(self.cache, RequestSlot(slot), self.hot[slot], self.pages[slot], tokens, capacity)

    def start(self, slot: int, token_ids: Sequence[int], capacity: int | None = None) -> None:
        self.prefill(slot, token_ids)
        self.open(slot, capacity)

    def resize(self, slot: int, capacity: int) -> None:
        self._hold(slot, max(self.buffer_pages, -(-capacity // PAGE_SIZE)))
        self.cache.resize(RequestSlot(slot), self.hot[slot], capacity)

    def close(self, slot: int) -> None:
        """Fill its pages with NaN and free them."""
        self._hold(slot, 0)
        for pool in self.cache.pools:
            for page in self.pages[slot]:
                poison(pool.data[page])
        self.free += self.pages.pop(slot)
        del self.tokens[slot], self.hot[slot]

    def begin(self, slot: int, token_ids: Sequence[int], cached: int = 0) -> None:
        """Open a fully resident buffer for a prompt that is computed in chunks; [0, cached) are in its pages."""
        self.hot[slot] = []
        self._hold(slot, max(self.buffer_pages, len(token_ids) // PAGE_SIZE + 1))
        capacity = len(self.hot[slot]) * PAGE_SIZE
        if cached:
            self.prefill(slot, token_ids[:cached])
        else:
            self.pages[slot] = []
        self.pages[slot] += [self.free.pop() for _ in range(-(-len(token_ids) // PAGE_SIZE) - len(self.pages[slot]))]
        open_loaded(self.cache, RequestSlot(slot), self.hot[slot], self.pages[slot], cached, capacity)
        self.tokens[slot] = list(token_ids)

    def step(self, slots: Sequence[int], chunks: Sequence[tuple[int, int, int]] = ()) -> torch.Tensor:
        """Decode one token for each, and compute chunks (slot, start, end) of prompts; returns the logits, after
        comparing both caches. The last chunk of a prompt samples its first token.
        """
        slices = []
        for slot in slots:
            ids, pages = self.tokens[slot], self.pages[slot]
            if len(ids) > len(pages) * PAGE_SIZE:
                pages.append(self.free.pop())
            slices.append(SequenceSlice(ids[-1:], len(ids) - 1, pages, hot_slot=slot))
        for slot, start, end in chunks:
            slices.append(SequenceSlice(self.tokens[slot][start:end], start, self.pages[slot], hot_slot=slot))
        expected = self.forward(self.plain, [msgspec.structs.replace(piece, hot_slot=None) for piece in slices])
        found = self.forward(self.cache, slices)
        assert not found.isnan().any()
        assert found.equal(expected)
        for piece in slices:
            assert piece.hot_slot is not None
            self.check_host(piece.hot_slot, piece.end)
            self.written += len(piece.token_ids)
        self.cache.check_integrity()
        for piece, token in zip(slices, found.argmax(-1).tolist(), strict=True):
            assert piece.hot_slot is not None
            if piece.end == len(self.tokens[piece.hot_slot]):
                self.tokens[piece.hot_slot].append(token)
        return found

    def lend(self, hot_pages: int) -> list[KvPage]:
        """Lend free pages of keys, in whole units, as hot pages."""
        _, keys = self.cache.pools
        overlay = PoolOverlay.of(NUM_PAGES, kv_page_bytes=keys.page_bytes, hot_page_bytes=self.cache.hot.page_bytes)
        lent: list[KvPage] = []
        for number in random.Random(3).sample(range(overlay.count), overlay.count):
            unit = [KvPage(page) for page in range(number * overlay.kv_pages, (number + 1) * overlay.kv_pages)]
            if set(unit) <= set(self.free) and len(lent) * overlay.hot_pages < hot_pages * overlay.kv_pages:
                lent += unit
                self.free_hot = overlay.hot_pages_under(unit) + self.free_hot
        self.free = [page for page in self.free if page not in lent]
        return lent

    def take_back(self, lent: list[KvPage]) -> None:
        """Return lent pages, as the next to be taken."""
        self.free_hot = [page for page in self.free_hot if page in self.cache.own_hot_pages]
        self.free += lent

    def forward(self, cache: KvCache, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        logits = self.runner.forward(cache, slices)
        assert logits is not None
        return logits

    def check_host(self, slot: int, tokens: int) -> None:
        """Check that host memory has the new rows and all others, in every layer."""
        plain, _ = self.plain.pools
        positions = torch.arange(tokens)
        pages, offsets = torch.tensor(self.pages[slot])[positions // PAGE_SIZE], positions % PAGE_SIZE
        found = self.cache.host.data[pages, :, 0, 0, offsets]
        assert len(found) == tokens
        assert found.equal(plain.data.cpu()[pages, :, 0, 0, offsets])

    def _hold(self, slot: int, pages: int) -> None:
        """Take hot pages, or return them, full of NaN, as the next to be taken."""
        held = self.hot[slot]
        while len(held) < pages:
            held.append(self.free_hot.pop())
        while len(held) > pages:
            page = held.pop()
            poison(self.cache.hot.data[page])
            self.free_hot.append(page)


@pytest.fixture(scope="module", params=list(MODELS))
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    architecture, overrides = MODELS[request.param]
    return load(make_dsa_checkpoint(tmp_path_factory.mktemp(request.param), architecture, **overrides), CPU)


@pytest.fixture(scope="module")
def glm_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dsa_checkpoint(tmp_path_factory.mktemp("glm"), "glm_moe_dsa", index_topk_pattern="FSSF")


@pytest.fixture(scope="module")
def glm(glm_directory: Path) -> ModelRunner:
    return load(glm_directory, CPU)


def load(directory: Path, device: torch.device) -> ModelRunner:
    return ModelRunner.load(locate_model(str(directory)), device=device, dtype=torch.float32)


@pytest.mark.parametrize("times", [1, 2, 4])
def test_evicting_contexts_far_beyond_the_buffer_equal_a_plain_cache(runner: ModelRunner, times: int) -> None:
    """Three prompts: one is longer than the buffer, which starts empty; one fills it; one grows beyond it."""
    twin = Twin(runner, hot_rows=times * TOP_K)
    twin.start(0, prompt(0, 150))
    twin.start(2, prompt(1, times * TOP_K))
    twin.start(1, prompt(2, times * TOP_K - 5))
    for _ in range(12):
        twin.step([2, 0, 1])
    counters = twin.cache.counters()
    assert counters["misses"] > 0
    assert counters["hits"] > 0
    layers = len(twin.cache.groups)
    assert counters["write_backs"] == twin.written * layers
    groups = len(set(twin.cache.groups))
    if groups == layers or groups == 1:
        assert counters["bytes_swapped_in"] == counters["misses"] * layers / groups * 64 * 4


def test_tokens_equal_transformers(glm_directory: Path, glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=TOP_K)
    token_ids = prompt(7, 100)
    twin.start(3, token_ids)
    for _ in range(15):
        twin.step([3])
    assert len(twin.tokens[3]) == 116
    assert is_reference_greedy(load_reference(glm_directory), token_ids, twin.tokens[3][100:])


def test_fully_resident_sequence_looks_up_no_rows(glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=TOP_K)
    twin.start(0, prompt(3, 120), capacity=136)
    for _ in range(10):
        twin.step([0])
    assert twin.cache.counters() == {
        "hits": 0,
        "misses": 0,
        "bytes_swapped_in": 0,
        "write_backs": 10 * len(twin.cache.groups),
    }


@pytest.mark.parametrize("length", [60, 31, 33, 16, 17])
def test_pages_of_a_request_that_becomes_evicting_are_reused_at_once(glm: ModelRunner, length: int) -> None:
    twin = Twin(glm, hot_rows=2 * TOP_K, hot_pages=14)
    twin.start(0, prompt(4, length), capacity=72)
    twin.step([0])
    twin.resize(0, 2 * TOP_K)
    twin.start(1, prompt(5, 50), capacity=56)
    for _ in range(20):
        twin.step([1, 0])
    assert twin.cache.counters()["misses"] > 0


def test_capacity_grows_with_the_sequence_until_pages_run_out(glm: ModelRunner) -> None:
    """Page by page, like the scheduler; without a further page it becomes evicting."""
    twin = Twin(glm, hot_rows=TOP_K)
    twin.start(0, prompt(6, 20), capacity=24)
    for _ in range(4):
        twin.step([0])
    for capacity in (32, 40):
        twin.resize(0, capacity)
        for _ in range(8):
            twin.step([0])
    assert twin.cache.counters()["misses"] == 0
    twin.step([0])
    assert twin.cache.counters()["misses"] > 0


def test_short_sequence_can_have_fewer_pages_than_a_buffer(glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=2 * TOP_K)
    twin.prefill(0, prompt(8, 5))
    twin.hot[0] = []
    for _ in range(40):
        twin._hold(0, min(-(-len(twin.tokens[0]) // PAGE_SIZE), twin.buffer_pages))
        if len(twin.tokens[0]) == 6:
            open_loaded(twin.cache, RequestSlot(0), twin.hot[0], twin.pages[0], 5, 2 * TOP_K)
        twin.cache.resize(RequestSlot(0), twin.hot[0], 2 * TOP_K)
        twin.step([0])


def test_slot_is_reused_by_another_request(glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=TOP_K, hot_pages=9)
    for seed, (length, capacity) in enumerate([(90, None), (10, None), (40, 48), (100, None), (16, None)]):
        twin.start(1, prompt(seed, length), capacity)
        for _ in range(5):
            twin.step([1])
        twin.close(1)


def test_reopened_evicting_request_becomes_fully_resident(glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=TOP_K)
    twin.start(0, prompt(9, 80))
    for _ in range(5):
        twin.step([0])
    misses = twin.cache.counters()["misses"]
    twin._hold(0, 0)
    twin.open(0, capacity=104)
    for _ in range(10):
        twin.step([0])
    assert twin.cache.counters()["misses"] == misses


def test_requests_start_and_end_in_mixed_batches(glm: ModelRunner) -> None:
    generator = random.Random(11)
    twin = Twin(glm, hot_rows=TOP_K, hot_pages=40)
    for turn in range(25):
        for slot in range(SLOTS):
            if slot not in twin.tokens and generator.random() < 0.6:
                length = generator.choice([1, 8, 15, 16, 17, 40, 70])
                twin.start(slot, prompt(turn, length), generator.choice([None, None, 48]))
            elif slot in twin.tokens and generator.random() < 0.1:
                twin.close(slot)
            elif slot in twin.tokens and generator.random() < 0.1:
                twin.resize(slot, TOP_K)
        live = [slot for slot in twin.tokens if generator.random() < 0.8]
        if live:
            twin.step(generator.sample(live, len(live)))
    assert twin.cache.counters()["misses"] > 0


@pytest.mark.parametrize("cached", [0, 24])
def test_chunks_beside_decode_steps_equal_a_plain_cache(runner: ModelRunner, cached: int) -> None:
    """Two prompts are computed in chunks beside a running request. Afterwards all three are evicting."""
    twin = Twin(runner, hot_rows=TOP_K)
    twin.start(3, prompt(0, 60), capacity=88)
    twin.begin(0, prompt(1, 75), cached)
    twin.begin(2, prompt(2, 41))
    twin.step([3], [(0, cached, 32)])
    twin.step([3], [(0, 32, 56), (2, 0, 16)])
    twin.step([], [(2, 16, 40)])
    twin.step([3], [(2, 40, 41), (0, 56, 75)])
    twin.step([2, 3, 0])
    assert twin.cache.counters()["misses"] == 0
    for slot in (0, 2, 3):
        twin.resize(slot, TOP_K)
    for _ in range(6):
        twin.step([2, 3, 0])
    counters = twin.cache.counters()
    assert counters["misses"] > 0
    assert counters["write_backs"] == twin.written * len(twin.cache.groups)


def test_prompt_computed_in_chunks_gives_the_tokens_of_transformers(glm_directory: Path, glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=TOP_K)
    token_ids = prompt(12, 90)
    twin.begin(1, token_ids)
    for start in range(0, 90, 32):
        twin.step([], [(1, start, min(90, start + 32))])
    twin.resize(1, TOP_K)
    for _ in range(15):
        twin.step([1])
    assert len(twin.tokens[1]) == 106
    assert is_reference_greedy(load_reference(glm_directory), token_ids, twin.tokens[1][90:])


def lend_and_take_back(twin: Twin) -> None:
    """One request has the only hot buffer, and further rows in lent pages. Then the pages hold keys of the next one."""
    for seed in range(3):
        lent = twin.lend(hot_pages=9)
        twin.start(0, prompt(seed, 60), capacity=80)
        assert set(twin.hot[0]) - set(twin.cache.own_hot_pages)
        for _ in range(6):
            twin.step([0])
        twin.resize(0, TOP_K)
        twin.take_back(lent)
        twin.start(1, prompt(seed + 10, 53))
        assert set(twin.pages[1]) <= set(lent), "the keys are not in the lent pages"
        for _ in range(12):  # it grows into pages next to lent ones
            twin.step([0, 1])
        twin.close(1)
        twin.close(0)


def test_lent_pages_hold_hot_rows_and_then_keys_again(glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=TOP_K, hot_pages=6)
    lend_and_take_back(twin)
    assert twin.cache.counters()["misses"] > 0


def test_pages_are_copied_saved_and_loaded_with_the_newest_row(glm: ModelRunner) -> None:
    """Like n > 1 and retraction, between steps: the copy decodes like the original."""
    twin = Twin(glm, hot_rows=TOP_K)
    twin.start(0, prompt(12, 43))
    twin.step([0])
    saved = [cache.save(twin.pages[0]) for cache in (twin.plain, twin.cache)]
    expected = [twin.step([0]) for _ in range(3)]

    del twin.tokens[0][-3:]
    twin.tokens[1], twin.pages[1] = twin.tokens[0], [twin.free.pop() for _ in twin.pages[0]]
    for cache, parts in zip((twin.plain, twin.cache), saved, strict=True):
        cache.load(parts, twin.pages[1])
    last = twin.free.pop()
    twin.plain.copy_page(twin.pages[1][-1], last)
    twin.cache.copy_page(twin.pages[1][-1], last)
    twin.pages[1][-1] = last
    twin.open(1)
    for logits in expected:
        assert twin.step([1]).equal(logits)


def test_packed_rows_are_copied_unchanged(glm: ModelRunner) -> None:
    assert isinstance(glm._decoder, DsaDecoder)
    packed = ModelRunner(DsaDecoder(glm._decoder.parameters, packed=True), device=CPU, dtype=torch.float32)
    twin = Twin(packed, hot_rows=TOP_K)
    assert twin.cache.host.data.dtype == torch.uint8
    twin.start(0, prompt(14, 100))
    twin.start(1, prompt(15, TOP_K - 2))
    for _ in range(8):
        twin.step([1, 0])
    assert twin.cache.counters()["misses"] > 0
    lend_and_take_back(Twin(packed, hot_rows=TOP_K, hot_pages=6))


def test_several_tokens_per_sequence_are_refused(glm: ModelRunner) -> None:
    twin = Twin(glm, hot_rows=TOP_K)
    twin.start(0, prompt(13, 20))
    with pytest.raises(ValueError, match="a step of 3 tokens of 1 sequences: one each is needed"):
        twin.forward(twin.cache, [SequenceSlice([1, 2, 3], 18, twin.pages[0], hot_slot=0)])


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """Without experts, so that its steps can be captured in float32."""
    directory = make_dsa_checkpoint(
        tmp_path_factory.mktemp("gpu"), "glm_moe_dsa", index_topk_pattern="FSSF", first_k_dense_replace=4
    )
    return load(directory, torch.device("cuda", 0))


class Late:
    """Delays an operation on its stream by 5 ms, so that work that does not wait for it runs earlier."""

    def __init__(self, operation: Callable[..., None]) -> None:
        self._operation = operation
        self.streams: list[torch.cuda.Stream] = []

    def __call__(self, *args: object) -> None:
        self.streams.append(torch.cuda.current_stream())
        torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
        self._operation(*args)


@pytest.fixture(params=["write_back", "copy_misses", "swap_in"])
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Late]:
    """The operations that run concurrently with the layers, one per test."""
    operations: dict[str, Callable[..., None]] = {
        "write_back": write_back,
        "copy_misses": copy_misses,
        "swap_in": swap_in,
    }
    operation = Late(operations[request.param])
    monkeypatch.setattr(hot_rows, request.param, operation)
    yield operation
    assert operation.streams, "it was never called"
    assert all(stream != torch.cuda.default_stream() for stream in operation.streams)


def mixed_requests(twin: Twin) -> None:
    twin.start(0, prompt(20, 150))
    twin.start(1, prompt(21, 2 * TOP_K - 3))
    twin.start(2, prompt(22, 70), capacity=96)


@pytest.mark.gpu
@pytest.mark.parametrize("times", [1, 2])
def test_gpu_decoding_equals_a_plain_cache(on_gpu: ModelRunner, times: int) -> None:
    twin = Twin(on_gpu, hot_rows=times * TOP_K)
    mixed_requests(twin)
    for step in range(20):
        twin.step([2, 0, 1])
        if step == 10:
            twin.resize(2, times * TOP_K)
    twin.cache.wait()
    twin.cache.counters()
    twin.cache.wait()
    assert twin.cache.counters()["misses"] > 0
    twin.cache.close()


@pytest.mark.gpu
def test_lent_pages_hold_hot_rows_and_then_keys_again_on_the_gpu(on_gpu: ModelRunner) -> None:
    twin = Twin(on_gpu, hot_rows=TOP_K, hot_pages=6)
    lend_and_take_back(twin)
    twin.cache.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("late")
def test_steps_wait_for_delayed_operations(on_gpu: ModelRunner) -> None:
    """The buffer has only top_k rows, so every step evicts rows. A row that is overwritten before it is read, or read
    before it is written, changes the logits or host memory.
    """
    twin = Twin(on_gpu, hot_rows=TOP_K)
    mixed_requests(twin)
    for step in range(12):
        twin.step([0, 2, 1])
        if step == 4:
            twin.resize(2, TOP_K)
    twin.cache.close()


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["write_back"], indirect=True)
def test_event_after_a_step_covers_its_write_back(on_gpu: ModelRunner, late: Late) -> None:
    """The executor waits for this event before it reports a step: its pages may then be freed, sent or saved."""
    twin = Twin(on_gpu, hot_rows=TOP_K)
    mixed_requests(twin)
    twin.step([0, 1, 2])  # compiles: later steps keep the host for less time than the write-back is delayed
    late.streams.clear()
    pieces = [
        SequenceSlice(twin.tokens[slot][-1:], len(twin.tokens[slot]) - 1, [*twin.pages[slot], twin.free.pop()], slot)
        for slot in (0, 1, 2)
    ]
    twin.forward(twin.cache, pieces)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    assert not done.query(), "the write-back was not delayed"  # type: ignore[no-untyped-call]
    done.synchronize()
    for piece in pieces:
        page, offset = piece.pages[piece.start // PAGE_SIZE], piece.start % PAGE_SIZE
        assert not twin.cache.host.data[page, :, 0, 0, offset].isnan().any()
    assert len(late.streams) == 1
    twin.cache.close()


@pytest.mark.gpu
def test_graph_replays_equal_eager_steps(on_gpu: ModelRunner) -> None:
    check_graphs(on_gpu)


@pytest.mark.gpu
@pytest.mark.usefixtures("late")
def test_graphs_wait_for_delayed_operations(on_gpu: ModelRunner) -> None:
    check_graphs(on_gpu)


def check_graphs(on_gpu: ModelRunner) -> None:
    """Batches of 1 to 4, some padded, over both caches in graphs: the same kernels on the same shapes."""
    twin = Twin(on_gpu, hot_rows=TOP_K)
    graphed = {}
    for cache in (twin.plain, twin.cache):
        graphed[cache] = ModelRunner(on_gpu._decoder, device=on_gpu.device, dtype=on_gpu.dtype)
        assert graphed[cache].capture_graphs(cache, max_batch=SLOTS, max_context=MAX_CONTEXT)

    def forward(cache: KvCache, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        logits = graphed[cache].forward(cache, slices)
        assert logits is not None
        return logits.clone()

    twin.forward = forward  # type: ignore[method-assign]
    mixed_requests(twin)
    for slots in ([0], [1, 0], [2, 0, 1], [1, 2], [2, 1, 0], [0, 1, 2]) * 2:
        twin.step(slots)
    twin.resize(2, TOP_K)
    twin.start(3, prompt(23, 40))
    for _ in range(6):
        twin.step([3, 0, 2, 1])
    twin.cache.close()
