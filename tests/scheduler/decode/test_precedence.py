"""Who goes before whom when there is not enough for all: the higher priority, those that run, the older."""

import math
from collections.abc import Callable

import pytest

from pdserve.configs.sampling import SamplingParams
from pdserve.scheduler.decode.dispatch.dispatcher import MAX_OVERTAKES
from pdserve.scheduler.decode.requests.request import Prompt, Request
from pdserve.scheduler.messages.lifecycle import State
from tests.scheduler.simulation.simulator import ENDPOINTS, World


def work(world: World, until: Callable[[], object], *, servers: int = 2, turns: int = 300) -> None:
    """Nothing but work, of so many prefill servers, checked after every turn, until it is so."""
    for _ in range(turns):
        if until():
            return
        for which in range(servers):
            world.deliver(which, up=False)
            world.prefill_turn(which)
            world.end_write(which, ok=True, late=False)
            world.deliver(which, up=True)
        world.decode_turn()
        world.check()
        world.rank_turn(eos=False)
        world.check()
        world.copy_turn()
        world.check()
        world.pass_time(0.01)
    raise AssertionError(f"not within {turns} turns: {world.decode.state_counts()}")


def ask(world: World, tokens: int, new: int, *, priority: int = 0, server: int = 0) -> Request:
    """Submit, later than all before it, a request that finds nothing in the cache."""
    world.pass_time(0.001)
    world.flush()
    before = set(world.decode.requests)
    world.submit(tokens, 0, new, 1, ENDPOINTS[server], priority)
    (rid,) = world.decode.requests.keys() - before
    return world.decode.requests[rid]


def first_retracted(world: World, requests: list[Request]) -> Request:
    work(world, lambda: world.decode.counters["retractions"])
    (victim,) = [request for request in requests if request.state is State.RETRACTED or request.prompt.output_tokens]
    return victim


@pytest.mark.parametrize("stages", [1, 2])
def test_one_that_waits_for_a_hot_buffer_gives_its_pages_before_one_that_runs(stages: int) -> None:
    """Two buffers, twelve pages. Who waits is not the youngest."""
    world = World(stages=stages, look_ahead=stages == 1, hot_pages=7)
    requests = [ask(world, 6, 20, server=server) for server in (0, 1, 0)]
    work(world, lambda: world.decode.running == 2, servers=1)
    work(world, lambda: requests[1].state is State.ARRIVED)
    assert first_retracted(world, requests) is requests[1]
    work(world, lambda: not world.decode.requests)
    assert world.decode.counters["requests_finished"] == 3
    world.finish()


@pytest.mark.parametrize(("priority", "gives_way"), [(0, True), (1, False)])
def test_one_that_waits_for_a_place_in_the_batch_gives_its_pages_first_unless_it_matters_more(
    priority: int, gives_way: bool
) -> None:
    """Three run at a time. Of one priority it is who waits, although it is older than two that run."""
    world = World()
    first, waits = ask(world, 4, 20), ask(world, 4, 20, priority=priority, server=1)
    later = [ask(world, 4, 20) for _ in range(2)]
    work(world, lambda: world.decode.running == 3, servers=1)
    work(world, lambda: waits.state is State.READY)
    victim = first_retracted(world, [first, waits, *later])
    assert victim is (waits if gives_way else later[-1])
    work(world, lambda: not world.decode.requests)
    world.finish()


def test_the_higher_priority_comes_back_first() -> None:
    """Although it went last: the lowest goes first."""
    world = World(retract_pages=24)
    ask(world, 4, 30, priority=1)
    high, low = ask(world, 4, 30, priority=1), ask(world, 4, 30)
    work(world, lambda: low.state is State.RETRACTED)
    assert high.state is State.RUNNING
    work(world, lambda: high.state is State.RETRACTED)
    work(world, lambda: State.RUNNING in (high.state, low.state))
    assert world.decode.runs.running[0] is high
    work(world, lambda: not world.decode.requests)
    assert world.decode.counters["requests_finished"] == 3
    world.finish()


def test_the_higher_priority_gets_the_next_place_in_the_batch() -> None:
    world = World()
    for _ in range(3):
        ask(world, 2, 11)
    low = ask(world, 2, 3)
    work(world, lambda: low.state is State.READY)
    high = ask(world, 2, 3, priority=1, server=1)
    work(world, lambda: high.state is State.READY)
    assert low.state is State.READY
    work(world, lambda: State.RUNNING in (high.state, low.state))
    assert high.state is State.RUNNING
    work(world, lambda: not world.decode.requests)
    world.finish()


def test_one_that_was_retracted_holds_up_those_of_its_priority_only() -> None:
    world = World(retract_pages=24)
    ask(world, 4, 30)
    low = ask(world, 4, 30)
    work(world, lambda: low.state is State.RETRACTED)
    equal, high = ask(world, 2, 3), ask(world, 2, 3, priority=1)
    work(world, lambda: high.state is not State.QUEUED, turns=3)
    assert (low.state, equal.state) == (State.RETRACTED, State.QUEUED)
    work(world, lambda: not world.decode.requests)
    assert world.decode.counters["requests_finished"] == 4
    world.finish()


def test_a_large_prompt_is_passed_sixteen_times_whoever_waits_beside_it() -> None:
    """A larger one of a higher priority that waits as well does not begin a new count for it."""
    decode = World(prefill_pages=20).decode
    intake = decode.intake
    assert decode.pages.grant("somebody", 6) is not None
    sent = 0

    def push(tokens: int, priority: int = 0) -> Prompt:
        prompt = intake.new_prompt(tuple(range(tokens)), priority=priority, now=0.0)
        prompt.members.append(
            Request("r", prompt, SamplingParams(max_new_tokens=1), deadline=math.inf, now=float(prompt.prompt_id))
        )
        intake.queue.push(prompt)
        return prompt

    large = push(28)
    for _ in range(MAX_OVERTAKES):
        small = push(1)
        intake.dispatch(0.0)
        assert small not in intake.queue
        for grant in (small.grant, small.members[0].grant):
            assert grant is not None
            decode.pages.release(grant)
        sent += 1
    larger, small = push(40, priority=1), push(1)
    intake.dispatch(0.0)
    assert [prompt in intake.queue for prompt in (larger, large, small)] == [True, True, True]
    assert intake.counters["overtakes"] == sent == large.overtaken == MAX_OVERTAKES
    assert larger.overtaken == 0


@pytest.mark.parametrize("servers", [0, 1])
def test_kv_is_kept_while_nobody_is_there_to_compute_it_anew(servers: int) -> None:
    """Although that would be cheaper: its client would be told three seconds later that there is no prefill server."""
    world = World(retract_pages=24)
    requests = [ask(world, 6, 30) for _ in range(2)]
    work(world, lambda: world.decode.running == 2)
    world.decode.retracted.rates.copied_pages.measured(1, 1.0)
    world.decode.retracted.rates.prefilled_tokens.measured(10**6, 1.0)
    for _ in ENDPOINTS[servers:]:
        world.kill(1 if servers else 0)
    work(world, lambda: world.decode.counters["retractions"], servers=servers)
    assert world.decode.counters["retractions_recomputed"] == servers
    assert requests[1].state is (State.QUEUED if servers else State.RETRACTED)
    work(world, lambda: not world.decode.requests, servers=servers)
    assert world.decode.counters["requests_finished"] == 2
    world.finish()
