"""Fills uninitialised memory, so that tests detect reads of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdserve.kernels.backends.dispatch import Impl


@contextmanager
def poisoned(impl: Impl) -> Iterator[None]:
    """torch.empty gives NaN or the largest integer, so that tests detect elements that were not written.

    The torch mode that does this forbids cuBLAS matrix products, so it is off for references.
    """
    torch.use_deterministic_algorithms(impl != "reference")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
