"""Simulated clusters: latencies follow from the step times, and the schedulers pass their integrity checks."""

import msgspec
import pytest

from pdserve.scheduler.prefill.limits import PrefillLimits
from pdserve.scheduler.simulation.cluster import Arrival, Cluster, Outcome, ServerSettings
from pdserve.scheduler.simulation.step_times import Interference, StepTimes
from tests.scheduler.simulation.timed_simulator import decode_limits

TIMES = StepTimes(
    prefill_step_s=0.01,
    prefill_token_s=0.001,
    decode_steps=((1, 0.02), (4, 0.05)),
    write_s=0.002,
    kv_token_s=0.0001,
    message_s=0.001,
)
SETTINGS = ServerSettings(
    decode=decode_limits(),
    decode_pages=1024,
    prefill=PrefillLimits(
        page_size=16, chunk_size=128, max_queued_requests=64, context_length=4096, vocab_size=1 << 31, steps_in_flight=1
    ),
    prefill_pages=1024,
)


def prompt(number: int, tokens: int) -> tuple[int, ...]:
    return (number,) * tokens


def simulate(
    arrivals: list[Arrival], *, prefills: int = 1, decodes: int = 1, cores: int | None = None
) -> list[Outcome]:
    cluster = Cluster(SETTINGS, TIMES, prefills=prefills, decodes=decodes, cores=cores)
    outcomes = cluster.run(arrivals)
    for prefill in cluster._prefills:
        prefill.scheduler.check_integrity()
    for decode in cluster._decodes:
        decode.scheduler.check_integrity()
    return outcomes


@pytest.mark.parametrize(
    ("requests", "seconds"), [(1, 0.02), (2, 0.03), (4, 0.05), (8, 0.09)], ids=["first", "between", "last", "beyond"]
)
def test_decode_step_time_is_interpolated(requests: int, seconds: float) -> None:
    assert TIMES.decode_s([0] * requests) == pytest.approx(seconds)


def test_context_adds_to_steps() -> None:
    times = StepTimes(prefill_token_s=1.0, prefill_pair_s=0.5, decode_steps=((1, 1.0),), decode_pair_s=0.25)
    assert times.prefill_s([(4, 6)]) == pytest.approx(2 * (1 + 0.5 * 5))
    assert times.decode_s([4, 8]) == pytest.approx(2.0 + 0.25 * 12)
    assert times.decode_s([], [(0, 2)]) == pytest.approx(2 * 1.5)


def test_one_request_takes_the_time_of_its_parts() -> None:
    (outcome,) = simulate([Arrival(0.5, prompt(1, 100), 5)])
    first, *others = outcome.token_times_s
    # a message, a step of 100 tokens, its write, a message
    assert first - 0.5 == pytest.approx(0.001 + 0.11 + 0.01 + 0.002 + 0.001)
    assert others[-1] - others[0] == pytest.approx(3 * 0.02)
    assert outcome.failure is None
    assert sum(outcome.timeline.values()) == pytest.approx((outcome.ended_s or 0) - 0.5)


def test_chunks_of_a_long_prompt_are_written_while_the_next_is_computed() -> None:
    (outcome,) = simulate([Arrival(0, prompt(1, 256), 1)])
    computed = 2 * 0.01 + 256 * 0.001
    assert outcome.token_times_s[0] == pytest.approx(0.001 + computed + 128 * 0.0001 + 0.002 + 0.001)


def test_requests_share_decode_steps_and_wait_for_prefill() -> None:
    outcomes = simulate([Arrival(0, prompt(number, 100), 20) for number in range(4)])
    firsts = [outcome.token_times_s[0] for outcome in outcomes]
    assert firsts == sorted(firsts)
    assert firsts[3] > 4 * 0.1
    assert all(len(outcome.token_times_s) == 20 for outcome in outcomes)


def test_more_prefill_servers_shorten_the_wait_and_more_decode_servers_the_steps() -> None:
    arrivals = [Arrival(0, prompt(number, 128), 40) for number in range(8)]
    one, more_prefill, more_decode = (
        simulate(arrivals, prefills=prefills, decodes=decodes) for prefills, decodes in ((1, 1), (2, 1), (1, 2))
    )
    assert more_prefill[-1].token_times_s[0] < 0.7 * one[-1].token_times_s[0]
    per_token = [(run[-1].token_times_s[-1] - run[-1].token_times_s[0]) / 39 for run in (one, more_decode)]
    assert per_token[1] < per_token[0]


def test_servers_that_share_too_few_cores_are_slower() -> None:
    arrivals = [Arrival(0, prompt(number, 128), 10) for number in range(8)]
    alone, shared = simulate(arrivals, prefills=2), simulate(arrivals, prefills=2, cores=1)
    assert max(outcome.ended_s or 0 for outcome in shared) > 1.5 * max(outcome.ended_s or 0 for outcome in alone)


def test_servers_beside_each_other_are_slower_by_the_measured_factor() -> None:
    arrivals = [Arrival(0, prompt(number, 128), 40) for number in range(8)]
    times = msgspec.structs.replace(TIMES, interference=(Interference(1, 1, 1.5, 1.5),))
    ends = []
    for model in (TIMES, times):
        cluster = Cluster(SETTINGS, model, prefills=1, decodes=2, cores=3)
        ends.append(max(outcome.ended_s or 0 for outcome in cluster.run(arrivals)))
    assert 1.2 * ends[0] < ends[1] < 1.5 * ends[0]


def test_requests_beyond_the_queue_fail_as_on_a_server() -> None:
    outcomes = simulate([Arrival(0, prompt(number, 64), 2) for number in range(340)])
    failures = {outcome.failure for outcome in outcomes}
    assert None in failures
    assert any(failure is not None and failure.startswith("429") for failure in failures)


def test_cached_prefixes_are_not_computed_again() -> None:
    cold, warm = simulate([Arrival(0, prompt(1, 128), 2), Arrival(5, prompt(1, 128), 2)])
    assert warm.token_times_s[0] - 5 < 0.6 * cold.token_times_s[0]
