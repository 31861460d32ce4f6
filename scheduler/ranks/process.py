"""Rank processes, seen from their parent: the leader or, on other machines, `pdserve` with --node-rank. No torch."""

import json
import os
import subprocess
import sys

from ...common.machine.cpus import usable_cpus
from ...configs.load import revealed_dict
from ...configs.schema import AnyServerConfig
from ...transfer.control.curve import ClusterKeys


def meeting_point(config: AnyServerConfig) -> tuple[str, int]:
    """The address of the rendezvous of the ranks, for a server on several machines."""
    assert config.dist_init_addr is not None, "the configuration requires it with nnodes > 1"
    host, _, port = config.dist_init_addr.rpartition(":")
    return host, int(port)


def leader_address(meet_at: tuple[str, int]) -> str:
    """The address at which the leader accepts its ranks, for a server on several machines."""
    return f"tcp://{meet_at[0]}:{meet_at[1] + 1}"


def rank_threads(config: AnyServerConfig) -> int | None:
    """CPU threads of each rank of this machine; None: torch's default, all cores that it may run on. With a CPU quota,
    more threads than it allows would all be stopped for most of each period.
    """
    ranks, cpus = len(config.local_ranks), usable_cpus()
    if config.threads is not None or (ranks == 1 and cpus == len(os.sched_getaffinity(0))):
        return config.threads
    return max(1, cpus // ranks)


def thread_environ(config: AnyServerConfig) -> dict[str, str]:
    """Variables for processes that compute. On aarch64 torch's linear layers ignore `torch.set_num_threads`: the Arm
    Compute Library takes the number of threads that OpenMP has when torch is imported.
    """
    threads = rank_threads(config)
    return {} if threads is None else {"OMP_NUM_THREADS": str(threads)}


class RankProcess:
    """A rank process that this process has started. It exits when we do: its stdin is a pipe that only we hold."""

    # -P keeps the working directory out of sys.path: in a checkout its folders have the names of other packages.
    COMMAND = (sys.executable, "-P", "-m", "pdserve.scheduler.ranks.main")

    def __init__(
        self, config: AnyServerConfig, rank: int, *, leader: str, meet_at: tuple[str, int], keys: ClusterKeys | None
    ) -> None:
        """`keys` as the leader has them. The rank gets their seeds: to derive them would take each rank 0.2 s."""
        self.rank = rank
        # its own process group: Ctrl-C in a terminal reaches only the frontend, which drains all processes
        environ = {**os.environ, **thread_environ(config)}
        self._process = subprocess.Popen(self.COMMAND, stdin=subprocess.PIPE, process_group=0, env=environ)
        introduction = {
            "config": revealed_dict(config),
            "rank": rank,
            "leader": leader,
            "meet_at": meet_at,
            "key_seeds": keys.seeds.hex() if keys is not None else None,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(introduction).encode() + b"\n")
        self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit status as in subprocess; None if it has not exited in time."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        self._process.kill()

    def let_go(self) -> None:
        """Close its stdin; it exits then."""
        assert self._process.stdin is not None
        self._process.stdin.close()
