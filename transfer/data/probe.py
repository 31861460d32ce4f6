"""Whether a transport works between two ranks: bytes are written into the peer's memory and read back.

What two machines or processes say of themselves does not tell: CUDA IPC handles do not open across PID namespaces or
for devices that are not visible, and an HCA may not reach GPU memory. Every pool has a few bytes behind its pages for
this (`Pool.probe_address`), so a probe never touches KV.
"""

import random
import secrets
import time
from typing import Final

import torch

from ...kernels.backends.streams import wait_for_arrivals, wait_for_stream
from ..mooncake.engine import SendEngine, WriteState
from ..protocol.messages import Pool

WORD_BYTES: Final = 16
ATTEMPTS: Final = 3
"""Two ranks may probe at the same time, and pick the same bytes: the one that reads the other's word tries again."""
TIMEOUT_S: Final = 2.0
_NAP_S: Final = 0.0002


def probe(engine: SendEngine, local: torch.Tensor, pool: Pool) -> str | None:
    """Write a random word behind the pages of `pool` and read it back; why that failed, None when it worked.

    `local` is memory of our own (uint8), of the kind that KV for this pool is written from; it is changed. Nothing is
    tried where either side has no memory for it.
    """
    slots = min(pool.probe_bytes, len(local)) // WORD_BYTES
    if not slots:
        return None
    for _ in range(ATTEMPTS):
        word, at = secrets.token_bytes(WORD_BYTES), WORD_BYTES * random.randrange(slots)
        ours, address = local[at : at + WORD_BYTES], pool.probe_address + at
        _put(ours, word)
        problem = _write(engine, ours, address)
        if problem is not None:
            return problem
        _put(ours, bytes(WORD_BYTES))
        if not engine.read(ours.data_ptr(), address, WORD_BYTES):
            return "the peer's memory cannot be read"
        wait_for_arrivals(ours.device)
        if bytes(ours.cpu().tolist()) == word:
            return None
    return "what was read back is not what was written"


def _put(memory: torch.Tensor, word: bytes) -> None:
    memory.copy_(torch.tensor(list(word), dtype=torch.uint8))
    wait_for_stream(memory.device)


def _write(engine: SendEngine, source: torch.Tensor, address: int) -> str | None:
    write = engine.submit(source.data_ptr(), address, len(source))
    if write is None:
        return "the peer's memory cannot be opened for writing"
    deadline = time.monotonic() + TIMEOUT_S
    while (state := engine.poll(write)) is WriteState.PENDING:
        if time.monotonic() > deadline:
            return f"a write of {len(source)} bytes did not end within {TIMEOUT_S:g} s"
        time.sleep(_NAP_S)
    return None if state is WriteState.DONE else f"a write of {len(source)} bytes failed"
