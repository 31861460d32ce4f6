"""Poisons uninitialised memory, so that tests notice reads of it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdserve.kernels.backends.dispatch import Impl


@contextmanager
def poisoned(impl: Impl) -> Iterator[None]:
    """torch.empty gives NaN or the largest integer, so that uninitialised and unwritten elements are noticed.

    The torch mode that does this forbids cuBLAS matrix products, so it is off for references.
    """
    torch.use_deterministic_algorithms(impl != "reference")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
