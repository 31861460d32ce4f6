"""What decoders of all kinds do around attention: one rank's embedding, norms, MLPs and logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from ...kernels.linear.rms_norm import add_rms_norm, rms_norm
from ..config.sharding import RankTokens
from ..layers.batch import ForwardBatch
from ..layers.moe import MlpParameters, MoeParameters
from ..layers.parallel import Parallel
from ..layers.rope import Rotary
from ..layers.stage_mlps import StageMlps
from ..layers.vocabulary import Vocabulary
from .rank_parameters import RankParameters


@dataclass(frozen=True, kw_only=True)
class StageLayer:
    """A layer without its attention. A norm, [hidden], is None if the family has none there."""

    input_norm: torch.Tensor | None  # of the input of attention ...
    mlp_norm: torch.Tensor | None  # ... and of the MLP
    mlp: MlpParameters | MoeParameters
    attention_post_norm: torch.Tensor | None = None  # of the result of attention ...
    mlp_post_norm: torch.Tensor | None = None  # ... and of the MLP


ParametersT = TypeVar("ParametersT", bound=RankParameters[StageLayer])


class StageDecoder(Generic[ParametersT]):
    """Weights and the arithmetic on them; has no state of sequences."""

    def __init__(self, parameters: ParametersT, parallel: Parallel) -> None:
        self.parameters = parameters
        self.config = parameters.config
        self._parallel = parallel
        self._vocabulary = Vocabulary(
            self.config, parallel, embedding=parameters.embedding, norm=parameters.norm, head=parameters.head
        )
        self._mlps = StageMlps([layer.mlp for layer in parameters.layers], self.config, parallel)
        self._rotary = Rotary(self.config, parameters.device, parameters.dtype)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a step."""
        return self._mlps.capturable

    def assist(self, ranks: Sequence[RankTokens]) -> None:
        """Take part in a step in which this rank has no tokens."""
        self._mlps.assist(ranks, self.parameters.no_rows())

    def _enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input of attention of the first layer."""
        norm = self.parameters.layers[0].input_norm
        return hidden if norm is None else rms_norm(hidden, norm, self.config.norm_eps)

    def _leave(
        self, index: int, attended: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows attention in a layer, whose result is this rank's part of a sum: the hidden state, and the input
        of attention of the next layer. Without a norm between the two, and in the last layer, they are the same.
        """
        layers, eps = self.parameters.layers, self.config.norm_eps
        layer = layers[index]
        attended = self._parallel.all_reduce(attended)
        if layer.attention_post_norm is not None:
            attended = rms_norm(attended, layer.attention_post_norm, eps)
        hidden, update = self._mlps.add(index, hidden, attended, layer.mlp_norm, batch.ranks)
        if layer.mlp_post_norm is not None:
            update = rms_norm(update, layer.mlp_post_norm, eps)
        norm = layers[index + 1].input_norm if index + 1 < len(layers) else None
        if norm is None:
            hidden = hidden + update
            return hidden, hidden
        return add_rms_norm(hidden, update, norm, eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """The final norm and the head: float32 logits [N, vocab] of any rows of `hidden`, in `out` if given.

        Called by all ranks of the last stage; returns None on all but the first of them.
        """
        return self._vocabulary.logits(hidden, out)
