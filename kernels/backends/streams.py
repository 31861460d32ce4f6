"""Every thread that uses a GPU enqueues its work on its own stream, never on the legacy default stream. It also has a
side stream, for small kernels that can run concurrently with those on its stream.

Mooncake's CUDA IPC transport waits, before every write, for all work on the legacy default stream. A rank that computed
on it would send the KV of one step only after the steps queued behind it. Streams made by torch do not synchronise with
the legacy default stream.
"""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

_Result = TypeVar("_Result")
_thread = threading.local()
_FEW_ROWS = 128
"""Products of up to this many rows, as in decode steps, run on the side stream. Those of prompts use the whole GPU."""


def use_own_stream(device: torch.device) -> None:
    """Make a new stream the current one of the calling thread. Does nothing if `device` is not a GPU."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def wait_for_arrivals(device: torch.device) -> None:
    """Order the next work of this thread after copies to `device` that Mooncake's TCP transport has reported complete.

    It copies pageable host memory on the legacy default stream, and such a copy may return before the bytes are on
    the GPU. The host does not wait.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


def wait_for_stream(device: torch.device) -> None:
    """Wait for all work that this thread has enqueued on `device`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def start_beside(device: torch.device, compute: Callable[[], _Result]) -> Callable[[], _Result]:
    """Enqueue the kernels of `compute` on the side stream: after all work of this thread so far, concurrent with what
    it enqueues next. Returns a function that orders later work after them, and returns the result.

    It is for kernels that leave most of the GPU idle. Several computations run one after another. The caller must keep
    their inputs until it requests the results. A CUDA graph can capture them. On a CPU they are computed immediately.
    """
    if device.type != "cuda":
        result = compute()
        return lambda: result
    assert not is_beside(), "a computation on the side stream starts no other one"
    if not hasattr(_thread, "side"):
        _thread.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    side = _thread.side
    side.wait_stream(torch.cuda.current_stream(device))
    _thread.beside = True
    try:
        with torch.cuda.stream(side):
            result = compute()
    finally:
        _thread.beside = False
    done = side.record_event()

    def finished() -> _Result:
        torch.cuda.current_stream(device).wait_event(done)
        return result

    return finished


def beside_if_few(x: torch.Tensor, compute: Callable[[], _Result]) -> Callable[[], _Result]:
    """`start_beside` if x has so few rows that their kernels leave most of the GPU idle. Otherwise the result is
    computed when it is requested, so that it overlaps copies that were started before. Request it once.
    """
    return start_beside(x.device, compute) if len(x) <= _FEW_ROWS else compute


class Beside(Generic[_Result]):
    """A computation that `start` may start, as `beside_if_few` does; otherwise `result` computes it."""

    def __init__(self, x: torch.Tensor, compute: Callable[[], _Result]) -> None:
        self._x, self._finish = x, compute

    def start(self) -> None:
        self._finish = beside_if_few(self._x, self._finish)

    def result(self) -> _Result:
        """Request it once."""
        return self._finish()


def is_beside() -> bool:
    """Whether the calling thread is in a `compute` of `start_beside`."""
    return getattr(_thread, "beside", False)
