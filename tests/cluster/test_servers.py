"""Servers that a test run starts, forked or from the command line, end with it."""

import os
import time
from pathlib import Path

from tests.cluster.servers import Server, fork_server, start_forked, wait_until
from tests.processes import gone


def run_tests(arguments: list[str]) -> int:
    """A test run, in a process of its own. Prints the PIDs of two servers and of its fork server."""
    model, log = arguments
    os.environ.pop("PYTEST_XDIST_TESTRUNUID", None)  # otherwise it would share the fork server of this run
    servers = [Server("prefill", model, Path(log), forked=forked).start() for forked in (True, False)]
    for server in servers:
        server.wait_ready()
        assert server.process is not None
        print(server.process.pid, server.leader_pid(), end=" ")
    print(fork_server().pid, flush=True)
    time.sleep(60)
    return 0


def test_killed_test_run_leaves_no_server_behind(llama: Path, tmp_path: Path) -> None:
    """Nor its fork server."""
    run, stdin, stdout = start_forked("tests.cluster.test_servers:run_tests", str(llama), str(tmp_path / "log"))
    with stdin, stdout:
        processes = [int(pid) for pid in stdout.readline().split()]
        assert len(processes) == 5
        assert fork_server().pid not in processes
        assert not any(map(gone, processes))
        run.kill()
        run.wait(10)
    wait_until(lambda: all(map(gone, processes)), 15, "frontends, leaders and the fork server end")
