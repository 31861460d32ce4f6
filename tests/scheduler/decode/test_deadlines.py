"""Whose time is up hears so in that turn, and which limit it was; nobody hears it earlier."""

import pytest

from pdserve.configs.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.frontend import Failed, Submit
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import DEADLINE_GRACE_S, PageSpace
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.protocol.messages import KvDestination, TransferFailed, TransferKey
from tests.scheduler.simulation.simulator import DECODE, ENDPOINTS, World

PREFILL_WAIT_S, QUEUE_TIMEOUT_S, PREFILL_TIMEOUT_S, REQUEST_TIMEOUT_S = 3.0, 60.0, 40.0, 200.0
"""Of the world."""


def turn_at(world: World, now: float) -> list[Failed]:
    """A turn of decode at this time; who has failed by then."""
    world.now = now
    world.decode_turn()
    world.check()
    return list(world.failures.values())


def submit(
    world: World, rid: str, *, tokens: int = 6, endpoint: str | None = None, timeout_s: float | None = None
) -> None:
    world.submitted.add(rid)
    sampling = SamplingParams(max_new_tokens=20)
    world.decode.submit(Submit(rid, tuple(range(tokens)), sampling, endpoint, timeout_s=timeout_s), world.now)
    world.act()


@pytest.mark.parametrize(
    ("timeout_s", "after_s", "message"),
    [
        (None, PREFILL_TIMEOUT_S, "prefill did not deliver within 40 s (prefill_timeout_s)"),
        (0.5, 0.5, "not finished within its deadline of 0.5 s (timeout_s)"),
        (1000.0, PREFILL_TIMEOUT_S, "prefill did not deliver within 40 s (prefill_timeout_s)"),
    ],
)
def test_prefill_that_is_silent(timeout_s: float | None, after_s: float, message: str) -> None:
    world = World()
    world.now = 1000.25
    submit(world, "r", timeout_s=timeout_s)
    assert not turn_at(world, 1000.25)
    assert world.decode.state_counts()["prefilling"] == 1
    assert not turn_at(world, 1000.25 + after_s - 0.01)
    (failed,) = turn_at(world, 1000.25 + after_s)
    assert (failed.status, failed.code, failed.message) == (504, "deadline", message)
    world.finish()


def test_a_request_that_runs_too_long() -> None:
    world = World()
    submit(world, "r")
    while world.decode.running == 0:
        world.work()
    assert not turn_at(world, REQUEST_TIMEOUT_S - 0.01)
    (failed,) = turn_at(world, REQUEST_TIMEOUT_S)
    assert failed.message == "not finished within its deadline of 200 s (request_timeout_s)"
    world.finish()


def test_no_memory() -> None:
    world = World()
    submit(world, "a", tokens=26)
    turn_at(world, 0.0)
    submit(world, "b", tokens=26)
    assert not turn_at(world, 0.01)
    assert world.decode.state_counts()["queued"] == 1
    first = world.decode.requests["a"]
    first.life.since = first.prompt.waits_since = 30.0  # as if it had come later: it is not what this is about
    assert not turn_at(world, QUEUE_TIMEOUT_S - 0.01)
    (failed,) = turn_at(world, QUEUE_TIMEOUT_S)
    assert (failed.rid, failed.status) == ("b", 503)
    assert failed.message == "no KV memory became free within 60 s (queue_timeout_s)"
    world.finish()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("in_time", [False, True])
def test_one_that_has_run_waits_for_memory_until_its_own_deadline(saved: bool, in_time: bool) -> None:
    """Its client has tokens already. It makes no difference whether its KV was kept or is to be computed anew."""
    world = World(retract_pages=12 if saved else 0, prefix_cache=False)
    for rid in ("a", "b"):
        submit(world, rid, tokens=20)
        world.pass_time(0.001)
    while not world.decode.counters["retractions"]:
        world.work()
    waits = world.decode.requests["b"]
    assert waits.state.value == ("retracted" if saved else "queued")
    assert waits.output_ids
    assert not turn_at(world, REQUEST_TIMEOUT_S - 0.01), "longer than queue_timeout_s"
    assert waits.state.value == ("retracted" if saved else "queued")
    if in_time:
        while world.decode.requests:
            world.work()
        assert not world.failures
    else:
        message = "not finished within its deadline of 200 s (request_timeout_s)"
        assert [failed.message for failed in turn_at(world, REQUEST_TIMEOUT_S + 0.01)] == [message] * 2
    world.finish()


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("endpoint", [None, "a:1"])
def test_who_waits_for_memory_waits_for_a_lost_server_as_long_as_anybody(endpoint: str | None, returns: bool) -> None:
    """It has been in the queue for longer than `prefill_wait_s`: that was not without a server."""
    world = World()
    submit(world, "a", tokens=26, endpoint="b:1")
    turn_at(world, 0.0)
    submit(world, "b", tokens=26, endpoint=endpoint)
    assert not turn_at(world, 10.0)
    assert world.decode.requests["b"].state.value == "queued"
    for _ in ENDPOINTS:
        world.kill(0)
    assert not turn_at(world, 10.0 + PREFILL_WAIT_S - 0.01)
    if returns:
        world.start("a:1")
    told = {failed.rid: failed.message for failed in turn_at(world, 10.0 + PREFILL_WAIT_S)}
    where = f" at {endpoint}" if endpoint else ""
    message = f"no prefill server{where} is paired; waited 3 s (prefill_wait_s)"
    assert told.get("b") == (None if returns else message)
    world.finish()


@pytest.mark.parametrize(
    ("endpoint", "why"), [(None, "a:1: connection refused; b:1: wrong key"), ("b:1", "wrong key"), ("c:1", None)]
)
def test_the_answer_says_why_there_is_no_server(endpoint: str | None, why: str | None) -> None:
    world = World()
    for _ in ENDPOINTS:
        world.kill(0)
    world.decode.intake.peers.unreachable = {"a:1": "connection refused", "b:1": "wrong key"}
    submit(world, "r", endpoint=endpoint)
    (failed,) = turn_at(world, PREFILL_WAIT_S)
    where = f" at {endpoint}" if endpoint else ""
    reason = f": {why}" if why else ""
    assert failed.message == f"no prefill server{where} is paired; waited 3 s (prefill_wait_s){reason}"
    world.finish()


def test_a_server_under_another_address_is_a_server() -> None:
    world = World()
    (instance, _) = world.servers
    submit(world, "r", endpoint="alias:1")
    assert not turn_at(world, PREFILL_WAIT_S - 0.01)
    world.decode.peer_alias(instance, "alias:1")
    assert not turn_at(world, PREFILL_WAIT_S)
    assert world.decode.state_counts()["prefilling"] == 1
    world.finish()


def prefill_server() -> PrefillScheduler:
    limits = PrefillLimits(page_size=4, chunk_size=4, max_queued_requests=9, context_length=64, vocab_size=100)
    scheduler = PrefillScheduler(limits, PageAllocator[KvPage](8))
    scheduler.peer_up(DECODE, PageSpace(8, 4))
    return scheduler


def ask(scheduler: PrefillScheduler, number: int, timeout_s: float, now: float) -> None:
    wanted = KvDestination(
        key=TransferKey(number, 1),
        rid=f"r{number}",
        sampling=SamplingParams(max_new_tokens=4),
        timeout_s=timeout_s,
        prefix_tokens=0,
        room=number,
    )
    scheduler.receive(DECODE, wanted, range(6), [0, 1], now)


def test_transfers_end_when_their_time_is_up_whatever_their_order() -> None:
    scheduler = prefill_server()
    for number, timeout_s in enumerate((9.0, 3.0, 6.0)):
        ask(scheduler, number, timeout_s, 0.0)
    ended: list[tuple[float, str]] = []
    for tenth in range(150):
        scheduler.advance(tenth / 10)
        ended += [
            (tenth / 10, effect.message.reason)
            for effect in scheduler.take_effects()
            if isinstance(effect, SendToPeer) and isinstance(effect.message, TransferFailed)
        ]
    assert ended == [
        (timeout_s + DEADLINE_GRACE_S, f"not done within the {timeout_s:.1f} s it was given")
        for timeout_s in (3.0, 6.0, 9.0)
    ]
