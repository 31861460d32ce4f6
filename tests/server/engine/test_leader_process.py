"""The environment of a leader process."""

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
    """On a busy machine, spinning threads take the cores from the thread they wait for and from the other server."""
    leader = LeaderProcess(DecodeConfig(), "ipc://unused", [sys.executable, "-c", MEASURE_IDLE_THREADS])
    try:
        assert await leader.wait() == 0
    finally:
        leader.close()


async def test_linear_layers_compute_on_the_configured_threads() -> None:
    """On aarch64 they ignore torch.set_num_threads, so that a server with `threads = 1` used two cores."""
    leader = LeaderProcess(DecodeConfig(threads=1), "ipc://unused", [sys.executable, "-c", COUNT_NEW_THREADS])
    try:
        assert await leader.wait() == 0
    finally:
        leader.close()


@pytest.mark.parametrize("patience_s", [0.0, 0.01])
async def test_only_a_leader_that_had_time_to_exit_is_warned_about(
    patience_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A leader that loads a model is ended with SIGTERM at once, which is no problem."""
    leader = LeaderProcess(DecodeConfig(), "ipc://unused", [sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert await leader.stop(patience_s) == -signal.SIGTERM
    finally:
        leader.close()
    assert ("has not exited; sending SIGTERM" in caplog.text) == (patience_s > 0)
