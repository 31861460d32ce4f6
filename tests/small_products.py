"""Products of the tiny matrices of tests."""

import torch


def multiply_without_onednn() -> None:
    """Let this process multiply matrices with torch's BLAS. On aarch64, torch uses oneDNN, which prepares each product
    anew: that takes twenty times as long as a small product itself. Servers that are not forked, such as the second
    machine of test_ranks.py, keep oneDNN.
    """
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
