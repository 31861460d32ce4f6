"""Overload: the order and the length of waits, and the errors of requests that are not served."""

import itertools
import math
import random

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.scheduler.chunking.fair_queue import MAX_OVERTAKES
from pdserve.scheduler.decode.requests.request import Prompt, Request
from pdserve.scheduler.decode.rooms.batch import RequestQueue
from pdserve.scheduler.decode.rooms.queued import MEASURED_S, PromptQueue, QueuePace
from pdserve.scheduler.messages.frontend import Cancel
from pdserve.scheduler.messages.lifecycle import State
from tests.scheduler.decode.test_precedence import ask, work
from tests.scheduler.simulation.simulator import Simulator
from tests.scheduler.simulation.timed_simulator import TimedSimulator, decode_limits


class Flood:
    """Clients that send the next request when the last one ends, or some time later if it was refused."""

    def __init__(self, simulator: TimedSimulator, clients: int, tokens: int, priority: int = 0) -> None:
        self._simulator = simulator
        self._tokens = tokens
        self._priority = priority
        self._names = (f"flood {number}" for number in itertools.count())
        self._draw = random.Random(clients)
        self.served = 0
        for _ in range(clients):
            simulator.at(self._later(), self._ask)

    def _ask(self) -> None:
        rid = next(self._names)
        self._simulator.ask(rid, self._tokens, priority=self._priority)
        self._poll(rid)

    def _poll(self, rid: str) -> None:
        if rid not in self._simulator.ended_at:
            self._simulator.at(self._later() - 0.1, lambda: self._poll(rid))
        elif rid in self._simulator.failures:
            self._simulator.at(self._later(), self._ask)
        else:
            self.served += 1
            self._ask()

    def _later(self) -> float:
        return self._simulator.now + self._draw.uniform(0.1, 0.5)


@pytest.mark.slow
def test_full_prefill_server_does_not_count_as_absent() -> None:
    """300 prompts at a server that computes ten per second, queues two and reports no window. They wait in our queue up
    to `queue_timeout_s`, not only the three seconds of `prefill_wait_s`.
    """
    limits = decode_limits(max_queued_requests=1000, queue_timeout_s=20.0, prefill_wait_s=3.0)
    simulator = TimedSimulator(
        tokens_per_s=160, limits=limits, chunk_size=16, max_queued=2, prefill_tokens=64, reports=False
    )
    for number in range(300):
        simulator.ask(f"r{number}", 16)
    simulator.run(lambda: not simulator.decode.requests)
    assert simulator.decode.counters["redispatches"] > 10, "nothing was refused"
    late = {rid: failed for rid, failed in simulator.failures.items() if simulator.ended_at[rid] < 20.0}
    assert not late, next(iter(late.values()))
    assert max(simulator.ended_at.values()) < 20.5, "a refusal does not restart the clock"
    assert len(simulator.failures) == pytest.approx(100, abs=10)
    (message,) = {failed.message for failed in simulator.failures.values()}
    assert message == "prefill did not start the prompt within 20 s (queue_timeout_s)"


@pytest.mark.parametrize("queue_timeout_s", [20.0, 60.0])
def test_prompt_that_prefill_does_not_begin_in_time_fails_with_the_reason(queue_timeout_s: float) -> None:
    """Another decode server has prompts of a higher priority there. A prompt that computes, even slowly, has begun."""
    limits = decode_limits(queue_timeout_s=queue_timeout_s, prefill_timeout_s=120.0)
    simulator = TimedSimulator(tokens_per_s=8, limits=limits)
    simulator.ask("computes", 700)
    simulator.run_for(2.0)
    simulator.ask("waits", 300, priority=-1)
    simulator.flood(3, 400, priority=100)
    simulator.run_for(1.0)
    assert simulator.decode.state_counts()["prefilling"] == 2
    simulator.run(lambda: "waits" in simulator.ended_at)
    assert simulator.ended_at["waits"] == pytest.approx(2.0 + queue_timeout_s, abs=0.5)
    message = f"prefill did not start the prompt within {queue_timeout_s:g} s (queue_timeout_s)"
    assert (simulator.failures["waits"].status, simulator.failures["waits"].message) == (503, message)
    simulator.run(lambda: "computes" in simulator.ended_at)
    assert "computes" not in simulator.failures, "its first chunk takes 64 s"


def test_prefill_server_that_shuts_down_counts_as_absent() -> None:
    simulator = TimedSimulator(tokens_per_s=160, limits=decode_limits(queue_timeout_s=20.0, prefill_wait_s=3.0))
    simulator.drain(0)
    simulator.ask("r", 16)
    simulator.run(lambda: not simulator.decode.requests)
    assert simulator.now == pytest.approx(3.0, abs=0.5)
    assert "waited 3 s (prefill_wait_s): the prefill server is shutting down" in simulator.failures["r"].message


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "least_served", "first_s"), [(16, 2, 17.0), (2000, 1, 37.0)])
def test_low_priorities_are_served_and_time_out_in_a_flood_of_higher_ones(
    tokens: int, least_served: int, first_s: float
) -> None:
    """40 clients, whose prompts take prefill 20 s in total, keep both queues full of higher priorities. The oldest
    prompt has every seventeenth step of half a second: 2,000 tokens need four of them.
    """
    limits = decode_limits(queue_timeout_s=20.0, prefill_timeout_s=120.0)
    simulator = TimedSimulator(tokens_per_s=1000, limits=limits)
    flood = Flood(simulator, 40, 500, priority=100)
    simulator.run_for(5.0)
    low = [f"low {number}" for number in range(12)]
    asked_at = simulator.now
    for rid in low:
        simulator.ask(rid, tokens)
    simulator.run(lambda: set(low) <= simulator.ended_at.keys(), most_s=100.0)
    waited = {rid: simulator.ended_at[rid] - asked_at for rid in low}
    failed = [rid for rid in low if rid in simulator.failures]
    served = [rid for rid in low if rid not in simulator.failures]
    assert failed, "none had to wait too long"
    assert max(waited[rid] for rid in failed) == pytest.approx(20.0, abs=1.0), "queue_timeout_s"
    assert len(served) >= least_served
    assert min(waited[rid] for rid in served) < first_s
    assert flood.served > 15 * len(served)
    assert {simulator.failures[rid].status for rid in failed} <= {503}


def test_prompt_is_next_after_sixteen_overtakes() -> None:
    """Independently of sizes and priorities, the oldest first; raised priorities are kept."""
    queue = PromptQueue()
    low = [Prompt(number, (1,) * (1 + 200 * number), priority=-number, now=0.0) for number in range(3)]
    for prompt in low:
        queue.push(prompt, 0.0)
    left: list[Prompt] = []
    for number in range(3, 3 + 3 * MAX_OVERTAKES + 1):
        queue.push(Prompt(number, (1,) * 50, priority=100 + number % 3, now=0.0), 0.0)
        first = queue.first
        assert first is not None
        queue.take(first, 0.0)
        left.append(first)
    assert [left.index(prompt) for prompt in low] == [MAX_OVERTAKES * at for at in (1, 2, 3)]
    assert {prompt.priority for prompt in low} == {102}
    assert (len(queue), queue.tokens) == (3, 150)


def test_waiting_request_is_raised_after_sixteen_overtakes() -> None:
    queue = RequestQueue()

    def request(number: int, priority: int) -> Request:
        prompt = Prompt(number, (1,), priority=priority, now=float(number))
        return Request(f"r{number}", prompt, SamplingParams(), deadline=math.inf, now=float(number))

    low = [request(number, 0) for number in range(2)]
    for each in low:
        queue.push(each)
    left: list[Request] = []
    for number in range(2, 2 * MAX_OVERTAKES + 4):
        queue.push(request(number, 5))
        left.append(queue.pop())
    assert [left.index(each) for each in low] == [MAX_OVERTAKES, 2 * MAX_OVERTAKES]
    assert {each.priority for each in low} == {5}


def test_retracted_requests_count_as_queued() -> None:
    """Five may be queued: while one is saved, there is room for four prompts."""
    simulator = Simulator(retract_pages=24, prefix_cache=False)
    ask(simulator, 4, 30)
    low = ask(simulator, 4, 30)
    work(simulator, lambda: low.state is State.SAVED)
    for _ in range(4):
        ask(simulator, 4, 4)
    simulator.submit(4, 0, 4, 1, None, 0)
    (refused,) = simulator.failures.values()
    assert (refused.status, refused.code) == (429, "overloaded")
    simulator.finish()


def test_retracted_request_of_low_priority_is_resumed() -> None:
    """Requests of a higher priority take the pages that become free, and it needs more pages than one of them frees."""
    simulator = Simulator(retract_pages=24, prefix_cache=False)
    ask(simulator, 4, 30, priority=1)
    low = ask(simulator, 4, 30)
    work(simulator, lambda: low.state is State.SAVED)
    passed = 0
    while low.state is State.SAVED:
        while len(simulator.decode.requests) < 5:
            passed += 1
            ask(simulator, 12, 20, priority=1)
        work(simulator, lambda: len(simulator.decode.requests) < 5 or low.state is not State.SAVED)
        assert passed <= MAX_OVERTAKES + 5, "starved"
    assert low.priority == 1
    work(simulator, lambda: not simulator.decode.requests)
    assert not simulator.failures
    simulator.finish()


@pytest.mark.parametrize(
    ("hot_pages", "running", "waits"), [(None, 3, State.READY), (7, 2, State.ARRIVED)], ids=["batch", "hot buffers"]
)
def test_requests_that_wait_for_the_batch_or_a_hot_buffer_count_as_queued(
    hot_pages: int | None, running: int, waits: State
) -> None:
    """There are pages for all of them, and prefill has computed all prompts."""
    limits = decode_limits(page_size=4, max_running_requests=3, max_queued_requests=2, growth_tokens=4)
    simulator = Simulator(limits=limits, pages=100, hot_pages=hot_pages)
    accepted: list[Request] = []
    for _ in range(running):
        accepted.append(ask(simulator, 6, 60))
        work(simulator, lambda: accepted[-1].state is State.RUNNING)
    for _ in range(2):
        accepted.append(ask(simulator, 6, 60))
        work(simulator, lambda: accepted[-1].state is waits)
    refused = simulator.ask_for(tuple(range(6)), 60)
    assert (simulator.failures[refused].status, simulator.failures[refused].code) == (429, "overloaded")
    simulator.decode.handle(Cancel(accepted[0].rid), simulator.now)  # another one takes its place
    work(simulator, lambda: [request.state for request in accepted].count(State.RUNNING) == running)
    assert simulator.ask_for(tuple(range(6)), 60) not in simulator.failures


@pytest.mark.slow
def test_call_with_many_prompts_is_accepted_when_its_first_is() -> None:
    """64 clients keep a queue of 16 full, so it rarely has room for eight prompts at once."""
    limits = decode_limits(max_queued_requests=16)
    simulator = TimedSimulator(tokens_per_s=10_000, limits=limits)
    Flood(simulator, 64, 500)
    simulator.run_for(2.0)
    accepted, draw = dict.fromkeys(["single", "batch"], 0), random.Random(1)
    for attempt in range(100):
        simulator.ask(f"single {attempt}", 500)
        simulator.run_for(draw.uniform(0.1, 0.3))
        first = f"batch {attempt} 0"
        for item in range(8):
            simulator.ask(f"batch {attempt} {item}", 500, follows=first if item else None)
        simulator.run_for(draw.uniform(0.1, 0.3))
        refused = [f"batch {attempt} {item}" in simulator.failures for item in range(8)]
        assert len(set(refused)) == 1, "a part of it was accepted"
        accepted["batch"] += not refused[0]
        accepted["single"] += f"single {attempt}" not in simulator.failures
    assert accepted["batch"] >= 5
    assert accepted["batch"] > accepted["single"] / 3
    assert len(simulator.decode.rooms.queued) < 16 + 8


def test_prompts_of_two_calls_may_alternate() -> None:
    simulator = TimedSimulator(tokens_per_s=10_000, limits=decode_limits(max_queued_requests=2))
    for rid, first in (("a", None), ("b", None), ("c", None), ("a 1", "a"), ("c 1", "c"), ("b 1", "b")):
        simulator.ask(rid, 500, follows=first)
    assert set(simulator.failures) == {"c", "c 1"}


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False])
def test_retry_after_is_the_expected_wait_in_the_queue(full: bool) -> None:
    """Ten prompts per second: 40 in the queue take four seconds. No prompt waits longer than the timeout."""
    limits = decode_limits(max_queued_requests=40 if full else 1000, queue_timeout_s=30.0 if full else 3.0)
    simulator = TimedSimulator(tokens_per_s=5000, limits=limits)
    flood = Flood(simulator, 80, 500)
    simulator.run_for(15.0)
    failed = list(simulator.failures.values())[-1]
    assert failed.status == (429 if full else 503)
    assert failed.retry_after_s == pytest.approx(4.0 if full else 3.0, rel=0.1)
    assert flood.served == pytest.approx(150, abs=8), "prefill computes prompts that have not timed out"


def test_queue_pace_predicts_the_wait() -> None:
    pace = QueuePace()
    assert pace.wait_s(0, 0.0, most_s=60.0) == 0.0
    pace.note(10, (), 0.0)
    assert pace.wait_s(10, 0.01, most_s=60.0) == 1.0, "nothing is known yet"
    assert pace.wait_s(10, 0.5, most_s=60.0) == 5.0, "nothing has moved yet"
    assert pace.wait_s(10, 20.0, most_s=60.0) == 60.0
    for second in range(1, 100):
        pace.served(float(second))
        pace.served(second + 0.5)
        pace.note(10, (), second + 0.5)
    assert pace.wait_s(10, 100.0, most_s=60.0) == pytest.approx(5.0, rel=0.05)
    assert pace.wait_s(10, 100.0 + MEASURED_S / 2, most_s=60.0) == pytest.approx(10.0, rel=0.05), "it has slowed down"
    assert pace.wait_s(10, 100.0 + 2 * MEASURED_S, most_s=60.0) == 60.0
    pace.note(0, (), 200.0)
    assert pace.wait_s(0, 201.0, most_s=60.0) == 0.0


def test_queue_pace_keeps_only_the_times_that_it_measures() -> None:
    """Also if nothing asks for the expected wait while the queue is never empty."""
    pace = QueuePace()
    pace.note(10, (), 0.0)
    for second in range(10_000):
        pace.served(float(second))
    assert len(pace._served) == MEASURED_S + 1


def test_queue_pace_of_a_new_queue_begins_with_that_of_the_last_one() -> None:
    """A burst fills the queue at once. The seconds without a queue do not count."""
    pace = QueuePace()
    for second in range(100):
        pace.note(10, (), float(second))
        pace.served(second + 0.5)
    pace.note(0, (), 100.0)
    pace.served(500.0)
    pace.note(30, (), 1000.0)
    assert pace.wait_s(30, 1000.0, most_s=60.0) == pytest.approx(30.0, rel=0.05)
    for quarter in range(1, 81):
        pace.served(1000.0 + quarter / 4)
    assert pace.wait_s(30, 1020.0, most_s=60.0) == pytest.approx(9.0, rel=0.1), "soon, the new rate counts"


def test_queue_pace_measures_how_long_prefill_was_busy() -> None:
    """At one endpoint, while other prompts wait for memory."""
    pace = QueuePace()
    pace.note(3, {"a:1"}, 10.0)
    assert (pace.is_busy("a:1"), pace.is_busy(None)) == (True, False)
    assert pace.busy_s("a:1", 12.0) == 2.0
    pace.note(3, (), 13.0)
    assert (pace.is_busy("a:1"), pace.busy_s("a:1", 20.0), pace.busy_s(None, 20.0)) == (False, 3.0, 0.0)
    pace.note(3, {"a:1", None}, 20.0)
    pace.note(3, {None}, 21.0)
    assert (pace.busy_s("a:1", 30.0), pace.busy_s(None, 30.0)) == (4.0, 10.0)


@pytest.mark.parametrize("pinned", [None, "a:1"])
def test_prompt_longer_than_the_pool_of_prefill_is_refused(pinned: str | None) -> None:
    """At once, or when a server pairs that is too small; not if one of the servers can hold it."""
    simulator = TimedSimulator(tokens_per_s=1e5, prefill_tokens=1024, endpoints=("a:1", "b:1"))
    simulator.ask("long", 1025, endpoint=pinned)
    failed = simulator.failures["long"]
    assert (failed.status, failed.code) == (413, "too_large")
    assert failed.message == "the prompt (1025 tokens) exceeds prefill's KV pool of 1024 tokens"
    simulator.ask("fits", 1024, endpoint=pinned)
    simulator.kill(0)
    simulator.kill(0)
    simulator.ask("early", 1025, endpoint=pinned)
    simulator.run_for(0.1)
    assert "early" in simulator.decode.requests, "no server is paired, so its length is not checked"
    simulator.prefill_pages *= 2
    simulator.start("b:1")
    simulator.run_for(0.1)
    assert ("early" in simulator.failures, "early" in simulator.ended_at) == (False, pinned is None)
    simulator.prefill_pages //= 2
    simulator.start("a:1")
    simulator.run_for(0.5)
    assert {rid: failed.status for rid, failed in simulator.failures.items()} == {"long": 413} | (
        {"early": 413} if pinned else {}
    )
    assert simulator.ended_at.keys() == {"long", "fits", "early"}


def test_retracted_request_too_long_for_prefill_fails_as_unavailable() -> None:
    """The prefill server that could compute it again is replaced by one with a smaller pool."""
    limits = decode_limits(growth_tokens=16)
    simulator = TimedSimulator(
        tokens_per_s=1e5, prefill_tokens=2048, pool_tokens=2048, limits=limits, endpoints=("a:1",)
    )
    for rid in ("a", "b"):
        simulator.ask(rid, 1000, 200)
        simulator.run_for(0.05)
    simulator.run(lambda: simulator.decode.counters["retractions_recomputed"])
    simulator.kill(0)
    simulator.prefill_pages = 1008 // 16
    simulator.start("a:1")
    simulator.run_for(0.1)
    failed = simulator.failures["b"]
    assert failed.status == 503
    assert "lost its KV; they exceed prefill's KV pool of 1008 tokens" in failed.message
