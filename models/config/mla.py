"""Latent attention (MLA) of the DeepSeek-V3 family (V3, R1, Kimi-K2) and of the families of dsa.py. No torch.

Supports what transformers 5.17 computes. A configuration with other options that would change the result is refused.
"""

from dataclasses import dataclass
from pathlib import Path

from ...common.errors import StartupError
from ..formats.json_fields import Json, integer, refuse_others


@dataclass(frozen=True)
class MlaConfig:
    """Attention in the latent space. A query head has `nope_dim` elements without position and `rope_dim` with one."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def latent_dim(self) -> int:
        """Elements of a cache row: the normed latent, then the rotated part of the key."""
        return self.kv_rank + self.rope_dim

    def active_parameters(self, hidden_size: int, num_heads: int, num_layers: int) -> int:
        """Weights of attention, in all layers, that one token is multiplied with."""
        queries = self.q_rank * (hidden_size + num_heads * (self.nope_dim + self.rope_dim))
        keys = hidden_size * self.latent_dim + num_heads * self.kv_rank * (self.nope_dim + self.value_dim)
        output = num_heads * self.value_dim * hidden_size
        return num_layers * (queries + keys + output)


def read_mla_config(path: Path, raw: Json, *, num_heads: int) -> MlaConfig:
    """The fields that `deepseek_v3`, `deepseek_v32` and `glm_moe_dsa` have in common; raises StartupError."""
    supported = {
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_interleave": True,
        "num_key_value_heads": num_heads,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    }
    refuse_others(path, raw, supported)
    config = MlaConfig(
        q_rank=integer(path, raw, "q_lora_rank"),
        kv_rank=integer(path, raw, "kv_lora_rank"),
        nope_dim=integer(path, raw, "qk_nope_head_dim"),
        rope_dim=integer(path, raw, "qk_rope_head_dim"),
        value_dim=integer(path, raw, "v_head_dim"),
    )
    if config.rope_dim % 2:
        raise StartupError(f"{path}: qk_rope_head_dim = {config.rope_dim} must be even")
    return config
