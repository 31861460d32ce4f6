"""What a prefill server reads from a KvDestination and its frames."""

from collections.abc import Sequence

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.scheduler.messages.frontend import Submit
from pdserve.scheduler.prefill.request import PrefillRequest
from pdserve.transfer.protocol.messages import InstanceId, KvDestination, TransferKey
from tests.scheduler.simulation.simulator import Simulator

DECODE = InstanceId("decode")
DESTINATION = KvDestination(TransferKey(1, 0), "r", SamplingParams(), 10.0)
FRAMES: list[Sequence[int]] = [(5, 6, 7), (3,), (4,), b"00-trace", (250, 800), (1, 2, 3)]
"""Also one of a newer peer."""


@pytest.mark.parametrize("count", range(2, 1 + len(FRAMES)))
def test_frames_that_an_older_peer_does_not_send_have_defaults(count: int) -> None:
    found = PrefillRequest.received(DECODE, DESTINATION, FRAMES[:count], now=100.0)
    assert (found.token_ids, found.indices) == ((5, 6, 7), (3,))
    assert found.hot_indices == ((4,) if count > 2 else ())
    assert found.traceparent == ("00-trace" if count > 3 else None)
    assert found.arrived_at == (99.75 if count > 4 else 100.0)
    assert found.slo_ttft_s == (0.8 if count > 4 else None)


@pytest.mark.parametrize(("slo_ttft_ms", "limit_s"), [(None, None), (800.0, 0.8)])
def test_prefill_gets_the_age_and_the_limit_of_a_prompt(slo_ttft_ms: float | None, limit_s: float | None) -> None:
    simulator = Simulator(local_prefill="never")
    simulator.kill(1)
    (server,) = simulator.servers.values()
    sampling = SamplingParams(max_new_tokens=1)
    simulator.submitted.add("r")
    simulator.decode.handle(Submit("r", (1, 2, 3), sampling, slo_ttft_ms=slo_ttft_ms), simulator.now)
    simulator.pass_time(0.25)
    simulator.decode_turn()
    (sent,) = server.to_prefill
    assert isinstance(sent.message, KvDestination)
    found = PrefillRequest.received(DECODE, sent.message, sent.arrays, simulator.now)
    assert found.slo_ttft_s == limit_s
    assert found.arrived_at == pytest.approx(simulator.now - 0.25, abs=0.001)
