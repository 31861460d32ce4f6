"""The lightning indexer: a small attention whose scores select the tokens that the main attention reads.

    score(t, s)  =  sum_h weights[t, h] * relu(query[t, h] . key[s])

One key per token, in a cache of its own: in the model's dtype or, like the queries then, in fp8
(kernels/mla/fp8_rows.py). The first `rope_dim` dimensions of queries and keys are rotated (in MLA, the last); mla.py
computes both together with its own. It is small: every tensor-parallel rank computes all of it from the same hidden
state, so that they select the same tokens without communication.
"""

from dataclasses import dataclass

import torch

from ...kernels.linear.float_linear import float_linear


@dataclass(frozen=True)
class IndexerParameters:
    """The same on every rank. The matrices of keys and queries are part of those of mla.py."""

    key_norm: torch.Tensor  # [index_dim]
    key_norm_bias: torch.Tensor  # [index_dim]
    weights: torch.Tensor  # [index_heads, hidden] float32


def index_weights(x: torch.Tensor, parameters: IndexerParameters) -> torch.Tensor:
    """[T, index_heads] float32, without the model's scale: it is positive, and only the order of scores matters."""
    return float_linear(x, parameters.weights)
