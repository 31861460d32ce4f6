"""How prompts share the steps of a prefill server: short ones start quickly, and long ones do not starve."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.common.sampling import SamplingParams, TokenLogprob
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator, pages_for
from pdserve.scheduler.chunking.fair_queue import MAX_OVERTAKES
from pdserve.scheduler.messages.ranks import ChunkReport
from pdserve.scheduler.messages.step import StepResult
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PageSpace, PrefillRequest, PrefillStep
from pdserve.scheduler.prefill.scheduler import PrefillScheduler
from pdserve.transfer.data.chunks import ChunkWrite, ChunkWritten
from pdserve.transfer.protocol.messages import KvDestination, TransferKey
from tests.examples import examples
from tests.scheduler.simulation.simulator import DECODE
from tests.scheduler.simulation.timed_simulator import TimedSimulator

PAGE = 16
STEP_S = 0.01
"""51,200 tokens a second with steps of 512."""


class Steps:
    """A prefill server whose steps are counted; one step is in flight at a time."""

    def __init__(self, chunk_size: int, *, num_pages: int = 1 << 16) -> None:
        limits = PrefillLimits(
            page_size=PAGE,
            chunk_size=chunk_size,
            max_queued_requests=1000,
            context_length=1 << 20,
            vocab_size=100,
            prefix_cache=False,
            steps_in_flight=1,
        )
        self.scheduler = PrefillScheduler(limits, PageAllocator[KvPage](num_pages))
        self.scheduler.peer_up(DECODE, PageSpace(1 << 20, PAGE))
        self.chunk_size = chunk_size
        self.steps = 0
        self.done: dict[int, int] = {}
        """The step after which each prompt was computed."""
        self.computed: dict[int, int] = {}

    @property
    def now(self) -> float:
        return self.steps * STEP_S

    def arrive(self, number: int, tokens: int, priority: int = 0) -> None:
        wanted = KvDestination(
            key=TransferKey(number, 1),
            rid=f"r{number}",
            sampling=SamplingParams(max_new_tokens=1),
            timeout_s=1e6,
            priority=priority,
        )
        self.computed[number] = 0
        self.scheduler.receive(
            PrefillRequest(DECODE, wanted, [1] * tokens, list(range(pages_for(tokens, PAGE))), self.now),
            self.now,
        )

    def step(self) -> PrefillStep | None:
        """The next step, computed."""
        self.scheduler.advance(self.now)
        step = self.scheduler.next_step(self.now)
        if step is None:
            return None
        self.steps += 1
        assert sum(chunk.end - chunk.start for chunk in step.chunks) <= self.chunk_size
        assert len({chunk.owner for chunk in step.chunks}) == len(step.chunks), "two slices of one prompt"
        for chunk in step.chunks:
            number = chunk.owner.key.transfer_id
            assert chunk.start == self.computed[number]
            assert chunk.last or chunk.end % PAGE == 0, "a page would be sent twice"
            self.computed[number] = chunk.end
            if chunk.last:
                self.done[number] = self.steps
        results = [StepResult((TokenLogprob(1, None),) if chunk.last else (), ()) for chunk in step.chunks]
        self.scheduler.step_done(step.command_id, results, self.now)
        for effect in self.scheduler.take_effects():
            if isinstance(effect, ChunkWrite):
                written = ChunkWritten(DECODE, effect.key, effect.token_start, effect.token_end, ok=True)
                self.scheduler.handle(ChunkReport(0, written), self.now)
        return step


@settings(max_examples=examples(200, 80), deadline=None)
@given(
    chunk_pages=st.sampled_from([1, 2, 3, 32]),
    prompts=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 3000)), min_size=1, max_size=30),
)
def test_no_prompt_starves(chunk_pages: int, prompts: list[tuple[int, int]]) -> None:
    """The oldest one has every seventeenth step, whatever comes later."""
    server = Steps(chunk_pages * PAGE)
    bounds: dict[int, float] = {}
    arrivals = sorted(prompts)
    while arrivals or server.done.keys() != server.computed.keys():
        while arrivals and arrivals[0][0] <= server.steps:
            _, tokens = arrivals.pop(0)
            number = len(bounds)
            server.arrive(number, tokens)
            left = tokens + sum(
                request.prompt_tokens - request.scheduled
                for request in server.scheduler.requests.values()
                if request.key.transfer_id != number
            )
            bounds[number] = server.steps + (MAX_OVERTAKES + 1) * (left / server.chunk_size + len(bounds) + 1)
        if server.step() is None:
            server.steps += 1  # idle
    assert all(server.done[number] <= bound for number, bound in bounds.items()), (server.done, bounds)


@settings(max_examples=examples(100, 40), deadline=None)
@given(longs=st.integers(1, 8), tokens=st.integers(1, 256), seed=st.integers(0, 1000))
def test_short_prompt_is_in_the_next_step(longs: int, tokens: int, seed: int) -> None:
    """If all others are longer."""
    server, draw = Steps(512), random.Random(seed)
    for number in range(longs):
        server.arrive(number, draw.randint(2000, 9000))
    for _ in range(draw.randint(1, 3)):
        server.step()
    server.arrive(100, tokens)
    began = server.steps
    server.step()
    assert server.done[100] == began + 1


@pytest.mark.parametrize(("shorts", "most_s"), [(2, 0.3), (4, 0.8), (8, 3.0)])
def test_long_prompt_does_not_starve_in_a_flood_of_short_prompts(shorts: int, most_s: float) -> None:
    """They arrive in every step: 40 %, 80 % and 160 % of what the server computes. Alone it takes 160 ms."""
    server = Steps(512)
    server.arrive(0, 8000)
    number = 0
    while 0 not in server.done:
        for _ in range(shorts):
            number += 1
            server.arrive(number, 100)
        server.step()
    assert server.now <= most_s


def test_highest_priority_gets_the_whole_step() -> None:
    server = Steps(512)
    server.arrive(0, 4000)
    server.arrive(1, 5)
    server.arrive(2, 2000, priority=1)
    server.arrive(3, 1000, priority=1)
    while len(server.done) < 4:
        server.step()
    assert max(server.done[2], server.done[3]) == 6
    assert server.done[1] == 7, "the rest of step 6 is less than a page"


def test_prompts_of_equal_length_are_served_in_order_of_arrival() -> None:
    server = Steps(512)
    for number in range(6):
        server.arrive(number, 700)
    while len(server.done) < 6:
        server.step()
    assert list(server.done) == list(range(6))


def test_prompt_that_waits_for_pages_is_overtaken_at_most_sixteen_times() -> None:
    """A computing prompt has 60 of 100 pages, and the next one needs as many. Short ones take free pages, until those
    are kept for it.
    """
    server = Steps(512, num_pages=100)
    server.arrive(0, 960)
    server.arrive(1, 960)
    server.step()
    for number in range(100, 130):
        server.arrive(number, 32)
    server.scheduler.advance(0.0)
    with_pages = [ref[1].transfer_id for ref, each in server.scheduler.requests.items() if each.grant is not None]
    assert with_pages == [0, *range(100, 100 + MAX_OVERTAKES)]
    while 0 not in server.done:
        assert not any(number >= 100 + MAX_OVERTAKES for number in server.done)
        server.step()
    server.scheduler.advance(server.now)
    assert server.scheduler.requests[DECODE, TransferKey(1, 1)].grant is not None
    while len(server.done) < 32:
        server.step()


def test_prompt_of_5_tokens_is_fast_behind_three_prompts_of_8000() -> None:
    """1,800 tokens per second, as on two cores. Behind all of them it took 13.2 s."""
    simulator = TimedSimulator(tokens_per_s=1800)
    simulator.run_for(1.0)
    began = simulator.now
    for number in range(3):
        simulator.ask(f"long {number}", 8000)
    simulator.run_for(1.0)
    asked = simulator.now
    simulator.ask("short", 5)
    simulator.run(lambda: "short" in simulator.ended_at)
    assert simulator.ended_at["short"] - asked < 3 * 512 / 1800, "two steps are in flight, it is in the third"
    simulator.run(lambda: not simulator.decode.requests)
    assert simulator.now - began == pytest.approx(24_005 / 1800, rel=0.01)
