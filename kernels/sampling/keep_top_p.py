"""Keeps the weights of the best tokens, as few as reach a given mass (top-p), and sets the others to 0.

    weights[r, t] = 0      unless sum of weights[r, u] over all u ranked before t < needed[r]

Tokens are ranked by logit, and those with the same logit by id. Shapes: logits [B, V] float32, weights [B, V] int64,
not negative, equal for equal logits; needed [B, 1] int64, above 0 and at most the sum of the row's weights. All values
are integers, so that the result does not depend on the order of additions. In place. Lower bound: weights read and
written once, logits read once.

On a GPU the host does not wait, however many tokens are needed: checking whether a short list is long enough would
synchronise in every step.
"""

import torch

from ..backends.nvrtc import CudaImpl, load_kernel, use_cuda
from .top_tokens import top_tokens

THREADS = 1024
SHORT_LIST = 1024
"""Almost always enough tokens. Sorting a whole vocabulary takes tens of milliseconds on a CPU."""


def keep_top_p_reference(logits: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> None:
    vocabulary = logits.shape[-1]
    for count in (min(SHORT_LIST, vocabulary), vocabulary):
        ids, _ = top_tokens(logits, count)
        ranked = weights.gather(1, ids)
        mass = ranked.cumsum(dim=-1)
        if count == vocabulary or bool((mass[:, -1:] >= needed).all()):
            kept = ranked.where(mass - ranked < needed, 0)
            weights.zero_().scatter_(1, ids, kept)
            return


def keep_top_p(logits: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor, *, impl: CudaImpl = "auto") -> None:
    """See the module docstring. Rows of logits with NaN keep some of their weights."""
    dtypes = (logits.dtype, weights.dtype, needed.dtype)
    if dtypes != (torch.float32, torch.int64, torch.int64):
        raise ValueError(f"logits must be float32, weights and needed int64, got {dtypes}")
    if weights.shape != logits.shape or needed.shape != (len(logits), 1):
        raise ValueError(
            f"weights {list(weights.shape)} and needed {list(needed.shape)} do not fit logits {list(logits.shape)}"
        )
    if logits.stride(1) != 1 or weights.stride(1) != 1:
        raise ValueError("rows of logits and weights must be contiguous")
    if not use_cuda(impl, logits.device):
        keep_top_p_reference(logits, weights, needed)
    elif len(logits):
        launch_keep_top_p(logits, weights, needed.contiguous())


def launch_keep_top_p(logits: torch.Tensor, weights: torch.Tensor, needed: torch.Tensor) -> None:
    load_kernel("sampling/keep_top_p.cu", "keep_top_p", logits.device, (("THREADS", THREADS),)).launch(
        logits.data_ptr(),
        logits.stride(0),
        weights.data_ptr(),
        weights.stride(0),
        needed.data_ptr(),
        logits.shape[1],
        blocks=len(logits),
        threads=THREADS,
    )
