"""Prefill and decode on one GPU with `--local-prefill never`, by step times of an H200: decode steps take turns with
prefill, so first tokens come at most twice as late as those of one process, and gaps stay shorter than its gaps.
"""

import itertools

import pytest

from benchmarks.first_tokens import H200, arrivals_of, percentile, server_settings
from pdserve.scheduler.simulation.cluster import Cluster, Outcome

SECONDS = 12.0


def run(load: str, cluster: Cluster) -> tuple[list[float], list[float]]:
    """First tokens and gaps."""
    outcomes = cluster.run(arrivals_of(load, 0, SECONDS))
    assert not any(outcome.failure for outcome in outcomes)
    return [outcome.token_times_s[0] - outcome.at_s for outcome in outcomes], [*itertools.chain(*map(_gaps, outcomes))]


def _gaps(outcome: Outcome) -> list[float]:
    return [after - before for before, after in itertools.pairwise(outcome.token_times_s)]


@pytest.mark.parametrize(("rate", "most_gap_s"), [(12, 0.035), (20, 0.045)])
def test_first_tokens_come_at_most_twice_as_late_as_those_of_one_process(rate: int, most_gap_s: float) -> None:
    load = f"poisson:{rate}"
    first, gaps = run(load, Cluster(server_settings("never"), H200, prefills=1, decodes=1, one_gpu=True))
    first_alone, _ = run(load, Cluster(server_settings("always"), H200, prefills=0, decodes=1))
    for part in (50, 90, 99):
        assert percentile(first, part) <= 2 * percentile(first_alone, part)
    assert percentile(gaps, 99) <= most_gap_s


def test_streams_go_on_while_prefill_is_always_busy() -> None:
    """32 streams, then prompts for 5 s of the GPU."""
    cluster = Cluster(server_settings("never"), H200, prefills=1, decodes=1, one_gpu=True)
    _, gaps = run("long", cluster)
    assert max(gaps) < 0.1


@pytest.mark.parametrize("slowness", [1000.0, None])
def test_decode_does_not_wait_for_a_server_that_hangs_or_is_dead(slowness: float | None) -> None:
    cluster = Cluster(server_settings("auto"), H200, prefills=1, decodes=1, one_gpu=True)
    if slowness is None:
        cluster.kill(0, 2.0)
    else:
        cluster.slow_down(0, 2.0, slowness)
    _, gaps = run("poisson:12", cluster)
    assert percentile(gaps, 99) <= 0.06
