"""The weights of one rank of a decoder: base classes of all families."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch

from ..config.model import ModelConfig
from ..config.sharding import WHOLE, Shard
from ..weights.format import Format, Part
from ..weights.slots import Slot
from ..weights.weight import AnyWeight
from .mlp_parameters import WeightMemory

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def head_name(config: ModelConfig) -> str:
    """The tensor of the head."""
    return EMBEDDING if config.tied_embeddings else HEAD


class NormedLayer(Protocol):
    @property
    def input_norm(self) -> torch.Tensor: ...


LayerT = TypeVar("LayerT", bound=NormedLayer)


class LayerMemory(WeightMemory, ABC, Generic[LayerT]):
    """Allocates the layers and both ends of one rank."""

    @abstractmethod
    def layer(self, index: int) -> LayerT:
        """A global layer."""

    def norm(self, size: int) -> torch.Tensor:
        """The weight of a norm. A float32 one is applied before its result is rounded (rms_norm.py)."""
        return self.tensor(size, dtype=torch.float32 if self.config.float32_norms else None)

    def embedding(self, rows: int) -> AnyWeight:
        return self.weight(rows, self.config.hidden_size, parts=[Part(EMBEDDING, rows)], place="vocabulary")

    def head(self, rows: int) -> AnyWeight:
        part = Part(head_name(self.config), rows)
        return self.weight(rows, self.config.hidden_size, parts=[part], place="vocabulary", wide=self.wide)


@dataclass(frozen=True)
class RankParameters(ABC, Generic[LayerT]):
    """The weights of a rank. `head` is `embedding` itself if the checkpoint ties them and one stage has both."""

    config: ModelConfig
    shard: Shard
    layers: tuple[LayerT, ...]  # of its stage
    embedding: AnyWeight | None  # [vocabulary rows, hidden] on the first stage
    norm: torch.Tensor | None  # [hidden] on the last stage
    head: AnyWeight | None  # [vocabulary rows, hidden] on the last stage
    dtype: torch.dtype  # of the hidden state and, by default, of the cache

    memory: ClassVar[type[LayerMemory[Any]]]

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        shard: Shard = WHOLE,
        *,
        device: torch.device,
        dtype: torch.dtype,
        stored: Format | None = None,
    ) -> Self:
        """Uninitialised memory for the weights of `shard`; raises StartupError if the model cannot be divided. `stored`
        has the checkpoint tensors to keep as they are stored where possible.
        """
        memory = cls.memory(config, shard, device=device, dtype=dtype, stored=stored)
        layers = tuple(memory.layer(index) for index in config.stage_layers(shard))
        rows = shard.attention.vocabulary_rows(config.vocab_size)
        norm, head = (memory.norm(config.hidden_size), memory.head(rows)) if shard.last else (None, None)
        embedding = None
        if shard.first:
            embedding = head if config.tied_embeddings and head is not None else memory.embedding(rows)
        return cls(config, shard, layers, embedding, norm, head, dtype)

    @abstractmethod
    def layer_slots(self, layer: LayerT) -> dict[str, Slot]:
        """The slots of a layer, by the names of tensors within the layer."""

    @classmethod
    def names(cls, config: ModelConfig) -> frozenset[str]:
        """The tensors that a checkpoint of the whole model has."""
        return frozenset(cls.allocate(config, device=torch.device("meta"), dtype=torch.float32).slots())

    @property
    def layer_range(self) -> range:
        """The global layers of `layers`."""
        return self.config.stage_layers(self.shard)

    @property
    def device(self) -> torch.device:
        return self.layers[0].input_norm.device

    def no_rows(self) -> torch.Tensor:
        """The hidden state of no tokens, [0, hidden]."""
        return torch.empty(0, self.config.hidden_size, dtype=self.dtype, device=self.device)

    def slots(self) -> dict[str, Slot]:
        """Maps Hugging Face tensor names to the slots that they fill. Together the slots cover every used element once;
        the padding rows of the vocabulary are not used.
        """
        slots = self.outer_slots()
        for index, layer in zip(self.layer_range, self.layers, strict=True):
            slots.update({f"model.layers.{index}.{name}": slot for name, slot in self.layer_slots(layer).items()})
        return slots

    def outer_slots(self) -> dict[str, Slot]:
        """The slots outside of layers."""
        slots = {}
        ids = self.shard.attention.vocabulary(self.config.vocab_size)
        for name, matrix in ((head_name(self.config), self.head), (EMBEDDING, self.embedding)):
            if matrix is not None:
                slots[name] = Slot.part(matrix[: len(ids)], dim=0, start=ids.start, size=self.config.vocab_size)
        if self.norm is not None:
            slots["model.norm.weight"] = Slot.whole(self.norm, self.config.norm_offset)
        return slots
