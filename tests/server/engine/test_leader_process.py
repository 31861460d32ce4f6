"""The environment of a leader process."""

import sys

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


async def test_openmp_threads_spin_only_briefly() -> None:
    """On a busy machine, spinning threads take the cores from the thread they wait for and from the other server."""
    leader = LeaderProcess(DecodeConfig(), "ipc://unused", [sys.executable, "-c", MEASURE_IDLE_THREADS])
    try:
        assert await leader.wait() == 0
    finally:
        leader.close()
