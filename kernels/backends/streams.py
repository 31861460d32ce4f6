"""Every thread that uses a GPU enqueues its work on a stream of its own, never on the legacy default stream.

The legacy default stream takes part in everything: Mooncake's CUDA IPC transport waits, before every write, for all
work that is queued there. A rank that computed on it would send the KV of one step only after the steps queued behind
it. Streams made by torch do not synchronise with it.
"""

import torch


def use_own_stream(device: torch.device) -> None:
    """Give the calling thread a new stream as its current one. Does nothing where `device` is not a GPU."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def wait_for_arrivals(device: torch.device) -> None:
    """Order the next work of this thread after the copies to `device` that Mooncake's TCP transport has reported.

    It copies from pageable host memory on the legacy default stream, and such a copy may return before the bytes are on
    the GPU. The host does not wait.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


def wait_for_stream(device: torch.device) -> None:
    """Wait until all that this thread has enqueued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
