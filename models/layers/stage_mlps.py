"""The MLPs and mixtures of a stage's layers, summed over the ranks of the stage, in all decoders.

Tensor-parallel ranks have the same rows and sum their parts of the results. Data-parallel ranks have rows of their own
and exchange them (token_exchange.py); they know the numbers of rows of all ranks.
"""

from collections.abc import Sequence

import torch

from ...kernels.linear.rms_norm import add_rms_norm
from ..config.model import ModelConfig
from ..config.sharding import RankTokens
from .moe import MlpParameters, MoeParameters, add_feed_forward, feed_forward
from .parallel import Parallel
from .token_exchange import over_all_ranks


class StageMlps:
    """One rank's part of them; `index` counts the layers of the stage."""

    def __init__(self, mlps: Sequence[MlpParameters | MoeParameters], config: ModelConfig, parallel: Parallel) -> None:
        self._mlps = mlps
        self._config = config
        self._parallel = parallel

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture them. With data-parallel attention, the tokens of other ranks differ between
        steps.
        """
        mixtures = (mlp for mlp in self._mlps if isinstance(mlp, MoeParameters))
        return all(mlp.capturable for mlp in mixtures) and not self._parallel.shard.dp_attention

    def add(
        self,
        index: int,
        hidden: torch.Tensor,
        attended: torch.Tensor,
        norm: torch.Tensor | None,
        ranks: Sequence[RankTokens] | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden + attended [T, hidden], and the result of a layer for its norm, or without a norm for itself. `ranks`:
        see ForwardBatch.
        """
        eps = self._config.norm_eps
        if ranks is None and norm is not None:
            hidden, update = add_feed_forward(hidden, attended, norm, eps, self._mlps[index], self._config.moe)
            return hidden, self._parallel.all_reduce(update)
        if norm is None:
            hidden = normed = hidden + attended
        else:
            hidden, normed = add_rms_norm(hidden, attended, norm, eps)
        if ranks is None:
            return hidden, self._parallel.all_reduce(feed_forward(normed, self._mlps[index], self._config.moe))
        return hidden, self._exchanged(index, normed, ranks)

    def assist(self, ranks: Sequence[RankTokens], nothing: torch.Tensor) -> None:
        """Take part in a step in which this rank has no tokens: compute its part of the MLPs for those of `ranks`.
        `nothing` is its hidden state, [0, hidden].
        """
        for index in range(len(self._mlps)):
            self._exchanged(index, nothing, ranks)

    def _exchanged(self, index: int, normed: torch.Tensor, ranks: Sequence[RankTokens]) -> torch.Tensor:
        def compute(rows: torch.Tensor) -> torch.Tensor:
            return feed_forward(rows, self._mlps[index], self._config.moe)

        outputs_only = self._parallel.shard.last and index + 1 == len(self._mlps)
        counts = [rank.outputs if outputs_only else rank.tokens for rank in ranks]
        return over_all_ranks(compute, normed, counts, self._parallel)
