"""Late requests are counted once for each limit, by what they waited for."""

import collections

import pytest

from pdserve.common.sampling import Grammar, SamplingParams
from pdserve.scheduler.messages.frontend import Submit
from tests.scheduler.simulation.simulator import Simulator
from tests.scheduler.simulation.timed_simulator import TimedSimulator, decode_limits


def server(**changes: object) -> TimedSimulator:
    """Decode steps of 10 ms, and 10,000 prompt tokens/s."""
    pool_tokens = int(str(changes.pop("pool_tokens", 1 << 18)))
    settings = {"local_prefill": "always", "max_step_tokens": 512, "overlap": True, **changes}
    return TimedSimulator(tokens_per_s=10_000, pool_tokens=pool_tokens, limits=decode_limits(**settings))


def late(simulator: Simulator) -> dict[str, int]:
    """Late requests by limit and cause, without zeros."""
    counters: collections.Counter[str] = simulator.decode.counters
    return {name: number for name, number in counters.items() if name.startswith(("late_first", "late_gap")) and number}


def ask_all(simulator: TimedSimulator, prompts: dict[str, int], new: int = 4) -> None:
    for rid, tokens in prompts.items():
        simulator.ask(rid, tokens, new)
    simulator.run(lambda: len(simulator.ended_at) == len(prompts))


def test_requests_within_their_limits_are_not_late() -> None:
    simulator = server()
    ask_all(simulator, {"a": 128, "b": 128}, new=50)
    assert late(simulator) == {}


def test_late_first_token_counts_for_the_longest_stage_before_it() -> None:
    simulator = server()
    ask_all(simulator, {"long": 8192, **{f"r{number}": 2048 for number in range(8)}}, new=1)
    assert late(simulator)["late_first_token_prefill"] == 1, "0.8 s for the long one"
    assert late(simulator)["late_first_token_prefill_queue"] >= 4, "2.5 s in all"


def test_limit_of_a_request_replaces_that_of_the_server() -> None:
    simulator = server()
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
    for rid, slo_ttft_ms in (("patient", 60_000.0), ("strict", 100.0)):
        simulator.submitted.add(rid)
        simulator.decode.handle(Submit(rid, (1,) * 8192, sampling, slo_ttft_ms=slo_ttft_ms), simulator.now)
    simulator.run(lambda: len(simulator.ended_at) == 2)
    assert sum(late(simulator).values()) == 1


def test_request_counts_once_for_its_late_gaps() -> None:
    """Its own limit is far below a step, so every token of it is late."""
    simulator = server(slo_itl_s=0.0)
    sampling = SamplingParams(max_new_tokens=100, ignore_eos=True)
    simulator.submitted.add("stream")
    simulator.decode.handle(Submit("stream", (1,) * 16, sampling, slo_itl_ms=1.0), simulator.now)
    simulator.run(lambda: simulator.output["stream"] >= 1)
    simulator.ask("long", 4096)
    simulator.run(lambda: len(simulator.ended_at) == 2)
    causes = [name for name in late(simulator) if name.startswith("late_gap")]
    assert len(causes) == 1
    assert late(simulator)[causes[0]] == 1, "it has many"


@pytest.mark.parametrize(("local_prefill", "cause"), [("never", "steps"), ("always", "prompts")])
def test_late_gap_is_due_to_steps_only_without_prompts_in_them(local_prefill: str, cause: str) -> None:
    simulator = server(local_prefill=local_prefill, slo_itl_s=0.005)
    simulator.ask("stream", 16, new=40)
    simulator.run(lambda: simulator.output["stream"] >= 1)
    if local_prefill == "always":
        simulator.ask("long", 4096, new=1)
    simulator.run(lambda: simulator.output["stream"] >= 3)
    assert late(simulator) == {f"late_gap_{cause}": 1}


def test_late_gap_of_a_retracted_request_is_due_to_that() -> None:
    """The pool holds both prompts, but not both outputs."""
    simulator = server(pool_tokens=768, growth_tokens=16, max_running_requests=2, prefix_cache=False)
    ask_all(simulator, {"a": 128, "b": 128}, new=500)
    assert simulator.decode.counters["retractions"] > 0
    assert late(simulator)["late_gap_retracted"] == 1


def test_late_gap_of_a_request_with_slow_masks_is_due_to_its_grammar() -> None:
    simulator = Simulator(slow_masks=True, local_prefill="always")
    simulator.submitted.add("r")
    sampling = SamplingParams(max_new_tokens=8, ignore_eos=True, grammar=Grammar("regex", ".*"))
    simulator.decode.handle(Submit("r", (1, 2, 3), sampling, slo_itl_ms=100.0), 0.0)
    simulator.act()
    while simulator.decode.requests:
        simulator.decode_turn()
        simulator.rank_turn(eos=False)
        if simulator.masks:
            simulator.pass_time(0.15)
            simulator.mask_turn()
    assert late(simulator).get("late_gap_grammar") == 1, simulator.decode.counters
