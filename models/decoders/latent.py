"""Base class of the decoders with latent attention (MLA)."""

import torch

from ..layers.batch import ForwardBatch
from ..layers.mla import project_output
from ..layers.parallel import ALONE, Parallel
from ..layers.rope import score_factor
from .latent_parameters import LatentParameters
from .stage import StageDecoder


class LatentDecoder(StageDecoder[LatentParameters]):
    def __init__(self, parameters: LatentParameters, parallel: Parallel = ALONE) -> None:
        super().__init__(parameters, parallel)
        mla = parameters.config.mla
        assert mla is not None
        self._mla = mla
        self._scale = (mla.nope_dim + mla.rope_dim) ** -0.5 * score_factor(self.config.rope)

    def _finish_layer(
        self, index: int, attended: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch, *, last_only: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What follows attention in a layer; see `_leave`. `last_only`: see `hidden` of a decoder."""
        if last_only and index + 1 == len(self.parameters.layers):
            assert batch.last_rows is not None
            attended, hidden = (part.index_select(0, batch.last_rows) for part in (attended, hidden))
        projected = project_output(attended, self.parameters.layers[index].attention, self._mla)
        return self._leave(index, projected, hidden, batch)
