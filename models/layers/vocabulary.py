"""Both ends of a decoder: token embedding and logits. The ranks of a stage divide the vocabulary; with data-parallel
attention, each rank has all of it.
"""

import torch

from ...kernels.linear.rms_norm import rms_norm
from ..config.model import ModelConfig
from ..weights.weight import AnyWeight
from .parallel import Parallel


class Vocabulary:
    """The embedding if the rank is in the first stage; the final norm and the head if it is in the last."""

    def __init__(
        self,
        config: ModelConfig,
        parallel: Parallel,
        *,
        embedding: AnyWeight | None,
        norm: torch.Tensor | None,
        head: AnyWeight | None,
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._embedding, self._norm, self._head = embedding, norm, head
        self._scale: float | None = None  # of embeddings, rounded to their dtype as in transformers
        if config.scaled_embedding and embedding is not None:
            self._scale = torch.tensor(config.hidden_size**0.5, dtype=embedding.values.dtype).item()

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden]. Each rank looks up the tokens of its part; the sum over ranks has all of them."""
        shard = self._parallel.shard.attention
        if shard.tp_size == 1:
            return self._scaled(self._rows(token_ids))
        own = shard.vocabulary(self._config.vocab_size)
        elsewhere = (token_ids < own.start) | (token_ids >= own.stop)
        rows = self._rows((token_ids - own.start).masked_fill_(elsewhere, 0))
        return self._scaled(self._parallel.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(1), 0)))

    def _rows(self, indices: torch.Tensor) -> torch.Tensor:
        """Rows of this rank's embedding."""
        assert self._embedding is not None, "the first stage embeds tokens"
        return self._embedding.look_up(indices)

    def _scaled(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._scale is None else rows * self._scale

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor | None:
        """Float32 logits [N, vocab] of rows [N, hidden], in `out` if given.

        Called by all ranks of the last stage; returns None on all but the sampling ranks.
        """
        assert self._norm is not None, "the last stage computes logits"
        assert self._head is not None
        shares = self._head.linear(rms_norm(hidden, self._norm, self._config.norm_eps))
        if (cap := self._config.logit_cap) is not None:
            shares = torch.tanh(shares / cap) * cap
        logits = self._parallel.gather_last_dim(shares, self._config.vocab_size)
        if logits is None:
            return None
        return logits.float() if out is None else out.copy_(logits)
