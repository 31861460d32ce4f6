"""Timelines: time behind other prompts counts as waiting on either server; only time in steps counts as computing."""

import pytest

from tests.scheduler.simulation.timed_simulator import LATENCY_S, TimedSimulator, decode_limits

STEP_S = 512 / 256


def test_time_behind_other_prompts_counts_as_prefill_queue() -> None:
    """2,448 tokens at 256 per second are five steps of two seconds. A timeline used to show 0.1 ms in the queue."""
    simulator = TimedSimulator(tokens_per_s=256)
    simulator.run_for(1.0)
    began = simulator.now
    rids = [f"r{number}" for number in range(8)]
    for rid in rids:
        simulator.ask(rid, 306)
    simulator.run(lambda: not simulator.decode.requests)
    for rid in rids:
        stages = simulator.timelines[rid]
        whole = simulator.ended_at[rid] - began
        assert sum(stages.values()) == pytest.approx(whole)
        assert stages["prefill_queue"] + stages["prefill"] == pytest.approx(whole, abs=4 * LATENCY_S)
        assert stages["prefill"] < 2 * STEP_S + 0.001, "it was in more than two steps"
    waits = [simulator.timelines[rid]["prefill_queue"] for rid in rids]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(0.0, abs=0.01)
    assert waits[-1] == pytest.approx(2448 / 256 - 306 / 256, abs=STEP_S)
    assert sum(simulator.timelines[rid]["prefill"] for rid in rids) < 5 * STEP_S * 3, "three share a step"


def test_requests_behind_others_count_as_waiting_with_or_without_pages() -> None:
    simulator = TimedSimulator(tokens_per_s=256)
    simulator.run_for(1.0)
    for number in range(6):
        simulator.ask(f"r{number}", 306)
    simulator.run_for(0.01)
    (server,) = simulator.servers.values()
    load = server.scheduler.load()
    assert (load.waiting_requests, load.running_requests, load.waiting_tokens) == (2, 4, 6 * 306), "two steps in flight"
    counts = server.scheduler.state_counts()
    assert (counts["waiting"], counts["computing"]) == (2, 4)
    assert all(request.grant is not None for request in server.scheduler.requests.values())
    simulator.run(lambda: not simulator.decode.requests)
    load = server.scheduler.load()
    assert (load.waiting_requests, load.running_requests, load.waiting_tokens) == (0, 0, 0)


def test_long_prompt_that_shares_its_steps_counts_as_computing() -> None:
    """20 short ones pass it or share its steps: it computes for most of the six seconds that all of them take."""
    simulator = TimedSimulator(tokens_per_s=1000)
    simulator.run_for(1.0)
    simulator.ask("long", 4000)
    for number in range(20):
        simulator.ask(f"short {number}", 100)
    simulator.run(lambda: "long" in simulator.timelines)
    stages = simulator.timelines["long"]
    assert 4.0 <= stages["prefill"] <= 6.0
    assert stages["prefill"] + stages["prefill_queue"] == pytest.approx(6.0, rel=0.02)
    simulator.run(lambda: not simulator.decode.requests)


@pytest.mark.parametrize("limit", ["prefill", "memory"])
def test_timeline_shows_whether_prefill_or_memory_is_the_limit(limit: str) -> None:
    """Ten prompts of 1,000 tokens: prefill takes a second for each, or decode holds one at a time for as long."""
    busy = limit == "prefill"
    simulator = TimedSimulator(
        tokens_per_s=1000 if busy else 1e6,
        step_s=0.01,
        pool_tokens=65536 if busy else 1500,
        limits=decode_limits(growth_tokens=400),
    )
    simulator.run_for(1.0)
    for number in range(10):
        simulator.ask(f"r{number}", 1000, 1 if busy else 100)
    simulator.run(lambda: not simulator.decode.requests)
    last = simulator.timelines["r9"]
    waited = {"prefill": "prefill_queue", "memory": "queue"}[limit]
    assert last[waited] == pytest.approx(9.0, rel=0.1)
    assert sum(last.values()) - last[waited] < 1.7


def test_computing_a_retracted_request_again_counts_as_retracted() -> None:
    """Its second prefill used to count as `control`."""
    simulator = TimedSimulator(tokens_per_s=1000, pool_tokens=1600, limits=decode_limits(growth_tokens=16))
    simulator.run_for(1.0)
    began = simulator.now
    for number in range(4):
        simulator.ask(f"r{number}", 300, 300)
    simulator.run(lambda: not simulator.decode.requests)
    assert simulator.decode.counters["retractions_recomputed"] > 0
    for rid, stages in simulator.timelines.items():
        assert sum(stages.values()) == pytest.approx(simulator.ended_at[rid] - began)
        assert stages["control"] == pytest.approx(0.0, abs=8 * LATENCY_S)
    assert max(stages["retracted"] for stages in simulator.timelines.values()) > 0.3, "300 tokens and more"
