"""What the DeepSeek-V3.2 and GLM DSA families add to latent attention (mla.py), from config.json. No torch.

They attend to the rows that a lightning indexer selects. Their mixtures of experts are in moe.py.
"""

from dataclasses import asdict, dataclass
from pathlib import Path

from ...common.errors import StartupError
from ..formats.json_fields import Json, integer, shown
from .mla import MlaConfig, read_mla_config
from .sharding import Shard

SPARSE_ATTENTION = "deepseek_sparse_attention"
"""The value of `layer_types` for every layer of these families."""


@dataclass(frozen=True)
class DsaConfig(MlaConfig):
    """Latent attention, and the selection of tokens for it. Layers that are not `indexed` attend to the selection of
    the last indexed layer before them.
    """

    index_heads: int
    index_dim: int
    index_topk: int
    index_interleaved: bool  # the indexer rotates pairs of adjacent elements, not the two halves
    indexed: tuple[bool, ...]

    def active_parameters(self, hidden_size: int, num_heads: int, num_layers: int) -> int:
        """Weights of attention and its indexers."""
        indexer = self.index_dim * (self.q_rank * self.index_heads + hidden_size) + hidden_size * self.index_heads
        return super().active_parameters(hidden_size, num_heads, num_layers) + sum(self.indexed) * indexer

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
    config = DsaConfig(
        **asdict(read_mla_config(path, raw, num_heads=num_heads)),
        index_heads=integer(path, raw, "index_n_heads"),
        index_dim=integer(path, raw, "index_head_dim"),
        index_topk=integer(path, raw, "index_topk"),
        index_interleaved=bool(raw.get("indexer_rope_interleave", glm)),
        indexed=_indexed_layers(path, raw, num_layers) if glm else (True,) * num_layers,
    )
    if config.rope_dim > config.index_dim:
        raise StartupError(
            f"{path}: qk_rope_head_dim = {config.rope_dim} must be at most index_head_dim = {config.index_dim}"
        )
    return config


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


_INDEXER_KINDS = {"full": True, "shared": False, "F": True, "S": False}
