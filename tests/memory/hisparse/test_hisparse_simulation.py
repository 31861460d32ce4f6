"""Random workloads: the scheduler's decisions run on a real HiSparse cache. Every row that a step selects and every key
of its sequence is correct, in memory where keys and hot rows overlap.
"""

import collections
import random

import pytest
import torch

from pdserve.kernels.hisparse.slot_tables import HotRows, KvRows
from pdserve.kernels.hisparse.swap_in import copy_misses, swap_in
from pdserve.kernels.hisparse.write_back import write_back
from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.kv_pool import KvPool, zeroed
from pdserve.scheduler.decode.rooms.batch import DecodeRow
from pdserve.scheduler.messages.ranks import OpenHot, ResizeHot
from tests.scheduler.decode.test_scheduler_traces import Mode
from tests.scheduler.simulation.random_workloads import ACTIONS, run_workload
from tests.scheduler.simulation.simulator import HOT_BYTES, HOT_ROWS, KEY_BYTES, LOST, PAGE_SIZE, Prefix, Row, Simulator

LAYERS, GROUPS, TOP_K, MAX_CONTEXT, SLOTS = 3, (0, 0, 1), 5, 64, 3
CPU = torch.device("cpu")
PARTS = torch.arange(LAYERS) / LAYERS
"""A layer adds this to the number of a row, so that rows of different layers differ."""


class CacheSimulator(Simulator):
    """A simulator with one HiSparse cache as its ranks. A row, and its key, is a number that identifies the prefix."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(**mode._asdict())
        hot_pages = mode.hot_pages
        assert hot_pages is not None, "the mode has no hot buffers"
        host, keys = self._pool(self.pages, "latent"), self._pool(self.pages, "indexer")
        hot = self._pool(hot_pages, "latent")
        if mode.lends:
            overlay = PoolOverlay.of(self.pages, kv_page_bytes=keys.page_bytes, hot_page_bytes=hot.page_bytes)
            memory = zeroed((overlay.covered + hot_pages) * hot.page_bytes, CPU)
            keys = self._pool(self.pages, "indexer", memory)
            hot = self._pool(overlay.covered + hot_pages, "latent", memory)
        self.cache = HiSparseCache(
            host,
            keys,
            hot,
            slots=SLOTS,
            hot_rows=HOT_ROWS,
            max_context=MAX_CONTEXT,
            top_k=TOP_K,
            groups=GROUPS,
        )
        self.keys = keys
        for pool in (host, keys, hot):
            pool.data.fill_(torch.nan)
        self._numbers: dict[Prefix, int] = {(): 0, LOST: 1}
        self._draw = random.Random(hot_pages)
        self.rows_seen = 0
        """Selected rows that were compared."""

    def _pool(self, num_pages: int, plane: str, memory: torch.Tensor | None = None) -> KvPool:
        return KvPool(
            num_pages=num_pages,
            num_layers=LAYERS,
            num_heads=1,
            page_size=PAGE_SIZE,
            head_dim=HOT_BYTES if plane == "latent" else KEY_BYTES,
            dtype=torch.float32,
            device=CPU,
            planes=(plane,),
            memory=memory,
        )

    def _number(self, prefix: Prefix) -> int:
        return self._numbers.setdefault(prefix, len(self._numbers))

    def _rows(self, prefix: Prefix) -> torch.Tensor:
        """[layers, 1]: the row of a token in each layer, one number in every column."""
        return (self._number(prefix) + PARTS)[:, None]

    def _write(self, row: Row, prefix: Prefix) -> None:
        """An external write: by a prefill server, or of a copied page."""
        super()._write(row, prefix)
        page, offset = row
        # as numpy arrays: torch takes ten times as long for one element
        self.cache.host.data.numpy()[page, :, 0, 0, offset] = (self._number(prefix) + PARTS.numpy())[:, None]
        self.keys.data.numpy()[page, :, 0, 0, offset] = self._number(prefix)

    def _open_hot(self, opened: OpenHot) -> None:
        super()._open_hot(opened)
        self.cache.open(opened.slot, opened.hot_pages, opened.tokens, opened.capacity)

    def _load_hot(self, opened: OpenHot) -> None:
        super()._load_hot(opened)
        self.cache.load_rows(opened.hot_pages, opened.pages, opened.tokens)

    def _resize_hot(self, buffer: ResizeHot) -> None:
        super()._resize_hot(buffer)
        self.cache.resize(buffer.slot, buffer.hot_pages, buffer.capacity)

    def _use_hot(self, row: DecodeRow, tokens: Prefix, *, alive: bool) -> None:
        """Place the new row, select, compare the selected rows (unless the request has ended), write back."""
        super()._use_hot(row, tokens, alive=alive)
        if not row.pages:
            return
        cache, length = self.cache, len(tokens)
        requests, seq_lens = torch.tensor([row.hot_slot], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        newest = cache.tables.newest_rows(requests, seq_lens)  # [groups, 1]
        for layer, group in enumerate(GROUPS):
            page, offset = divmod(int(newest[group, 0]), PAGE_SIZE)
            cache.hot.data[page, layer, 0, 0, offset] = self._rows(tokens)[layer]
        host_pages, plan = torch.tensor([row.pages], dtype=torch.int32), cache.swaps(1)
        for layer, group in enumerate(GROUPS):
            host, hot = cache.host_bytes[:, layer], cache.hot_bytes[:, layer]
            if layer and group == GROUPS[layer - 1]:
                copy_misses(plan, host, hot)
            else:
                selected = [self._draw.randrange(-1, length) for _ in range(TOP_K)]
                top_k = torch.tensor([selected], dtype=torch.int32)
                swap_in(plan, top_k, requests, seq_lens, cache.group_tables[group], host_pages, host, hot)
            if alive:
                self._check_rows(layer, selected, plan.rows[0].tolist(), tokens)
        target = row.pages[row.position // PAGE_SIZE] * PAGE_SIZE + row.position % PAGE_SIZE
        hot_rows = HotRows(newest[cache.layer_groups])
        write_back(cache.hot_bytes, hot_rows, cache.host_bytes, KvRows(torch.tensor([target], dtype=torch.int32)))
        if alive:
            self._check_pages(row, tokens)

    def _check_rows(self, layer: int, selected: list[int], rows: list[int], tokens: Prefix) -> None:
        assert [row < 0 for row in rows] == [token < 0 for token in selected]
        used = torch.tensor([row for row in rows if row >= 0], dtype=torch.long)
        found = self.cache.hot.data[used // PAGE_SIZE, layer, 0, 0, used % PAGE_SIZE]
        expected = [self._number(tokens[: token + 1]) for token in selected if token >= 0]
        rows_of_layer = (torch.tensor(expected) + PARTS[layer])[:, None]
        assert (found == rows_of_layer).all(), f"layer {layer} reads a wrong row of {selected}"
        self.rows_seen += len(expected)

    def _check_pages(self, row: DecodeRow, tokens: Prefix) -> None:
        """All rows are in host memory; all keys except the newest, which this step writes, are on the device."""
        positions = torch.arange(len(tokens))
        pages, offsets = torch.tensor(row.pages)[positions // PAGE_SIZE], positions % PAGE_SIZE
        numbers = torch.tensor([self._number(tokens[: position + 1]) for position in range(len(tokens))])
        rows = numbers[:, None] + PARTS
        assert (self.cache.host.data[pages, :, 0, 0, offsets] == rows[:, :, None]).all(), "host rows"
        keys = self.keys.data[pages[:-1], :, 0, 0, offsets[:-1]]
        assert (keys == numbers[:-1, None, None]).all(), "keys"


MODES = (
    Mode(overlap=True, hot_pages=7, lends=True, prefix_cache=False),
    Mode(stages=2, hot_pages=9, lends=True, prefix_cache=False),
    Mode(stages=2, hot_pages=10, lends=True, prefix_cache=False),
    Mode(hot_pages=3, lends=True),
    Mode(overlap=True, hot_pages=7),
    Mode(stages=2, hot_pages=9),
)
BUSY = {**ACTIONS, "submit": 20, "decode_turn": 40, "rank_turn": 60, "prefill_turn": 40, "end_write": 40, "deliver": 90}


@pytest.mark.slow
def test_every_selected_row_is_correct_in_random_workloads() -> None:
    """The workloads have every transition of a hot buffer."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(12):
        simulator = CacheSimulator(MODES[seed % len(MODES)])
        run_workload(simulator, BUSY, seed, steps=450)
        simulator.cache.check_integrity()
        seen.update(simulator.hot_seen)
        seen.update(simulator.cache.counters())
        seen["rows"] += simulator.rows_seen
    for event in (
        "opened fully resident",
        "opened evicting",
        "grown",
        "shrunk",
        "evicting step",
        "lent",
        "reclaimed",
        "lost hot buffer",
        "reopened",
        "hits",
        "misses",
    ):
        assert seen[event] > 0, f"{event} never happened"
    assert seen["rows"] > 10_000
