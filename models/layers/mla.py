"""Multi-head latent attention (MLA) in the latent space: all query heads read the same short row per token.

    row        =  [rms_norm(c), rotate(k)]            with  p, c, k = x @ compress.T;  the content of the cache
    query_h    =  [q_h @ up_key_h, rotate(r_h)]       with  q_h, r_h = head h of rms_norm(p) @ expand.T
    result_h   =  up_value_h @ (attention of query_h over the rows, summing only their first part)

Keys and values are not expanded per head: their matrices are absorbed into the queries and the result. This multiplies
the same matrices in another order, both for whole prompts and for single tokens. `compress` and `expand` also compute
the keys and queries of a layer's indexer.
"""

from dataclasses import dataclass

import torch

from ...kernels.dsa.key_write import KeyWrite
from ...kernels.dsa.latent_write import latent_write
from ...kernels.dsa.rotate_queries import IndexQueries, rotate_queries
from ...kernels.head_linear.head_linear import head_linear
from ..config.dsa import DsaConfig
from ..config.mla import MlaConfig
from ..weights.weight import AnyWeight
from .latent_rows import RowPlaces

NORM_EPS = 1e-6
"""Epsilon of the norms inside attention: transformers 5.17 does not use the model's own here."""


@dataclass(frozen=True)
class MlaParameters:
    """The weights of attention. `heads` are the heads of this rank; the weights before the heads are the same on every
    rank.

    The rows of `compress` compute the queries' latent, the cache row and, with an indexer, its key; those of `expand`
    compute the queries of the heads and of the indexer. `kv_b` is always expanded: it is small, and used in batched
    products per head.
    """

    compress: AnyWeight  # [q_rank + kv_rank + rope_dim (+ index_dim), hidden]
    q_norm: torch.Tensor  # [q_rank]
    kv_norm: torch.Tensor  # [kv_rank]
    expand: AnyWeight  # [heads * (nope_dim + rope_dim) (+ index_heads * index_dim), q_rank]
    kv_b: torch.Tensor  # [heads, nope_dim + value_dim, kv_rank]: expands keys, then values
    o: AnyWeight  # [hidden, heads * value_dim]


def compress(
    x: torch.Tensor,
    parameters: MlaParameters,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    places: RowPlaces,
    key: KeyWrite | None,
) -> torch.Tensor:
    """Write the rows of the tokens [T, hidden], and their indexer keys; returns [T, q_rank], the input of the queries
    of attention and of the indexer.
    """
    return latent_write(
        parameters.compress.linear(x),
        parameters.q_norm,
        parameters.kv_norm,
        cos,
        signed_sin,
        places.pages,
        places.rows,
        eps=NORM_EPS,
        key=key,
    )


def expand_head_queries(
    compressed: torch.Tensor, parameters: MlaParameters, config: MlaConfig, cos: torch.Tensor, signed_sin: torch.Tensor
) -> torch.Tensor:
    """[T, heads, kv_rank + rope_dim]: queries whose product with a cache row is that of expanded queries and keys."""
    rows = len(parameters.kv_b) * (config.nope_dim + config.rope_dim)
    query, _ = _expand(compressed, parameters.expand[:rows], parameters.kv_b, config, cos, signed_sin)
    return query


def expand_index_queries(
    compressed: torch.Tensor,
    parameters: MlaParameters,
    config: DsaConfig,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    *,
    fp8_index: bool,
) -> IndexQueries:
    """[T, index_heads, index_dim]: the queries of the layer's indexer."""
    rows = len(parameters.kv_b) * (config.nope_dim + config.rope_dim)
    own = parameters.expand[rows:], parameters.kv_b[:0]
    _, index_query = _expand(compressed, *own, config, cos, signed_sin, fp8_index)
    assert index_query is not None, "the layer has an indexer"
    return index_query


def _expand(
    compressed: torch.Tensor,
    expand: AnyWeight,
    kv_b: torch.Tensor,
    config: MlaConfig,
    cos: torch.Tensor,
    signed_sin: torch.Tensor,
    fp8_index: bool = False,
) -> tuple[torch.Tensor, IndexQueries | None]:
    """The queries of the heads of `kv_b`, which come first in `expand`, and of an indexer, if rows remain."""
    tokens, heads, head_dim = len(compressed), len(kv_b), config.nope_dim + config.rope_dim
    expanded = expand.linear(compressed)
    query = compressed.new_empty(tokens, heads, config.latent_dim)
    if heads:
        plain = expanded[:, : heads * head_dim].view(tokens, heads, head_dim)[:, :, : config.nope_dim]
        head_linear(plain, kv_b[:, : config.nope_dim], query[:, :, : config.kv_rank])
    indexer = config if isinstance(config, DsaConfig) else None
    index_query = rotate_queries(
        expanded,
        cos,
        signed_sin,
        query,
        head_dim=head_dim,
        index_dim=config.rope_dim if indexer is None else indexer.index_dim,
        interleaved=indexer is not None and indexer.index_interleaved,
        fp8=fp8_index,
    )
    return query, index_query


def project_output(attended: torch.Tensor, parameters: MlaParameters, config: MlaConfig) -> torch.Tensor:
    """Project sums of latents [T, heads, kv_rank] to [T, hidden]: this rank's part of the sum over heads."""
    up_value = parameters.kv_b[:, config.nope_dim :].transpose(1, 2)
    values = attended.new_empty(*attended.shape[:2], config.value_dim)
    head_linear(attended, up_value, values)
    return parameters.o.linear(values.flatten(1))
