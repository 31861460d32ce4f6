"""The lightning indexer: a small attention whose scores select the tokens that the main attention reads.

    score(t, s)  =  sum_h weights[t, h] * relu(query[t, h] . key[s])

There is one key per token, in a separate cache. Queries and keys are in the model's dtype, or both in fp8
(kernels/dsa/fp8_rows.py). Their first `rope_dim` dimensions are rotated (in MLA, the last); mla.py computes them
together with its own queries and rows. The indexer is small: every tensor-parallel rank computes all of it from the
same hidden state, so that all ranks select the same tokens without communication.
"""

from dataclasses import dataclass

import torch

from ...kernels.linear.float_linear import float_linear


@dataclass(frozen=True)
class IndexerParameters:
    """The same on every rank. The matrices of keys and queries are parts of the matrices of mla.py."""

    key_norm: torch.Tensor  # [index_dim]
    key_norm_bias: torch.Tensor  # [index_dim]
    weights: torch.Tensor  # [index_heads, hidden] float32


def index_weights(x: torch.Tensor, parameters: IndexerParameters) -> torch.Tensor:
    """[T, index_heads] float32, without the model's scale: it is positive, and only the order of scores matters."""
    return float_linear(x, parameters.weights)
