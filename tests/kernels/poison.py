"""Memory that shows when it is read without having been written."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pdserve.kernels.backends.dispatch import Impl


@contextmanager
def poisoned(impl: Impl) -> Iterator[None]:
    """torch.empty gives NaN, or the largest integer: what is read or left unwritten shows.

    The mode that does this forbids matrix products by cuBLAS, so references go without.
    """
    torch.use_deterministic_algorithms(impl != "reference")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
