"""Blocks are copied between the pools of ranks and a store in memory: any layout reads what any other wrote."""

import queue
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from pdserve.memory.index_spaces import KvPage
from pdserve.memory.kv_pool import KvPool
from pdserve.models.config.sharding import Shard
from pdserve.scheduler.messages.ranks import RankReport, StoreLoad, StoreLoaded, StorePing, StoreWrite, StoreWritten
from pdserve.scheduler.ranks.store import RankStore
from pdserve.scheduler.ranks.transfers.announcement import layout_of
from pdserve.transfer.data.local_pool import LocalPool
from pdserve.transfer.store.blocks import BLOCK_TOKENS, PoolShard
from tests.transfer.store.fake_store import FakeChannel, FakeStore

LAYERS, HEADS, BLOCKS = 6, 4, 5
CPU = torch.device("cpu")
HASHES = tuple(bytes([number]) * 32 for number in range(BLOCKS))


class Rank:
    """A rank with one dense pool, or with the two pools of a sparse model."""

    def __init__(
        self,
        store: FakeStore,
        *,
        page_size: int,
        tp: tuple[int, int] = (0, 1),
        pp: tuple[int, int] = (0, 1),
        sparse: bool = False,
        writes: bool = True,
    ) -> None:
        self.page_size = page_size
        self.reports: queue.SimpleQueue[RankReport] = queue.SimpleQueue()
        self.channels: list[FakeChannel] = []
        layers = Shard(stage=pp[0], stages=pp[1]).layers(LAYERS)
        share = HEADS // tp[1]
        num_pages = 2 * (-(-BLOCKS * BLOCK_TOKENS // page_size) + 1)
        kinds: list[tuple[tuple[str, ...], str | None, range]]
        kinds = [(("latent",), None, range(1)), (("indexer",), "indexer_scale", range(1))]
        if not sparse:
            kinds = [(("k", "v"), None, range(tp[0] * share, (tp[0] + 1) * share))]
        self.pools = [
            KvPool(
                num_pages=num_pages,
                num_layers=len(layers),
                num_heads=len(heads),
                page_size=page_size,
                head_dim=16,
                dtype=torch.float32 if scale is None else torch.float8_e4m3fn,
                device=CPU,
                planes=planes,
                scale_plane=scale,
                first_layer=layers.start,
                first_head=heads.start,
            )
            for planes, scale, heads in kinds
        ]
        pages = list(range(num_pages))
        random.Random(page_size).shuffle(pages)
        self.pages = tuple(map(KvPage, pages))

        def stage_layers(stages: int) -> list[range]:
            of_stages = (Shard(stage=stage, stages=stages) for stage in range(stages))
            return [shard.layers(LAYERS) for shard in of_stages] if stages <= LAYERS else []

        def open_channel(size_bytes: int) -> FakeChannel:
            # room for two blocks, so that there are several batches
            self.channels.append(FakeChannel(store, min(size_bytes, 2 * LAYERS * HEADS * BLOCK_TOKENS * 200)))
            return self.channels[-1]

        pools = [LocalPool(pool, layout_of(pool)) for pool in self.pools]
        shards = [PoolShard(pool.layout, stage_layers, writes=writes) for pool in pools]
        self.store = RankStore(0, pools, shards, CPU, report=self.reports.put, open_channel=open_channel)

    def fill(self) -> None:
        """Write KV that depends on token, layer, head and plane only."""
        for pool in self.pools:
            planes = [
                expected(name, size, pool.layers, pool.heads)
                for name, size in zip(pool.planes, pool.plane_token_bytes, strict=True)
            ]
            pool.write_tokens(self.pages, 0, planes)

    def check(self, start: int, end: int) -> None:
        """Tokens [start, end) have the KV of `fill`."""
        if start == end:
            return
        for pool in self.pools:
            found = pool.read_tokens(self.pages, start, end)
            for name, size, plane in zip(pool.planes, pool.plane_token_bytes, found, strict=True):
                assert torch.equal(plane, expected(name, size, pool.layers, pool.heads)[:, :, start:end]), name

    def write(self, blocks: Sequence[bytes] = HASHES, first: int = 0) -> StoreWritten:
        first_page, offset = divmod(first * BLOCK_TOKENS, self.page_size)
        self.store.enqueue(StoreWrite(1, tuple(blocks), self.pages[first_page:], offset))
        report = self.reports.get(timeout=30)
        assert isinstance(report, StoreWritten)
        return report

    def load(
        self, first: int = 0, skip: int = 0, timeout_s: float = 30.0, lookup_timeout_s: float = 30.0
    ) -> StoreLoaded:
        first_page, offset = divmod(first * BLOCK_TOKENS, self.page_size)
        command = StoreLoad(2, HASHES[first:], self.pages[first_page:], offset, skip, timeout_s, lookup_timeout_s)
        self.store.load(command, lambda: None)
        report = self.reports.get(timeout=30)
        assert isinstance(report, StoreLoaded)
        return report


def expected(name: str, size: int, layers: range, heads: range) -> torch.Tensor:
    cells = [
        torch.randint(
            0,
            256,
            (BLOCKS * BLOCK_TOKENS, size),
            dtype=torch.uint8,
            generator=torch.Generator().manual_seed(len(name) * 10_000 + layer * 100 + head),
        )
        for layer in layers
        for head in heads
    ]
    return torch.stack(cells).view(len(layers), len(heads), BLOCKS * BLOCK_TOKENS, size)


MakeRank = Callable[..., Rank]


@contextmanager
def ranks(store: FakeStore) -> Iterator[MakeRank]:
    made: list[Rank] = []

    def make(**options: object) -> Rank:
        made.append(Rank(store, **options))  # type: ignore[arg-type]
        return made[-1]

    try:
        yield make
    finally:
        for rank in made:
            rank.store.close()


@pytest.fixture
def store() -> FakeStore:
    return FakeStore()


@pytest.fixture
def make(store: FakeStore) -> Iterator[MakeRank]:
    with ranks(store) as maker:
        yield maker


LAYOUTS = [
    pytest.param([{}], [{}], id="equal"),
    pytest.param([{}], [{"page_size": 64}], id="pages-16-to-64"),
    pytest.param([{"page_size": 48}], [{"page_size": 16}], id="pages-48-to-16"),
    pytest.param([{}], [{"tp": (0, 2)}, {"tp": (1, 2)}], id="tp1-to-tp2"),
    pytest.param([{"tp": (rank, 4)} for rank in range(4)], [{"tp": (0, 2)}, {"tp": (1, 2)}], id="tp4-to-tp2"),
    pytest.param([{"pp": (0, 2)}, {"pp": (1, 2)}], [{}], id="pp2-to-pp1"),
    pytest.param([{}], [{"pp": (stage, 3)} for stage in range(3)], id="pp1-to-pp3"),
    pytest.param(
        [{"pp": (stage, 3), "page_size": 8} for stage in range(3)],
        [{"pp": (stage, 2), "tp": (rank, 2), "page_size": 128} for stage in range(2) for rank in range(2)],
        id="pp3-to-tp2-pp2",
    ),
    pytest.param([{"sparse": True}], [{"sparse": True, "page_size": 64}], id="sparse"),
    pytest.param([{"sparse": True, "pp": (0, 2)}, {"sparse": True, "pp": (1, 2)}], [{"sparse": True}], id="sparse-pp"),
]


@pytest.mark.parametrize(("writers", "readers"), LAYOUTS)
def test_any_layout_reads_what_another_wrote(
    make: MakeRank, writers: list[dict[str, object]], readers: list[dict[str, object]]
) -> None:
    for options in writers:
        rank = make(**{"page_size": 16, **options})
        rank.fill()
        assert rank.write().blocks == BLOCKS
    for options in readers:
        rank = make(**{"page_size": 16, **options})
        report = rank.load()
        assert (report.blocks, report.problem, report.corrupt) == (BLOCKS, None, 0)
        rank.check(0, BLOCKS * BLOCK_TOKENS)


def test_load_ends_at_the_first_missing_block(make: MakeRank) -> None:
    writer, reader = make(page_size=16), make(page_size=16)
    writer.fill()
    writer.write(HASHES[:2])
    writer.write(HASHES[3:], first=3)
    assert reader.load().blocks == 2
    reader.check(0, 2 * BLOCK_TOKENS)
    assert not reader.pools[0].read_tokens(reader.pages, 2 * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS)[0].any()


def test_blocks_of_two_layouts_continue_each_other(make: MakeRank) -> None:
    whole, reader = make(page_size=16), make(page_size=16)
    whole.fill()
    whole.write(HASHES[:2])
    for stage in range(2):
        rank = make(page_size=16, pp=(stage, 2))
        rank.fill()
        rank.write(HASHES[2:], first=2)
    assert reader.load().blocks == BLOCKS
    reader.check(0, BLOCKS * BLOCK_TOKENS)


def test_load_does_not_overwrite_tokens_in_shared_pages(make: MakeRank) -> None:
    writer, reader = make(page_size=16), make(page_size=16)
    writer.fill()
    writer.write()
    skip = 16  # the first half of block 1 is in a page that others read
    assert reader.load(first=1, skip=skip).blocks == BLOCKS - 1
    reader.check(BLOCK_TOKENS + skip, BLOCKS * BLOCK_TOKENS)
    assert not reader.pools[0].read_tokens(reader.pages, 0, BLOCK_TOKENS + skip)[0].any()


def test_stored_blocks_are_not_written_again(make: MakeRank, store: FakeStore) -> None:
    rank = make(page_size=16)
    rank.fill()
    rank.write(HASHES[:3])
    store.calls.clear()
    assert rank.write().blocks == 2
    assert rank.write().blocks == 0
    assert store.calls == ["exist", "put", "exist"]


def test_replica_writes_nothing(make: MakeRank, store: FakeStore) -> None:
    rank = make(page_size=16, writes=False)
    assert rank.write() == StoreWritten(0, 1, 0, 0)
    assert not store.values


def test_full_store_takes_what_fits_and_is_no_failure(make: MakeRank, store: FakeStore) -> None:
    rank = make(page_size=16)
    rank.fill()
    store.most_values = 2 * HEADS + 1
    report = rank.write()
    assert (report.blocks, report.problem, report.refused) == (2, None, BLOCKS - 2)
    assert rank.load().blocks == 2


def test_dead_store_is_reported_and_loads_nothing(make: MakeRank, store: FakeStore) -> None:
    rank = make(page_size=16)
    store.dead = True
    assert rank.load().problem == rank.write().problem == "the master of the store does not answer"
    rank.store.enqueue(StorePing())
    assert rank.reports.get(timeout=30).problem is not None  # type: ignore[union-attr]
    store.dead = False
    rank.store.enqueue(StorePing())
    assert rank.reports.get(timeout=30).problem is None  # type: ignore[union-attr]


def test_store_that_does_not_answer_in_time_is_a_problem(make: MakeRank) -> None:
    rank = make(page_size=16)
    rank.channels[0].silent = True
    for timeout_s in (0.05, 1.0, 20.0):
        report = rank.load(timeout_s=timeout_s)
        assert (report.blocks, report.late) == (0, True)
        if report.problem is not None:  # None: on a busy machine, the load did not begin in time
            break
    assert report.problem == "the store has not answered"


def test_slow_lookup_is_given_up_without_a_problem(make: MakeRank) -> None:
    rank = make(page_size=16)
    report = rank.load(lookup_timeout_s=0.0)
    assert (report.blocks, report.problem, report.late) == (0, None, True)


@pytest.mark.parametrize(("busy_s", "problem"), [(0.5, None), (40.0, "the store has not answered for 40.0 s")])
def test_load_does_not_wait_for_one_that_was_given_up(make: MakeRank, busy_s: float, problem: str | None) -> None:
    rank = make(page_size=16)
    rank.channels[0].busy_for_s = busy_s
    report = rank.load(timeout_s=30.0)
    assert (report.blocks, report.problem, report.late) == (0, problem, True)


@pytest.mark.parametrize("seed", range(8))
def test_wrong_bytes_are_never_used(make: MakeRank, store: FakeStore, seed: int) -> None:
    """A store that returns changed, short, empty or exchanged values: what is loaded is right, the rest is counted."""
    chance = random.Random(seed)
    writer = make(page_size=16)
    writer.fill()
    writer.write()

    def lie(_key: str, value: bytes) -> bytes:
        match chance.randrange(12):
            case 0:
                at = chance.randrange(len(value))
                return value[:at] + bytes([value[at] ^ 1 << chance.randrange(8)]) + value[at + 1 :]
            case 1:
                return value[: chance.randrange(len(value))]
            case 2:
                return chance.choice(list(store.values.values()))
            case _:
                return value

    store.read_hook = lie
    reader = make(page_size=chance.choice([16, 32, 64]))
    before = len(store.values)
    report = reader.load()
    reader.check(0, report.blocks * BLOCK_TOKENS)
    assert report.blocks == BLOCKS or before - len(store.values) == report.corrupt
    store.read_hook = lambda _key, value: value
    writer.write()  # wrong values were removed, so they can be written again
    assert reader.load().blocks == BLOCKS
    reader.check(0, BLOCKS * BLOCK_TOKENS)
