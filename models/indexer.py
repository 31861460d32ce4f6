"""The lightning indexer: a small attention whose scores only say which tokens the real one looks at.

    score(t, s)  =  sum_h weights[t, h] * relu(query[t, h] . key[s])

One key per token, in a cache of its own. The first `rope_dim` dimensions of queries and keys are rotated (in MLA it is
the last). It is small, and every tensor-parallel rank computes all of it from the same hidden state: they select the
same tokens without a word.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import layer_norm

from ..kernels.linear import linear
from .dsa_config import DsaConfig
from .mla import NORM_EPS
from .rope import rotate


@dataclass(frozen=True)
class IndexerParameters:
    """The same on every rank."""

    query: torch.Tensor  # [index_heads * index_dim, q_rank]
    key: torch.Tensor  # [index_dim, hidden]
    key_norm: torch.Tensor  # [index_dim]
    key_norm_bias: torch.Tensor  # [index_dim]
    weights: torch.Tensor  # [index_heads, hidden] float32


def index_keys(
    x: torch.Tensor, parameters: IndexerParameters, config: DsaConfig, cos: torch.Tensor, signed_sin: torch.Tensor
) -> torch.Tensor:
    """[T, index_dim]: the tokens' keys, for the cache."""
    keys = linear(x, parameters.key)
    keys = layer_norm(keys, (config.index_dim,), parameters.key_norm, parameters.key_norm_bias, NORM_EPS)
    return _rotate_first(keys.unsqueeze(1), config, cos, signed_sin).squeeze(1)


def index_queries(
    compressed: torch.Tensor,
    parameters: IndexerParameters,
    config: DsaConfig,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
) -> torch.Tensor:
    """[T, index_heads, index_dim] from compressed queries [T, q_rank]."""
    queries = linear(compressed, parameters.query).view(len(compressed), config.index_heads, config.index_dim)
    return _rotate_first(queries, config, cos, signed_sin)


def index_weights(x: torch.Tensor, parameters: IndexerParameters, config: DsaConfig) -> torch.Tensor:
    """[T, index_heads] float32. The scale of the products is positive, so it may as well be in here."""
    scale: float = (config.index_heads * config.index_dim) ** -0.5
    return linear(x.float(), parameters.weights) * scale


def _rotate_first(heads: torch.Tensor, config: DsaConfig, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    turning, plain = heads[..., : config.rope_dim], heads[..., config.rope_dim :]
    return torch.cat((rotate(turning, cos, signed_sin, interleaved=config.index_interleaved), plain), dim=-1)
