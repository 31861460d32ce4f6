"""Random workloads in the simulator with staging: no region, page or terminal message is lost."""

import collections

import pytest

from tests.examples import examples
from tests.scheduler.simulation.joint_simulator import JointSimulator
from tests.scheduler.simulation.random_workloads import STAGED_ACTIONS, run_joint_workload, run_workload
from tests.scheduler.simulation.staged_simulator import StagedSimulator


@pytest.mark.slow
def test_random_staged_workloads_reach_every_state() -> None:
    """Every kind of event happens often enough for the checks to be meaningful."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(examples(48, 16)):
        simulator = StagedSimulator(stages=1 + seed % 2, overlap=seed % 4 == 0, verifies=seed % 3 == 0)
        run_workload(simulator, STAGED_ACTIONS, seed, steps=800)
        seen.update(simulator.decode.counters)
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


@pytest.mark.slow
def test_random_staged_workloads_of_data_parallel_ranks_reach_every_state() -> None:
    """Prompts move between ranks, and parts are staged into the ring of the rank that has the request."""
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(examples(48, 20)):
        joint = JointSimulator(2 + seed % 2, overlap=seed % 4 == 0, verifies=seed % 3 == 0)
        run_joint_workload(joint, STAGED_ACTIONS, seed, steps=1200)
        for number, rank in enumerate(joint.ranks):
            seen.update(rank.decode.counters)
            seen[f"staged_parts of rank {number}"] += rank.decode.counters["staged_parts"]
    for event in (
        "requests_finished",
        "requests_failed",
        "requests_aborted",
        "redispatches",
        "transfers_failed",
        "prefix_tokens_reused",
        "stale_messages",
        "retractions",
        "prompts_moved",
        *(f"staged_parts of rank {number}" for number in range(3)),
    ):
        assert seen[event] >= 10, f"{event} happened {seen[event]} times"
