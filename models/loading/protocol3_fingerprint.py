"""The fingerprint that servers of protocol version 3 have compared since before 0.1.0. No torch. Frozen.

It depends on how `ModelConfig` was spelled then, so this file spells it out: names on the left stay, whatever becomes
of the classes on the right. `fingerprint.py` has the one that needs none of this, which decides wherever both servers
send it. This file goes with protocol version 3.
"""

import json
from typing import Any

from ..config.dsa import DsaConfig
from ..config.mla import MlaConfig
from ..config.model import ModelConfig
from ..config.moe import MoeConfig
from ..config.rope import RopeConfig

_Fields = dict[str, Any]


def protocol3_configuration(config: ModelConfig) -> bytes:
    """What that fingerprint covers of the configuration: no stop tokens. Fields that came later only where set."""
    fields: _Fields = {
        "architecture": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "context_length": config.context_length,
        "norm_eps": config.norm_eps,
        "rope": _rope(config.rope),
        "tied_embeddings": config.tied_embeddings,
        "qkv_bias": config.qkv_bias,
        "o_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "qk_norm": config.qk_norm,
        "dtype": config.dtype,
        "mla": _mla(config.mla) if config.mla is not None else None,
    }
    later: _Fields = {
        "moe": _moe(config.moe) if config.moe is not None else None,
        "mixed": config.mixed,
        "window": config.window,
        "windowed": config.windowed,
        "local_rope": _rope(config.local_rope) if config.local_rope is not None else None,
        "query_scalar": config.query_scalar,
        "gelu": config.gelu,
        "post_norms": config.post_norms,
        "norm_offset": config.norm_offset,
        "float32_norms": config.float32_norms,
        "scaled_embedding": config.scaled_embedding,
        "logit_cap": config.logit_cap,
        "sinks": config.sinks,
    }
    if config.scheme is not None:
        later |= config.scheme.protocol3
    return json.dumps(fields | _set(later), sort_keys=True).encode()


def _set(fields: _Fields) -> _Fields:
    return {name: value for name, value in fields.items() if value}


def _rope(rope: RopeConfig) -> _Fields:
    return {
        "kind": rope.kind,
        "theta": rope.theta,
        "factor": rope.factor,
        "original_context_length": rope.original_context_length,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "attention_factor": rope.attention_factor,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
        "truncate": rope.truncate,
        "factors": rope.factors,
    }


def _mla(mla: MlaConfig) -> _Fields:
    fields: _Fields = {
        "q_rank": mla.q_rank,
        "kv_rank": mla.kv_rank,
        "nope_dim": mla.nope_dim,
        "rope_dim": mla.rope_dim,
        "value_dim": mla.value_dim,
    }
    if isinstance(mla, DsaConfig):
        fields |= {
            "index_heads": mla.index_heads,
            "index_dim": mla.index_dim,
            "index_topk": mla.index_topk,
            "index_interleaved": mla.index_interleaved,
            "indexed": mla.indexed,
        }
    return fields


def _moe(moe: MoeConfig) -> _Fields:
    fields: _Fields = {
        "num_experts": moe.num_experts,
        "experts_per_token": moe.experts_per_token,
        "expert_size": moe.expert_size,
        "shared_size": moe.shared_size,
        "num_groups": moe.num_groups,
        "groups_per_token": moe.groups_per_token,
        "normalised": moe.normalised,
        "scale": moe.scale,
        "scoring": moe.scoring,
    }
    return fields | _set({"biases": moe.biases, "limit": moe.limit})
