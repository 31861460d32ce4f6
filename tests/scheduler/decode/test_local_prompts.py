"""Decode servers that compute prompts themselves, in simulations: beside running requests, and when prefill is lost."""

import collections
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.scheduler.chunking import shared_prefix
from pdserve.scheduler.chunking.step_rule import LATE_GAPS
from pdserve.scheduler.decode.placer import PAIRING_S
from pdserve.scheduler.decode.rooms.batch import DecodeStep
from pdserve.scheduler.messages.frontend import Submit
from tests.examples import examples
from tests.scheduler.simulation.random_workloads import ACTIONS, run_workload
from tests.scheduler.simulation.simulator import Simulator
from tests.scheduler.simulation.timed_simulator import TimedSimulator, decode_limits

MODES: list[dict[str, Any]] = [
    {"local_prefill": local_prefill, **mode}
    for mode in (
        {"overlap": True},
        {},
        {"stages": 2},
        {"overlap": True, "retract_pages": 0},
        {"overlap": True, "prefix_cache": False},
        {"verifies": True},
    )
    for local_prefill in ("auto", "always")
]
HISPARSE_MODES: list[dict[str, Any]] = [
    {"local_prefill": local_prefill, **mode}
    for mode in (
        {"overlap": True, "hot_pages": 10},
        {"hot_pages": 9},
        {"stages": 2, "hot_pages": 9, "verifies": True},
        {"overlap": True, "hot_pages": 9, "lends": True, "prefix_cache": False},
        {"hot_pages": 6, "lends": True},
        {"overlap": True, "hot_pages": 12, "retract_pages": 0},
    )
    for local_prefill in ("auto", "always")
]
"""Three request slots. Hot pages are too few for three fully resident requests, and sometimes for one prompt."""


def test_random_workloads_end_with_full_pools_and_one_response_per_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill servers die, hang and come back meanwhile. Every kind of decision happens often enough to be tested. The
    prompts are short, so they wait for short prefixes.
    """
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 1)
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(examples(84, 24)):
        simulator = Simulator(**MODES[seed % len(MODES)])
        run_workload(simulator, ACTIONS, seed, steps=400)
        seen.update(simulator.decode.counters)
        seen["local chunks"] += simulator.seen_chunks
    for event in (
        "local chunks",
        "local_prefill_always",
        "local_prefill_absent",
        "local_prefill_failed",
        "local_prefill_short",
        "remote_prefill_on_time",
        "remote_prefill_unmeasured",
        "retractions_recomputed",
        "steps_failed",
        "prefix_tokens_reused",
        "prefix_waits",
    ):
        assert seen[event] >= examples(3, 1), f"{event} happened {seen[event]} times"


def test_random_hisparse_workloads_end_with_full_pools_and_read_the_right_rows() -> None:
    """Prompts are computed in fully resident hot buffers, which become those of running requests."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(examples(84, 24)):
        simulator = Simulator(**HISPARSE_MODES[seed % len(HISPARSE_MODES)])
        run_workload(simulator, ACTIONS, seed, steps=400)
        seen.update(simulator.decode.counters)
        seen.update(simulator.hot_seen)
    for event in (
        "resident chunk",
        "mixed step",
        "step of chunks",
        "evicting step",
        "shrunk",
        "opened evicting",
        "lost hot buffer",
        "lent",
        "reclaimed",
        "local_prefill_always",
        "local_prefill_absent",
        "local_prefill_short",
        "remote_prefill_hot_rows",
        "retractions_recomputed",
        "requests_aborted",
        "steps_failed",
        "prefix_tokens_reused",
    ):
        assert seen[event] >= examples(3, 1), f"{event} happened {seen[event]} times"


def local(step_s: float = 0.006, **changes: Any) -> TimedSimulator:
    """Like an H200: decode steps of 6 ms, and 40,000 prompt tokens/s."""
    settings = {"local_prefill": "always", "max_step_tokens": 2048, "overlap": True, **changes}
    return TimedSimulator(tokens_per_s=40_000, step_s=step_s, pool_tokens=1 << 18, limits=decode_limits(**settings))


def longest_gap(simulator: TimedSimulator, rids: list[str]) -> float:
    """Run until all but these requests have ended; returns the longest time between two of their tokens."""
    last, gaps = dict.fromkeys(rids, simulator.now), [0.0]
    seen = {rid: simulator.output[rid] for rid in rids}

    def ended() -> bool:
        for rid in rids:
            if simulator.output[rid] > seen[rid]:
                gaps.append(simulator.now - last[rid])
                last[rid], seen[rid] = simulator.now, simulator.output[rid]
        return simulator.decode.requests.keys() <= set(rids)

    simulator.run(ended)
    return max(gaps)


@pytest.mark.parametrize(
    ("step_s", "target_s", "longest_s"),
    [
        (0.006, None, LATE_GAPS * 0.050),
        (0.030, None, LATE_GAPS * 0.075),
        (0.006, 0.030, LATE_GAPS * 0.030),
        (0.006, 0.0, 0.006 + 2048 / 40_000),
        (0.060, 0.045, 0.060 / 0.7),
    ],
)
def test_time_between_tokens_stays_inside_its_limit(step_s: float, target_s: float | None, longest_s: float) -> None:
    """By default 50 ms or 2.5 decode steps. They are LATE_GAPS times as long while a first token is late, as that of a
    prompt of 32,768 tokens. Where that is less than a decode step, prompts get 30 % of the time.
    """
    simulator = local(step_s, slo_itl_s=target_s)
    streams = [f"s{number}" for number in range(32)]
    for rid in streams:
        simulator.ask(rid, 16, new=10_000)
    simulator.run(lambda: all(simulator.output[rid] >= 20 for rid in streams))
    simulator.ask("long", 32_768)
    started = simulator.now
    assert 0.8 * longest_s <= longest_gap(simulator, streams) <= 1.02 * longest_s
    prompts_s = min(longest_s - step_s, 2048 / 40_000)
    assert simulator.now - started <= 1.2 * 32_768 / 40_000 * (step_s + prompts_s) / prompts_s


def test_step_of_prompts_only_stays_inside_the_limit_of_a_request_in_another_stage() -> None:
    """The request is in one of two stages, so every second step has only prompt tokens."""
    simulator = local(stages=2, overlap=False)
    simulator.ask("stream", 16, new=10_000)
    simulator.run(lambda: simulator.output["stream"] >= 20)
    simulator.ask("long", 32_768)
    assert longest_gap(simulator, ["stream"]) <= 1.02 * LATE_GAPS * 0.050


def test_shortest_limit_of_the_running_requests_bounds_the_time_between_tokens() -> None:
    simulator = local(slo_itl_s=0.050)
    for rid, slo_itl_ms in (("strict", 20.0), ("loose", 500.0), ("default", None)):
        sampling = SamplingParams(max_new_tokens=10_000, ignore_eos=True)
        simulator.submitted.add(rid)
        simulator.decode.handle(Submit(rid, (1,) * 16, sampling, slo_itl_ms=slo_itl_ms), simulator.now)
    simulator.run(lambda: simulator.output["strict"] >= 20)
    simulator.ask("long", 32_768)
    assert longest_gap(simulator, ["strict", "loose", "default"]) <= 1.02 * LATE_GAPS * 0.020


@pytest.mark.parametrize(("slo_ttft_ms", "first"), [(None, "short"), (100.0, "long")])
def test_own_limit_of_a_request_brings_a_long_prompt_before_a_short_one(slo_ttft_ms: float | None, first: str) -> None:
    """The long one takes 51 ms, and would have its first token after 180 ms."""
    simulator = local(local_prefill="always", max_step_tokens=512)
    simulator.ask("stream", 1024, new=10_000)
    simulator.run(lambda: simulator.output["stream"] >= 20)
    sampling = SamplingParams(max_new_tokens=1, ignore_eos=True)
    simulator.submitted.add("long")
    simulator.decode.handle(Submit("long", (1,) * 2048, sampling, slo_ttft_ms=slo_ttft_ms), simulator.now)
    simulator.ask("short", 1500)
    simulator.run(lambda: len(simulator.ended_at) == 2)
    assert min(simulator.ended_at, key=simulator.ended_at.__getitem__) == first


def test_many_waiting_prompts_get_large_steps() -> None:
    """A burst of 64 prompts is computed at nearly the full rate, although the first ones run already."""
    simulator = local(max_running_requests=64, growth_tokens=16)
    for number in range(64):
        simulator.ask(f"r{number}", 1024, new=200)
    simulator.run(lambda: len(simulator.output) == 64)
    assert simulator.now <= 1.25 * 64 * 1024 / 40_000


def test_short_prompt_does_not_wait_behind_a_long_one() -> None:
    simulator = local()
    simulator.ask("long", 32_768)
    simulator.run_for(0.1)
    simulator.ask("short", 100)
    asked = simulator.now
    simulator.run(lambda: "short" in simulator.ended_at)
    assert simulator.ended_at["short"] - asked <= 3 * 2048 / 40_000
    assert "long" not in simulator.ended_at


def test_prompt_is_computed_here_at_once_when_the_last_prefill_server_is_lost() -> None:
    simulator = local(local_prefill="auto")
    simulator.ask("r", 8192)
    simulator.run_for(0.05)
    assert simulator.decode.state_counts()["prefilling"] == 1
    simulator.kill(0)
    simulator.run(lambda: "r" in simulator.ended_at, most_s=1.0)
    assert not simulator.failures
    assert simulator.decode.counters["local_prefill_absent"] == 1


def test_prompt_waits_for_the_first_prefill_server_to_pair() -> None:
    simulator = local(local_prefill="auto")
    simulator.decode.peers._peers.clear()
    simulator.ask("r", 100)
    simulator.run_for(0.9 * PAIRING_S)
    assert simulator.decode.state_counts()["queued"] == 1
    simulator.start("a:2")
    simulator.run(lambda: "r" in simulator.ended_at)
    assert simulator.decode.counters["remote_prefill_unmeasured"] == 1


def test_long_prompts_go_to_prefill_and_short_ones_are_computed_here() -> None:
    simulator = local(local_prefill="auto")
    simulator.ask("first", 4096, new=4)
    simulator.run(lambda: "first" in simulator.ended_at)
    simulator.run_for(1.0)  # until the rate of prefill is reported; the step of decode is measured
    simulator.ask("short", 16)
    simulator.ask("long", 8192)
    simulator.run(lambda: len(simulator.ended_at) == 3)
    counters = simulator.decode.counters
    assert (counters["local_prefill_short"], counters["transfers"]) == (1, 2)


@pytest.mark.parametrize(("slow_s", "again"), [(0.5, True), (20.0, False)])
def test_slow_transfer_does_not_keep_prefill_idle_for_ever(slow_s: float, again: bool) -> None:
    """It is measured again after a minute, or after a hundred times as long as it took."""
    simulator = local(local_prefill="auto")
    simulator.decode.rates.prefilled_tokens.measured(4096, 0.1)
    simulator.decode.rates.transfers.ended(slow_s, simulator.now)
    for number in range(10):
        simulator.ask(f"r{number}", 8192)
        simulator.run(partial(simulator.ended_at.__contains__, f"r{number}"))
        simulator.run_for(10.0)
    counters = simulator.decode.counters
    assert (counters["remote_prefill_unmeasured"], counters["remote_prefill_on_time"] > 0) == (again, again)
    assert counters["local_prefill_late"] > 0


def test_rate_of_short_prompts_is_not_used_for_long_ones() -> None:
    """Short prompts have a low rate, because a step has a fixed cost."""
    decode = local(local_prefill="auto").decode
    placer = decode.placer
    decode.rates.prefilled_tokens.measured(8192, 0.2)
    decode.rates.local_tokens.measured(16, 0.006)
    assert placer._local_rate(16) == pytest.approx(16 / 0.006)
    assert placer._local_rate(8192) == pytest.approx(8192 / 0.2), "as fast as prefill, until it is measured"
    decode.rates.local_tokens.measured(2048, 0.05)
    assert placer._local_rate(8192) == pytest.approx(2048 / 0.05)


def test_prompts_are_computed_here_while_prefill_is_busy() -> None:
    """Another decode server keeps the prefill server busy for longer than this server would take."""
    simulator = local(local_prefill="auto")
    simulator.ask("first", 4096)
    simulator.run(lambda: "first" in simulator.ended_at)
    simulator.flood(prompts=40, tokens=4096)
    simulator.run_for(1.0)
    simulator.ask("r", 4096)
    simulator.run(lambda: "r" in simulator.ended_at)
    assert simulator.decode.counters["local_prefill_late"] == 1


@pytest.mark.parametrize(("step_s", "here"), [(0.03, 0), (3.0, 2)])
def test_prompt_at_a_silent_prefill_server_is_computed_here_before_it_is_late(step_s: float, here: int) -> None:
    """Also one that arrives while the server is silent. The server is not lost yet. A prompt has eight steps."""
    simulator = local(local_prefill="auto", growth_tokens=16)
    simulator.ask("first", 4096, new=1000)
    simulator.run(lambda: simulator.output["first"] >= 200)  # the rates of both servers are known
    simulator._least_step_s = step_s
    simulator.ask("stuck", 4096)
    simulator.run_for(0.45)
    simulator.ask("next", 4096)
    asked = simulator.now
    simulator.run(lambda: {"stuck", "next"} <= simulator.ended_at.keys())
    assert sum(simulator.decode.counters[f"local_prefill_{reason}"] for reason in ("failed", "late")) == here
    assert simulator.ended_at["stuck"] <= asked + 0.05
    assert simulator.ended_at["next"] <= asked + 0.3
    simulator.decode.check_integrity()


def test_prompt_too_long_for_prefill_servers_is_computed_here() -> None:
    limits = decode_limits(local_prefill="auto", max_step_tokens=2048)
    simulator = TimedSimulator(tokens_per_s=40_000, limits=limits, prefill_tokens=1024)
    simulator.ask("r", 2048)
    simulator.run(lambda: "r" in simulator.ended_at)
    assert not simulator.failures


def test_timeline_of_a_local_prompt_adds_up() -> None:
    simulator = local()
    for number in range(3):
        simulator.ask(f"r{number}", 4096, new=5)
    simulator.run(lambda: len(simulator.ended_at) == 3)
    for rid, timeline in simulator.timelines.items():
        assert sum(timeline.values()) == pytest.approx(simulator.ended_at[rid])
        assert timeline["prefill"] >= 4096 / 40_000
        assert timeline["transfer"] == 0
        assert timeline["control"] == pytest.approx(0)


# -- HiSparse ------------------------------------------------------------------------------------------------------


def settle(simulator: Simulator, until: Callable[[], object]) -> None:
    """Run, with checks, until this is true."""
    for _ in range(300):
        simulator.work()
        simulator.check()
        simulator.pass_time(0.01)
        if until():
            return
    raise AssertionError(simulator.decode.state_counts())


def prompt_of(tokens: int, first: int = 100) -> tuple[int, ...]:
    return tuple(range(first, first + tokens))


def test_hisparse_prompt_is_computed_in_the_hot_buffer_that_its_request_then_has() -> None:
    simulator = Simulator(local_prefill="always", hot_pages=9, overlap=True)
    rid = simulator.ask_for(prompt_of(20), 8)
    simulator.decode_turn()
    hot = simulator.decode.memory.hot
    assert hot is not None
    (buffer,) = hot._buffers.values()
    assert (buffer.computing, buffer.capacity) == (True, 24)
    settle(simulator, lambda: simulator.output[rid] >= 3)
    assert hot.of(rid) is buffer
    settle(simulator, lambda: not simulator.decode.requests)
    assert simulator.hot_seen["opened fully resident"] == 1, "no second buffer, and no copy of rows"
    simulator.finish()


def test_cached_rows_are_copied_into_the_hot_buffer_before_the_first_chunk() -> None:
    simulator = Simulator(local_prefill="always", hot_pages=9)
    simulator.ask_for(prompt_of(20), 2)
    settle(simulator, lambda: not simulator.decode.requests)
    simulator.ask_for(prompt_of(22), 2)
    simulator.decode_turn()
    simulator.rank_turn(eos=False)
    assert [copy.kind for copy in simulator.decode.memory.copies.in_flight.values()] == ["prefix"]
    simulator.decode_turn()
    assert not simulator.commands, "its chunks wait for the copy"
    settle(simulator, lambda: not simulator.decode.requests)
    assert simulator.decode.counters["prefix_tokens_reused"] == 20
    simulator.finish()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("situation", ["copied", "computed", "in a step"])
def test_abort_of_a_computing_hisparse_prompt_releases_its_hot_buffer(situation: str, samples: int) -> None:
    """Of all its samples, or of the first: the buffer goes to the next one."""
    simulator = Simulator(local_prefill="always", hot_pages=9, overlap=True)
    simulator.submit(8, 0, 2, 1, None, 0)
    settle(simulator, lambda: not simulator.decode.requests)
    simulator.submit(22, 0, 4, samples, None, 0)
    simulator.decode_turn()
    if situation != "copied":
        simulator.work_ranks()
        simulator.decode_turn()
    if situation == "computed":
        simulator.rank_turn(eos=False)
    state = "loading" if situation == "copied" else "computing"
    assert simulator.decode.state_counts()[state] == samples
    simulator.cancel(0, stopped=False)
    simulator.check()
    assert len(simulator.decode.memory.hot or ()) == samples - 1
    settle(simulator, lambda: not simulator.decode.requests)
    simulator.finish()
    assert simulator.decode.counters["requests_finished"] == samples


def test_chunks_and_steps_of_evicting_requests_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hot rows for one long prompt: it makes the running request evicting, and both progress."""
    simulator = Simulator(local_prefill="always", hot_pages=9, overlap=True, pages=32)
    running = simulator.ask_for(prompt_of(20), 40)
    settle(simulator, lambda: simulator.output[running] >= 2)
    simulator.ask_for(prompt_of(22, first=200), 1)
    steps: list[tuple[int, int]] = []
    compute = simulator._compute

    def recorded(step: DecodeStep, eos: bool) -> None:
        steps.append((len(step.rows), len(step.chunks)))
        compute(step, eos)

    monkeypatch.setattr(simulator, "_compute", recorded)
    settle(simulator, lambda: len(simulator.decode.requests) == 1)
    assert simulator.hot_seen["shrunk"] == 1
    first, last = steps.index((0, 1)), len(steps) - 1 - steps[::-1].index((0, 1))
    assert last - first >= 4
    assert steps[first : last + 1] == [(0, 1), *[(1, 0), (0, 1)] * ((last - first) // 2)]
    settle(simulator, lambda: not simulator.decode.requests)
    simulator.finish()


def test_hisparse_prompt_goes_to_prefill_while_hot_rows_are_short() -> None:
    """Measured rates say that all prompts are faster here; but this one would make a running request evicting."""
    simulator = Simulator(local_prefill="auto", hot_pages=9, pages=32)
    rates = simulator.decode.rates
    rates.local_tokens.measured(1 << 20, 0.001)
    rates.prefilled_tokens.measured(1, 1.0)
    rates.transfers.measured(1, 1.0)
    running = simulator.ask_for(prompt_of(20), 40)
    settle(simulator, lambda: simulator.output[running] >= 2)
    assert simulator.decode.counters["local_prefill_late"] == 1
    simulator.ask_for(prompt_of(22, first=200), 2)
    settle(simulator, lambda: len(simulator.decode.requests) == 1)
    assert simulator.decode.counters["remote_prefill_hot_rows"] == 1
    simulator.finish()


def test_hisparse_prompt_waits_for_hot_rows_without_a_prefill_server() -> None:
    """Two running requests keep their first pages."""
    simulator = Simulator(local_prefill="always", hot_pages=9, pages=64)
    for first in (100, 200):
        simulator.ask_for(prompt_of(22, first), 30)
    settle(simulator, lambda: simulator.decode.state_counts()["running"] == 2)
    long = simulator.ask_for(prompt_of(22, 300), 2)
    simulator.work()
    assert simulator.decode.state_counts()["queued"] == 1, "three first pages are free, and it needs six"
    settle(simulator, lambda: not simulator.decode.requests)
    assert simulator.output[long] == 2
    simulator.finish()


def test_hisparse_prompt_that_can_never_be_computed_is_refused_with_the_limit() -> None:
    simulator = Simulator(local_prefill="always", hot_pages=3, pages=32)
    fits, too_long = simulator.ask_for(prompt_of(11), 1), simulator.ask_for(prompt_of(12), 1)
    failed = simulator.failures[too_long]
    assert (failed.status, failed.code) == (413, "too_large")
    assert "the prompt (12 tokens) exceeds this server's hot pool" in failed.message
    assert "prompts of up to 11 tokens" in failed.message
    settle(simulator, lambda: not simulator.decode.requests)
    assert simulator.output[fits] == 1
    simulator.finish()


def test_error_without_a_prefill_server_names_the_longest_prompt_that_is_computed_here() -> None:
    simulator = Simulator(local_prefill="auto", hot_pages=3, pages=32, endpoints=())
    short, long = simulator.ask_for(prompt_of(11), 1), simulator.ask_for(prompt_of(12), 1)
    for _ in range(8):
        simulator.pass_time(0.5)
        simulator.work()
    assert simulator.output[short] == 1
    failed = simulator.failures[long]
    assert (failed.status, failed.code) == (503, "unavailable")
    assert "this server computes prompts of up to 11 tokens (hot pool), and this one has 12" in failed.message
    simulator.finish()
