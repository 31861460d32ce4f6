"""A program that measures a transfer between two Mooncake engines of its process, over one transport.

A broken driver can end or hang the process that uses it, so `measure` runs this program as a child with a time limit.

    python -m pdserve.server.doctor.trial_transfer TRANSPORT HOST [DEVICE ...]
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy

from .facts import Transfer

if TYPE_CHECKING:
    from ...transfer.mooncake.engine import SendEngine

SIZE_BYTES = 16 << 20
MOST_WRITES = 256
MEASURED_S = 0.5
TIMEOUT_S = 120.0


def measure(transport: str, host: str, devices: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> Transfer:
    """The speed of a transfer, or why there was none."""
    command = [sys.executable, "-P", "-m", __name__, transport, host, *devices]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Transfer(transport, host, problem=f"it did not end within {timeout_s:g} s")
    try:
        result = json.loads(done.stdout.splitlines()[-1])
        return Transfer(transport, host, result.get("gib_per_s"), result.get("problem"))
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return Transfer(transport, host, problem=f"the test ended with status {done.returncode}: {last}")


def main(transport: str, host: str, devices: Sequence[str]) -> None:
    from ...common.errors import PdserveError

    try:
        result: dict[str, float | str] = {"gib_per_s": _transfer(transport, host, devices)}
    except (PdserveError, OSError, RuntimeError) as error:
        result = {"problem": str(error)}
    print(json.dumps(result))


class _Buffers(NamedTuple):
    """Memory to send from and to receive into. Both belong to `owner`."""

    source: int
    target: int
    arrived: Callable[[], bool]
    owner: object


def _allocate(transport: str) -> _Buffers:
    if transport == "nvlink":
        import torch

        source = torch.randint(0, 256, (SIZE_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.zeros_like(source)
        return _Buffers(source.data_ptr(), target.data_ptr(), lambda: torch.equal(source, target), (source, target))
    sent = numpy.frombuffer(random.randbytes(SIZE_BYTES), numpy.uint8)
    received = numpy.zeros_like(sent)
    same = partial(numpy.array_equal, sent, received)
    return _Buffers(sent.ctypes.data, received.ctypes.data, same, (sent, received))


def _transfer(transport: str, host: str, devices: Sequence[str]) -> float:
    """GiB per second of writes of SIZE_BYTES bytes, one after another. The received bytes are compared."""
    from ...transfer.mooncake.engine import ReceiveEngine, SendEngine
    from ...transfer.mooncake.rdma_engine import RdmaEngine
    from ...transfer.mooncake.sockets import Region

    buffers = _allocate(transport)
    receiver = ReceiveEngine(host, transport=transport, devices=devices)  # type: ignore[arg-type]  # from the command line
    try:
        receiver.register(buffers.target, SIZE_BYTES)
        sender = SendEngine(
            receiver.session,
            [Region(buffers.target, SIZE_BYTES)],
            transport=transport,  # type: ignore[arg-type]
            rdma=RdmaEngine(host, devices=devices) if transport == "rdma" else None,
            sources=[Region(buffers.source, SIZE_BYTES)],
        )
        try:
            _write(sender, buffers)  # opens the connection
            started, writes = time.monotonic(), 0
            while not writes or (writes < MOST_WRITES and time.monotonic() < started + MEASURED_S):
                _write(sender, buffers)
                writes += 1
            seconds = time.monotonic() - started
        finally:
            sender.destroy()
        if not buffers.arrived():
            raise RuntimeError("the received bytes differ from the bytes sent")
        return writes * SIZE_BYTES / seconds / (1 << 30)
    finally:
        receiver.close()


def _write(sender: "SendEngine", buffers: _Buffers) -> None:
    from ...transfer.mooncake.engine import WriteState

    write = sender.submit(buffers.source, buffers.target, SIZE_BYTES)
    if write is None:
        raise RuntimeError("the receiving engine does not answer")
    while (state := sender.poll(write)) is WriteState.PENDING:
        time.sleep(0.0002)
    if state is WriteState.FAILED:
        raise RuntimeError("the write failed")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
