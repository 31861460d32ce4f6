"""mypy, with our settings, refuses every line that mixes two index spaces."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch

from pdserve.kernels.hisparse.slot_tables import SlotTables
from pdserve.kernels.hisparse.write_back import write_back
from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.index_spaces import HotPage, KvPage, RequestSlot
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.prefix_cache import PrefixCache
from pdserve.models.layers.batch import ForwardBatch
from pdserve.models.layers.latent_rows import new_token_rows
from pdserve.scheduler.messages.ranks import CopyPage, OpenHot, ResizeHot
from pdserve.scheduler.decode.memory.hot_buffers import HotBuffer, HotBuffers
from pdserve.scheduler.decode.memory.page_lending import Loan
from pdserve.scheduler.decode.memory.command_log import CommandLog
from pdserve.scheduler.decode.requests.request import Request


def leader(buffer: HotBuffer, request: Request, hot: HotBuffers, commands: CommandLog, prefixes: PrefixCache) -> None:
    assert request.grant is not None
    OpenHot(1, buffer.slot, tuple(buffer.pages), tuple(request.pages), 3, buffer.capacity)
    OpenHot(1, buffer.slot, tuple(request.pages), tuple(buffer.pages), 3, buffer.capacity)  # no
    ResizeHot(buffer.pages[0], tuple(buffer.pages), 8)  # no
    ResizeHot(buffer.slot, tuple(request.pages), 8)  # no
    CopyPage(1, request.pages[0], buffer.pages[0])  # no
    commands.release(request.grant)
    commands.release(buffer.grant)  # no
    hot.pages.release(buffer.grant)
    hot.pages.release(request.grant)  # no
    hot.pages.grant("a", 1, shared=request.pages)  # no
    prefixes.insert((1, 2), buffer.pages)  # no
    request.pages.append(7)  # no


def lender(buffer: HotBuffer, loan: Loan, overlay: PoolOverlay, commands: CommandLog, hot: HotBuffers) -> None:
    buffer.pages += overlay.hot_pages_under(loan.grant.pages)
    buffer.pages += loan.grant.pages  # no
    overlay.hot_pages_under(loan.hot_pages)  # no
    overlay.local_pages(loan.hot_pages, overlay)
    overlay.local_pages(loan.grant.pages, overlay)  # no
    buffer.pages += overlay.local_pages(loan.hot_pages, overlay)  # no
    commands.release(loan.grant)
    hot.pages.release(loan.grant)  # no


def rank(cache: HiSparseCache, slot: RequestSlot, hot_pages: list[HotPage], pages: list[KvPage]) -> None:
    cache.open(slot, hot_pages, 3, 8)
    cache.open(slot, pages, 3, 8)  # no
    cache.open(hot_pages[0], hot_pages, 3, 8)  # no
    cache.load_rows(hot_pages, pages, 3)
    cache.load_rows(pages, hot_pages, 3)  # no
    cache.resize(slot, pages, 8)  # no


def step(cache: HiSparseCache, tables: SlotTables, batch: ForwardBatch, slots: torch.Tensor) -> None:
    host_rows = new_token_rows(batch, 8, None)
    hot_rows = tables.newest_rows(slots, batch.positions)
    write_back(cache.hot_bytes, hot_rows, cache.host_bytes, host_rows)
    write_back(cache.host_bytes, host_rows, cache.hot_bytes, hot_rows)  # no
    write_back(cache.hot_bytes, slots, cache.host_bytes, host_rows)  # no
    write_back(cache.hot_bytes, hot_rows, cache.host_bytes, batch.positions)  # no
    write_back(cache.hot_bytes, hot_rows, cache.host_bytes, cache.swaps(1).miss_rows)  # no
    write_back(cache.hot_bytes, cache.swaps(1).miss_rows, cache.host_bytes, cache.swaps(1).miss_sources)
"""


def test_mypy_refuses_every_mix_up_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "mixed_index_spaces.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    # by file name only: mypy's cache may hold the path of an earlier run
    refused = {int(line) for line in re.findall(r"mixed_index_spaces\.py:(\d+): error: ", done.stdout)}
    mixed = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# no")}
    assert refused == mixed, done.stdout + done.stderr
