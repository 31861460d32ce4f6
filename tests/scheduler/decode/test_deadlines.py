"""Deadlines: a request fails in the turn in which its deadline passes, not earlier, and the error names the setting."""

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.scheduler.messages.effects import SendToPeer
from pdserve.scheduler.messages.frontend import Failed, Submit
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import DEADLINE_GRACE_S, PageSpace, PrefillRequest
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.control.events import PeerAlias, PeersUnreachable
from pdserve.transfer.protocol.messages import KvDestination, TransferFailed, TransferKey
from tests.scheduler.simulation.simulator import DECODE, ENDPOINTS, Simulator

PREFILL_WAIT_S, QUEUE_TIMEOUT_S, PREFILL_TIMEOUT_S, REQUEST_TIMEOUT_S = 3.0, 60.0, 40.0, 200.0
"""Limits of the simulator."""


def turn_at(simulator: Simulator, now: float) -> list[Failed]:
    """A turn of decode at this time; returns all failures so far."""
    simulator.now = now
    simulator.decode_turn()
    simulator.check()
    return list(simulator.failures.values())


def submit(
    simulator: Simulator, rid: str, *, tokens: int = 6, endpoint: str | None = None, timeout_s: float | None = None
) -> None:
    simulator.submitted.add(rid)
    sampling = SamplingParams(max_new_tokens=20)
    simulator.decode.handle(Submit(rid, tuple(range(tokens)), sampling, endpoint, timeout_s=timeout_s), simulator.now)
    simulator.act()


@pytest.mark.parametrize(
    ("timeout_s", "after_s", "message"),
    [
        (None, PREFILL_TIMEOUT_S, "prefill did not send all KV within 40 s (prefill_timeout_s)"),
        (0.5, 0.5, "not finished within its deadline of 0.5 s (timeout_s)"),
        (1000.0, PREFILL_TIMEOUT_S, "prefill did not send all KV within 40 s (prefill_timeout_s)"),
    ],
)
def test_silent_prefill_server_times_out(timeout_s: float | None, after_s: float, message: str) -> None:
    simulator = Simulator()
    simulator.now = 1000.25
    submit(simulator, "r", timeout_s=timeout_s)
    assert not turn_at(simulator, 1000.25)
    assert simulator.decode.state_counts()["prefilling"] == 1
    assert not turn_at(simulator, 1000.25 + after_s - 0.01)
    (failed,) = turn_at(simulator, 1000.25 + after_s)
    assert (failed.status, failed.code, failed.message) == (504, "deadline", message)
    simulator.finish()


def test_running_request_times_out() -> None:
    simulator = Simulator()
    submit(simulator, "r")
    while len(simulator.decode.rooms.batch.running) == 0:
        simulator.work()
    assert not turn_at(simulator, REQUEST_TIMEOUT_S - 0.01)
    (failed,) = turn_at(simulator, REQUEST_TIMEOUT_S)
    assert failed.message == "not finished within its deadline of 200 s (request_timeout_s)"
    simulator.finish()


def test_queued_request_times_out_without_memory() -> None:
    simulator = Simulator()
    submit(simulator, "a", tokens=26)
    turn_at(simulator, 0.0)
    submit(simulator, "b", tokens=26)
    assert not turn_at(simulator, 0.01)
    assert simulator.decode.state_counts()["queued"] == 1
    first = simulator.decode.requests["a"]
    first.since = first.prompt.waits_since = 30.0  # as if it had come later, so that it does not time out
    assert not turn_at(simulator, QUEUE_TIMEOUT_S - 0.01)
    (failed,) = turn_at(simulator, QUEUE_TIMEOUT_S)
    assert (failed.rid, failed.status) == ("b", 503)
    assert failed.message == "no KV memory became free within 60 s (queue_timeout_s)"
    simulator.finish()


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("in_time", [False, True])
def test_retracted_request_waits_for_memory_until_its_own_deadline(saved: bool, in_time: bool) -> None:
    """Its client has tokens already. The same holds whether its KV was saved or has to be computed again."""
    simulator = Simulator(retract_pages=12 if saved else 0, prefix_cache=False)
    for rid in ("a", "b"):
        submit(simulator, rid, tokens=20)
        simulator.pass_time(0.001)
    while not simulator.decode.counters["retractions"]:
        simulator.work()
    waits = simulator.decode.requests["b"]
    assert waits.state.value == ("saved" if saved else "queued")
    assert waits.output_ids
    assert not turn_at(simulator, REQUEST_TIMEOUT_S - 0.01), "longer than queue_timeout_s"
    assert waits.state.value == ("saved" if saved else "queued")
    if in_time:
        while simulator.decode.requests:
            simulator.work()
        assert not simulator.failures
    else:
        message = "not finished within its deadline of 200 s (request_timeout_s)"
        assert [failed.message for failed in turn_at(simulator, REQUEST_TIMEOUT_S + 0.01)] == [message] * 2
    simulator.finish()


@pytest.mark.parametrize("returns", [False, True])
@pytest.mark.parametrize("endpoint", [None, "a:1"])
def test_prefill_wait_starts_when_the_server_is_lost(endpoint: str | None, returns: bool) -> None:
    """Time in the queue while a server was paired does not count for `prefill_wait_s`."""
    simulator = Simulator()
    submit(simulator, "a", tokens=26, endpoint="b:1")
    turn_at(simulator, 0.0)
    submit(simulator, "b", tokens=26, endpoint=endpoint)
    assert not turn_at(simulator, 10.0)
    assert simulator.decode.requests["b"].state.value == "queued"
    for _ in ENDPOINTS:
        simulator.kill(0)
    assert not turn_at(simulator, 10.0 + PREFILL_WAIT_S - 0.01)
    if returns:
        simulator.start("a:1")
    messages = {failed.rid: failed.message for failed in turn_at(simulator, 10.0 + PREFILL_WAIT_S)}
    where = f" at {endpoint}" if endpoint else ""
    message = f"no prefill server{where} is paired; waited 3 s (prefill_wait_s)"
    assert messages.get("b") == (None if returns else message)
    simulator.finish()


@pytest.mark.parametrize(
    ("endpoint", "why"), [(None, "a:1: connection refused; b:1: wrong key"), ("b:1", "wrong key"), ("c:1", None)]
)
def test_error_has_the_reason_why_no_server_is_paired(endpoint: str | None, why: str | None) -> None:
    simulator = Simulator()
    for _ in ENDPOINTS:
        simulator.kill(0)
    simulator.decode.handle(PeersUnreachable({"a:1": "connection refused", "b:1": "wrong key"}), simulator.now)
    submit(simulator, "r", endpoint=endpoint)
    (failed,) = turn_at(simulator, PREFILL_WAIT_S)
    where = f" at {endpoint}" if endpoint else ""
    reason = f": {why}" if why else ""
    assert failed.message == f"no prefill server{where} is paired; waited 3 s (prefill_wait_s){reason}"
    simulator.finish()


def test_alias_of_a_server_counts_as_paired() -> None:
    simulator = Simulator()
    (instance, _) = simulator.servers
    submit(simulator, "r", endpoint="alias:1")
    assert not turn_at(simulator, PREFILL_WAIT_S - 0.01)
    simulator.decode.handle(PeerAlias("alias:1", instance), simulator.now)
    assert not turn_at(simulator, PREFILL_WAIT_S)
    assert simulator.decode.state_counts()["prefilling"] == 1
    simulator.finish()


@pytest.mark.parametrize("queued", [True, False])
def test_request_that_names_several_servers_fails_and_its_error_names_them(queued: bool) -> None:
    """Whether it arrives before or after decode knows what the name stands for."""
    simulator = Simulator()
    if queued:
        submit(simulator, "r", endpoint="prefill:1")
    for instance in simulator.servers:
        simulator.decode.handle(PeerAlias("prefill:1", instance), simulator.now)
    if not queued:
        submit(simulator, "r", endpoint="prefill:1")
    (failed,) = turn_at(simulator, 0.0)
    assert (failed.status, failed.code) == (400, "invalid_request")
    assert failed.message == "bootstrap_host: prefill:1 stands for 2 prefill servers: name one of a:1, b:1"
    submit(simulator, "one", endpoint="b:1")
    simulator.kill(0)
    submit(simulator, "left", endpoint="prefill:1")
    assert turn_at(simulator, 0.0) == [failed]
    simulator.finish()


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
    scheduler.receive(PrefillRequest(DECODE, wanted, range(6), [0, 1], now), now)


def test_prefill_requests_expire_in_order_of_their_deadlines() -> None:
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
        (timeout_s + DEADLINE_GRACE_S, f"not done within its deadline of {timeout_s:.1f} s")
        for timeout_s in (3.0, 6.0, 9.0)
    ]
