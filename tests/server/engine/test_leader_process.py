"""A leader process: the environment of its threads, and how it is stopped."""

import signal
import sys

import pytest

from pdserve.configs.schema import DecodeConfig
from pdserve.server.engine.leader_process import LeaderProcess

MEASURE_IDLE_THREADS = """
import sys, time, torch
torch.set_num_threads(2)
values = torch.randn(1024, 1024)

def idle_cpu_s():
    (values + values).sum()
    began = time.process_time()
    time.sleep(0.05)
    return time.process_time() - began

sys.exit(sorted(idle_cpu_s() for _ in range(11))[5] > 0.0004)
"""

COUNT_NEW_THREADS = """
import os, sys, torch
torch.set_num_threads(1)
threads = len(os.listdir("/proc/self/task"))
torch.nn.functional.linear(torch.randn(256, 512), torch.randn(1024, 512))
sys.exit(len(os.listdir("/proc/self/task")) - threads)
"""


async def test_openmp_threads_spin_only_briefly() -> None:
    """On a busy machine, spinning threads use the cores that the thread they wait for and the other server need."""
    leader = LeaderProcess(DecodeConfig(), "ipc://unused", [sys.executable, "-c", MEASURE_IDLE_THREADS])
    try:
        assert await leader.wait() == 0
    finally:
        leader.close()


async def test_linear_layers_compute_on_the_configured_threads() -> None:
    """On aarch64, linear layers ignore torch.set_num_threads: a server with `threads = 1` used two cores."""
    leader = LeaderProcess(DecodeConfig(threads=1), "ipc://unused", [sys.executable, "-c", COUNT_NEW_THREADS])
    try:
        assert await leader.wait() == 0
    finally:
        leader.close()


@pytest.mark.parametrize("patience_s", [0.0, 0.01])
async def test_kill_is_logged_only_if_the_leader_had_time_to_exit(
    patience_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A leader that still loads its model is killed at once, which needs no warning."""
    leader = LeaderProcess(DecodeConfig(), "ipc://unused", [sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert await leader.stop(patience_s) == -signal.SIGKILL
    finally:
        leader.close()
    assert ("has not exited in 0.01 s; sending SIGKILL" in caplog.text) == (patience_s > 0)
