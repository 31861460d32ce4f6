"""The fingerprint that servers of protocol version 3 have compared since before 0.1.0. No torch. Frozen.

It depends on how `ModelConfig` was spelled then, so this file spells it out: these names stay, and whoever renames a
field of the classes maps it here. `fingerprint.py` has the one that needs none of this, which decides wherever both
servers send it. This file goes with protocol version 3.
"""

import json
from collections.abc import Sequence
from typing import Any

from ..config.dsa import DsaConfig
from ..config.model import ModelConfig

_FIELDS = (
    "architecture", "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
    "head_dim", "context_length", "norm_eps", "rope", "tied_embeddings", "qkv_bias", "o_bias", "mlp_bias", "qk_norm",
    "dtype", "mla",
)  # fmt: skip
_LATER = (
    "moe", "mixed", "window", "windowed", "local_rope", "query_scalar", "gelu", "post_norms", "norm_offset",
    "float32_norms", "scaled_embedding", "logit_cap", "sinks",
)  # fmt: skip
"""Fields that came later count only where they are set."""
_ROPE = (
    "kind", "theta", "factor", "original_context_length", "low_freq_factor", "high_freq_factor", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "factors",
)  # fmt: skip
_MLA = ("q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")
_DSA = ("index_heads", "index_dim", "index_topk", "index_interleaved", "indexed")
_MOE = (
    "num_experts", "experts_per_token", "expert_size", "shared_size", "num_groups", "groups_per_token", "normalised",
    "scale", "scoring",
)  # fmt: skip
_MOE_LATER = ("biases", "limit")


def protocol3_configuration(config: ModelConfig) -> bytes:
    """What that fingerprint covers of the configuration: no stop tokens."""
    later = _fields(config, (), _LATER) | (config.scheme.protocol3 if config.scheme is not None else {})
    parts = {
        "rope": _fields(config.rope, _ROPE),
        "local_rope": config.local_rope and _fields(config.local_rope, _ROPE),
        "mla": config.mla and _fields(config.mla, _MLA + (_DSA if isinstance(config.mla, DsaConfig) else ())),
        "moe": config.moe and _fields(config.moe, _MOE, _MOE_LATER),
    }
    fields = _fields(config, _FIELDS) | later
    return json.dumps({name: parts.get(name, value) for name, value in fields.items()}, sort_keys=True).encode()


def _fields(value: object, names: Sequence[str], later: Sequence[str] = ()) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names} | {
        name: found for name in later if (found := getattr(value, name))
    }
