"""Nobody starves on a decode server that computes prompts: neither long prompts, nor short ones, nor streams."""

import collections
from functools import partial

import pytest

from pdserve.memory.hisparse.shared_pool import PoolOverlay
from pdserve.scheduler.chunking.step_rule import LATE_GAPS, LEAST_SHARE, LIMIT_STEPS, SLO_TTFT_S
from pdserve.scheduler.decode.memory.hot_buffers import HotLimits
from pdserve.scheduler.decode.requests.limits import GPU_ITL_S
from tests.scheduler.simulation.timed_simulator import PAGE_SIZE, TimedSimulator, decode_limits

TOKENS_PER_S = 40_000
STEP_TOKENS = 2048
FLOOD, FLOOD_TOKENS = 8, 300
"""So many short prompts wait all the time: when one ends, the next one arrives."""
LONG_TOKENS = 16_384
STREAMS = ("s0", "s1", "s2", "s3")
NO_LENDING = PoolOverlay(num_pages=1, kv_pages=2, hot_pages=1, covered=0)
EVICTING = HotLimits(num_pages=1200, page_size=PAGE_SIZE, hot_rows=64, slots=32, overlay=NO_LENDING)
"""A long prompt and the short ones fit, but hardly a second one of the long prompts."""
SECONDS = 6.0


class Load:
    """Streams, a flood of short prompts and now and then a long prompt."""

    def __init__(self, simulator: TimedSimulator) -> None:
        self.simulator = simulator
        self.asked_at: dict[str, float] = {}
        self.first_after_s: dict[str, float] = {}
        self.gaps: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
        self._last: dict[str, tuple[int, float]] = {}
        for rid in STREAMS:
            self._ask(rid, 16, 1 << 14)
        simulator.run(lambda: all(simulator.output[rid] for rid in STREAMS))
        for number in range(FLOOD):
            self._ask(f"short {number}", FLOOD_TOKENS, 2)
        for number in range(3):
            simulator.at(simulator.now + 0.5 + number, partial(self._ask, f"long {number}", LONG_TOKENS, 2))

    def run(self, seconds: float) -> None:
        """Let the flood continue for so long, then until all prompts have ended."""
        end = self.simulator.now + seconds
        self.simulator.run(lambda: self._look(ask=self.simulator.now < end), most_s=seconds + 30)

    def longest_wait_s(self, kind: str) -> float:
        return max(wait_s for rid, wait_s in self.first_after_s.items() if rid.startswith(kind))

    def _ask(self, rid: str, tokens: int, new: int) -> None:
        self.asked_at[rid] = self.simulator.now
        self.simulator.ask(rid, tokens, new)

    def _look(self, *, ask: bool) -> bool:
        now = self.simulator.now
        for rid in self.asked_at.keys() - self.first_after_s.keys():
            if self.simulator.output[rid]:
                self.first_after_s[rid] = now - self.asked_at[rid]
                if rid.startswith("short") and ask:
                    self._ask(f"short {len(self.asked_at)}", FLOOD_TOKENS, 2)
        for rid in STREAMS:
            tokens, since = self._last.get(rid, (0, now))
            if self.simulator.output[rid] > tokens:
                self.gaps[rid].append(now - since)
                self._last[rid] = self.simulator.output[rid], now
        return len(self.first_after_s) == len(self.asked_at) and not ask


@pytest.mark.parametrize("step_s", [0.005, 0.025, 0.060])
@pytest.mark.parametrize(
    ("settings", "pool_tokens", "hot"),
    [
        ({"overlap": True}, 1 << 18, None),
        ({"stages": 2}, 1 << 18, None),
        ({"overlap": True, "retract_pages": 1024, "prefix_cache": False, "growth_tokens": 16}, 19_200, None),
        ({"overlap": True, "hisparse": True}, 1 << 18, EVICTING),
    ],
    ids=["one stage", "two stages", "little memory", "HiSparse"],
)
def test_prompts_and_streams_in_overload(
    step_s: float, settings: dict[str, object], pool_tokens: int, hot: HotLimits | None
) -> None:
    """Prompts get the time of a step that the limit on gaps leaves, at least LEAST_SHARE. A prompt that is nine of its
    limits late comes before every one that arrives now, so a long one waits for less than ten and for its own time.
    """
    limits = decode_limits(local_prefill="always", max_step_tokens=STEP_TOKENS, **settings)
    simulator = TimedSimulator(
        tokens_per_s=TOKENS_PER_S, step_s=step_s, pool_tokens=pool_tokens, limits=limits, hot=hot
    )
    load = Load(simulator)
    load.run(SECONDS)
    limit_s = max(GPU_ITL_S / limits.stages, LIMIT_STEPS * step_s)
    per_s = TOKENS_PER_S * max(LEAST_SHARE, min(limit_s - step_s, STEP_TOKENS / TOKENS_PER_S) / limit_s)
    assert load.longest_wait_s("long") <= 10 * SLO_TTFT_S + LONG_TOKENS / per_s
    assert load.longest_wait_s("short") <= 2 * limit_s + (FLOOD * FLOOD_TOKENS + LONG_TOKENS) / per_s
    short_of_memory = hot is not None or limits.growth_tokens == 16  # then streams wait for pages, too
    most_s = SLO_TTFT_S if short_of_memory else 1.02 * LATE_GAPS * limit_s * limits.stages
    assert all(max(gaps) <= most_s for gaps in load.gaps.values()), load.gaps
    assert not simulator.failures
