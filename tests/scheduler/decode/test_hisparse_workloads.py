"""HiSparse requests: aborted in every state, finished after one token, and too many at once."""

from collections.abc import Callable
from functools import partial

import pytest

from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.messages.frontend import Cancel
from pdserve.scheduler.messages.lifecycle import State
from tests.scheduler.simulation.simulator import PAGE_SIZE, PAGES, Simulator, lost_hot_buffer


def busy_simulator(stages: int) -> Simulator:
    """Two hot buffers, and pages for about two long requests; three requests from the start."""
    simulator = Simulator(stages=stages, overlap=stages == 1, hot_pages=7)
    for _ in range(3):
        simulator.submit(6, 0, 26, 1, None, 0)
        simulator.flush()  # so that requests share no pages
    return simulator


def work(simulator: Simulator, seen: Callable[[Simulator], bool], urgent_at: int | None = None) -> bool:
    """Run until `seen` is true, checked after every move; returns whether it was. `urgent_at` adds a request."""
    for turn in range(400):
        if turn == urgent_at:
            simulator.submit(6, 1, 26, 1, None, 1)
            simulator.flush()
            if seen(simulator):
                return True
        moves: list[Callable[[], None]] = [
            partial(simulator.decode.advance, simulator.now),
            simulator.act,
            simulator.decode_turn,
        ]
        for which in range(2):
            moves += [
                partial(simulator.deliver, which, up=False),
                partial(simulator.prefill_turn, which),
                partial(simulator.end_write, which, ok=True, late=False),
                partial(simulator.deliver, which, up=True),
            ]
        moves += [partial(simulator.rank_turn, eos=False), simulator.copy_turn, partial(simulator.pass_time, 0.01)]
        for move in moves:
            move()
            simulator.check()
            if seen(simulator):
                return True
    return False


def being_written(simulator: Simulator, request: Request) -> bool:
    attempt = request.prompt.attempt
    writes = [write for server in simulator.servers.values() for write in server.writes]
    return attempt is not None and attempt.key in [write.chunk.key for write in writes]


SITUATIONS: dict[str, Callable[[Simulator, Request], object]] = {
    "queued": lambda _, request: request.state is State.QUEUED and not request.output_ids,
    "queued for recomputation": lambda _, request: request.state is State.QUEUED and request.output_ids,
    "being written": being_written,
    "waiting for a hot buffer": lambda simulator, request: (
        request in simulator.decode.rooms.batch.arrived and not lost_hot_buffer(request)
    ),
    "ready": lambda _, request: request.state is State.READY,
    "in a step": lambda _, request: request.state is State.RUNNING and request.in_flight,
    "in no step": lambda _, request: request.state is State.RUNNING and not request.in_flight,
    "lost hot buffer": lambda _, request: lost_hot_buffer(request),
    "being saved": lambda _, request: request.state is State.SAVING,
    "saved": lambda _, request: request.state is State.SAVED,
    "being restored": lambda _, request: request.state is State.RESTORING,
    "getting its hot rows": lambda _, request: request.state is State.OPENING,
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_abort_releases_all_memory_in_every_state(situation: str, stages: int) -> None:
    """At the end all pages are free (`finish`), and after each move every page is accounted for."""
    simulator = busy_simulator(stages)
    found: list[str] = []

    def abort(simulator: Simulator) -> bool:
        requests = simulator.decode.requests.items()
        found.extend(rid for rid, request in requests if SITUATIONS[situation](simulator, request))
        for rid in found:
            simulator.decode.handle(Cancel(rid), simulator.now)
        simulator.act()
        return bool(found)

    assert work(simulator, abort, urgent_at=8), f"no request was ever {situation}"
    simulator.check()
    simulator.decode_turn()  # before the others get any message
    simulator.check()
    assert {simulator.failures[rid].code for rid in found} == {"aborted"}
    assert not set(found) & simulator.decode.requests.keys()
    simulator.finish()
    assert simulator.decode.counters["requests_finished"] == len(simulator.submitted) - len(found)


@pytest.mark.parametrize("stages", [1, 2])
def test_request_of_one_token_needs_no_hot_buffer(stages: int) -> None:
    """As in a health check: the request ends when its KV arrives."""
    simulator = Simulator(stages=stages, hot_pages=3)
    simulator.submit(10, 0, 1, 1, None, 0)
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
    assert simulator.decode.counters["requests_finished"] == 1
    assert sum(simulator.hot_seen.values()) == 0


def test_request_may_be_longer_than_the_hot_pool_but_not_than_the_host_pool() -> None:
    simulator = Simulator(hot_pages=3)
    most = PAGES * PAGE_SIZE
    simulator.submit(22, 0, most - 21, 1, None, 0)  # the last token is never fed back
    simulator.submit(22, 1, most - 20, 1, None, 0)
    (refused,) = simulator.failures.values()
    assert (refused.status, refused.code) == (413, "too_large")
    assert f"exceed the KV pool of {most} tokens" in refused.message
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
    assert simulator.hot_seen["evicting step"] == simulator.decode.counters["decode_steps"] == most - 22


@pytest.mark.parametrize("stages", [1, 2])
def test_requests_finish_when_all_resources_are_short(stages: int) -> None:
    """Pages, hot buffers, the queue and the length of requests: requests wait if possible; others are refused."""
    simulator = busy_simulator(stages)
    for number in range(12):
        simulator.submit(4 + number, number % 2, 20, 1, None, number % 2)
        simulator.submit(40, 0, 20, 1, None, 1)  # longer than the pool
        work(simulator, lambda _: True)
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
    answers = {(failed.status, failed.code) for failed in simulator.failures.values()}
    assert answers == {(413, "too_large"), (429, "overloaded")}
    assert simulator.decode.counters["retractions"] > 0
    assert simulator.hot_seen["waited"] > 0
    assert simulator.decode.counters["requests_finished"] == len(simulator.submitted) - len(simulator.failures)


def test_higher_priority_gets_a_hot_buffer_while_steps_are_in_flight() -> None:
    """There is one buffer. Its owner gets no further step, and loses the buffer when its step has ended."""
    simulator = Simulator(overlap=True, hot_pages=3)
    simulator.submit(6, 0, 26, 1, None, 0)
    assert work(simulator, lambda simulator: len(simulator.decode.rooms.batch.running) == 1)
    simulator.submit(6, 1, 4, 1, None, 1)
    assert work(simulator, lambda simulator: simulator.decode.counters["requests_finished"] == 1)
    (slow,) = simulator.decode.requests.values()
    assert slow.prompt.priority == 0
    assert simulator.hot_seen["lost hot buffer"] > 0
    assert work(simulator, lambda simulator: not simulator.decode.requests)
    simulator.finish()
