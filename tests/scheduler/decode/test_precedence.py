"""Precedence when memory is short: the higher priority, then running requests, then older ones."""

import itertools
import math
from collections.abc import Callable

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.scheduler.chunking.fair_queue import MAX_OVERTAKES
from pdserve.scheduler.decode.requests.request import Prompt, Request
from pdserve.scheduler.messages.lifecycle import State
from tests.scheduler.simulation.simulator import ENDPOINTS, Simulator


def work(simulator: Simulator, until: Callable[[], object], *, servers: int = 2, turns: int = 300) -> None:
    """Run with `servers` prefill servers, with checks after every turn, until the condition holds."""
    for _ in range(turns):
        if until():
            return
        for which in range(servers):
            simulator.deliver(which, up=False)
            simulator.prefill_turn(which)
            simulator.end_write(which, ok=True, late=False)
            simulator.deliver(which, up=True)
        simulator.decode_turn()
        simulator.check()
        simulator.rank_turn(eos=False)
        simulator.check()
        simulator.copy_turn()
        simulator.check()
        simulator.pass_time(0.01)
    raise AssertionError(f"not within {turns} turns: {simulator.decode.state_counts()}")


def ask(simulator: Simulator, tokens: int, new: int, *, priority: int = 0, server: int = 0) -> Request:
    """Submit a request, later than all others, that finds nothing in the cache."""
    simulator.pass_time(0.001)
    simulator.flush()
    before = set(simulator.decode.requests)
    simulator.submit(tokens, 0, new, 1, ENDPOINTS[server], priority)
    (rid,) = simulator.decode.requests.keys() - before
    return simulator.decode.requests[rid]


def first_retracted(simulator: Simulator, requests: list[Request]) -> Request:
    work(simulator, lambda: simulator.decode.counters["retractions"])
    retracted = (State.SAVING, State.SAVED)
    (victim,) = [request for request in requests if request.state in retracted or request.prompt.output_tokens]
    return victim


@pytest.mark.parametrize("stages", [1, 2])
def test_arrived_request_is_retracted_before_a_running_one(stages: int) -> None:
    """Two hot buffers, twelve pages. The waiting request is not the youngest."""
    simulator = Simulator(stages=stages, overlap=stages == 1, hot_pages=7)
    requests = [ask(simulator, 6, 20, server=server) for server in (0, 1, 0)]
    work(simulator, lambda: len(simulator.decode.rooms.batch.running) == 2, servers=1)
    work(simulator, lambda: requests[1].state is State.ARRIVED)
    assert first_retracted(simulator, requests) is requests[1]
    work(simulator, lambda: not simulator.decode.requests)
    assert simulator.decode.counters["requests_finished"] == 3
    simulator.finish()


@pytest.mark.parametrize(("priority", "gives_way"), [(0, True), (1, False)])
def test_ready_request_is_retracted_first_unless_it_has_a_higher_priority(priority: int, gives_way: bool) -> None:
    """Three run at a time. With equal priorities the READY request is retracted, although it is older than others."""
    simulator = Simulator()
    first, waits = ask(simulator, 4, 20), ask(simulator, 4, 20, priority=priority, server=1)
    later = [ask(simulator, 4, 20) for _ in range(2)]
    work(simulator, lambda: len(simulator.decode.rooms.batch.running) == 3, servers=1)
    work(simulator, lambda: waits.state is State.READY)
    victim = first_retracted(simulator, [first, waits, *later])
    assert victim is (waits if gives_way else later[-1])
    work(simulator, lambda: not simulator.decode.requests)
    simulator.finish()


def test_higher_priority_is_resumed_first() -> None:
    """Although it was retracted last: the lowest priority is retracted first."""
    simulator = Simulator(retract_pages=24)
    ask(simulator, 4, 30, priority=1)
    high, low = ask(simulator, 4, 30, priority=1), ask(simulator, 4, 30)
    work(simulator, lambda: low.state is State.SAVED)
    assert high.state is State.RUNNING
    work(simulator, lambda: high.state is State.SAVED)
    work(simulator, lambda: State.RUNNING in (high.state, low.state))
    assert simulator.decode.rooms.batch.running[0] is high
    work(simulator, lambda: not simulator.decode.requests)
    assert simulator.decode.counters["requests_finished"] == 3
    simulator.finish()


def test_higher_priority_gets_the_next_place_in_the_batch() -> None:
    simulator = Simulator()
    for _ in range(3):
        ask(simulator, 2, 11)
    low = ask(simulator, 2, 3)
    work(simulator, lambda: low.state is State.READY)
    high = ask(simulator, 2, 3, priority=1, server=1)
    work(simulator, lambda: high.state is State.READY)
    assert low.state is State.READY
    work(simulator, lambda: State.RUNNING in (high.state, low.state))
    assert high.state is State.RUNNING
    work(simulator, lambda: not simulator.decode.requests)
    simulator.finish()


def test_retracted_request_blocks_only_prompts_of_its_priority() -> None:
    simulator = Simulator(retract_pages=24)
    ask(simulator, 4, 30)
    low = ask(simulator, 4, 30)
    work(simulator, lambda: low.state is State.SAVED)
    equal, high = ask(simulator, 2, 3), ask(simulator, 2, 3, priority=1)
    work(simulator, lambda: high.state is not State.QUEUED, turns=3)
    assert (low.state, equal.state) == (State.SAVED, State.QUEUED)
    work(simulator, lambda: not simulator.decode.requests)
    assert simulator.decode.counters["requests_finished"] == 4
    simulator.finish()


def test_large_prompt_is_overtaken_at_most_sixteen_times() -> None:
    """A larger prompt of a higher priority that waits as well does not restart its count."""
    decode = Simulator(prefill_pages=20).decode
    assert decode.allocator.grant("somebody", 6) is not None
    sent, ids = 0, itertools.count(1)

    def push(tokens: int, priority: int = 0) -> Prompt:
        prompt = Prompt(next(ids), tuple(range(tokens)), priority=priority, now=0.0)
        prompt.members.append(
            Request("r", prompt, SamplingParams(max_new_tokens=1), deadline=math.inf, now=float(prompt.prompt_id))
        )
        decode.rooms.queued.push(prompt, 0.0)
        return prompt

    large = push(28)
    for _ in range(MAX_OVERTAKES):
        small = push(1)
        decode.transitions.dispatch(0.0, above=None)
        assert small not in decode.rooms.queued
        for grant in (small.grant, small.members[0].grant):
            assert grant is not None
            decode.allocator.release(grant)
        sent += 1
    larger, small = push(40, priority=1), push(1)
    decode.transitions.dispatch(0.0, above=None)
    assert [prompt in decode.rooms.queued for prompt in (larger, large, small)] == [True, True, True]
    assert decode.counters["overtakes"] == sent == MAX_OVERTAKES
    assert [decode.rooms.queued.is_due(prompt) for prompt in (large, larger)] == [True, False]


@pytest.mark.parametrize("servers", [0, 1])
def test_kv_is_saved_while_no_prefill_server_can_recompute_it(servers: int) -> None:
    """Although prefill would be cheaper: without a server the request would fail after `prefill_wait_s`."""
    simulator = Simulator(retract_pages=24)
    requests = [ask(simulator, 6, 30) for _ in range(2)]
    work(simulator, lambda: len(simulator.decode.rooms.batch.running) == 2)
    simulator.decode.rates.copied_pages.measured(1, 1.0)
    simulator.decode.rates.prefilled_tokens.measured(10**6, 1.0)
    for _ in ENDPOINTS[servers:]:
        simulator.kill(1 if servers else 0)
    work(simulator, lambda: simulator.decode.counters["retractions"], servers=servers)
    assert simulator.decode.counters["retractions_recomputed"] == servers
    assert requests[1].state is (State.QUEUED if servers else State.SAVED)
    work(simulator, lambda: not simulator.decode.requests, servers=servers)
    assert simulator.decode.counters["requests_finished"] == 2
    simulator.finish()
