"""The weights of one rank of a decoder: base class of all families."""

from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self

import torch

from ..config.model import ModelConfig
from ..config.sharding import WHOLE, Shard
from ..weights.format import Format
from ..weights.slots import Share, Slot
from ..weights.weight import AnyWeight
from .rank_memory import LayerT_co, RankMemory, StepMaker

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"


@dataclass(frozen=True)
class RankParameters(Generic[LayerT_co]):
    """The weights of a rank. `head` is `embedding` itself if the checkpoint ties them and one stage has both."""

    config: ModelConfig
    shard: Shard
    layers: tuple[LayerT_co, ...]  # of its stage
    embedding: AnyWeight | None  # [vocabulary rows, hidden] on the first stage
    norm: torch.Tensor | None  # [hidden] on the last stage
    head: AnyWeight | None  # [vocabulary rows, hidden] on the last stage
    memory: RankMemory[LayerT_co]

    memory_type: ClassVar[type[RankMemory[Any]]]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        shard: Shard = WHOLE,
        *,
        device: torch.device,
        dtype: torch.dtype,
        stored: Format | None = None,
        step: StepMaker | None = None,
    ) -> Self:
        """Uninitialised memory for the weights of `shard`; raises StartupError if the model cannot be divided. `stored`
        has the checkpoint tensors to keep as they are stored where possible; `step` is that of the family.
        """
        memory = cls.memory_type(config, shard, device=device, dtype=dtype, stored=stored, step=step)
        layers = tuple(memory.layer(index) for index in config.stage_layers(shard))
        hidden, vocabulary = config.hidden_size, shard.attention
        ids = vocabulary.vocabulary(config.vocab_size)
        rows = Share(ids.start, vocabulary.vocabulary_rows(config.vocab_size), config.vocab_size)
        embedding = norm = head = None
        if shard.last:
            name = EMBEDDING if config.tied_embeddings else HEAD
            norm = memory.norm("model.norm", hidden)
            head = memory.weight({name: rows}, hidden, place="vocabulary", wide=memory.wide)
        if shard.first:
            tied = config.tied_embeddings and head is not None
            embedding = head if tied else memory.weight({EMBEDDING: rows}, hidden, place="vocabulary")
        return cls(config, shard, layers, embedding, norm, head, memory)

    @property
    def layer_range(self) -> range:
        """The global layers of `layers`."""
        return self.config.stage_layers(self.shard)

    @property
    def heads(self) -> range:
        return self.memory.heads

    @property
    def kv_heads(self) -> range:
        return self.memory.kv_heads

    @property
    def device(self) -> torch.device:
        return self.memory.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden state and, by default, of the cache."""
        return self.memory.dtype

    def slots(self) -> dict[str, Slot]:
        """See `RankMemory`."""
        return self.memory.slots()

    def no_rows(self) -> torch.Tensor:
        """The hidden state of no tokens, [0, hidden]."""
        return torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)
