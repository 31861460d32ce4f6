"""Prompts that decode takes back from a prefill server that is late, while something else fails."""

import pytest

from pdserve.transfer.control.events import LoadReported
from pdserve.transfer.protocol.messages import Abort, Load
from tests.scheduler.simulation.simulator import Simulator

LATE_S = 0.6
"""Later than the limit on first tokens."""


def taken_back(*, overlap: bool = False, reports: bool = True) -> Simulator:
    """The only prefill server writes a chunk of a prompt, and has not got the Abort of decode, which computes it. It
    `reports` its rate, or decode knows that of an earlier server.
    """
    simulator = Simulator(local_prefill="auto", overlap=overlap, prefix_cache=False)
    simulator.kill(1)
    (server,) = simulator.servers.values()
    if reports:
        simulator.decode.handle(LoadReported(server.instance, Load(tokens_per_s=1000.0)), simulator.now)
    else:
        simulator.decode.rates.prefilled_tokens.measured(100, 0.1)
    simulator.submit(20, 1, 6, 1, None, 0)
    for _ in range(3):
        simulator.decode_turn()
        simulator.deliver(0, up=False)
        simulator.prefill_turn(0)
        simulator.check()
    assert simulator.decode.state_counts()["prefilling"] == 1
    assert server.writes
    simulator.pass_time(LATE_S)
    simulator.decode_turn()
    assert simulator.decode.state_counts()["computing"] == 1
    assert simulator.decode.memory.holds.quarantined_pages > 0
    assert [type(effect.message) for effect in server.to_prefill] == [Abort]
    simulator.check()
    return simulator


def end_writes(simulator: Simulator, *, ok: bool, late: bool = False) -> None:
    for _ in range(4):
        simulator.end_write(0, ok=ok, late=late)
        simulator.prefill_turn(0)
        simulator.deliver(0, up=True)
        simulator.check()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "fault", ["none", "killed", "hangs", "hangs and loses decode", "all written", "a write fails", "a late write"]
)
def test_request_is_answered_once_and_its_old_pages_become_free(fault: str, overlap: bool) -> None:
    simulator = taken_back(overlap=overlap)
    match fault:
        case "killed":
            simulator.kill(0)
        case "hangs":
            simulator.hang(0)
        case "hangs and loses decode":
            simulator.hang(0)
            simulator.wake(0, lost_us=True)
        case "all written":
            end_writes(simulator, ok=True)
        case "a write fails":
            end_writes(simulator, ok=False)
        case "a late write":
            end_writes(simulator, ok=False, late=True)
    simulator.check()
    for _ in range(40):
        simulator.decode_turn()
        simulator.rank_turn(eos=False)
        simulator.check()
    assert simulator.decode.counters["requests_finished"] == 1, "decode needs no answer of prefill to compute it"
    assert not simulator.failures
    assert simulator.seen_chunks > 0
    simulator.finish()


@pytest.mark.parametrize("killed", [False, True])
def test_client_may_leave_before_prefill_has_stopped(killed: bool) -> None:
    simulator = taken_back()
    simulator.cancel(0, stopped=False)
    assert simulator.decode.memory.holds.quarantined_pages > 0, "prefill may still write"
    if killed:
        simulator.kill(0)
    simulator.check()
    simulator.finish()


def test_request_whose_step_fails_ends_and_prefill_gets_no_second_prompt() -> None:
    """Decode's rank fails in the step that computes the prompt."""
    simulator = taken_back()
    (server,) = simulator.servers.values()
    simulator.rank_turn(eos=False, fail=True)
    simulator.decode_turn()
    (failed,) = simulator.failures.values()
    assert failed.status == 500
    assert [type(effect.message) for effect in server.to_prefill] == [Abort]
    simulator.finish()


def test_prompt_of_a_server_that_has_reported_no_rate_comes_back_too() -> None:
    taken_back(reports=False).finish()
