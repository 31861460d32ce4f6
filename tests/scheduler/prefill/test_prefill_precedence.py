"""The order in which a prefill server serves prompts that wait for pages or for their next chunk."""

import itertools

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.scheduler.chunking.fair_queue import MAX_OVERTAKES
from pdserve.scheduler.messages.frontend import Submit
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from tests.scheduler.simulation.simulator import Simulator


class PrefillQueue:
    """A simulator with one prefill server of 13 pages of 2 tokens, with steps of 4 tokens. Prompts share no pages."""

    def __init__(self) -> None:
        self.simulator = Simulator(prefix_cache=False)
        self.simulator.kill(1)
        (self._server,) = self.simulator.servers.values()
        self._numbers = itertools.count()

    @property
    def prefill(self) -> PrefillScheduler:
        return self._server.scheduler

    @property
    def with_pages(self) -> int:
        return sum(request.grant is not None for request in self.prefill.requests.values())

    @property
    def served(self) -> list[str]:
        """The finished requests, in order; each generates one token."""
        return list(self.simulator.terminal)

    def arrive(self, tokens: int, priority: int = 0) -> str:
        """Submit a request that reaches prefill after all earlier ones. It gets its pages, if free, but no step."""
        simulator, number = self.simulator, next(self._numbers)
        rid, prompt = f"r{number}", (*divmod(number, 90), *range(tokens - 2))
        simulator.submitted.add(rid)
        simulator.decode.handle(Submit(rid, prompt, SamplingParams(max_new_tokens=1), priority=priority), simulator.now)
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        assert simulator.decode.requests[rid].state.value == "prefilling"
        assert len(self.prefill.requests) == len(simulator.decode.requests), "prefill has refused it"
        self.prefill.advance(simulator.now)
        return rid

    def turn(self) -> None:
        """One step of prefill, with its writes and messages."""
        simulator = self.simulator
        simulator.prefill_turn(0)
        while self._server.writes:
            simulator.end_write(0, ok=True, late=False)
        while self._server.to_decode:
            simulator.deliver(0, up=True)
        simulator.pass_time(0.01)
        simulator.decode_turn()
        simulator.check()

    def turns_until(self, rid: str) -> int:
        """The number of turns until this request is finished."""
        for turns in range(60):
            if rid in self.served:
                return turns
            self.turn()
        raise AssertionError(f"{rid} was not served in 60 turns: {self.prefill.state_counts()}")

    def finish(self) -> None:
        assert not self.simulator.failures
        self.simulator.finish()


def test_higher_priority_overtakes_computing_requests() -> None:
    """All have their pages. The step in flight is not recalled."""
    queue = PrefillQueue()
    low = [queue.arrive(10) for _ in range(2)]
    queue.turn()
    assert queue.with_pages == 2
    urgent = queue.arrive(4, priority=1)
    assert queue.turns_until(urgent) <= 3
    assert queue.served == [urgent]
    queue.turns_until(low[1])
    assert queue.served == [urgent, *low]
    queue.finish()


def test_higher_priority_overtakes_requests_that_wait_for_pages() -> None:
    queue = PrefillQueue()
    holds, waits = queue.arrive(20), queue.arrive(12)
    queue.turn()
    urgent = queue.arrive(10, priority=1)
    queue.turn()
    assert (queue.with_pages, len(queue.prefill.requests)) == (1, 3)
    queue.turns_until(waits)
    assert queue.served == [holds, urgent, waits]
    queue.finish()


def test_higher_priority_that_fits_overtakes_a_request_that_waits_for_pages() -> None:
    """The free pages are too few for the request before it, but enough for it."""
    queue = PrefillQueue()
    holds, waits = queue.arrive(20), queue.arrive(12)
    queue.turn()
    urgent = queue.arrive(4, priority=1)
    queue.turns_until(waits)
    assert queue.served == [urgent, holds, waits]
    queue.finish()


@pytest.mark.parametrize(("holding", "tokens", "priorities"), [(2, 4, (0, 5, -3, 0, 5, -3)), (20, 8, (0, 5, 0))])
def test_equal_priorities_are_served_in_order_of_arrival(
    holding: int, tokens: int, priorities: tuple[int, ...]
) -> None:
    """Requests that wait for steps, and requests that wait for pages: one holds 10 of 13, the others need 4 each."""
    queue = PrefillQueue()
    first = queue.arrive(holding)
    queue.turn()
    later = [queue.arrive(tokens, priority) for priority in priorities]
    assert len(queue.prefill.requests) - queue.with_pages == (3 if holding == 20 else 0)
    for rid in (first, *later):
        queue.turns_until(rid)
    expected = sorted(zip(later, priorities, strict=True), key=lambda each: -each[1])  # a stable sort
    assert [rid for rid in queue.served if rid != first] == [rid for rid, _ in expected]
    queue.finish()


def test_computing_request_of_low_priority_gets_a_turn() -> None:
    """Higher priorities could fill every step. Every seventeenth step is for the oldest request."""
    queue = PrefillQueue()
    low, turns = queue.arrive(12), 0  # three steps
    while low not in queue.served:
        queue.arrive(4, priority=1)
        queue.turn()
        turns += 1
        assert turns < 100, "starved"
    assert 3 * MAX_OVERTAKES < turns <= 3 * (MAX_OVERTAKES + 1) + 3
    assert len(queue.served) > turns - 5, "the others had all other steps"
    queue.finish()


def test_request_of_low_priority_gets_pages() -> None:
    """There is always a request of a higher priority that takes all pages but three; this one needs four."""
    queue = PrefillQueue()
    queue.arrive(20, priority=1)
    queue.turn()
    low = queue.arrive(8)
    while low not in queue.served:
        if len(queue.simulator.decode.requests) < 3:
            queue.arrive(20, priority=1)
        queue.turn()
        assert len(queue.served) <= MAX_OVERTAKES + 2, "starved"
    assert queue.served.index(low) == MAX_OVERTAKES + 1
    queue.finish()


def test_step_shared_with_the_oldest_request_does_not_count_as_overtaking() -> None:
    """Short requests share a step. The count of overtakes is per request: the next oldest starts at zero."""
    queue = PrefillQueue()
    for _ in range(MAX_OVERTAKES):
        queue.arrive(2)
        queue.arrive(2, priority=1)
        queue.turn()
    low, urgent = queue.arrive(4), queue.arrive(4, priority=1)
    queue.turns_until(low)
    assert queue.served[-2:] == [urgent, low]
    queue.finish()
