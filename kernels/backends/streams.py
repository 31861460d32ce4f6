"""Every thread that uses a GPU enqueues its work on a stream of its own, never on the legacy default stream.

Mooncake's CUDA IPC transport waits, before every write, for all work on the legacy default stream. A rank that computed
on it would send the KV of one step only after the steps queued behind it. Streams made by torch do not synchronise with
the legacy default stream.
"""

import torch


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
