"""Processes that are the ranks of one group on cuda:0, for tests on a real GPU."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pdserve.kernels.backends.streams import use_own_stream
from pdserve.kernels.collectives.ipc_collectives import IpcCollectives
from tests.ports import free_port

DEVICE = torch.device("cuda", 0)
GONE = "gone"
"""The result of a rank that calls `vanish`."""

Work = Callable[..., Any]
"""Called in every process with its IpcCollectives, its rank and further arguments."""


def run_ranks(ranks: int, work: Work, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """The result of each rank; GONE if the rank exited early. An exception in a rank fails the test."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    started = []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, rank, ranks, port, work, args), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    results = []
    try:
        for rank, (_, pipe) in enumerate(started):
            assert pipe.poll(timeout_s), f"rank {rank} does not answer"
            try:
                result = pipe.recv()
            except EOFError:
                result = GONE
            assert not isinstance(result, RuntimeError), str(result)
            results.append(result)
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    return results


def vanish() -> None:
    """End this process as if it was killed."""
    os._exit(1)


def exchange(message: bytes) -> list[bytes]:
    """All-gather of a message between all ranks, over gloo."""
    own = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    messages = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(messages, own)
    return [bytes(each.tolist()) for each in messages]


def _serve(pipe: Any, rank: int, ranks: int, port: int, work: Work, args: tuple[Any, ...]) -> None:
    try:
        torch.cuda.set_device(DEVICE)
        use_own_stream(DEVICE)
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
        )
        ipc = IpcCollectives(rank, ranks, DEVICE, exchange, timeout_s=60.0)
        pipe.send(work(ipc, rank, *args))
        torch.cuda.synchronize()
        dist.barrier()
        ipc.close()
    except Exception as error:  # reported to the test, which fails with it
        pipe.send(RuntimeError("".join(traceback.format_exception(error))))
