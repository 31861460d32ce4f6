"""Latent attention (mla.py) to the rows that a lightning indexer selects. No torch."""

from dataclasses import dataclass

from ...common.errors import StartupError
from .mla import MlaConfig
from .sharding import Shard


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
