"""Collectives of the tensor-parallel ranks of one stage: their implementations, and the choice of one.

- Ranks with a GPU each: NCCL; small tensors over CUDA IPC memory, if the ranks are on one machine.
- Ranks that share a GPU: CUDA IPC memory.
- Otherwise gloo, which blocks the host: no CUDA graphs.
"""

import logging
from typing import Protocol

import torch
import torch.distributed as dist

from ...kernels.collectives.ipc_collectives import MAX_RANKS, IpcCollectives
from ...kernels.collectives.ipc_memory import IpcError
from ..config.sharding import Shard

log = logging.getLogger(__name__)

SMALL_BYTES = 1 << 20
"""Up to this size IPC memory is used where NCCL is available: a decode step sums a few rows at a time, and NCCL takes
longer to start than to send them.
"""
STARTUP_TIMEOUT_S = 600.0
"""Timeout of a collective during start-up, while other ranks load weights or compile kernels."""
STEP_TIMEOUT_S = 30.0
"""The same after start-up. The leader detects a lost rank earlier, by its silence."""


class StageCollectives(Protocol):
    """All ranks of the stage make the same calls in the same order."""

    name: str
    on_device: bool
    """Whether calls are enqueued on the current CUDA stream, so that a graph can capture them; otherwise they block."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum over the ranks, in place."""

    def gather(self, share: torch.Tensor) -> torch.Tensor | None:
        """The shares [rows, width] of all ranks side by side on the first rank; None on the others."""

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of the first rank to all, in place."""

    def check(self) -> None:
        """Raise CollectiveTimeoutError if a call on the device has given up waiting for a rank."""

    def start_serving(self) -> None:
        """From now on, timeouts are short, and a late rank counts as lost: all ranks have loaded and compiled
        everything.
        """

    def close(self) -> None: ...


class GroupCollectives:
    """Over a process group of torch.distributed, gloo or NCCL."""

    def __init__(self, group: "dist.ProcessGroup | None", rank: int, ranks: int, first_rank: int, name: str) -> None:
        """`first_rank` is the number of the group's first rank among all ranks of the server."""
        self._group, self._rank, self._ranks, self._first_rank = group, rank, ranks, first_rank
        self.name = name
        self.on_device = name == "NCCL"

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self._group)

    def gather(self, share: torch.Tensor) -> torch.Tensor | None:
        shares = [torch.empty_like(share) for _ in range(self._ranks)] if self._rank == 0 else None
        dist.gather(share, shares, dst=self._first_rank, group=self._group)
        return None if shares is None else torch.cat(shares, dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        dist.broadcast(tensor, src=self._first_rank, group=self._group)

    def check(self) -> None:
        pass

    def start_serving(self) -> None:
        pass

    def close(self) -> None:
        pass


class IpcStage:
    """Over CUDA IPC memory. With `large`, tensors above SMALL_BYTES use that implementation."""

    on_device = True

    def __init__(self, ipc: IpcCollectives, large: GroupCollectives | None) -> None:
        self._ipc, self._large = ipc, large
        self.name = "CUDA IPC memory" if large is None else f"CUDA IPC memory up to {SMALL_BYTES >> 20} MiB, then NCCL"

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._choose(tensor).all_reduce(tensor)

    def gather(self, share: torch.Tensor) -> torch.Tensor | None:
        return self._choose(share).gather(share)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._choose(tensor).broadcast(tensor)

    def check(self) -> None:
        self._ipc.check()

    def start_serving(self) -> None:
        self._ipc.set_timeout(STEP_TIMEOUT_S)

    def close(self) -> None:
        self._ipc.close()

    def _choose(self, tensor: torch.Tensor) -> IpcCollectives | GroupCollectives:
        return self._ipc if self._large is None or tensor.nbytes <= SMALL_BYTES else self._large


def choose_collectives(
    group: "dist.ProcessGroup | None", shard: Shard, device: torch.device, *, nccl: bool
) -> StageCollectives:
    """The collectives of this rank's stage, over `group` of NCCL or gloo. All ranks of the stage make the same choice,
    which is logged.
    """
    first_rank = shard.stage * shard.tp_size
    by_group = GroupCollectives(group, shard.tp_rank, shard.tp_size, first_rank, "NCCL" if nccl else "gloo")
    chosen: StageCollectives = by_group
    problem = "" if shard.tp_size <= MAX_RANKS else f"it takes at most {MAX_RANKS} ranks"
    if device.type == "cuda" and not problem:

        def exchange(message: bytes) -> list[bytes]:
            own = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device if nccl else "cpu")
            messages = [torch.empty_like(own) for _ in range(shard.tp_size)]
            dist.all_gather(messages, own, group=group)
            return [bytes(each.tolist()) for each in messages]

        try:
            ipc = IpcCollectives(
                shard.tp_rank,
                shard.tp_size,
                device,
                exchange,
                timeout_s=STARTUP_TIMEOUT_S,
                first_rank=first_rank,
            )
            chosen = IpcStage(ipc, by_group if nccl else None)
        except IpcError as error:
            problem = str(error)
    log.info(
        "tensor-parallel ranks communicate over %s%s%s",
        chosen.name,
        f" (no CUDA IPC memory: {problem})" if problem and device.type == "cuda" else "",
        "" if chosen.on_device else ", which blocks the host" + ("; no CUDA graphs" if device.type == "cuda" else ""),
    )
    return chosen
