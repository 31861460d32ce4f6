"""The rate of a prefill server, by which decode servers place their prompts."""

import pytest

from pdserve.common.sampling import SamplingParams
from pdserve.scheduler.prefill.compute_queue import ComputeQueue
from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.prefill.request import PrefillRequest
from pdserve.transfer.protocol.messages import InstanceId, KvDestination, TransferKey

CHUNK, STEP_S = 64, 0.5


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_rate_is_that_of_steps_that_end_one_after_the_other(stages: int) -> None:
    """All stages have a step. With n stages a step takes n times as long, and one ends after each STEP_S."""
    limits = PrefillLimits(
        page_size=16,
        chunk_size=CHUNK,
        max_queued_requests=8,
        context_length=1 << 20,
        vocab_size=1 << 20,
        stages=stages,
        steps_in_flight=stages,
    )
    queue = ComputeQueue(limits)
    wanted = KvDestination(TransferKey(1, 1), "r", SamplingParams(), timeout_s=60.0)
    queue.add(PrefillRequest(InstanceId("decode"), wanted, range(20 * CHUNK), [], 0.0))
    started = [queue.next_step(0.0) for _ in range(stages)]
    for number in range(1, 10):
        step = started.pop(0)
        assert step is not None
        queue.take(step.command_id, number * STEP_S)
        started.append(queue.next_step(number * STEP_S))
    assert queue.rate.per_s == CHUNK / STEP_S
