"""Prefill and decode on GPUs of their own, by step times of an H200: gaps of `auto` are as steady as those of `never`,
and its first tokens are on time where those of `never` are not.
"""

import functools

import pytest

from benchmarks.first_tokens import percentile
from benchmarks.separate_servers import MOST_GAP, Run, simulate
from pdserve.configs.setting_types import LocalPrefillSetting

SECONDS = 12.0


@functools.cache
def run(mode: LocalPrefillSetting, rate: float, ratio: tuple[int, int] = (1, 1), fault: str = "none") -> Run:
    return simulate(mode, rate, ratio, fault=fault, seconds=SECONDS)


@pytest.mark.parametrize(("ratio", "rate"), [((1, 1), 20.0), ((1, 1), 30.0), ((2, 2), 20.0)])
def test_gaps_stay_steady_while_prefill_is_on_time(ratio: tuple[int, int], rate: float) -> None:
    never, auto = run("never", rate, ratio), run("auto", rate, ratio)
    assert percentile(auto.gaps_s, 99) <= MOST_GAP * percentile(never.gaps_s, 99)
    step_s = percentile(never.gaps_s, 50)
    assert auto.good(step_s) >= never.good(step_s) >= 0.99
    assert percentile(auto.ttft_s, 99) <= percentile(never.ttft_s, 99)


def test_decode_computes_what_a_prefill_server_would_bring_late() -> None:
    """60 requests a second are more than one server computes, prefill or decode."""
    never, always, auto = (run(mode, 60.0) for mode in ("never", "always", "auto"))
    assert auto.on_time >= max(never.on_time, always.on_time) + 0.1


@pytest.mark.parametrize("fault", ["dies", "slow 30 x"])
@pytest.mark.parametrize("ratio", [(1, 1), (2, 2)])
def test_decode_keeps_deadlines_when_a_prefill_server_fails(ratio: tuple[int, int], fault: str) -> None:
    always, auto = run("always", 12.0, ratio), run("auto", 12.0, ratio, fault)
    assert always.on_time == 1.0
    assert auto.on_time >= 0.9
