"""Requests whose KV is in host memory: aborted wherever they are, over in one token, and too many of them at once."""

from collections.abc import Callable
from functools import partial

import pytest

from pdserve.scheduler.decode.memory.background_copies import CopyKind
from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.messages.lifecycle import State
from tests.scheduler.simulation.simulator import PAGE_SIZE, PAGES, World, is_parked


def busy_world(stages: int) -> World:
    """Two hot buffers, and pages for about two requests when they are long; three want them from the start."""
    world = World(stages=stages, look_ahead=stages == 1, hot_pages=7)
    for _ in range(3):
        world.submit(6, 0, 26, 1, None, 0)
        world.flush()  # nobody shares pages
    return world


def work(world: World, seen: Callable[[World], bool], urgent_at: int | None = None) -> bool:
    """Run a world until `seen` says so, looking after every move; whether it did. An urgent request may come."""
    for turn in range(400):
        if turn == urgent_at:
            world.submit(6, 1, 26, 1, None, 1)
            world.flush()
            if seen(world):
                return True
        moves: list[Callable[[], None]] = [partial(world.decode.advance, world.now), world.act, world.decode_turn]
        for which in range(2):
            moves += [
                partial(world.deliver, which, up=False),
                partial(world.prefill_turn, which),
                partial(world.end_write, which, ok=True, late=False),
                partial(world.deliver, which, up=True),
            ]
        moves += [partial(world.rank_turn, eos=False), world.copy_turn, partial(world.pass_time, 0.01)]
        for move in moves:
            move()
            world.check()
            if seen(world):
                return True
    return False


def being_written(world: World, request: Request) -> bool:
    attempt = request.prompt.attempt
    writes = [write for server in world.servers.values() for write in server.writes]
    return attempt is not None and attempt.key in [write.chunk.key for write in writes]


def is_copied(world: World, request: Request, kind: CopyKind) -> bool:
    copy = world.decode.memory.copies.of(request)
    return copy is not None and copy.kind == kind


PLACES: dict[str, Callable[[World, Request], object]] = {
    "queued": lambda _, request: request.state is State.QUEUED and not request.output_ids,
    "computed anew": lambda _, request: request.state is State.QUEUED and request.output_ids,
    "being written": being_written,
    "waiting for a hot buffer": lambda world, request: request in world.decode.runs.arrived and not is_parked(request),
    "ready": lambda _, request: request.state is State.READY,
    "in a step": lambda _, request: request.state is State.RUNNING and request.in_flight,
    "in no step": lambda _, request: request.state is State.RUNNING and not request.in_flight,
    "parked": lambda _, request: is_parked(request),
    "being saved": lambda world, request: is_copied(world, request, "save"),
    "saved": lambda world, request: request.state is State.RETRACTED and world.decode.memory.copies.of(request) is None,
    "being loaded": lambda world, request: is_copied(world, request, "load"),
    "getting its hot rows": lambda world, request: is_copied(world, request, "open"),
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_an_abort_gives_everything_back_wherever_the_request_is(place: str, stages: int) -> None:
    """All pools are full in the end (`finish`), and after each move every page has exactly the holders it should."""
    world = busy_world(stages)
    found: list[str] = []

    def abort(world: World) -> bool:
        found.extend(rid for rid, request in world.decode.requests.items() if PLACES[place](world, request))
        for rid in found:
            world.decode.cancel(rid, world.now)
        world.act()
        return bool(found)

    assert work(world, abort, urgent_at=12), f"no request was ever {place}"
    world.check()
    world.decode_turn()  # before anybody else has heard of it
    world.check()
    assert {world.failures[rid].code for rid in found} == {"aborted"}
    assert not set(found) & world.decode.requests.keys()
    world.finish()
    assert world.decode.counters["requests_finished"] == len(world.submitted) - len(found)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_request_of_one_token_needs_no_hot_buffer_and_leaves_nothing(stages: int) -> None:
    """What a health check sends: it is over when its KV arrives."""
    world = World(stages=stages, hot_pages=3)
    world.submit(10, 0, 1, 1, None, 0)
    assert work(world, lambda world: not world.decode.requests)
    world.finish()
    assert world.decode.counters["requests_finished"] == 1
    assert sum(world.hot_seen.values()) == 0


def test_a_request_longer_than_the_hot_pool_is_served_and_one_longer_than_the_host_pool_refused() -> None:
    world = World(hot_pages=3)
    most = PAGES * PAGE_SIZE
    world.submit(22, 0, most - 21, 1, None, 0)  # the last token is never fed back
    world.submit(22, 1, most - 20, 1, None, 0)
    (refused,) = world.failures.values()
    assert (refused.status, refused.code) == (413, "too_large")
    assert f"exceed the KV pool of {most} tokens" in refused.message
    assert work(world, lambda world: not world.decode.requests)
    world.finish()
    assert world.hot_seen["cycled"] == world.decode.counters["decode_steps"] == most - 22


@pytest.mark.parametrize("stages", [1, 2])
def test_everything_is_too_little_at_once(stages: int) -> None:
    """Pages, hot buffers, the queue and the length of a request: who can wait does, the others hear why not."""
    world = busy_world(stages)
    for number in range(12):
        world.submit(4 + number, number % 2, 20, 1, None, number % 2)
        world.submit(40, 0, 20, 1, None, 1)  # longer than the pool
        work(world, lambda _: True)
    assert work(world, lambda world: not world.decode.requests)
    world.finish()
    answers = {(failed.status, failed.code) for failed in world.failures.values()}
    assert answers == {(413, "too_large"), (429, "overloaded")}
    assert world.decode.counters["retractions"] > 0
    assert world.hot_seen["waited"] > 0
    assert world.decode.counters["requests_finished"] == len(world.submitted) - len(world.failures)


def test_an_urgent_request_gets_a_buffer_although_steps_are_always_under_way() -> None:
    """There is one buffer. Its owner is held back from the next step, and parked when it is in none."""
    world = World(look_ahead=True, hot_pages=3)
    world.submit(6, 0, 26, 1, None, 0)
    assert work(world, lambda world: world.decode.running == 1)
    world.submit(6, 1, 4, 1, None, 1)
    assert work(world, lambda world: world.decode.counters["requests_finished"] == 1)
    (slow,) = world.decode.requests.values()
    assert slow.prompt.priority == 0
    assert world.hot_seen["parked"] > 0
    assert work(world, lambda world: not world.decode.requests)
    world.finish()
