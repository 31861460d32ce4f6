"""Tests whether a transport works between two ranks: writes bytes into the peer's memory and reads them back.

The announced capabilities are not enough: CUDA IPC handles do not open across PID namespaces or for devices that are
not visible, and an HCA may not reach GPU memory. Every pool has a few bytes behind its pages for probes
(`Pool.probe_address`), so a probe never touches KV.
"""

import random
import secrets
import time
from typing import Final

import torch

from ...common.stuck import RunningTime
from ...kernels.backends.streams import wait_for_arrivals, wait_for_stream
from ..mooncake.engine import SendEngine, WriteState
from ..protocol.messages import Pool

PATTERN_BYTES: Final = 16
ATTEMPTS: Final = 3
"""Two ranks may probe the same bytes at the same time. A rank that reads a foreign pattern tries again."""
TIMEOUT_S: Final = 2.0
_NAP_S: Final = 0.0002
_LONGEST_GAP_S: Final = 0.25
"""If two checks of a write are further apart, this process was stopped or starved."""


def probe(engine: SendEngine, local: torch.Tensor, pool: Pool) -> str | None:
    """Write a random pattern behind the pages of `pool` and read it back. Returns the problem, or None on success.

    `local` is our memory (uint8), of the same kind as the source of KV for this pool; it is overwritten. If either side
    has no memory for probes, nothing is tested.
    """
    slots = min(pool.probe_bytes, len(local)) // PATTERN_BYTES
    if not slots:
        return None
    for _ in range(ATTEMPTS):
        pattern, offset = secrets.token_bytes(PATTERN_BYTES), PATTERN_BYTES * random.randrange(slots)
        ours, address = local[offset : offset + PATTERN_BYTES], pool.probe_address + offset
        _put(ours, pattern)
        problem = _write(engine, ours, address)
        if problem is not None:
            return problem
        _put(ours, bytes(PATTERN_BYTES))
        if not engine.read(ours.data_ptr(), address, PATTERN_BYTES):
            return "the peer's memory cannot be read"
        wait_for_arrivals(ours.device)
        if bytes(ours.cpu().tolist()) == pattern:
            return None
    return "the bytes read back differ from the bytes written"


def _put(memory: torch.Tensor, pattern: bytes) -> None:
    memory.copy_(torch.tensor(list(pattern), dtype=torch.uint8))
    wait_for_stream(memory.device)


def _write(engine: SendEngine, source: torch.Tensor, address: int) -> str | None:
    write = engine.submit(source.data_ptr(), address, len(source))
    if write is None:
        return "the peer's memory cannot be opened for writing"
    waited = RunningTime(_LONGEST_GAP_S)
    while (state := engine.poll(write)) is WriteState.PENDING:
        if waited.read() > TIMEOUT_S:
            return f"a write of {len(source)} bytes did not end within {TIMEOUT_S:g} s"
        time.sleep(_NAP_S)
    return None if state is WriteState.DONE else f"a write of {len(source)} bytes failed"
