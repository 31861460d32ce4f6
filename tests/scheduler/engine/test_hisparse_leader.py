"""A HiSparse leader with a real rank: its pools, what it announces, and the integrity check when it is idle."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest.mock import Mock

import msgspec
import pytest
import zmq

from pdserve.common.sampling import SamplingParams
from pdserve.configs.schema import DecodeConfig
from pdserve.kernels.hisparse.slot_tables import buffer_pages
from pdserve.memory.hisparse.cache import HiSparseCache
from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.memory.sizing import GIB
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.engine import frontend_link as link_module
from pdserve.scheduler.engine import leader as leader_module
from pdserve.scheduler.engine.frontend_link import FrontendLink
from pdserve.scheduler.engine.leader import Leader
from pdserve.scheduler.engine.loop import IDLE_WAIT_S
from pdserve.scheduler.messages.frontend import Cancel, Ready, Status, Stop, Submit, ToFrontendBatch
from pdserve.scheduler.ranks.group import _LocalRank
from pdserve.transfer.control.events import LoadReported
from pdserve.transfer.protocol.messages import InstanceId, Load, Rank
from tests.checkpoints import make_dsa_checkpoint
from tests.scheduler.decode.memory.test_hot_buffers import open_loaded

PAGE_SIZE, HOT_ROWS, HOST_PAGES, SLOTS = 8, 16, 8, 3
LATENT_BYTES, INDEXER_BYTES = 4 * 64 * 4, 4 * 32 * 4
"""Bytes per token: four layers, rows of 48 + 16 and 32 floats."""
DEVICE_BYTES = HOST_PAGES * PAGE_SIZE * INDEXER_BYTES + 10.5 * PAGE_SIZE * LATENT_BYTES
"""For the index, which is as large as four hot pages, and for ten hot pages."""


def receive(frontend: "zmq.Socket[bytes]") -> ToFrontendBatch:
    assert frontend.poll(60_000), "the leader is silent"
    batch: ToFrontendBatch = msgspec.msgpack.decode(frontend.recv(), type=ToFrontendBatch)
    return batch


class Engine(NamedTuple):
    """A serving leader, and the socket of its frontend."""

    scheduler: DecodeScheduler
    cache: HiSparseCache
    peer_info: Rank
    inbox: "queue.SimpleQueue[object]"
    frontend: "zmq.Socket[bytes]"

    def status(self, wanted: Callable[[Status], bool]) -> Status:
        """The first Status that fulfils the condition."""
        ends_at = time.monotonic() + 10
        while time.monotonic() < ends_at:
            for message in receive(self.frontend):
                if isinstance(message, Status) and wanted(message):
                    return message
        raise AssertionError("no Status fulfilled the condition")

    def be_busy_and_idle(self) -> None:
        """Submit a request, which finds no prefill server, and abort it."""
        self.inbox.put(Submit("r", (1, 2, 3), SamplingParams(max_new_tokens=4)))
        self.status(lambda status: status.states["queued"] == 1)
        self.inbox.put(Cancel("r"))
        self.status(lambda status: status.states["queued"] == 0)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = make_dsa_checkpoint(tmp_path_factory.mktemp("model"), "deepseek_v32", index_topk=16, index_head_dim=32)
    config = DecodeConfig(
        model=str(model),
        device="cpu",
        page_size=PAGE_SIZE,
        enable_hisparse=True,
        hot_rows=HOT_ROWS,
        kv_tokens=HOST_PAGES * PAGE_SIZE,
        kv_memory_gib=DEVICE_BYTES / GIB,
        host_memory_gib=0.01,
        max_running_requests=SLOTS,
        local_prefill="never",  # so that a request waits in the queue
        threads=1,
    )
    schedulers: list[DecodeScheduler] = []

    def recorded(*arguments: object) -> DecodeScheduler:
        schedulers.append(DecodeScheduler(*arguments))  # type: ignore[arg-type]  # the arguments of the leader
        return schedulers[0]

    address = f"ipc://{tmp_path_factory.mktemp('socket')}/front"
    inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
    with zmq.Context() as context, context.socket(zmq.PAIR) as frontend, pytest.MonkeyPatch.context() as patch:
        frontend.bind(address)
        patch.setattr(leader_module, "DecodeScheduler", recorded)
        patch.setattr(link_module, "STATUS_INTERVAL_S", 0.02)
        link = FrontendLink(address, inbox.put)
        leader = Leader(config, link, inbox)
        thread = threading.Thread(target=leader.serve)
        thread.start()
        try:
            while not any(isinstance(message, Ready) for message in receive(frontend)):
                pass
            assert isinstance(leader._ranks._link, _LocalRank)
            assert leader._ranks._link._engine is not None
            cache = leader._ranks._link._engine._executor.cache
            assert isinstance(cache, HiSparseCache)
            close = Mock(wraps=cache.close)
            patch.setattr(cache, "close", close)
            (peer_info,) = leader._peer_infos
            yield Engine(schedulers[0], cache, peer_info, inbox, frontend)
        finally:
            inbox.put(Stop(drain_s=0))
            thread.join(20)
            link.close()
        close.assert_called_once_with()  # otherwise the driver frees the memory after the exit, which is slow


def test_leader_and_rank_agree_on_the_pools(engine: Engine) -> None:
    hot, cache = engine.scheduler.memory.hot, engine.cache
    assert hot is not None
    assert (engine.scheduler.allocator.num_pages, cache.num_pages) == (HOST_PAGES, HOST_PAGES)
    assert hot.limits.overlay == PoolOverlay(num_pages=8, kv_pages=2, hot_pages=1, covered=4)
    assert (hot.limits.num_pages, cache.own_hot_pages, cache.hot.num_pages) == (10, range(4, 14), 14)
    assert (hot.limits.slots, len(cache.tables.capacity)) == (SLOTS, SLOTS)
    assert (hot.limits.hot_rows, cache.tables.hot_rows) == (HOT_ROWS, HOT_ROWS)
    assert hot.limits.buffer_pages == buffer_pages(HOT_ROWS, PAGE_SIZE)


def test_device_memory_is_as_planned(engine: Engine) -> None:
    latent, indexer = engine.cache.pools
    assert latent.size_bytes == HOST_PAGES * PAGE_SIZE * LATENT_BYTES
    on_device = engine.cache.hot.size_bytes
    assert on_device == indexer.size_bytes + 10 * PAGE_SIZE * LATENT_BYTES
    assert engine.cache.device_bytes == on_device + engine.cache.tables.size_bytes
    assert on_device <= DEVICE_BYTES < on_device + PAGE_SIZE * LATENT_BYTES, "one more hot page would have fitted"


def test_rank_announces_which_pool_is_in_host_memory(engine: Engine) -> None:
    pools = {pool.layout.planes[0].name: (pool.memory, pool.base_address) for pool in engine.peer_info.pools}
    latent, indexer = engine.cache.pools
    assert pools == {"latent": ("host", latent.base_address), "indexer": ("device", indexer.base_address)}


def lose_page(engine: Engine) -> Callable[[], None]:
    """A KV page: in host memory, with its index on the device."""
    (page,) = engine.scheduler.allocator._free.take(1)
    return lambda: engine.scheduler.allocator._free.add(page)


def hold_page(engine: Engine) -> Callable[[], None]:
    grant = engine.scheduler.allocator.grant("nobody", 1)
    assert grant is not None
    return lambda: engine.scheduler.allocator.release(grant)


def lose_hot_page(engine: Engine) -> Callable[[], None]:
    assert engine.scheduler.memory.hot is not None
    pages = engine.scheduler.memory.hot.allocator
    (page,) = pages._free.take(1)
    return lambda: pages._free.add(page)


def keep_loan(engine: Engine) -> Callable[[], None]:
    """Lent pages that no hot buffer has."""
    loan = engine.scheduler.allocator.lend("hot buffer of nobody", 1)
    return lambda: engine.scheduler.allocator.release(loan)


def lose_request_slot(engine: Engine) -> Callable[[], None]:
    assert engine.scheduler.memory.hot is not None
    slots = engine.scheduler.memory.hot._free_slots
    slot = slots.pop()
    return lambda: slots.append(slot)


def keep_hot_buffer(engine: Engine) -> Callable[[], None]:
    hot = engine.scheduler.memory.hot
    assert hot is not None
    open_loaded(hot, "somebody", 3)
    return lambda: hot.close("somebody")


def break_table(engine: Engine) -> Callable[[], None]:
    """On the rank: the eviction order."""
    order = engine.cache.tables.eviction_order
    before = order.clone()
    order[1, 2, 0] = 5

    def mend() -> None:
        order.copy_(before)

    return mend


@pytest.mark.parametrize(
    ("break_it", "problem"),
    [
        (lose_page, "7 free + 0 idle + 0 held pages are not the 8 of the pool"),
        (hold_page, "idle, but pages are held by nobody"),
        (lose_hot_page, "free + 0 idle + 0 held pages are not the"),
        (keep_loan, "idle, but pages are held by hot buffer of nobody"),
        (lose_request_slot, "request slots are [1, 2]"),
        (keep_hot_buffer, "idle, but pages are held by somebody"),
        (break_table, "rank 0: index group 1, request slot 2: the eviction order does not list every slot once"),
    ],
)
def test_broken_pool_is_logged_and_counted_and_makes_the_server_unhealthy(
    engine: Engine, break_it: Callable[[Engine], Callable[[], None]], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    fine = engine.status(lambda status: "integrity_errors" in status.counters and not status.problems)
    mend = break_it(engine)
    with caplog.at_level(logging.ERROR):
        engine.be_busy_and_idle()
        status = engine.status(lambda status: bool(status.problems))
    assert len(status.problems) == 1
    assert status.problems[0].startswith("integrity check: ")
    assert problem in status.problems[0]
    assert status.counters["integrity_errors"] == fine.counters["integrity_errors"] + 1
    assert [record.message for record in caplog.records] == list(status.problems)
    mend()
    engine.be_busy_and_idle()
    engine.status(lambda status: not status.problems)


def test_idle_check_runs_despite_heartbeats_of_many_peers(engine: Engine) -> None:
    """A server is idle if it has no request; events may still come."""
    mend = hold_page(engine)
    checked = threading.Event()

    def beat() -> None:
        while not checked.wait(IDLE_WAIT_S / 10):
            engine.inbox.put(LoadReported(InstanceId("somebody"), Load()))

    peers = threading.Thread(target=beat)
    peers.start()
    try:
        engine.be_busy_and_idle()
        engine.status(lambda status: bool(status.problems))
        mend()
        engine.be_busy_and_idle()
        engine.status(lambda status: not status.problems)
    finally:
        checked.set()
        peers.join()
