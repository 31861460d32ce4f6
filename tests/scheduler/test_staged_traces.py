"""Random lives in the simulated world with staging: no ring, page or answer is lost, whatever happens when."""

import collections
import random

from tests.scheduler.staged_world import StagedWorld
from tests.scheduler.world import ENDPOINTS

ACTIONS = {
    "submit": 12,
    "decode_turn": 40,
    "rank_turn": 40,
    "prefill_turn": 25,
    "end_write": 25,
    "end_part": 60,
    "scatter_turn": 60,
    "deliver": 120,
    "cancel": 4,
    "kill": 0.4,
    "start": 2,
    "hang": 0.4,
    "wake": 2,
    "prefill_alone_loses_decode": 0.4,
    "pass_time": 6,
}


def live(seed: int, steps: int) -> StagedWorld:
    draw = random.Random(seed)
    world = StagedWorld(stages=1 + seed % 2, look_ahead=seed % 4 == 0)
    for _ in range(steps):
        (action,) = draw.choices(list(ACTIONS), list(ACTIONS.values()))
        which = draw.randrange(8)
        match action:
            case "submit":
                pinned = draw.choice([None, None, None, *ENDPOINTS])
                samples = draw.choice([1, 1, 1, 2, 3])
                world.submit(draw.randint(1, 22), draw.randrange(3), draw.randint(1, 24), samples, pinned, which % 2)
            case "decode_turn":
                world.decode_turn()
            case "rank_turn":
                world.rank_turn(eos=draw.random() < 0.05)
            case "prefill_turn":
                world.prefill_turn(which)
            case "end_write":
                world.end_write(which, ok=draw.random() < 0.97, late=draw.random() < 0.5)
            case "end_part":
                world.end_part(which, ok=draw.random() < 0.97, late=draw.random() < 0.5)
            case "scatter_turn":
                world.scatter_turn(which)
            case "deliver":
                world.deliver(which, up=draw.random() < 0.6)
            case "cancel":
                world.cancel(which, stopped=draw.random() < 0.5)
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


def test_long_lives_with_staging_go_everywhere() -> None:
    """Every kind of event happens often, so that the checks on the way mean something."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(80):
        seen.update(live(seed, steps=800).decode.counters)
    for event in (
        "requests_finished",
        "requests_failed",
        "requests_aborted",
        "redispatches",
        "transfers_failed",
        "prefix_tokens_reused",
        "stale_messages",
        "retractions",
        "staged_parts",
    ):
        assert seen[event] >= 10, f"{event} happened {seen[event]} times"
