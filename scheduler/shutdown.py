"""Time limits of a shutdown after the drain, step by step. The frontend waits for their sum. No torch."""

from typing import Final

from ..transfer.control.thread import LAST_WORDS_S

LAST_WRITES_S: Final = 0.5
"""Grace period after the drain deadline for cancelled writes to finish and be acknowledged."""
STOP_S: Final = 3.0
"""Time for ranks to exit after StopRank. A rank reads StopRank when its current step has ended."""
CUDA_STOP_S: Final = 10.0
"""The same on GPUs: NCCL shuts down when all ranks do, and the driver destroys one context after another."""
_MARGIN_S: Final = 1.5


def exit_s(device: str) -> float:
    """From the end of the drain to the end of the leader process."""
    return LAST_WRITES_S + LAST_WORDS_S + (STOP_S if device == "cpu" else CUDA_STOP_S) + _MARGIN_S
