"""Decode steps that wait while prefill computes on the same GPU."""

import math

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.scheduler.decode.placement.peers import PrefillPeer, PrefillPeers
from pdserve.scheduler.decode.requests.request import Prompt, PromptKind, Request
from pdserve.scheduler.decode.rooms.computing import StepTimes
from pdserve.scheduler.decode.rooms.turns import TURN_PART, Turns
from pdserve.scheduler.rates import Rate
from pdserve.transfer.protocol.messages import InstanceId, Load
from tests.scheduler.simulation.timed_simulator import decode_limits

STEP_S, LIMIT_S, TOKENS = 0.004, 0.04, 1000
ENDED_AT = 1.0


def turns(*, shares_gpu: bool = True, tokens: int = TOKENS, rate: float = 10_000.0, stages: int = 1) -> Turns:
    """A prefill server has got `tokens` tokens at ENDED_AT, when a decode step of STEP_S has ended."""
    peers = PrefillPeers()
    peer = PrefillPeer(InstanceId("a"), {"a:1"}, shares_gpu=shares_gpu)
    peers.up(peer)
    peers.report(peer.instance, Load(tokens_per_s=rate))
    peer.heard_at = ENDED_AT
    if tokens:
        peer.window.sent(PromptKind(0, tokens.bit_length()), tokens)
    times = StepTimes(Rate())
    times.started(4, 0, ENDED_AT - STEP_S)
    times.ended(ENDED_AT)
    return Turns(decode_limits(slo_itl_s=LIMIT_S, stages=stages), peers, times)


def requests(*slo_itl_s: float | None) -> list[Request]:
    """Running requests with these limits of their own."""
    prompt = Prompt(1, (1,), now=0.0)
    return [Request("a", prompt, SamplingParams(), deadline=math.inf, now=0.0, slo_itl_s=each) for each in slo_itl_s]


@pytest.mark.parametrize(("own", "limit_s"), [(None, LIMIT_S), (0.02, 0.02), (0.1, 0.1)])
def test_tokens_come_within_a_part_of_the_smallest_limit_on_gaps(own: float | None, limit_s: float) -> None:
    waits_s = turns().pause_s(requests(0.1, own), ENDED_AT + 0.001)
    assert waits_s == pytest.approx(TURN_PART * limit_s - STEP_S - 0.001)


def test_steps_without_a_limit_wait_as_long_as_with_the_automatic_one() -> None:
    assert turns().pause_s(requests(0.0), ENDED_AT) == pytest.approx(TURN_PART * decode_limits().auto_itl_s - STEP_S)


def test_next_step_waits_for_the_end_of_the_one_in_flight() -> None:
    found = turns()
    found._times.started(4, 0, ENDED_AT)
    assert found.pause_s(requests(None), ENDED_AT) == math.inf


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(turns(shares_gpu=False), id="prefill has a GPU of its own"),
        pytest.param(turns(tokens=0), id="prefill computes nothing of ours"),
        pytest.param(turns(rate=0.0), id="the rate of prefill is not known"),
        pytest.param(turns(stages=2), id="two pipeline stages"),
    ],
)
def test_step_does_not_wait(found: Turns) -> None:
    assert found.pause_s(requests(None), ENDED_AT) == 0.0


def test_step_does_not_wait_without_running_requests() -> None:
    assert turns().pause_s([], ENDED_AT) == 0.0


def test_step_does_not_wait_for_a_silent_server() -> None:
    """Its tokens take 0.1 s; then it may be silent for as long as the automatic limit on gaps."""
    slack_s = decode_limits().auto_itl_s
    found = turns()
    found._times.ended_at = ENDED_AT + 0.2
    assert found.pause_s(requests(None), ENDED_AT + 0.1 + slack_s - 0.001) > 0
    assert found.pause_s(requests(None), ENDED_AT + 0.1 + slack_s + 0.001) == 0.0
