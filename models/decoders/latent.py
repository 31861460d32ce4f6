"""Base class of the decoders with latent attention (MLA): one rank's weights, rotations, MLPs and logits."""

from collections.abc import Sequence

import torch

from ...kernels.linear.rms_norm import add_rms_norm
from ..config.sharding import RankTokens
from ..layers.batch import ForwardBatch
from ..layers.mla import project_output
from ..layers.parallel import ALONE, Parallel
from ..layers.rope import Rotary, score_factor
from ..layers.stage_mlps import StageMlps
from ..layers.vocabulary import Vocabulary
from .latent_parameters import LatentParameters


class LatentDecoder:
    """Weights and the arithmetic on them; has no state of sequences."""

    def __init__(self, parameters: LatentParameters, parallel: Parallel = ALONE) -> None:
        mla = parameters.config.mla
        assert mla is not None
        self._mla = mla
        self.parameters = parameters
        self.config = parameters.config
        self._parallel = parallel
        self._vocabulary = Vocabulary(
            self.config, parallel, embedding=parameters.embedding, norm=parameters.norm, head=parameters.head
        )
        self._mlps = StageMlps([layer.mlp for layer in parameters.layers], self.config, parallel)
        self._rotary = Rotary(self.config, parameters.device, parameters.dtype)
        self._scale = (mla.nope_dim + mla.rope_dim) ** -0.5 * score_factor(self.config.rope)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture a step."""
        return self._mlps.capturable

    def assist(self, ranks: Sequence[RankTokens]) -> None:
        """Take part in a step in which this rank has no tokens."""
        self._mlps.assist(ranks, self.parameters.no_rows())

    def _finish_layer(
        self, index: int, attended: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, *, last_only: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows attention in a layer. Returns the hidden state and its norm, the input of the next layer; the
        last layer has no norm, and returns the hidden state twice. `last_only`: see `hidden` of a decoder.
        """
        layers, eps = self.parameters.layers, self.config.norm_eps
        layer, last = layers[index], index + 1 == len(layers)
        if last_only and last:
            assert batch.last_rows is not None
            attended, hidden = (part.index_select(0, batch.last_rows) for part in (attended, hidden))
        attended = self._parallel.all_reduce(project_output(attended, layer.attention, self._mla))
        hidden, update = self._mlps.add(index, hidden, attended, layer.mlp_norm, batch.ranks)
        if last:
            hidden = hidden + update
            return hidden, hidden
        return add_rms_norm(hidden, update, layers[index + 1].input_norm, eps)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """Float32 logits [N, vocab] of any rows of `hidden`; see vocabulary.py."""
        return self._vocabulary.logits(hidden, out)
