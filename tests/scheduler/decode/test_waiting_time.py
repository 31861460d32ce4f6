"""Time behind other prompts is waiting, wherever it is spent, and only time in steps is computing."""

import pytest

from tests.scheduler.simulation.timed_simulator import LATENCY_S, TimedWorld, decode_limits

STEP_S = 512 / 256


def test_eight_prompts_at_once_wait_for_each_other() -> None:
    """2,448 tokens at 256 a second are five steps of two seconds. They were told of 0.1 ms in the queue."""
    world = TimedWorld(tokens_per_s=256)
    world.run_for(1.0)
    began = world.now
    rids = [f"r{number}" for number in range(8)]
    for rid in rids:
        world.ask(rid, 306)
    world.run(lambda: not world.decode.requests)
    for rid in rids:
        stages = world.timelines[rid]
        whole = world.ended_at[rid] - began
        assert sum(stages.values()) == pytest.approx(whole)
        assert stages["prefill_queue"] + stages["prefill"] == pytest.approx(whole, abs=4 * LATENCY_S)
        assert stages["prefill"] < 2 * STEP_S + 0.001, "in two steps at most"
    waits = [world.timelines[rid]["prefill_queue"] for rid in rids]
    assert waits == sorted(waits)
    assert waits[0] == pytest.approx(0.0, abs=0.01)
    assert waits[-1] == pytest.approx(2448 / 256 - 2448 % 512 / 256 - STEP_S, abs=STEP_S)
    assert sum(world.timelines[rid]["prefill"] for rid in rids) < 5 * STEP_S * 3, "three share a step"


def test_who_stands_behind_others_is_waiting_with_its_pages_and_without() -> None:
    world = TimedWorld(tokens_per_s=256)
    world.run_for(1.0)
    for number in range(6):
        world.ask(f"r{number}", 306)
    world.run_for(0.01)
    (server,) = world.servers.values()
    load = server.scheduler.load()
    assert (load.waiting_requests, load.running_requests, load.waiting_tokens) == (2, 4, 6 * 306), "two steps are given"
    counts = server.scheduler.state_counts()
    assert (counts["waiting"], counts["computing"]) == (2, 4)
    assert all(transfer.grant is not None for transfer in server.scheduler.transfers.values())
    world.run(lambda: not world.decode.requests)
    load = server.scheduler.load()
    assert (load.waiting_requests, load.running_requests, load.waiting_tokens) == (0, 0, 0)


def test_a_long_prompt_that_shares_its_steps_is_computing() -> None:
    """Half of every step is its own."""
    world = TimedWorld(tokens_per_s=1000)
    world.run_for(1.0)
    world.ask("long", 4000)
    for number in range(20):
        world.ask(f"short {number}", 100)
    world.run(lambda: "long" in world.timelines)
    stages = world.timelines["long"]
    assert stages["prefill"] == pytest.approx(6.0, rel=0.02)
    assert stages["prefill_queue"] == pytest.approx(0.0, abs=0.01)
    world.run(lambda: not world.decode.requests)


@pytest.mark.parametrize("limit", ["prefill", "memory"])
def test_the_queue_tells_which_side_is_the_limit(limit: str) -> None:
    """Ten prompts of 1,000 tokens: prefill takes a second for each, or decode holds one at a time for as long."""
    busy = limit == "prefill"
    world = TimedWorld(
        tokens_per_s=1000 if busy else 1e6,
        step_s=0.01,
        pool_tokens=65536 if busy else 1500,
        limits=decode_limits(growth_tokens=400),
    )
    world.run_for(1.0)
    for number in range(10):
        world.ask(f"r{number}", 1000, 1 if busy else 100)
    world.run(lambda: not world.decode.requests)
    last = world.timelines["r9"]
    waited = {"prefill": "prefill_queue", "memory": "queue"}[limit]
    assert last[waited] == pytest.approx(9.0, rel=0.1)
    assert sum(last.values()) - last[waited] < 1.7
