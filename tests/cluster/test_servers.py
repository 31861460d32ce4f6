"""Servers that a test run starts, forked or from the command line, end with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.cluster.servers import REPOSITORY, python_path, wait_until
from tests.processes import RUN_VARIABLE, gone

TEST_RUN = """
import pathlib, sys, time
from tests.cluster.servers import Server, fork_server

servers = [Server("prefill", sys.argv[1], pathlib.Path(sys.argv[2]), forked=forked).start() for forked in (True, False)]
for server in servers:
    server.wait_ready()
    print(server.process.pid, server.leader_pid(), end=" ")
print(fork_server().pid, flush=True)
time.sleep(60)
"""


def test_killed_test_run_leaves_no_server_behind(llama: Path, tmp_path: Path) -> None:
    """Nor its fork server: it is a run of its own, which does not share that of this run."""
    environment = {**os.environ, "PYTHONPATH": f"{python_path()}{os.pathsep}{REPOSITORY}"}
    environment.pop(RUN_VARIABLE, None)
    command = [sys.executable, "-P", "-c", TEST_RUN, str(llama), str(tmp_path / "log")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        processes = [int(pid) for pid in run.stdout.readline().split()]
        assert len(processes) == 5
        assert not any(map(gone, processes))
        run.send_signal(signal.SIGKILL)
    wait_until(lambda: all(map(gone, processes)), 15, "frontends, leaders and the fork server end")
