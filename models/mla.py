"""Multi-head latent attention in the latent space: all query heads read the same short row per token.

    row        =  [rms_norm(c), rotate(k)]            with  c, k = x @ kv_a.T;  what the cache holds
    query_h    =  [q_h @ up_key_h, rotate(r_h)]       with  q_h, r_h = head h of rms_norm(x @ q_a.T) @ q_b.T
    result_h   =  up_value_h @ (attention of query_h over the rows, summing only their first part)

Keys and values are never expanded per head: their matrices are absorbed by the queries and the result. That is the
product of the same matrices in another order, for a whole prompt and for a single token alike.
"""

from dataclasses import dataclass

import torch

from ..kernels.linear import linear
from ..kernels.rms_norm import rms_norm
from .dsa_config import DsaConfig
from .rope import rotate

NORM_EPS = 1e-6
"""Of the norms inside attention: transformers 5.17 does not take the model's own here."""


@dataclass(frozen=True)
class MlaParameters:
    """Attention's weights; `heads` are this rank's own, what comes before them is the same on every rank."""

    q_a: torch.Tensor  # [q_rank, hidden]
    q_a_norm: torch.Tensor  # [q_rank]
    q_b: torch.Tensor  # [heads * (nope_dim + rope_dim), q_rank]
    kv_a: torch.Tensor  # [kv_rank + rope_dim, hidden]
    kv_a_norm: torch.Tensor  # [kv_rank]
    kv_b: torch.Tensor  # [heads, nope_dim + value_dim, kv_rank]: what expands keys, then what expands values
    o: torch.Tensor  # [hidden, heads * value_dim]


def compress_query(x: torch.Tensor, parameters: MlaParameters) -> torch.Tensor:
    """[T, q_rank]: what the queries of attention and of the indexer are made of."""
    return rms_norm(linear(x, parameters.q_a), parameters.q_a_norm, NORM_EPS)


def compress_kv(
    x: torch.Tensor, parameters: MlaParameters, config: DsaConfig, cos: torch.Tensor, signed_sin: torch.Tensor
) -> torch.Tensor:
    """[T, kv_rank + rope_dim]: the rows of the tokens, for the cache."""
    latent, key = torch.split_with_sizes(linear(x, parameters.kv_a), (config.kv_rank, config.rope_dim), dim=-1)
    latent = rms_norm(latent.contiguous(), parameters.kv_a_norm, NORM_EPS)
    rotated = rotate(key.unsqueeze(1), cos, signed_sin, interleaved=True).squeeze(1)
    return torch.cat((latent, rotated), dim=-1)


def latent_queries(
    compressed: torch.Tensor, parameters: MlaParameters, config: DsaConfig, cos: torch.Tensor, signed_sin: torch.Tensor
) -> torch.Tensor:
    """[T, heads, kv_rank + rope_dim]: queries whose product with a row is that of the expanded ones."""
    heads = linear(compressed, parameters.q_b).view(len(compressed), -1, config.nope_dim + config.rope_dim)
    plain, turning = torch.split_with_sizes(heads, (config.nope_dim, config.rope_dim), dim=-1)
    absorbed = torch.bmm(plain.transpose(0, 1), parameters.kv_b[:, : config.nope_dim]).transpose(0, 1)
    return torch.cat((absorbed, rotate(turning, cos, signed_sin, interleaved=True)), dim=-1)


def project_output(attended: torch.Tensor, parameters: MlaParameters, config: DsaConfig) -> torch.Tensor:
    """From sums of latents [T, heads, kv_rank] to [T, hidden], this rank's part of the sum over heads."""
    up_value = parameters.kv_b[:, config.nope_dim :].transpose(1, 2)
    values = torch.bmm(attended.transpose(0, 1), up_value).transpose(0, 1)
    return linear(values.flatten(1), parameters.o)
