"""DeepSeek-V3 (with R1 and Kimi-K2), DeepSeek-V3.2 and GLM DSA: latent attention, in the last two of the rows that an
indexer selects, and groups of experts.

Supports what transformers 5.17 computes. A configuration with other options that would change the result is refused.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path

from ...common.errors import StartupError
from ..config.dsa import DsaConfig
from ..config.end_tokens import hf_end_tokens
from ..config.mla import MlaConfig
from ..config.model import ModelConfig
from ..config.moe import MoeConfig
from ..config.rope import context_length, read_hf_rope
from ..config.windows import FULL, read_layer_types
from ..formats.json_fields import Json, integer, number, refuse_others, shown
from ..weights.schemes import read_scheme
from .family import Family, check_activation, read_dtype

_SPARSE_ATTENTION = "deepseek_sparse_attention"
"""The value of `layer_types` for every layer of families with an indexer."""
_INDEXER_KINDS = {"full": True, "shared": False, "F": True, "S": False}
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(self_attn\.indexer\.)?")


@dataclass(frozen=True, kw_only=True)
class LatentFamily(Family):
    """A family whose layers are those of decoders/mla.py or, with an indexer, decoders/dsa.py."""

    default_context: int
    default_eps: float = 1e-6
    indexer: bool = True
    default_groups: tuple[int, int] = (8, 4)  # groups of experts, and how many of them a token selects
    indexer_interleaved: bool = False  # by default
    shares_selections: bool = False  # whether some layers attend to the selection of the layer before them

    def read(self, path: Path, raw: Json) -> ModelConfig:
        check_activation(path, raw)
        heads = integer(path, raw, "num_attention_heads")
        num_layers = integer(path, raw, "num_hidden_layers")
        read_layer_types(path, raw, num_layers, (_SPARSE_ATTENTION if self.indexer else FULL,))
        max_positions = integer(path, raw, "max_position_embeddings", self.default_context)
        rope = read_hf_rope(path, raw, max_positions)
        if rope.kind not in ("default", "yarn"):
            raise StartupError(
                f"{path}: rope type {rope.kind!r} is not supported for {self.name}; supported are default, yarn"
            )
        mla = self._read_dsa(path, raw, num_layers, heads) if self.indexer else _read_mla(path, raw, heads)
        return ModelConfig(
            architecture=self.name,
            vocab_size=integer(path, raw, "vocab_size"),
            hidden_size=integer(path, raw, "hidden_size"),
            intermediate_size=integer(path, raw, "intermediate_size"),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=mla.latent_dim,
            context_length=context_length(rope, max_positions),
            norm_eps=number(path, raw, "rms_norm_eps", self.default_eps),
            rope=rope,
            dtype=read_dtype(path, raw),
            eos_token_ids=hf_end_tokens(path.parent, raw),
            mla=mla,
            moe=self._read_moe(path, raw),
            mixed=_mixed_layers(path, raw, num_layers),
            scheme=read_scheme(path, raw),
        )

    def is_unused(self, name: str, config: ModelConfig) -> bool:
        """The extra layers for multi-token prediction, and the indexers of layers that do not select."""
        found = _OF_LAYER.match(name)
        if found is None:
            return False
        layer = int(found[1])
        if layer >= config.num_layers:
            return True
        return found[2] is not None and config.dsa is not None and not config.dsa.indexed[layer]

    def _read_dsa(self, path: Path, raw: Json, num_layers: int, num_heads: int) -> DsaConfig:
        config = DsaConfig(
            **asdict(_read_mla(path, raw, num_heads)),
            index_heads=integer(path, raw, "index_n_heads"),
            index_dim=integer(path, raw, "index_head_dim"),
            index_topk=integer(path, raw, "index_topk"),
            index_interleaved=bool(raw.get("indexer_rope_interleave", self.indexer_interleaved)),
            indexed=_indexed_layers(path, raw, num_layers) if self.shares_selections else (True,) * num_layers,
        )
        if config.rope_dim > config.index_dim:
            raise StartupError(
                f"{path}: qk_rope_head_dim = {config.rope_dim} must be at most index_head_dim = {config.index_dim}"
            )
        return config

    def _read_moe(self, path: Path, raw: Json) -> MoeConfig:
        """Groups of experts, shared experts."""
        size = integer(path, raw, "moe_intermediate_size")
        num_groups, groups_per_token = self.default_groups
        moe = MoeConfig(
            num_experts=integer(path, raw, "n_routed_experts"),
            experts_per_token=integer(path, raw, "num_experts_per_tok"),
            expert_size=size,
            shared_size=size * integer(path, raw, "n_shared_experts"),
            num_groups=integer(path, raw, "n_group", num_groups),
            groups_per_token=integer(path, raw, "topk_group", groups_per_token),
            normalised=bool(raw.get("norm_topk_prob", True)),
            scale=number(path, raw, "routed_scaling_factor", 2.5),
        )
        group_size, rest = divmod(moe.num_experts, moe.num_groups)
        if rest or group_size < 2 or not moe.experts_per_token <= moe.groups_per_token * group_size <= moe.num_experts:
            raise StartupError(
                f"{path}: num_experts_per_tok = {moe.experts_per_token} in topk_group = {moe.groups_per_token} of "
                f"n_group = {moe.num_groups} groups of n_routed_experts = {moe.num_experts}: groups must be equal and "
                "of two experts or more, topk_group at most n_group, and its groups must hold num_experts_per_tok "
                "experts"
            )
        return moe


def _read_mla(path: Path, raw: Json, num_heads: int) -> MlaConfig:
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


def _mixed_layers(path: Path, raw: Json, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts."""
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        dense = integer(path, raw, "first_k_dense_replace", 3, least=0)
        return tuple(layer >= dense for layer in range(num_layers))
    if len(kinds) != num_layers or not {"dense", "sparse"}.issuperset(kinds):
        raise StartupError(
            f"{path}: mlp_layer_types must say 'dense' or 'sparse' for each of {num_layers} layers, got {shown(kinds)}"
        )
    return tuple(kind == "sparse" for kind in kinds)


def _indexed_layers(path: Path, raw: Json, num_layers: int) -> tuple[bool, ...]:
    """From `indexer_types`, or a pattern that abbreviates it, or a period and an offset: GLM's three notations."""
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        period = max(integer(path, raw, "index_topk_freq", 1, least=0), 1)
        offset = integer(path, raw, "index_skip_topk_offset", 2, least=0)
        kinds = ["full" if max(layer - offset + 1, 0) % period == 0 else "shared" for layer in range(num_layers)]
    indexed = tuple(_INDEXER_KINDS.get(str(kind)) for kind in kinds)
    if len(indexed) != num_layers or None in indexed or not indexed[0]:
        raise StartupError(
            f"{path}: indexer_types must say 'full' or 'shared' for each of {num_layers} layers, the first one 'full', "
            f"got {shown(kinds)}"
        )
    return tuple(kind is True for kind in indexed)


DEEPSEEK_V3 = LatentFamily(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    attention="latent",
    default_context=4096,
    indexer=False,
)
DEEPSEEK_V32 = LatentFamily(
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    attention="sparse (HiSparse)",
    default_context=163840,
)
GLM_MOE_DSA = LatentFamily(
    name="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    attention="sparse (HiSparse)",
    default_context=202752,
    default_eps=1e-5,
    default_groups=(1, 1),
    indexer_interleaved=True,
    shares_selections=True,
)
