"""A decode server whose process was stopped for some time, for example by SIGSTOP: that time counts neither as a wait
for a prefill server nor as part of a quarantine.
"""

import math
import queue
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.engine import loop as loops
from pdserve.scheduler.engine.decode_engine import ADDING_PAUSE_S, DecodeEngine
from pdserve.scheduler.engine.loop import EngineLoop
from pdserve.scheduler.engine.routing import DecodeRouter
from pdserve.scheduler.messages.frontend import Submit
from pdserve.transfer.control.events import PeerClosed, PeerLost
from pdserve.transfer.protocol.messages import InstanceId

PREFILL = InstanceId("prefill")
PREFILL_WAIT_S, QUARANTINE_S, STOPPED_S = 3.0, 6.0, 30.0


class Server:
    """The engine loop of a decode server without ranks, frontend and control thread, and its clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(loops, "time", SimpleNamespace(monotonic=lambda: self.now, time=time.time))
        limits = DecodeLimits(
            page_size=4,
            max_running_requests=4,
            max_queued_requests=8,
            growth_tokens=4,
            retract_pages=0,
            queue_timeout_s=60,
            prefill_wait_s=PREFILL_WAIT_S,
            prefill_timeout_s=60,
            request_timeout_s=600,
            quarantine_s=QUARANTINE_S,
            local_prefill="never",
        )
        self.scheduler = DecodeScheduler(limits, PageAllocator[KvPage](20), [1])
        ranks = Mock(size=1, numbers=[0])
        ranks.busy_seconds.return_value = {}
        engine = DecodeEngine(self.scheduler, ranks, control=Mock(), hello=Mock())
        self.inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.loop = EngineLoop([engine], DecodeRouter([self.scheduler]), Mock(), self.inbox, ranks)

    def submit(self) -> None:
        self.inbox.put(Submit("r", tuple(range(10)), SamplingParams(max_new_tokens=4)))
        self.loop._handle_events()

    def run_for(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.loop._turn()

    def state(self) -> str:
        """Of the request."""
        return self.scheduler.requests["r"].state.value if "r" in self.scheduler.requests else "ended"


def test_request_still_waits_for_a_prefill_server_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.submit()
    server.run_for(1.0)
    server.now += STOPPED_S
    server.run_for(PREFILL_WAIT_S - 0.2)
    assert server.state() == "queued"
    server.scheduler.peer_up(PrefillPeer(PREFILL, {"a:1"}))
    server.run_for(0.1)
    assert server.state() == "prefilling"


def test_request_fails_if_no_prefill_server_pairs_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(monkeypatch)
    server.submit()
    server.run_for(1.0)
    server.now += STOPPED_S
    server.run_for(PREFILL_WAIT_S + 0.2)
    assert server.state() == "ended"


@pytest.mark.parametrize("stopped_s", [0.0, STOPPED_S])
def test_quarantine_goes_on_after_a_stop(stopped_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that the kernel received meanwhile are written into the pages when this process runs again."""
    server = Server(monkeypatch)
    server.scheduler.peer_up(PrefillPeer(PREFILL, {"a:1"}))
    server.submit()
    server.run_for(0.1)
    assert server.state() == "prefilling"
    server.scheduler.handle(PeerLost(PREFILL, "its connection was closed"), server.now)
    server.scheduler.handle(PeerClosed(PREFILL), server.now)
    server.run_for(1.0)
    holds = server.scheduler.memory.holds
    held = holds.quarantined_pages
    assert held
    server.now += stopped_s
    server.run_for(QUARANTINE_S - 1.2)
    assert holds.quarantined_pages == held
    server.run_for(0.4)
    assert holds.quarantined_pages == 0


class Inbox:
    """Without events; notes how long the loop waits for one."""

    def __init__(self) -> None:
        self.waits_s: list[float] = []

    def get(self, timeout: float) -> object:
        self.waits_s.append(timeout)
        raise queue.Empty


@pytest.mark.parametrize(
    ("pause_s", "waits_s"),
    [(0.02, [0.02]), (0.0, [loops.QUIET_S, loops.IDLE_WAIT_S]), (math.inf, [loops.QUIET_S, loops.IDLE_WAIT_S])],
)
def test_loop_waits_for_no_event_longer_than_the_next_step_waits(
    pause_s: float, waits_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, inbox = Server(monkeypatch), Inbox()
    monkeypatch.setattr(server.loop, "_inbox", inbox)
    server.scheduler.pause_s = pause_s
    server.loop._handle_events()
    assert inbox.waits_s == waits_s


@pytest.mark.parametrize("runs", [False, True])
def test_idle_loop_adds_pages_of_ended_requests_without_long_waits(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are held until they are added. While a request runs, its steps bring turns."""
    server, inbox = Server(monkeypatch), Inbox()
    monkeypatch.setattr(server.loop, "_inbox", inbox)
    server.scheduler.memory.inserts.of_ended.append(Mock())
    server.scheduler.rooms.batch.running += [Mock()] * runs
    server.loop._handle_events()
    assert inbox.waits_s == ([loops.QUIET_S, loops.IDLE_WAIT_S] if runs else [ADDING_PAUSE_S])
