"""Launcher of csrc/collectives/all_reduce.cu: sums and gathers between processes, through memory that all have mapped.

    all_reduce    parts[0] + parts[1] + ...      in float32, in the order of the ranks, rounded once
    gather        the shares of all ranks side by side, along the last dimension

The order of the sum does not depend on the rank, the size or the algorithm: all ranks get the same bits.

Every call is enqueued on torch's current stream and allocates nothing, so a CUDA graph can capture it. All ranks make
the same calls, with the same sizes, in the same order, on one stream each: a call ends when all ranks have started it.
Ranks may share a GPU, which then runs them in turns of a few milliseconds, or side by side under NVIDIA MPS.

A rank that waits for another longer than the timeout gives up: its results are undefined from then on, and `check`
raises.

Lower bound of a sum of m bytes over n ranks with a GPU each: one round trip between GPUs; in one shot (n - 1) * m bytes
into each GPU, in two shots 2 * m * (n - 1) / n.
"""

import math
from collections.abc import Iterator

import torch

from ...common.arithmetic import ceil_div
from ...common.errors import PdserveError
from ..backends.nvrtc import device_address, load_kernel
from .ipc_memory import Exchange, IpcMemory

MAX_RANKS = 8
MAX_BLOCKS = 32
THREADS = 512
HALF_BYTES = 8 << 20
"""The most that one launch sums or gathers; larger tensors take several."""
ONE_SHOT_BYTES = {2: 1 << 20, 3: 512 << 10, 4: 512 << 10}
"""Up to this size, by number of ranks, one shot is faster: reading all tensors takes less time than a second barrier.
"""
ONE_SHOT_BYTES_OF_MANY = 256 << 10
_ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_VECTOR_BYTES = 16


class CollectiveTimeoutError(PdserveError):
    """Another rank has not made a call in time."""


class IpcCollectives:
    """The collectives of one rank of a group. Owns the shared memory."""

    def __init__(
        self, rank: int, ranks: int, device: torch.device, exchange: Exchange, *, timeout_s: float, first_rank: int = 0
    ) -> None:
        """Ranks are numbered within the group; messages call the first of them `first_rank`. All ranks call it at the
        same time. Raises IpcError on all of them if one cannot take part.
        """
        assert 1 < ranks <= MAX_RANKS
        self._rank, self._ranks, self._device, self._first_rank = rank, ranks, device, first_rank
        self._memory = IpcMemory(8 * MAX_BLOCKS * ranks + 2 * HALF_BYTES, rank, device, exchange)
        self._addresses = torch.tensor(self._memory.addresses, dtype=torch.int64, device=device)
        self._state = torch.zeros(MAX_BLOCKS + 2, dtype=torch.int64, device=device)
        """Calls, by block; the timeout in ns; whether a call has failed."""
        self._report = torch.zeros(2, dtype=torch.int64, pin_memory=True)
        """Written by the device after a timeout: 1 + the rank that is missing, and the call."""
        self._timeout_s = timeout_s
        self.set_timeout(timeout_s)
        self._places = self._addresses.data_ptr(), self._state.data_ptr(), device_address(self._report)
        self._constants = (
            ("RANKS", ranks),
            ("RANK", rank),
            ("MAX_BLOCKS", MAX_BLOCKS),
            ("HALF_BYTES", HALF_BYTES),
            ("THREADS", THREADS),
        )

    def set_timeout(self, timeout_s: float) -> None:
        """The timeout of all calls from now on, also of those in graphs."""
        self._timeout_s = timeout_s
        self._state[MAX_BLOCKS].fill_(int(timeout_s * 1e9))

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum the tensors of all ranks, in place: contiguous bfloat16, float16 or float32."""
        if tensor.dtype not in _ELEMENTS:
            raise ValueError(f"all_reduce sums bfloat16, float16 and float32, got {tensor.dtype}")
        self._check(tensor)
        for part in _parts(tensor):
            self._sum(part)

    def gather(self, share: torch.Tensor) -> torch.Tensor | None:
        """The shares [rows, width] of all ranks side by side on rank 0; None on the others."""
        self._check(share)
        rows, width = share.shape
        if not width:
            raise ValueError("gather takes shares with at least one column")
        out = share.new_empty(rows, self._ranks * width) if self._rank == 0 else None
        most_rows = HALF_BYTES // (width * share.itemsize)
        if not most_rows:
            raise ValueError(f"gather takes rows of at most {HALF_BYTES} bytes, got {width * share.itemsize}")
        for start in range(0, rows, most_rows):
            part = slice(start, start + most_rows)
            self._copy(_aligned(share[part]), None if out is None else out[part], range(self._ranks))
        return out

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy the tensor of rank 0 to all ranks, in place."""
        self._check(tensor)
        for part in _parts(tensor):
            aligned = _aligned(part)
            row = aligned.view(1, -1)
            self._copy(row, None if self._rank == 0 else row, range(1))
            if aligned is not part:
                part.copy_(aligned)

    def check(self) -> None:
        """Raise CollectiveTimeoutError if this rank has given up waiting for another. Does not wait for the device."""
        missing, call = self._report.tolist()
        if missing:
            raise CollectiveTimeoutError(
                f"rank {self._first_rank + self._rank} waited {self._timeout_s:g} s for rank "
                f"{self._first_rank + missing - 1} in collective {call}: it hangs, or has exited"
            )

    def close(self) -> None:
        """Free the memory, after all ranks have ended their calls."""
        self._memory.close()

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.device != self._device or not tensor.is_contiguous():
            raise ValueError(
                f"collectives take contiguous tensors on {self._device}, got {list(tensor.shape)} with strides "
                f"{list(tensor.stride())} on {tensor.device}"
            )

    def _sum(self, tensor: torch.Tensor) -> None:
        """Up to HALF_BYTES."""
        aligned = _aligned(tensor)
        two_shot = tensor.nbytes > ONE_SHOT_BYTES.get(self._ranks, ONE_SHOT_BYTES_OF_MANY)
        constants = (*self._constants, ("ELEMENT", _ELEMENTS[tensor.dtype]), ("TWO_SHOT", int(two_shot)))
        vectors = ceil_div(tensor.nbytes, _VECTOR_BYTES * (self._ranks if two_shot else 1))
        load_kernel("collectives/all_reduce.cu", "all_reduce", self._device, constants).launch(
            aligned.data_ptr(),
            tensor.nbytes,
            *self._places,
            blocks=_blocks(vectors),
            threads=THREADS,
            overlap_previous=True,
        )
        if aligned is not tensor:
            tensor.copy_(aligned)

    def _copy(self, share: torch.Tensor, out: torch.Tensor | None, sources: range) -> None:
        """Write `share` [rows, width], up to HALF_BYTES, and read those of `sources` if `out` is given. Both are
        aligned.

        The unit depends on the width alone: all ranks must divide the work among blocks in the same way.
        """
        rows, row_bytes = share.shape[0], share.shape[1] * share.itemsize
        unit = math.gcd(row_bytes, _VECTOR_BYTES)
        load_kernel(
            "collectives/all_reduce.cu", "gather_shares", self._device, (*self._constants, ("UNIT_BYTES", unit))
        ).launch(
            share.data_ptr(),
            rows,
            row_bytes // unit,
            (share if out is None else out).data_ptr(),
            len(sources) * row_bytes // unit,
            sources.start,
            sources.start if out is None else sources.stop,
            *self._places,
            blocks=_blocks(rows * row_bytes // unit),
            threads=THREADS,
            overlap_previous=True,
        )


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Pieces of a contiguous tensor of at most HALF_BYTES; none of an empty one."""
    flat, size = tensor.view(-1), HALF_BYTES // tensor.itemsize
    return (flat[start : start + size] for start in range(0, len(flat), size))


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if its address is not aligned to vectors: slices of larger tensors may be anywhere."""
    return tensor.clone() if tensor.data_ptr() % _VECTOR_BYTES else tensor


def _blocks(items: int) -> int:
    return min(ceil_div(items, THREADS), MAX_BLOCKS)
