"""Random lives in the simulated world: short ones that hypothesis can shrink, and long ones that get everywhere."""

import collections
import random
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.scheduler.world import ENDPOINTS, World

WHICH = st.integers(0, 7)


class Mode(NamedTuple):
    """A kind of decode server: what `World` takes."""

    stages: int = 1
    look_ahead: bool = False
    hot_pages: int | None = None
    lends: bool = False
    prefix_cache: bool = True

    def world(self) -> World:
        return World(**self._asdict())


MODES = (
    Mode(),
    Mode(look_ahead=True),
    Mode(stages=2),
    Mode(stages=3),
    Mode(look_ahead=True, hot_pages=7),
    Mode(stages=2, hot_pages=9),
    Mode(hot_pages=3),
    Mode(look_ahead=True, hot_pages=9, lends=True, prefix_cache=False),
    Mode(stages=2, hot_pages=10, lends=True, prefix_cache=False),
    Mode(hot_pages=3, lends=True),
)
"""Hot pages are too few for three residents: enough for two buffers, for exactly three, for exactly one."""
RARELY = st.sampled_from([False, False, False, True])


class PairMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @initialize(mode=st.sampled_from(MODES))
    def begin(self, mode: Mode) -> None:
        self.world = mode.world()

    @rule(
        length=st.integers(1, 22),
        family=st.integers(0, 2),
        new=st.integers(1, 20),
        samples=st.sampled_from([1, 1, 1, 2, 3]),
        pinned=st.sampled_from([None, None, None, *ENDPOINTS]),
        priority=st.integers(0, 1),
    )
    def submit(self, length: int, family: int, new: int, samples: int, pinned: str | None, priority: int) -> None:
        self.world.submit(length, family, new, samples, pinned, priority)

    @rule(which=WHICH, stopped=st.booleans())
    def cancel(self, which: int, stopped: bool) -> None:
        self.world.cancel(which, stopped)

    @rule()
    def decode_turn(self) -> None:
        self.world.decode_turn()

    @rule(eos=RARELY, fail=st.sampled_from([False] * 9 + [True]))
    def rank_turn(self, eos: bool, fail: bool) -> None:
        self.world.rank_turn(eos, fail=fail)

    @rule(which=WHICH)
    def prefill_turn(self, which: int) -> None:
        self.world.prefill_turn(which)

    @rule(which=WHICH, failed=RARELY, late=st.booleans())
    def end_write(self, which: int, failed: bool, late: bool) -> None:
        self.world.end_write(which, not failed, late)

    @rule(which=WHICH, up=st.booleans())
    def deliver(self, which: int, up: bool) -> None:
        self.world.deliver(which, up)

    @rule(which=WHICH, really=RARELY)
    def kill(self, which: int, really: bool) -> None:
        if really:
            self.world.kill(which)

    @rule(endpoint=st.sampled_from(ENDPOINTS))
    def start(self, endpoint: str) -> None:
        self.world.start(endpoint)

    @rule(which=WHICH, really=RARELY)
    def hang(self, which: int, really: bool) -> None:
        if really:
            self.world.hang(which)

    @rule(which=WHICH, lost_us=st.booleans())
    def wake(self, which: int, lost_us: bool) -> None:
        self.world.wake(which, lost_us)

    @rule(which=WHICH, really=RARELY)
    def prefill_alone_loses_decode(self, which: int, really: bool) -> None:
        if really:
            self.world.prefill_alone_loses_decode(which)

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.finish()


TestPair = PairMachine.TestCase
TestPair.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def live(seed: int, steps: int) -> World:
    """A long life: mostly work, now and then a disaster."""
    draw = random.Random(seed)
    world = MODES[seed % len(MODES)].world()
    actions = {
        "submit": 12,
        "decode_turn": 25,
        "rank_turn": 30,
        "prefill_turn": 25,
        "end_write": 25,
        "deliver": 50,
        "cancel": 4,
        "flush": 0.3,
        "kill": 0.4,
        "start": 2,
        "hang": 0.4,
        "wake": 2,
        "prefill_alone_loses_decode": 0.4,
        "pass_time": 6,
    }
    for _ in range(steps):
        (action,) = draw.choices(list(actions), list(actions.values()))
        which = draw.randrange(8)
        match action:
            case "submit":
                pinned = draw.choice([None, None, None, *ENDPOINTS])
                samples = draw.choice([1, 1, 1, 2, 3])
                world.submit(draw.randint(1, 22), draw.randrange(3), draw.randint(1, 24), samples, pinned, which % 2)
            case "decode_turn":
                world.decode_turn()
            case "rank_turn":
                world.rank_turn(eos=draw.random() < 0.05, fail=draw.random() < 0.01)
            case "prefill_turn":
                world.prefill_turn(which)
            case "end_write":
                world.end_write(which, ok=draw.random() < 0.95, late=draw.random() < 0.5)
            case "deliver":
                world.deliver(which, up=draw.random() < 0.6)
            case "cancel":
                world.cancel(which, stopped=draw.random() < 0.5)
            case "flush":
                world.flush()
            case "kill":
                world.kill(which)
            case "start":
                world.start(draw.choice(ENDPOINTS))
            case "hang":
                world.hang(which)
            case "wake":
                world.wake(which, lost_us=draw.random() < 0.5)
            case "prefill_alone_loses_decode":
                world.prefill_alone_loses_decode(which)
            case "pass_time":
                world.pass_time(draw.choice([0.1, 0.1, 1.0, 4.0]))
        world.check()
    world.finish()
    return world


def test_long_lives_go_everywhere() -> None:
    """Every kind of event happens often, so that the checks on the way mean something."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(120):
        world = live(seed, steps=400)
        seen.update(world.decode.counters)
        seen.update(world.hot_seen)
    for event in (
        "requests_finished",
        "requests_failed",
        "requests_aborted",
        "requests_refused",
        "redispatches",
        "retractions",
        "retractions_recomputed",
        "overtakes",
        "transfers_failed",
        "prefix_tokens_reused",
        "stale_messages",
        "opened resident",
        "opened cold",
        "grown",
        "shrunk",
        "cycled",
        "waited",
        "parked",
        "lent",
        "called in",
    ):
        assert seen[event] >= 10, f"{event} happened {seen[event]} times"
