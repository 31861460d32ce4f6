"""The lightning indexer: a small attention whose scores only say which tokens the real one looks at.

    score(t, s)  =  sum_h weights[t, h] * relu(query[t, h] . key[s])

One key per token, in a cache of its own. The first `rope_dim` dimensions of queries and keys are rotated (in MLA it is
the last); mla.py computes both together with its own. It is small, and every tensor-parallel rank computes all of it
from the same hidden state: they select the same tokens without a word.
"""

from dataclasses import dataclass

import torch

from ...kernels.linear.float_linear import float_linear


@dataclass(frozen=True)
class IndexerParameters:
    """The same on every rank. The matrices of keys and queries are in those of mla.py."""

    key_norm: torch.Tensor  # [index_dim]
    key_norm_bias: torch.Tensor  # [index_dim]
    weights: torch.Tensor  # [index_heads, hidden] float32


def index_weights(x: torch.Tensor, parameters: IndexerParameters) -> torch.Tensor:
    """[T, index_heads] float32. The models' scale is left out: it is positive, and only the order of scores counts."""
    return float_linear(x, parameters.weights)
