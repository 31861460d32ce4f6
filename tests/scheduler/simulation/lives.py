"""Random lives of requests, as many as one likes: `make lives COUNT=20000`.

A life is a simulated server, or a pair, with a random workload and faults, checked after every action and at its end.
The tests run a few hundred of them with fixed seeds; here the seeds go on from `--seed`, and each failure is printed
with the arguments that repeat it.
"""

import argparse
import logging
import multiprocessing
import random
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any
from unittest import mock

from pdserve.scheduler.chunking import shared_prefix
from pdserve.scheduler.decode import transitions
from pdserve.scheduler.decode.memory import prefix_inserts
from pdserve.scheduler.decode.placer import Placer
from pdserve.scheduler.decode.rooms.computing import Computing
from pdserve.scheduler.store import kv_store
from tests.memory.hisparse import test_hisparse_simulation as rows
from tests.scheduler.decode import test_local_prompts as local
from tests.scheduler.decode import test_stored_prompts as stored
from tests.scheduler.decode.test_scheduler_traces import MODES
from tests.scheduler.simulation import random_workloads as workloads
from tests.scheduler.simulation.joint_simulator import JointSimulator
from tests.scheduler.simulation.simulator import Simulator
from tests.scheduler.simulation.staged_simulator import StagedSimulator
from tests.scheduler.simulation.store_simulator import BLOCK, StoreSimulator


def pair(seed: int, steps: int) -> None:
    simulator = random.Random(seed).choice(MODES).simulator()
    actions = workloads.MASK_ACTIONS if simulator.slow_masks else workloads.ACTIONS
    workloads.run_workload(simulator, actions, seed, steps)


def local_prompts(seed: int, steps: int) -> None:
    simulator = Simulator(**random.Random(seed).choice(local.MODES))
    with mock.patch.object(shared_prefix, "LEAST_TOKENS", 1):
        workloads.run_workload(simulator, workloads.ACTIONS, seed, steps)


def local_hisparse_prompts(seed: int, steps: int) -> None:
    workloads.run_workload(
        Simulator(**random.Random(seed).choice(local.HISPARSE_MODES)), workloads.ACTIONS, seed, steps
    )


def hisparse_rows(seed: int, steps: int) -> None:
    """With the tensors of the hot pool: every row that a step selects is compared."""
    simulator = rows.CacheSimulator(random.Random(seed).choice(rows.MODES))
    workloads.run_workload(simulator, rows.BUSY, seed, steps)
    simulator.cache.check_integrity()


def staged(seed: int, steps: int) -> None:
    simulator = StagedSimulator(**_overlap(seed), stages=1 + seed % 2)
    workloads.run_workload(simulator, workloads.STAGED_ACTIONS, seed, steps)


def data_parallel(seed: int, steps: int) -> None:
    joint = JointSimulator(2 + seed % 2, **_overlap(seed))
    workloads.run_joint_workload(joint, workloads.STAGED_ACTIONS, seed, steps)


def store(seed: int, steps: int) -> None:
    with mock.patch.multiple(kv_store, BLOCK_TOKENS=BLOCK, LEAST_TOKENS=BLOCK):
        simulator = StoreSimulator(seed, local_prefill="always", **random.Random(seed).choice(stored.MODES))
        workloads.run_workload(simulator, workloads.STORE_ACTIONS, seed, steps)


def store_and_prefill(seed: int, steps: int) -> None:
    actions = {**workloads.ACTIONS, **workloads.STORE_ACTIONS, "deliver": 120, "flush": 40}
    with (
        mock.patch.multiple(kv_store, BLOCK_TOKENS=BLOCK, LEAST_TOKENS=BLOCK),
        mock.patch.object(transitions, "LEAST_TOKENS", BLOCK),
        mock.patch.object(Placer, "_local_rate", return_value=400.0),
        mock.patch.object(Computing, "short_tokens", return_value=40),
    ):
        mode = random.Random(seed).choice(stored.MODES)
        simulator = StoreSimulator(seed, damage=0.8, local_prefill="auto", **mode)
        workloads.run_workload(simulator, actions, seed, steps)


def _overlap(seed: int) -> dict[str, Any]:
    return {"overlap": seed % 4 == 0, "verifies": seed % 3 == 0}


def _pages_added(seed: int) -> dict[str, Any]:
    """In half of the lives, the pages of ended requests are added to the prefix cache over several turns."""
    few = seed // len(KINDS) % 2
    return {name: 1 if few else getattr(prefix_inserts, name) for name in ("PAGES_AT_ONCE", "PAGES_INSERTED")}


KINDS: tuple[Callable[[int, int], None], ...] = (
    pair,
    local_prompts,
    local_hisparse_prompts,
    hisparse_rows,
    staged,
    data_parallel,
    store,
    store_and_prefill,
)


def live(which: tuple[str, int, int]) -> tuple[str, int, str | None]:
    """Run one life; returns its kind, its seed and the traceback of its failure."""
    kind, seed, steps = which
    logging.disable()  # of injected faults
    try:
        with mock.patch.multiple(prefix_inserts, **_pages_added(seed)):
            next(each for each in KINDS if each.__name__ == kind)(seed, steps)
    except Exception:
        return kind, seed, traceback.format_exc()
    return kind, seed, None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1_000_000, help="the first one")
    parser.add_argument("--steps", type=int, default=250, help="random actions of a life")
    parser.add_argument("--kinds", nargs="+", choices=[kind.__name__ for kind in KINDS], help="default: all")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    args = parser.parse_args()
    kinds = args.kinds or [kind.__name__ for kind in KINDS]
    lives = [(kinds[number % len(kinds)], args.seed + number, args.steps) for number in range(args.count)]
    failures, started, reported = 0, time.monotonic(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.workers, maxtasksperchild=500) as pool:
        for count, (kind, seed, problem) in enumerate(pool.imap_unordered(live, lives, chunksize=4), 1):
            if problem is not None:
                failures += 1
                print(f"--count 1 --kinds {kind} --seed {seed} --steps {args.steps} failed:\n{problem}", flush=True)
            if time.monotonic() - reported > 10 or count == args.count:
                reported = time.monotonic()
                print(f"{count} of {args.count} lives, {failures} failed, {reported - started:.0f} s", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
