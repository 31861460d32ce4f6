"""Random workloads in the simulator: short ones that hypothesis can shrink, and long ones that cover all states."""

import collections
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdserve.configs.setting_types import LocalPrefillSetting
from tests.examples import examples
from tests.scheduler.simulation.random_workloads import ACTIONS, MASK_ACTIONS, run_workload
from tests.scheduler.simulation.simulator import ENDPOINTS, Simulator

pytestmark = pytest.mark.slow

WHICH = st.integers(0, 7)


class Mode(NamedTuple):
    """A kind of decode server: arguments of `Simulator`."""

    stages: int = 1
    overlap: bool = False
    hot_pages: int | None = None
    lends: bool = False
    prefix_cache: bool = True
    verifies: bool = False
    local_prefill: LocalPrefillSetting = "never"
    writes_both: bool = False
    window: int | None = None
    prefill_window: int | None = None
    slow_masks: bool = False

    def simulator(self) -> Simulator:
        return Simulator(**self._asdict())


MODES = (
    Mode(),
    Mode(overlap=True),
    Mode(verifies=True),
    Mode(stages=2),
    Mode(stages=3),
    Mode(overlap=True, hot_pages=7),
    Mode(stages=2, hot_pages=9, verifies=True),
    Mode(hot_pages=3),
    Mode(overlap=True, hot_pages=9, lends=True, prefix_cache=False),
    Mode(stages=2, hot_pages=10, lends=True, prefix_cache=False),
    Mode(hot_pages=3, lends=True),
    Mode(overlap=True, local_prefill="auto"),
    Mode(stages=2, local_prefill="always"),
    Mode(overlap=True, hot_pages=10, local_prefill="always"),
    Mode(overlap=True, hot_pages=14, writes_both=True),
    Mode(stages=2, hot_pages=9, verifies=True, writes_both=True),
    Mode(overlap=True, hot_pages=12, lends=True, writes_both=True),
    Mode(overlap=True, hot_pages=12, prefix_cache=False, local_prefill="auto", writes_both=True),
    Mode(overlap=True, window=7, prefill_window=7),
    Mode(stages=2, window=6, prefill_window=6, verifies=True, local_prefill="auto"),
    Mode(overlap=True, window=10, prefill_window=10, local_prefill="always"),
    Mode(window=6),
    Mode(prefill_window=3),
    Mode(slow_masks=True),
    Mode(overlap=True, slow_masks=True, local_prefill="auto"),
    Mode(stages=2, slow_masks=True),
    Mode(overlap=True, hot_pages=7, slow_masks=True),
)
"""Hot pages suffice for one to three hot buffers, but not for three fully resident requests. With `writes_both`,
prefill writes rows of short prompts to the GPU. If only one server of a pair frees pages behind the window, the servers
are of different releases.
"""
RARELY = st.sampled_from([False, False, False, True])


class PairMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.simulator = Simulator()

    @initialize(mode=st.sampled_from(MODES))
    def begin(self, mode: Mode) -> None:
        self.simulator = mode.simulator()

    @rule(
        length=st.integers(1, 22),
        family=st.integers(0, 2),
        new=st.integers(1, 20),
        samples=st.sampled_from([1, 1, 1, 2, 3]),
        pinned=st.sampled_from([None, None, None, *ENDPOINTS]),
        priority=st.integers(0, 1),
    )
    def submit(self, length: int, family: int, new: int, samples: int, pinned: str | None, priority: int) -> None:
        self.simulator.submit(length, family, new, samples, pinned, priority)

    @rule(which=WHICH, stopped=st.booleans())
    def cancel(self, which: int, stopped: bool) -> None:
        self.simulator.cancel(which, stopped)

    @rule()
    def decode_turn(self) -> None:
        self.simulator.decode_turn()

    @rule(eos=RARELY, fail=st.sampled_from([False] * 9 + [True]))
    def rank_turn(self, eos: bool, fail: bool) -> None:
        self.simulator.rank_turn(eos, fail=fail)

    @rule()
    def copy_turn(self) -> None:
        self.simulator.copy_turn()

    @rule()
    def mask_turn(self) -> None:
        self.simulator.mask_turn()

    @rule(which=WHICH)
    def prefill_turn(self, which: int) -> None:
        self.simulator.prefill_turn(which)

    @rule(which=WHICH, failed=RARELY, late=st.booleans())
    def end_write(self, which: int, failed: bool, late: bool) -> None:
        self.simulator.end_write(which, not failed, late)

    @rule(which=WHICH, up=st.booleans())
    def deliver(self, which: int, up: bool) -> None:
        self.simulator.deliver(which, up)

    @rule(which=WHICH, really=RARELY)
    def kill(self, which: int, really: bool) -> None:
        if really:
            self.simulator.kill(which)

    @rule(endpoint=st.sampled_from(ENDPOINTS))
    def start(self, endpoint: str) -> None:
        self.simulator.start(endpoint)

    @rule(which=WHICH, really=RARELY)
    def hang(self, which: int, really: bool) -> None:
        if really:
            self.simulator.hang(which)

    @rule(which=WHICH, lost_us=st.booleans())
    def wake(self, which: int, lost_us: bool) -> None:
        self.simulator.wake(which, lost_us)

    @rule(which=WHICH, really=RARELY)
    def prefill_alone_loses_decode(self, which: int, really: bool) -> None:
        if really:
            self.simulator.prefill_alone_loses_decode(which)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.simulator.pass_time(seconds)

    @invariant()
    def holds(self) -> None:
        self.simulator.check()

    def teardown(self) -> None:
        self.simulator.finish()


TestPair = PairMachine.TestCase
TestPair.settings = settings(max_examples=examples(100, 30), stateful_step_count=60, deadline=None)


def test_random_workloads_reach_every_state() -> None:
    """Every kind of event happens often enough for the checks to be meaningful."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(examples(7, 2) * len(MODES)):
        simulator = MODES[seed % len(MODES)].simulator()
        run_workload(simulator, MASK_ACTIONS if simulator.slow_masks else ACTIONS, seed, steps=400)
        seen.update(simulator.decode.counters)
        seen.update(simulator.hot_seen)
    for event in (
        "requests_finished",
        "requests_failed",
        "requests_aborted",
        "requests_refused",
        "redispatches",
        "retractions",
        "retractions_recomputed",
        "masks_prepared",
        "overtakes",
        "transfers_failed",
        "prefix_tokens_reused",
        "stale_messages",
        "opened fully resident",
        "opened evicting",
        "grown",
        "shrunk",
        "reopened",
        "evicting step",
        "waited",
        "lost hot buffer",
        "lent",
        "reclaimed",
        "kv_path_device_resident",
        "written back",
        "copied within a page",
    ):
        assert seen[event] >= examples(10, 5), f"{event} happened {seen[event]} times"
