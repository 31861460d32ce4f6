"""How long a server may take to end after its drain, step by step. The frontend waits for the sum. No torch."""

from typing import Final

from ..transfer.control.thread import LAST_WORDS_S

LAST_WRITES_S: Final = 0.5
"""Grace period after the drain deadline for cancelled writes to finish, so that peers can be told so."""
STOP_S: Final = 3.0
"""For ranks to end when told to. One that computes a step does not listen before it has ended."""
CUDA_STOP_S: Final = 10.0
"""The same on GPUs: NCCL ends when all ranks have come to it, and the driver takes down one context after another."""
_MARGIN_S: Final = 1.5


def exit_s(device: str) -> float:
    """From the end of the drain to the end of the leader process."""
    return LAST_WRITES_S + LAST_WORDS_S + (STOP_S if device == "cpu" else CUDA_STOP_S) + _MARGIN_S
