"""Time limits of a shutdown after the drain, step by step. No torch."""

from typing import Final

from ..transfer.control.peers import LAST_WORDS_S

LAST_WRITES_S: Final = 0.5
"""Grace period after the drain deadline for cancelled writes to finish and be acknowledged."""
STOP_S: Final = 3.0
"""Time for ranks to exit after StopRank. A rank reads StopRank when its current step has ended."""
CUDA_STOP_S: Final = 10.0
"""The same on GPUs: NCCL shuts down when all ranks do, and the driver destroys one context after another."""
FRONTEND_S: Final = 1.5
"""From the end of the leader process, or its kill, to the end of the frontend."""
_MARGIN_S: Final = 1.5


def exit_s(device: str) -> float:
    """From the end of the drain to the end of the server. The frontend ends itself then, whatever it waits for."""
    return leader_exit_s(device) + FRONTEND_S


def leader_exit_s(device: str) -> float:
    """From the end of the drain to the end of the leader process. The frontend kills it then."""
    return LAST_WRITES_S + LAST_WORDS_S + (STOP_S if device == "cpu" else CUDA_STOP_S) + _MARGIN_S
