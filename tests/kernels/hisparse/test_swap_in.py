"""Swap-in against an LRU cache of Python lists, over traces: results, tables, misses and every byte of both pools."""

import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.kernels.backends import nvrtc
from pdserve.kernels.backends.nvrtc import CudaImpl
from pdserve.kernels.hisparse.slot_tables import (
    HotRows,
    KvRows,
    SlotTables,
    bucket_bits,
    buffer_pages,
    check_geometry,
    table_bytes,
)
from pdserve.kernels.hisparse.swap_in import copy_misses, swap_in
from pdserve.kernels.hisparse.swap_in_cuda import plan_threads
from pdserve.kernels.hisparse.swap_plan import SwapPlan
from pdserve.kernels.hisparse.write_back import write_back

LAYERS = 2  # one index group: layer 0 is swapped in, and its plan replayed on layer 1
POISON = 123456

Where = tuple[CudaImpl, torch.device]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("reference", "cpu"), id="reference-cpu"),
        pytest.param(("auto", "cpu"), id="auto-cpu"),
        pytest.param(("reference", "cuda"), id="reference-cuda", marks=pytest.mark.gpu),
        pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
    ],
)
def where(request: pytest.FixtureRequest) -> Where:
    impl, device = request.param
    return impl, torch.device(device, 0) if device == "cuda" else torch.device(device)


class ListLru:
    """The hot buffer of a request as Python lists, written from the definition of LRU."""

    def __init__(self, hot_rows: int, *, capacity: int, resident: bool) -> None:
        self.capacity = capacity
        self.tokens: list[int | None] = [slot if resident else None for slot in range(hot_rows)] + [None]
        self.order = list(range(hot_rows))
        self.reserved = hot_rows

    def newest_slot(self, seq_len: int) -> int:
        return seq_len - 1 if seq_len <= self.capacity else self.reserved

    def step(self, top_k: Sequence[int], seq_len: int) -> tuple[list[int | None], list[tuple[int, int]]]:
        """The slot of each selected token, and (token, slot) of each miss."""
        selected = [token if 0 <= token < seq_len else None for token in top_k]
        if seq_len <= self.capacity:
            return list(selected), []
        newest = seq_len - 1
        wanted = {token for token in selected if token not in (None, newest)}
        hits = [slot for slot in self.order if self.tokens[slot] in wanted]
        stale = [slot for slot in self.order if self.tokens[slot] not in wanted]
        where = {self.tokens[slot]: slot for slot in hits} | {newest: self.reserved}
        misses = []
        for token in selected:
            if token is not None and token not in where:
                slot = stale.pop(0)
                self.tokens[slot], where[token] = token, slot
                misses.append((token, slot))
        self.tokens[self.reserved] = newest
        self.order = stale + [slot for _, slot in misses] + hits + [self.reserved]
        self.reserved = self.order.pop(0)
        self.tokens[self.reserved] = None
        return [None if token is None else where[token] for token in selected], misses


@dataclasses.dataclass(frozen=True)
class Geometry:
    top_k: int
    hot_rows: int
    page_size: int
    row_bytes: int
    requests: int = 3
    max_context: int = 40

    @property
    def most_hot_pages(self) -> int:
        """The most pages of a request: those of its buffer, or of all its tokens."""
        return max(buffer_pages(self.hot_rows, self.page_size), -(-self.max_context // self.page_size))


class Simulator:
    """Both pools, the tables, and their expected content by the list model. `step` runs a step and checks all of it."""

    def __init__(self, geometry: Geometry, where: Where, *, batch: int, seed: int = 0) -> None:
        self.geometry, (self.impl, self.device), self.batch = geometry, where, batch
        g = geometry
        self.generator = torch.Generator().manual_seed(seed)
        check_geometry(
            top_k=g.top_k,
            hot_rows=g.hot_rows,
            requests=g.requests,
            max_context=g.max_context,
            page_size=g.page_size,
            row_bytes=g.row_bytes,
            host_rows=g.requests * g.max_context,
            hot_pool_rows=g.requests * g.most_hot_pages * g.page_size,
            device=self.device,
        )
        pages = -(-g.max_context // g.page_size)
        self.page_lists = self.shuffled_pages(g.requests, pages)
        self.host = self.noise(g.requests * pages + 2, LAYERS, g.page_size, g.row_bytes)
        if self.device.type == "cuda":
            self.host = self.host.pin_memory()
        self.hot_page_lists = self.shuffled_pages(g.requests, g.most_hot_pages)
        # the last page is not assigned
        self.hot = self.noise(g.requests * g.most_hot_pages + 3, LAYERS, g.page_size, g.row_bytes).to(self.device)
        self.expected_host, self.expected_hot = self.host.clone(), self.hot.to("cpu", copy=True)
        self.all_tables = SlotTables.allocate(
            groups=2,
            requests=g.requests,
            hot_rows=g.hot_rows,
            max_context=g.max_context,
            page_size=g.page_size,
            device=self.device,
        )
        self.tables = self.all_tables.group(1)
        self.plan = SwapPlan.allocate(batch + 1, g.top_k, self.device).first(batch)
        self.models = [ListLru(g.hot_rows, capacity=g.hot_rows, resident=False) for _ in range(g.requests)]
        self.hits = self.misses = 0
        self.lengths = [0] * g.requests  # tokens of each request, cached and generated
        self.truth = self.noise(g.requests, LAYERS, g.max_context, g.row_bytes)
        # inputs of the kernels, at fixed addresses for a CUDA graph
        self.top_k = torch.zeros(batch, g.top_k, dtype=torch.int32, device=self.device)
        self.requests = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.seq_lens = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.host_pages = torch.zeros(batch, pages, dtype=torch.int32, device=self.device)
        self.targets = torch.zeros(batch, dtype=torch.int32, device=self.device)
        self.new_rows = torch.zeros(batch, LAYERS, g.row_bytes, dtype=torch.uint8, device=self.device)

    def noise(self, *shape: int) -> torch.Tensor:
        count = math.prod(shape)
        words = torch.empty(-(-count // 8), dtype=torch.long).random_(-(1 << 63), None, generator=self.generator)
        return words.view(torch.uint8)[:count].view(shape)  # eight bytes per random number

    def shuffled_pages(self, requests: int, pages: int) -> list[list[int]]:
        order = torch.randperm(requests * pages + 2, generator=self.generator)[: requests * pages]
        lists: list[list[int]] = order.view(requests, pages).tolist()
        return lists

    def host_row(self, request: int, token: int) -> int:
        page, offset = divmod(token, self.geometry.page_size)
        return self.page_lists[request][page] * self.geometry.page_size + offset

    def hot_row(self, request: int, slot: int) -> int:
        page, offset = divmod(slot, self.geometry.page_size)
        return self.hot_page_lists[request][page] * self.geometry.page_size + offset

    def put(self, pool: torch.Tensor, rows: Sequence[int], content: torch.Tensor) -> None:
        """Set rows of a pool to `content` [layers, rows, bytes]."""
        index = torch.tensor(rows, dtype=torch.long, device=pool.device)
        pages, offsets = index // self.geometry.page_size, index % self.geometry.page_size
        pool[pages, :, offsets] = content.transpose(0, 1).to(pool.device)

    def admit(self, request: int, cached_tokens: int, capacity: int | None = None) -> None:
        """Start a new request in this slot, with its own content. Rows of the previous request stay, as poison."""
        g = self.geometry
        capacity = g.hot_rows if capacity is None else capacity
        resident = cached_tokens <= capacity
        self.lengths[request] = cached_tokens
        self.models[request] = ListLru(g.hot_rows, capacity=capacity, resident=resident)
        self.truth[request] = self.noise(LAYERS, g.max_context, g.row_bytes)
        self.all_tables.admit(request, resident=resident)
        self.set_capacity(request, capacity)
        rows = [self.host_row(request, token) for token in range(cached_tokens)]
        for pool in (self.host, self.expected_host):
            self.put(pool, rows, self.truth[request, :, :cached_tokens])
        if resident:
            rows = [self.hot_row(request, slot) for slot in range(cached_tokens)]
            for pool in (self.hot, self.expected_hot):
                self.put(pool, rows, self.truth[request, :, :cached_tokens])

    def set_capacity(self, request: int, capacity: int) -> None:
        """Set the capacity and assign pages for it. Freed pages are poisoned, so new ones contain poison."""
        g = self.geometry
        kept = max(buffer_pages(g.hot_rows, g.page_size), -(-capacity // g.page_size))
        self.models[request].capacity = capacity
        self.all_tables.set_pages(request, self.hot_page_lists[request][:kept], capacity)
        for page in self.hot_page_lists[request][kept:]:
            noise = self.noise(LAYERS, g.page_size, g.row_bytes)
            self.hot[page], self.expected_hot[page] = noise.to(self.device), noise

    def run(self) -> None:
        """A decode step without sparse attention; CUDA graphs capture this."""
        newest_rows = self.tables.newest_rows(self.requests, self.seq_lens)
        real, page_size = (newest_rows >= 0)[:, None, None], self.geometry.page_size
        pages, offsets = newest_rows.long() // page_size, newest_rows.long() % page_size
        self.hot[pages, :, offsets] = torch.where(real, self.new_rows, self.hot[pages, :, offsets])
        swap_in(
            self.plan,
            self.top_k,
            self.requests,
            self.seq_lens,
            self.tables,
            self.host_pages,
            self.host[:, 0],
            self.hot[:, 0],
            impl=self.impl,
        )
        for layer in range(1, LAYERS):
            copy_misses(self.plan, self.host[:, layer], self.hot[:, layer], impl=self.impl)
        hot_rows, host_rows = HotRows(newest_rows.expand(LAYERS, -1)), KvRows(self.targets)
        write_back(self.hot, hot_rows, self.host, host_rows, impl=self.impl)

    def set_inputs(self, selected: dict[int, list[int]]) -> None:
        """Live requests come first. Padding rows name slots that are not live, and select real tokens: no effect."""
        padding = [request for request in range(self.geometry.requests) if request not in selected]
        slots = (list(selected) + padding * self.batch)[: self.batch]
        for request in selected:
            self.lengths[request] += 1
        lengths = [self.lengths[request] if request in selected else 0 for request in slots]
        ids = [selected.get(request, [0] * self.geometry.top_k) for request in slots]
        self.top_k.copy_(torch.tensor(ids, dtype=torch.int32))
        self.requests.copy_(torch.tensor(slots, dtype=torch.int32))
        self.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.host_pages.copy_(torch.tensor([self.page_lists[request] for request in slots], dtype=torch.int32))
        targets = [self.host_row(slots[row], length - 1) if length else -1 for row, length in enumerate(lengths)]
        self.targets.copy_(torch.tensor(targets, dtype=torch.int32))
        new = [self.truth[request, :, length - 1] for request, length in zip(slots, lengths, strict=True)]
        self.new_rows.copy_(torch.stack(new))
        for tensor in (self.plan.rows, self.plan.miss_sources, self.plan.miss_rows, self.plan.miss_counts):
            tensor.fill_(POISON)

    def step(self, selected: dict[int, list[int]]) -> None:
        """One decode step of these requests, with the selection of each."""
        self.set_inputs(selected)
        self.run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.check_step(selected)
        self.check_state()

    def check_step(self, selected: dict[int, list[int]]) -> None:
        g = self.geometry
        rows, counts = self.plan.rows.tolist(), self.plan.miss_counts.tolist()
        sources, destinations = self.plan.miss_sources.tolist(), self.plan.miss_rows.tolist()
        for row, (request, top_k) in enumerate(selected.items()):
            model, length, truth = self.models[request], self.lengths[request], self.truth[request]
            newest_row = self.hot_row(request, model.newest_slot(length))
            slots, misses = model.step(top_k, length)
            assert rows[row] == [-1 if slot is None else self.hot_row(request, slot) for slot in slots]
            assert counts[row] == len(misses)
            filled = [self.hot_row(request, slot) for _, slot in misses]
            listed = zip(sources[row][: len(misses)], destinations[row][: len(misses)], strict=True)
            assert sorted(listed) == sorted(
                (self.host_row(request, token), hot_row) for (token, _), hot_row in zip(misses, filled, strict=True)
            )
            if length > model.capacity:
                self.hits += len({token for token in top_k if 0 <= token < length - 1}) - len(misses)
                self.misses += len(misses)

            self.put(self.expected_hot, [newest_row], truth[:, length - 1 : length])
            self.put(self.expected_hot, filled, truth[:, [token for token, _ in misses]])
            self.put(self.expected_host, [self.host_row(request, length - 1)], truth[:, length - 1 : length])
            tokens = [token for token, found in zip(top_k, rows[row], strict=True) if found >= 0]
            places = torch.tensor([found for found in rows[row] if found >= 0], dtype=torch.long)
            held = self.expected_hot[places // g.page_size, :, places % g.page_size]
            assert held.equal(truth[:, tokens].transpose(0, 1))
        for row in range(len(selected), self.batch):
            assert rows[row] == [-1] * g.top_k
            assert counts[row] == 0

    def check_state(self) -> None:
        g = self.geometry
        slot_tokens, token_slots = self.tables.slot_tokens.tolist(), self.tables.token_slots.tolist()
        order = self.tables.eviction_order.tolist()
        for request, model in enumerate(self.models):
            assert slot_tokens[request] == [-1 if token is None else token for token in model.tokens]
            inverse = {token: slot for slot, token in enumerate(model.tokens) if token is not None}
            assert token_slots[request] == [inverse.get(token, -1) for token in range(g.max_context)]
            assert order[request] == [*model.order, model.reserved]
        assert self.tables.lookups.tolist() == [self.hits, self.misses]
        assert self.plan.signals.count_nonzero() == 0
        assert self.hot.cpu().equal(self.expected_hot)
        assert self.host.equal(self.expected_host)


GEOMETRIES = [
    Geometry(top_k=top_k, hot_rows=times * top_k, page_size=page_size, row_bytes=row_bytes)
    for top_k, page_size, row_bytes in [(1, 4, 16), (3, 1, 24), (4, 3, 19), (6, 16, 33)]
    for times in (1, 2, 4)
]


@given(data=st.data())
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_traces_match_the_list_model(data: st.DataObject, where: Where) -> None:
    """Requests start at any length, change from fully resident to evicting and back, select any tokens, finish and
    leave their slot.
    """
    geometry = data.draw(st.sampled_from(GEOMETRIES))
    capacities = st.integers(geometry.hot_rows, geometry.max_context)
    simulator = Simulator(geometry, where, batch=3, seed=data.draw(st.integers(0, 3)))
    for _ in range(data.draw(st.integers(1, 10))):
        selected = {}
        for request in data.draw(st.permutations(range(geometry.requests))):
            length = simulator.lengths[request]
            if length == 0 or length + 1 > geometry.max_context or data.draw(st.integers(0, 9)) == 0:
                capacity = data.draw(st.just(geometry.hot_rows) | capacities)
                near_capacity = st.integers(max(0, capacity - 2), min(capacity + 2, geometry.max_context - 1))
                simulator.admit(request, data.draw(near_capacity | st.integers(0, geometry.max_context - 10)), capacity)
                length = simulator.lengths[request]
            elif data.draw(st.integers(0, 3)) == 0:
                larger = data.draw(capacities)
                shrinks = length > simulator.models[request].capacity or larger < simulator.models[request].capacity
                simulator.set_capacity(request, geometry.hot_rows if shrinks else larger)
            if data.draw(st.integers(0, 3)) == 0:
                continue  # not in this step's batch
            token = st.integers(-1, length + 1) | st.integers(max(0, length - 3), length)
            selected[request] = data.draw(st.lists(token, min_size=geometry.top_k, max_size=geometry.top_k))
        simulator.step(selected)


def drifting_trace(simulator: Simulator, generator: random.Random, steps: int, admitted: Sequence[int]) -> None:
    """The selected tokens change slightly or much per step, with duplicates and masked or out-of-range entries."""
    g = simulator.geometry
    for request, length in enumerate(admitted):
        simulator.admit(request, length)
    chosen = [generator.sample(range(max(g.top_k, length)), g.top_k) for length in admitted]
    for _ in range(steps):
        selected = {}
        for request in generator.sample(range(g.requests), generator.randint(1, simulator.batch)):
            length = simulator.lengths[request]
            for _ in range(generator.choice([0, 1, g.top_k // 4, g.top_k])):
                value = generator.choice([-1, length, generator.randrange(length), generator.choice(chosen[request])])
                chosen[request][generator.randrange(g.top_k)] = value
            selected[request] = list(chosen[request])
        simulator.step(selected)


@pytest.mark.parametrize("row_bytes", [48, 40, 2064])  # rows of 40 and 2064 bytes are not fetched early
@pytest.mark.parametrize("times", [1, 2, 4])
def test_long_traces_of_many_requests(times: int, row_bytes: int, where: Where) -> None:
    geometry = Geometry(
        top_k=72, hot_rows=72 * times, page_size=8, row_bytes=row_bytes, requests=5, max_context=72 * times + 120
    )
    simulator = Simulator(geometry, where, batch=4, seed=times)
    admitted = [geometry.hot_rows + offset for offset in (-9, -1, 0, 1, 90)]
    drifting_trace(simulator, random.Random(times), steps=20, admitted=admitted)


def test_planning_block_is_whole_warps_and_covers_every_entry() -> None:
    """For any geometry: at most 32 warps, whose results one warp can sum, and no warp without work."""
    for top_k, hot_rows in itertools.product((1, 31, 64, 65, 500, 2048, 4096, 32767), (1, 33, 127, 4096, 32767)):
        threads = plan_threads(top_k, max(top_k, hot_rows))
        assert threads % 32 == 0
        assert 32 <= threads <= 1024
        assert threads == 1024 or (2 * threads >= top_k and 4 * threads >= hot_rows)
        assert threads - 32 < max(top_k / 2, max(top_k, hot_rows) / 4)
        assert 1 << bucket_bits(top_k) >= 2 * top_k


@pytest.mark.gpu
@pytest.mark.parametrize("threads", [32, 96, 256, 960, 1024])
@pytest.mark.parametrize(("top_k", "hot_rows"), [(500, 500), (300, 1999), (2048, 4096)])
def test_plan_does_not_depend_on_the_block_size(
    top_k: int, hot_rows: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pdserve.kernels.hisparse import swap_in_cuda

    monkeypatch.setattr(swap_in_cuda, "plan_threads", lambda *_: threads)
    geometry = Geometry(top_k, hot_rows, page_size=64, row_bytes=16, requests=3, max_context=hot_rows + 3000)
    simulator = Simulator(geometry, ("cuda", torch.device("cuda", 0)), batch=3, seed=threads)
    drifting_trace(simulator, random.Random(threads), steps=4, admitted=[hot_rows - 2, hot_rows + 1, hot_rows + 2900])


@pytest.mark.gpu
def test_cuda_graph_replay_equals_eager_execution() -> None:
    geometry = Geometry(top_k=64, hot_rows=128, page_size=16, row_bytes=656, requests=4, max_context=400)
    simulator = Simulator(geometry, ("cuda", torch.device("cuda", 0)), batch=4)
    simulator.set_inputs({})
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        simulator.run()  # compiles; all rows are padding
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        simulator.run()
    simulator.run = graph.replay  # type: ignore[method-assign]
    drifting_trace(simulator, random.Random(5), steps=25, admitted=[120, 128, 129, 350])


def test_rows_just_loaded_are_not_evicted_next() -> None:
    """A buffer for the tokens of two steps: a step does not evict tokens of the previous step (SGLang #22170)."""
    simulator = Simulator(Geometry(4, 8, 4, 16), ("reference", torch.device("cpu")), batch=1)
    simulator.admit(0, 30)
    for step in range(6):
        tokens = [4 * step % 24 + i for i in range(4)]
        simulator.step({0: tokens})
        held = set(simulator.tables.slot_tokens[0].tolist())
        assert held >= set(tokens)


def test_the_previous_newest_token_is_a_hit() -> None:
    simulator = Simulator(Geometry(2, 4, 4, 16), ("reference", torch.device("cpu")), batch=1)
    simulator.admit(0, 20)
    simulator.step({0: [20, 3]})
    simulator.step({0: [20, 21]})
    assert simulator.plan.miss_counts.tolist() == [0]


# row sizes of 16n, 16n + 8 and 16n + 1..15 bytes, and rows shorter than one memory access
SIZES = [16, 48, 656, 1152, 4096, 24, 584, 8, 4, 1, 7, *range(33, 48), 1153, 1167]


@pytest.mark.parametrize("row_bytes", SIZES)
def test_rows_of_any_size_and_alignment_are_copied(row_bytes: int, where: Where) -> None:
    """The stride of rows is larger than their size, so that there are guard bytes between them."""
    impl, device = where
    generator = torch.Generator().manual_seed(row_bytes)
    pages, page_size, stride = 5, 3, row_bytes + 32 - row_bytes % 16
    misses = [[(14, 10), (0, 2)], [], [(7, 0), (3, 4), (8, 5), (1, 9)]]
    plan = SwapPlan.allocate(len(misses), 4, device)
    for row, pairs in enumerate(misses):
        plan.miss_counts[row] = len(pairs)
        for index, (source, destination) in enumerate(pairs):
            plan.miss_sources[row, index], plan.miss_rows[row, index] = source, destination

    def pool(memory: torch.Tensor, shift: int) -> torch.Tensor:
        return memory.as_strided((pages, page_size, row_bytes), (page_size * stride, stride, 1), shift)

    for host_shift, hot_shift in [(0, 0), (8, 0), (0, 4), (2, 2), (1, 0), (16, 15)]:
        size = (64 + pages * page_size * stride,)
        host_memory, hot_memory = (torch.randint(256, size, dtype=torch.uint8, generator=generator) for _ in range(2))
        expected = hot_memory.clone()
        for source, destination in itertools.chain(*misses):
            content = pool(host_memory, host_shift)[divmod(source, page_size)]
            pool(expected, hot_shift)[divmod(destination, page_size)] = content
        if device.type == "cuda":
            host_memory, hot_memory = host_memory.pin_memory(), hot_memory.to(device)
        copy_misses(plan, pool(host_memory, host_shift), pool(hot_memory, hot_shift), impl=impl)
        assert hot_memory.cpu().equal(expected)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("top_k", 65, "64"),
        ("top_k", 0, "1"),
        ("hot_rows", 32768, "32767"),
        ("requests", 0, "1"),
        ("page_size", 0, "1"),
        ("hot_pool_rows", 64, "65"),
        ("row_bytes", 0, "1"),
        ("host_rows", 2**31, str(2**31 - 1)),
        ("max_context", 0, "1"),
    ],
)
def test_geometry_is_refused_with_field_limit_and_value(field: str, value: int, limit: str) -> None:
    fits = {
        "top_k": 64,
        "hot_rows": 64,
        "requests": 8,
        "max_context": 100,
        "page_size": 4,
        "row_bytes": 16,
        "host_rows": 100,
        "hot_pool_rows": 68,
    }
    check_geometry(**fits, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"{field} must be in \[.*{limit}.*got {value}"):
        check_geometry(**{**fits, field: value}, device=torch.device("cpu"))


@pytest.mark.gpu
def test_more_shared_memory_than_a_block_has_is_refused() -> None:
    with pytest.raises(ValueError, match="bytes of shared memory per block"):
        check_geometry(
            top_k=30000,
            hot_rows=30000,
            requests=1,
            max_context=10**6,
            page_size=64,
            row_bytes=16,
            host_rows=10**6,
            hot_pool_rows=10**6,
            device=torch.device("cuda", 0),
        )


@pytest.mark.parametrize(("hot_rows", "max_context"), [(64, 1000), (64, 10)])
def test_tables_take_the_planned_memory(hot_rows: int, max_context: int) -> None:
    sizes = {"groups": 3, "requests": 5, "hot_rows": hot_rows, "max_context": max_context, "page_size": 8}
    tables = SlotTables.allocate(**sizes, device=torch.device("cpu"))
    tensors = [value for value in vars(tables).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 6
    assert table_bytes(**sizes) == sum(tensor.nbytes for tensor in tensors)


def test_invalid_arguments_are_refused() -> None:
    simulator = Simulator(Geometry(4, 4, 4, 16), ("reference", torch.device("cpu")), batch=2)

    def plan(**changed: object) -> None:
        arguments = {
            "plan": simulator.plan,
            "top_k": simulator.top_k,
            "requests": simulator.requests,
            "seq_lens": simulator.seq_lens,
            "tables": simulator.tables,
            "host_pages": simulator.host_pages,
            "host": simulator.host[:, 0],
            "hot": simulator.hot[:, 0],
        } | changed
        swap_in(**arguments)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match=r"selects 5 tokens, the hot buffer has 4"):
        plan(top_k=torch.zeros(2, 5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"the plan is for \[2, 4\]"):
        plan(top_k=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="do not fit 2 rows"):
        plan(seq_lens=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="must be int32"):
        plan(requests=simulator.requests.long())
    with pytest.raises(ValueError, match=r"host_pages \[1, 10\] do not fit 2 rows"):
        plan(host_pages=simulator.host_pages[:1])
    with pytest.raises(ValueError, match="pages of 3 rows, the tables are for 4"):
        plan(host=simulator.host[:, 0, :3], hot=simulator.hot[:, 0, :3])
    with pytest.raises(ValueError, match=r"tables.group\(i\)"):
        plan(tables=simulator.all_tables)
    with pytest.raises(ValueError, match="impl must be"):
        plan(impl="triton")
    with pytest.raises(ValueError, match="the tensors are on cpu"):
        plan(impl="cuda")
    with pytest.raises(ValueError, match="not pages of equal bytes"):
        copy_misses(simulator.plan, simulator.host[:, 0], simulator.hot[:, 0, :, :15])
    with pytest.raises(ValueError, match="rows must be contiguous"):
        copy_misses(simulator.plan, simulator.host[:, 0, :, ::2], simulator.hot[:, 0, :, ::2])
    with pytest.raises(ValueError, match="capacity 3 with 2 pages: a buffer has at least 4 rows"):
        simulator.all_tables.set_pages(0, [1, 2], 3)
    with pytest.raises(ValueError, match=r"with 11 pages: .* at most 10 pages"):
        simulator.all_tables.set_pages(0, list(range(11)), 4)


def test_missing_cuda_core_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(RuntimeError, match=r"cuda-core.*extra cuda12 or cuda13"):
        nvrtc.device_address(torch.zeros(1))


@pytest.mark.gpu
def test_unpinned_host_memory_is_refused() -> None:
    simulator = Simulator(Geometry(4, 4, 4, 16), ("cuda", torch.device("cuda", 0)), batch=2)
    with pytest.raises(ValueError, match="not pinned"):
        copy_misses(simulator.plan, simulator.host[:, 0].clone(), simulator.hot[:, 0])
