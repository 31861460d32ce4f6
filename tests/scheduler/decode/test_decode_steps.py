"""Steps of the decode scheduler: admission, batches of a pipeline, overlap scheduling, exhausted memory."""

import gc
import weakref
from functools import partial
from typing import Any

import msgspec
import pytest

from pdserve.common.sampling import Grammar, SamplingParams
from pdserve.configs.setting_types import LocalPrefillSetting
from pdserve.scheduler.decode.requests.request import Request
from pdserve.scheduler.decode.rooms.batch import DecodeStep
from pdserve.scheduler.decode.transitions import Transitions
from pdserve.scheduler.messages.effects import SendToFrontend
from pdserve.scheduler.messages.frontend import Cancel, Failed, Submit
from pdserve.scheduler.messages.lifecycle import DECODE_TRANSITIONS, State
from pdserve.scheduler.messages.ranks import MaskReady
from pdserve.scheduler.messages.step import StepResult
from pdserve.transfer.protocol.messages import KvDestination, TransferFailed
from tests.scheduler.simulation.simulator import ENDPOINTS, Simulator, lost_hot_buffer, sampled
from tests.scheduler.simulation.timed_simulator import TimedSimulator, decode_limits


def test_only_ready_requests_start_to_run() -> None:
    assert [state for state, targets in DECODE_TRANSITIONS.items() if State.RUNNING in targets] == [State.READY]


def admitted_after(request: Request, now: float) -> str:
    """What happened to a request before this admission."""
    if request.prompt.attempts > 1:
        return "sent again"
    if request.prompt.output_tokens:
        return "recomputed"
    if lost_hot_buffer(request):
        return "saved" if request.spent(State.SAVED, now=now) else "lost hot buffer"
    return "fresh"


@pytest.mark.parametrize("stages", [1, 2])
def test_every_admission_calls_admit_and_opens_a_hot_buffer(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a transfer, a retry, and every kind of retraction; with and without a pipeline."""
    admitted: list[str] = []
    seen: set[str] = set()
    admit = Transitions.admit

    def spy(transitions: Transitions, request: Request, now: float) -> None:
        admitted.append(request.rid)
        seen.add(admitted_after(request, now))
        admit(transitions, request, now)

    monkeypatch.setattr(Transitions, "admit", spy)
    simulator = Simulator(stages=stages, hot_pages=7)
    kill_at = 50
    for turn in range(400):
        if turn % 5 == 0:
            simulator.submit(6, turn % 2, 14, 1, None, turn // 5 % 2)
        if turn >= kill_at and simulator.decode.state_counts()["prefilling"]:
            kill_at += 90
            for endpoint in ENDPOINTS:
                simulator.kill(0)
                simulator.start(endpoint)
        for which in range(2):
            simulator.deliver(which, up=False)
            simulator.prefill_turn(which)
            simulator.end_write(which, ok=True, late=False)
            simulator.deliver(which, up=True)
        simulator.decode_turn()
        simulator.work_ranks()
        simulator.pass_time(0.05)
        for request in simulator.decode.rooms.batch.running:
            assert request.rid in admitted
    assert seen == {"fresh", "sent again", "lost hot buffer", "saved", "recomputed"}
    simulator.finish()
    assert simulator.hot_seen["opened fully resident"] + simulator.hot_seen["opened evicting"] == len(admitted)


def run_to_the_end(simulator: Simulator, turns: int) -> None:
    """Run without new requests and faults."""
    for _ in range(turns):
        for which in range(2):
            simulator.deliver(which, up=False)
            simulator.prefill_turn(which)
            simulator.end_write(which, ok=True, late=False)
            simulator.deliver(which, up=True)
        simulator.decode_turn()
        simulator.rank_turn(eos=False)
        simulator.copy_turn()
        simulator.pass_time(0.01)


@pytest.mark.parametrize(("stages", "overlap"), [(1, False), (1, True), (2, False)])
def test_requests_finish_when_the_pool_is_exhausted(stages: int, overlap: bool) -> None:
    """The pages of a retracted request go to the request that needs them, not back to itself."""
    simulator = Simulator(stages=stages, overlap=overlap)
    for _ in range(3):
        simulator.submit(12, 0, 20, 1, None, 0)
        simulator.flush()
    run_to_the_end(simulator, 400)
    assert simulator.decode.counters["retractions"] > 0
    assert simulator.decode.counters["requests_finished"] == 3


@pytest.mark.parametrize("local_prefill", ["never", "always"])
def test_prompt_tokens_are_counted_once(local_prefill: LocalPrefillSetting) -> None:
    """Not again when the KV of a retracted request is computed again, together with its output."""
    simulator = Simulator(retract_pages=0, prefix_cache=False, local_prefill=local_prefill)
    for _ in range(3):
        simulator.submit(12, 0, 20, 1, None, 0)
    run_to_the_end(simulator, 400)
    assert simulator.decode.counters["retractions_recomputed"] > 0
    assert simulator.decode.counters["requests_finished"] == 3
    assert simulator.decode.counters["prompt_tokens"] == 3 * 12


def running_steps(simulator: Simulator, requests: int, **sampling: Any) -> list[DecodeStep]:
    """The steps that start at once when `requests` requests run."""
    for index in range(requests):
        params = SamplingParams(max_new_tokens=9, **sampling)
        simulator.decode.handle(Submit(f"x{index}", (1, 2 + index, 3), params), simulator.now)
        simulator.submitted.add(f"x{index}")
    simulator.act()
    for _ in range(30):
        for which in range(2):
            simulator.deliver(which, up=False)
            simulator.prefill_turn(which)
            simulator.end_write(which, ok=True, late=False)
            simulator.deliver(which, up=True)
        simulator.decode.advance(simulator.now)
        simulator.act()
    steps = []
    while (step := simulator.decode.next_step(simulator.now)) is not None:
        simulator.act()
        simulator.commands.append(step)
        steps.append(step)
    return steps


def test_stages_get_even_batches_of_different_requests() -> None:
    steps = running_steps(Simulator(stages=2), 3)
    assert [len(step.rows) for step in steps] == [2, 1]
    assert len({row.request.rid for step in steps for row in step.rows}) == 3


def test_overlapped_step_follows_the_rows_of_the_previous_one() -> None:
    first, second = running_steps(Simulator(overlap=True), 3)
    assert [row.token for row in first.rows] == [50, 50, 50]
    assert [(row.token, row.follows) for row in second.rows] == [(None, 0), (None, 1), (None, 2)]
    assert [row.position for row in second.rows] == [row.position + 1 for row in first.rows]


def test_penalties_disable_overlap() -> None:
    assert len(running_steps(Simulator(overlap=True), 3, frequency_penalty=0.5)) == 1


def test_no_step_starts_after_the_last_token() -> None:
    simulator = Simulator(overlap=True)
    steps = running_steps(simulator, 1)
    while simulator.commands:
        simulator.rank_turn(eos=False)
        if (step := simulator.decode.next_step(simulator.now)) is not None:
            simulator.commands.append(step)
            steps.append(step)
    assert [step.rows[0].output_index for step in steps] == list(range(1, 9))
    assert simulator.decode.counters["requests_finished"] == 1


def step_of(simulator: Simulator, slow: bool) -> list[str]:
    """Run the step in flight, with a slow mask of request x0; start the next one. Returns its requests."""
    step = simulator.commands.popleft()
    assert isinstance(step, DecodeStep)
    results = [msgspec.structs.replace(sampled(50), slow_mask=slow and row.request.rid == "x0") for row in step.rows]
    simulator.decode.step_done(step.command_id, results, simulator.now)
    simulator.act()
    following = simulator.decode.next_step(simulator.now)
    if following is None:
        return []
    simulator.commands.append(following)
    return [row.request.rid for row in following.rows]


@pytest.mark.parametrize("problem", [None, "too many items"])
def test_request_with_a_slow_mask_sits_out_until_it_is_computed(problem: str | None) -> None:
    simulator = Simulator()
    running_steps(simulator, 2, grammar=Grammar("regex", ".*"))
    assert step_of(simulator, slow=True) == ["x1"]
    assert [step_of(simulator, slow=False) for _ in range(3)] == [["x1"]] * 3
    (command,) = simulator.masks
    assert (command.token, command.draw.output_index) == (50, 2)
    simulator.decode.handle(MaskReady(0, command.number, slow=True, problem=problem), simulator.now)
    assert step_of(simulator, slow=False) == (["x0", "x1"] if problem is None else ["x1"])
    assert step_of(simulator, slow=False) == ["x1"], "the mask after it is computed beside the steps too"
    assert simulator.decode.counters["masks_prepared"] == (2 if problem is None else 1)


def test_request_takes_part_in_every_step_when_its_masks_are_fast_again() -> None:
    simulator = Simulator(overlap=True)
    first, _ = running_steps(simulator, 1, grammar=Grammar("regex", ".*"))
    assert step_of(simulator, slow=True) == [], "a token is still in flight"
    assert not simulator.masks
    assert step_of(simulator, slow=False) == []
    (command,) = simulator.masks
    assert command.draw.output_index == first.rows[0].output_index + 2
    simulator.decode.handle(MaskReady(0, command.number, slow=False), simulator.now)
    steps = [simulator.decode.next_step(simulator.now) for _ in range(3)]
    assert [step.rows[0].follows for step in steps if step is not None] == [None, 0], "steps overlap again"


def test_mask_of_a_request_that_was_cancelled_is_not_used() -> None:
    simulator = Simulator()
    running_steps(simulator, 2, grammar=Grammar("regex", ".*"))
    step_of(simulator, slow=True)
    (command,) = simulator.masks
    simulator.decode.handle(Cancel("x0"), simulator.now)
    simulator.decode.handle(MaskReady(0, command.number, slow=True), simulator.now)
    assert step_of(simulator, slow=False) == ["x1"]


@pytest.mark.parametrize("too_complex", [True, False])
def test_request_ends_when_its_grammar_cannot_be_followed(too_complex: bool) -> None:
    simulator = Simulator()
    (step,) = running_steps(simulator, 1)
    simulator.decode.step_done(step.command_id, [StepResult((), (), "too many items", too_complex)], simulator.now)
    (ended,) = [effect.message for effect in simulator.decode.take_effects() if isinstance(effect, SendToFrontend)]
    assert isinstance(ended, Failed)
    assert (ended.status, ended.code) == ((400, "grammar_too_complex") if too_complex else (500, "internal"))
    assert "too many items" in ended.message
    assert simulator.decode.counters["grammars_too_complex"] == too_complex


@pytest.mark.parametrize("too_complex", [True, False])
def test_request_ends_when_prefill_cannot_follow_its_grammar(too_complex: bool) -> None:
    simulator = Simulator(local_prefill="never")
    simulator.decode.handle(Submit("x", (1, 2, 3), SamplingParams(max_new_tokens=9)), simulator.now)
    simulator.submitted.add("x")
    simulator.decode.advance(simulator.now)
    simulator.act()
    (key,) = [
        effect.message.key
        for server in simulator.servers.values()
        for effect in server.to_prefill
        if isinstance(effect.message, KvDestination)
    ]
    failed = TransferFailed(key, "too many items", retryable=False, too_complex=too_complex)
    simulator.decode.transitions.transfer_failed(failed, simulator.now)
    (ended,) = [effect.message for effect in simulator.decode.take_effects() if isinstance(effect, SendToFrontend)]
    assert isinstance(ended, Failed)
    assert (ended.status, ended.code) == ((400, "grammar_too_complex") if too_complex else (500, "internal"))


def test_token_of_an_ended_request_is_dropped_and_its_pages_are_released_after_the_step() -> None:
    simulator = Simulator(overlap=True)
    first, second = running_steps(simulator, 1)
    simulator.decode.step_done(first.command_id, [sampled(7)], simulator.now)  # EOS
    assert simulator.decode.counters["requests_finished"] == 1
    assert simulator.decode.memory.holds.pending_grants == 1
    simulator.decode.step_done(second.command_id, [sampled(50)], simulator.now)
    assert simulator.decode.memory.holds.pending_grants == 0
    assert simulator.decode.counters["generation_tokens"] == 2


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_ended_requests_are_forgotten_while_a_long_prompt_runs(prefix_cache: bool) -> None:
    """Its 313 pages are more than one turn adds to the prefix cache."""
    simulator = TimedSimulator(tokens_per_s=1e6, limits=decode_limits(prefix_cache=prefix_cache))
    simulator.ask("long", 5000, 10_000)
    requests: list[weakref.ref[Request]] = []
    for number in range(20):
        rid = f"r{number}"
        simulator.ask(rid, 32, 2)
        requests.append(weakref.ref(simulator.decode.requests[rid]))
        simulator.run(partial(simulator.ended_at.__contains__, rid))
    simulator.run_for(1.0)
    gc.collect()
    assert "long" in simulator.decode.requests
    assert sum(request() is not None for request in requests) == 0
