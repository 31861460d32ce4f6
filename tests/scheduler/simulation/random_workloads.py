"""Random workloads for the simulator: mostly work, sometimes a fault."""

import random
from collections.abc import Mapping

from tests.scheduler.simulation.joint_simulator import JointSimulator
from tests.scheduler.simulation.simulator import ENDPOINTS, Simulator
from tests.scheduler.simulation.staged_simulator import StagedSimulator
from tests.scheduler.simulation.store_simulator import StoreSimulator

ACTIONS = {
    "submit": 12,
    "decode_turn": 25,
    "rank_turn": 30,
    "copy_turn": 30,
    "prefill_turn": 25,
    "end_write": 25,
    "deliver": 60,
    "cancel": 4,
    "flush": 0.3,
    "kill": 0.4,
    "start": 2,
    "drain": 0.4,
    "hang": 0.4,
    "wake": 2,
    "prefill_alone_loses_decode": 0.4,
    "pass_time": 6,
}
MASK_ACTIONS = {**ACTIONS, "mask_turn": 15}
"""For requests with slow masks."""
STAGED_ACTIONS = {**ACTIONS, "decode_turn": 40, "rank_turn": 40, "deliver": 120, "end_part": 60, "scatter_turn": 60}
STORE_ACTIONS = {
    "submit": 14,
    "decode_turn": 60,
    "rank_turn": 80,
    "copy_turn": 40,
    "store_turn": 60,
    "cancel": 3,
    "flush": 8,
    "pass_time": 8,
}
"""For servers that compute their prompts."""
ON_ALL_RANKS = frozenset({"flush", "kill", "start", "drain", "hang", "wake", "prefill_alone_loses_decode", "pass_time"})
"""What happens to all data-parallel ranks at once."""


def run_workload(simulator: Simulator, actions: Mapping[str, float], seed: int, steps: int) -> None:
    """Run `steps` random actions, chosen by their weights; check the simulator after each, and finish it."""
    draw = random.Random(seed)
    for _ in range(steps):
        (action,) = draw.choices(list(actions), list(actions.values()))
        _act(simulator, action, draw)
        simulator.check()
    simulator.finish()


def run_joint_workload(joint: JointSimulator, actions: Mapping[str, float], seed: int, steps: int) -> None:
    """The same with data-parallel ranks: an action is one of a random rank, or one of all."""
    draw = random.Random(seed)
    for _ in range(steps):
        (action,) = draw.choices(list(actions), list(actions.values()))
        ranks, state = joint.ranks if action in ON_ALL_RANKS else [draw.choice(joint.ranks)], draw.getstate()
        for rank in ranks:
            draw.setstate(state)
            _act(rank, action, draw)
        joint.check()
    joint.finish()


def _act(simulator: Simulator, action: str, draw: random.Random) -> None:
    which = draw.randrange(8)
    match action:
        case "submit":
            pinned = draw.choice([None, None, None, *ENDPOINTS])
            samples = draw.choice([1, 1, 1, 2, 3])
            simulator.submit(draw.randint(1, 22), draw.randrange(3), draw.randint(1, 24), samples, pinned, which % 2)
        case "decode_turn":
            simulator.decode_turn()
        case "rank_turn":
            simulator.rank_turn(eos=draw.random() < 0.05, fail=draw.random() < 0.01)
        case "copy_turn":
            simulator.copy_turn()
        case "mask_turn":
            simulator.mask_turn()
        case "prefill_turn":
            simulator.prefill_turn(which)
        case "end_write":
            simulator.end_write(which, ok=draw.random() < 0.95, late=draw.random() < 0.5)
        case "end_part":
            assert isinstance(simulator, StagedSimulator)
            simulator.end_part(which, ok=draw.random() < 0.97, late=draw.random() < 0.5)
        case "scatter_turn":
            assert isinstance(simulator, StagedSimulator)
            simulator.scatter_turn(which)
        case "store_turn":
            assert isinstance(simulator, StoreSimulator)
            simulator.store_turn()
        case "deliver":
            simulator.deliver(which, up=draw.random() < 0.6)
        case "cancel":
            simulator.cancel(which, stopped=draw.random() < 0.5)
        case "flush":
            simulator.flush()
        case "kill":
            simulator.kill(which)
        case "start":
            simulator.start(draw.choice(ENDPOINTS))
        case "drain":
            simulator.drain(which)
        case "hang":
            simulator.hang(which)
        case "wake":
            simulator.wake(which, lost_us=draw.random() < 0.5)
        case "prefill_alone_loses_decode":
            simulator.prefill_alone_loses_decode(which)
        case "pass_time":
            simulator.pass_time(draw.choice([0.1, 0.1, 1.0, 4.0]))
        case other:
            raise AssertionError(other)
