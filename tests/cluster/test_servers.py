"""Servers that a test run starts, forked or not, end with the test run."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.servers import Server, fork_server, start_forked, wait_until
from tests.processes import RUN_VARIABLE, gone


def main(arguments: Sequence[str]) -> int:
    """A test run that starts servers, and prints the PIDs of all processes that should end with it."""
    model, log = arguments
    os.environ.pop(RUN_VARIABLE, None)
    servers = [Server("prefill", model, Path(log), forked=forked).start() for forked in (True, False)]
    for server in servers:
        server.wait_ready()
        assert server.process is not None
        print(server.process.pid, server.leader_pid(), end=" ")
    print(fork_server().pid, flush=True)
    time.sleep(60)
    return 0


def test_killed_test_run_leaves_no_server_behind(llama: Path, tmp_path: Path) -> None:
    """Nor a fork server. The test run is a process of its own, with a fork server of its own."""
    run, stdin, stdout = start_forked("tests.cluster.test_servers:main", str(llama), str(tmp_path / "log"))
    with stdin, stdout:
        processes = [int(pid) for pid in stdout.readline().split()]
        assert len(processes) == 5
        assert fork_server().pid not in processes
        assert not any(map(gone, processes))
        run.kill()
        run.wait(10)
    wait_until(lambda: all(map(gone, processes)), 15, "frontends, leaders and the fork server end")
