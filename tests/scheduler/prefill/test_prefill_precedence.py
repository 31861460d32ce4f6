"""Who is served first by a prefill server on which several prompts wait: for pages, or for their next chunk."""

import itertools

import pytest

from pdserve.configs.sampling import SamplingParams
from pdserve.scheduler.messages.frontend import Submit
from pdserve.scheduler.prefill.fair_queue import MAX_OVERTAKES
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from tests.scheduler.simulation.simulator import Simulator


class Line:
    """A world with one prefill server, with 13 pages of 2 tokens and steps of 4. No two prompts share any."""

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
        return sum(transfer.grant is not None for transfer in self.prefill.requests.values())

    @property
    def served(self) -> list[str]:
        """Who has the one token that it asked for, in order."""
        return list(self.simulator.terminal)

    def arrive(self, tokens: int, priority: int = 0) -> str:
        """A request that is on prefill, behind all before it. It has its pages, if there are any; no step."""
        simulator, number = self.simulator, next(self._numbers)
        rid, prompt = f"r{number}", (*divmod(number, 90), *range(tokens - 2))
        simulator.submitted.add(rid)
        simulator.decode.submit(Submit(rid, prompt, SamplingParams(max_new_tokens=1), priority=priority), simulator.now)
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        assert simulator.decode.requests[rid].state.value == "prefilling"
        assert len(self.prefill.requests) == len(simulator.decode.requests), "prefill has refused it"
        self.prefill.advance(simulator.now)
        return rid

    def turn(self) -> None:
        """One step of prefill, and everything that comes of it."""
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
        """How many it takes until this one is served."""
        for turns in range(60):
            if rid in self.served:
                return turns
            self.turn()
        raise AssertionError(f"{rid} was not served in 60 turns: {self.prefill.state_counts()}")

    def finish(self) -> None:
        assert not self.simulator.failures
        self.simulator.finish()


def test_one_that_matters_more_passes_those_that_compute() -> None:
    """All have their pages. The step that is under way is not recalled."""
    line = Line()
    low = [line.arrive(10) for _ in range(2)]
    line.turn()
    assert line.with_pages == 2
    urgent = line.arrive(4, priority=1)
    assert line.turns_until(urgent) <= 3
    assert line.served == [urgent]
    line.turns_until(low[1])
    assert line.served == [urgent, *low]
    line.finish()


def test_one_that_matters_more_passes_those_that_wait_for_pages() -> None:
    line = Line()
    holds, waits = line.arrive(20), line.arrive(12)
    line.turn()
    urgent = line.arrive(10, priority=1)
    line.turn()
    assert (line.with_pages, len(line.prefill.requests)) == (1, 3)
    line.turns_until(waits)
    assert line.served == [holds, urgent, waits]
    line.finish()


def test_it_needs_no_more_pages_than_there_are_to_pass() -> None:
    """What is left is too little for the one before it and enough for it."""
    line = Line()
    holds, waits = line.arrive(20), line.arrive(12)
    line.turn()
    urgent = line.arrive(4, priority=1)
    line.turns_until(waits)
    assert line.served == [urgent, holds, waits]
    line.finish()


@pytest.mark.parametrize(("holding", "tokens", "priorities"), [(2, 4, (0, 5, -3, 0, 5, -3)), (20, 8, (0, 5, 0))])
def test_those_of_one_priority_are_served_as_they_came(holding: int, tokens: int, priorities: tuple[int, ...]) -> None:
    """Those that wait for steps, and those that wait for pages: of 13 one has 10, and they need 4 each."""
    line = Line()
    first = line.arrive(holding)
    line.turn()
    later = [line.arrive(tokens, priority) for priority in priorities]
    assert len(line.prefill.requests) - line.with_pages == (3 if holding == 20 else 0)
    for rid in (first, *later):
        line.turns_until(rid)
    expected = sorted(zip(later, priorities, strict=True), key=lambda each: -each[1])  # equals stay as they are
    assert [rid for rid in line.served if rid != first] == [rid for rid, _ in expected]
    line.finish()


def test_one_that_computes_is_not_passed_for_ever() -> None:
    """Every step could be filled with what matters more. Every seventeenth is for who has been there longest."""
    line = Line()
    low, turns = line.arrive(12), 0  # three steps
    while low not in line.served:
        line.arrive(4, priority=1)
        line.turn()
        turns += 1
        assert turns < 100, "starved"
    assert 3 * MAX_OVERTAKES < turns <= 3 * (MAX_OVERTAKES + 1) + 3
    assert len(line.served) > turns - 5, "the others had all other steps"
    line.finish()


def test_one_that_waits_for_pages_is_not_passed_for_ever() -> None:
    """There is always another that matters more and takes all pages but three, and this one needs four."""
    line = Line()
    line.arrive(20, priority=1)
    line.turn()
    low = line.arrive(8)
    while low not in line.served:
        if len(line.simulator.decode.requests) < 3:
            line.arrive(20, priority=1)
        line.turn()
        assert len(line.served) <= MAX_OVERTAKES + 2, "starved"
    assert line.served.index(low) == MAX_OVERTAKES + 1
    line.finish()


def test_whom_the_turn_of_another_serves_as_well_was_not_passed() -> None:
    """Short ones share a step. The count is of one that waits, and does not go on with the next."""
    line = Line()
    for _ in range(MAX_OVERTAKES):
        line.arrive(2)
        line.arrive(2, priority=1)
        line.turn()
    low, urgent = line.arrive(4), line.arrive(4, priority=1)
    line.turns_until(low)
    assert line.served[-2:] == [urgent, low]
    line.finish()
