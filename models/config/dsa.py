"""What the DeepSeek-V3.2 and GLM DSA families add to a dense decoder, from config.json. No torch.

Latent attention (MLA) over the rows that a lightning indexer selects. Their mixtures of experts are in moe.py.
Supported is what transformers 5.17 computes; a configuration that would change the result is refused.
"""

from dataclasses import dataclass
from pathlib import Path

from ...configs.errors import StartupError
from ..formats.json_fields import Json, integer
from .sharding import Shard

SPARSE_ATTENTION = "deepseek_sparse_attention"
"""The value of `layer_types` for every layer of these families."""


@dataclass(frozen=True)
class DsaConfig:
    """Attention in the latent space, and the selection of tokens for it.

    A query head has `nope_dim` dimensions without position and `rope_dim` with one. Layers that are not `indexed`
    attend to the selection of the last indexed layer before them.
    """

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    index_heads: int
    index_dim: int
    index_topk: int
    index_interleaved: bool  # the indexer rotates pairs of adjacent elements, not the two halves
    indexed: tuple[bool, ...]

    @property
    def latent_dim(self) -> int:
        """Elements of a cache row: the normed latent, then the rotated part of the key."""
        return self.kv_rank + self.rope_dim

    def active_parameters(self, hidden_size: int, num_heads: int) -> int:
        """Weights of attention and its indexers, in all layers, that one token is multiplied with."""
        queries = self.q_rank * (hidden_size + num_heads * (self.nope_dim + self.rope_dim))
        keys = hidden_size * self.latent_dim + num_heads * self.kv_rank * (self.nope_dim + self.value_dim)
        output = num_heads * self.value_dim * hidden_size
        indexer = self.index_dim * (self.q_rank * self.index_heads + hidden_size) + hidden_size * self.index_heads
        return len(self.indexed) * (queries + keys + output) + sum(self.indexed) * indexer

    def stage_layers(self, shard: Shard) -> range:
        """Global layers of a stage: an even split, adjusted so that a layer and the layer whose selection it uses are
        on one stage. Raises StartupError if there are fewer such groups of layers than stages.
        """
        num_layers = len(self.indexed)
        starts = [layer for layer, indexed in enumerate(self.indexed) if indexed]
        if shard.stages > len(starts):
            raise StartupError(
                f"pp = {shard.stages} stages for a model whose {num_layers} layers share {len(starts)} indexers: "
                f"give at most {len(starts)}"
            )
        cuts, group = [0], 0
        for stage in range(1, shard.stages):
            even = Shard(stage=stage, stages=shard.stages).layers(num_layers).start
            # every earlier stage has at least one group, and one remains for each later stage
            possible = range(group + 1, len(starts) - (shard.stages - stage) + 1)
            group = min(possible, key=lambda candidate: abs(starts[candidate] - even))
            cuts.append(starts[group])
        cuts.append(num_layers)
        return range(cuts[shard.stage], cuts[shard.stage + 1])

    def stage_indexers(self, shard: Shard) -> range:
        """The indexers of a stage, at least one, numbered over the whole model, so that numbers are the same in every
        split.
        """
        layers = self.stage_layers(shard)
        return range(sum(self.indexed[: layers.start]), sum(self.indexed[: layers.stop]))


def read_dsa_config(path: Path, raw: Json, *, num_layers: int, num_heads: int, glm: bool) -> DsaConfig:
    """The fields of a `deepseek_v32` or `glm_moe_dsa` config.json; raises StartupError."""
    _refuse_unsupported(path, raw, num_heads)
    config = DsaConfig(
        q_rank=integer(path, raw, "q_lora_rank"),
        kv_rank=integer(path, raw, "kv_lora_rank"),
        nope_dim=integer(path, raw, "qk_nope_head_dim"),
        rope_dim=integer(path, raw, "qk_rope_head_dim"),
        value_dim=integer(path, raw, "v_head_dim"),
        index_heads=integer(path, raw, "index_n_heads"),
        index_dim=integer(path, raw, "index_head_dim"),
        index_topk=integer(path, raw, "index_topk"),
        index_interleaved=bool(raw.get("indexer_rope_interleave", glm)),
        indexed=_indexed_layers(path, raw, num_layers) if glm else (True,) * num_layers,
    )
    if config.rope_dim % 2 or config.rope_dim > config.index_dim:
        raise StartupError(
            f"{path}: qk_rope_head_dim = {config.rope_dim} must be even and at most index_head_dim = {config.index_dim}"
        )
    return config


def _refuse_unsupported(path: Path, raw: Json, num_heads: int) -> None:
    for key, supported in (
        ("attention_bias", False),
        ("tie_word_embeddings", False),
        ("rope_interleave", True),
        ("num_key_value_heads", num_heads),
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
    ):
        value = raw.get(key)
        if value is not None and value != supported:
            raise StartupError(f"{path}: {key} {value!r} is not supported; supported is {supported!r}")


def _indexed_layers(path: Path, raw: Json, num_layers: int) -> tuple[bool, ...]:
    """From `indexer_types`, or a pattern that abbreviates it, or a period and an offset: GLM's three notations."""
    kinds = raw.get("indexer_types") or raw.get("index_topk_pattern")
    if kinds is None:
        period = max(integer(path, raw, "index_topk_freq", 1, least=0), 1)
        offset = integer(path, raw, "index_skip_topk_offset", 2, least=0)
        kinds = ["full" if max(layer - offset + 1, 0) % period == 0 else "shared" for layer in range(num_layers)]
    indexed = tuple(_INDEXER_KINDS.get(kind) for kind in kinds)
    if len(indexed) != num_layers or None in indexed or not indexed[0]:
        raise StartupError(
            f"{path}: indexer_types must say 'full' or 'shared' for each of {num_layers} layers, the first one 'full', "
            f"got {kinds!r}"
        )
    return tuple(kind is True for kind in indexed)


_INDEXER_KINDS = {"full": True, "shared": False, "F": True, "S": False}
