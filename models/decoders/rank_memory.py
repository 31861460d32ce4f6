"""Memory for the weights of one rank, and the parts of checkpoint tensors that fill it.

Tensor parallelism divides the width of MLPs and of every expert or, with expert parallelism, distributes whole experts.
Every rank has the whole router. A weight is declared once, with the tensors that fill it: loading, fp8, 4-bit and dummy
weights follow from that (`slots`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import torch

from ..config.model import ModelConfig
from ..config.moe import MoeConfig
from ..config.sharding import Shard
from ..layers.moe import MlpParameters, MoeParameters
from ..layers.parallel import Parallel
from ..weights.format import Format, Matrix, Part, Place
from ..weights.plain import allocate_plain
from ..weights.slots import Share, Slot
from ..weights.weight import AnyWeight

LayerT_co = TypeVar("LayerT_co", covariant=True)


class AttentionStep(Protocol):
    """What only one family does with queries, keys and values of a layer, in place. It owns its weights."""

    def __call__(self, qkv: torch.Tensor, parallel: Parallel, /) -> None: ...


StepMaker = Callable[["RankMemory[Any]", str], AttentionStep | None]
"""Makes that of a layer; given the name of its attention in checkpoints."""


class RankMemory(ABC, Generic[LayerT_co]):
    """Allocates the weights of one rank, uninitialised."""

    wide: ClassVar[bool] = False
    """Whether MLPs and the head have few rows to multiply with wide matrices; see `Matrix`."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        device: torch.device,
        dtype: torch.dtype,
        stored: Format | None = None,
        step: StepMaker | None = None,
    ) -> None:
        """`stored` has the checkpoint tensors to keep as they are stored where possible."""
        self.config, self.shard = config, shard
        self.device, self.dtype = device, dtype
        self._stored, self._step = stored, step
        self._tensors: dict[str, Slot] = {}
        self._matrices: list[tuple[Matrix, AnyWeight]] = []

    @property
    def heads(self) -> range:
        """The global query heads of this rank."""
        return self.shard.attention.part("num_attention_heads", self.config.num_heads)

    @property
    def kv_heads(self) -> range:
        """The global KV heads of this rank."""
        return self.shard.attention.kv_heads(self.config.num_kv_heads)

    @property
    def query_rows(self) -> Share:
        return Share.of(self.heads, self.config.num_heads, self.config.head_dim)

    @property
    def key_rows(self) -> Share:
        return Share.of(self.kv_heads, self.config.num_kv_heads, self.config.head_dim)

    @abstractmethod
    def layer(self, index: int) -> LayerT_co:
        """A global layer."""

    @property
    def nbytes(self) -> int:
        """Of all weights. Counted without `slots`: a large model has tens of thousands, several for each expert."""
        return sum(slot.nbytes for slot in self._tensors.values()) + sum(weight.nbytes for _, weight in self._matrices)

    def slots(self) -> dict[str, Slot]:
        """What each tensor of the checkpoint fills. Together the slots cover every used element once; the padding rows
        of the vocabulary are not used.
        """
        slots = dict(self._tensors)
        for matrix, weight in self._matrices:
            slots.update(matrix.slots(weight))
        return slots

    def tensor(
        self, name: str, *dims: int | Share, dtype: torch.dtype | None = None, offset: float = 0.0
    ) -> torch.Tensor:
        """A part of a checkpoint tensor, or all of the dimensions that are given as a number. `offset` is added."""
        shares = [dim if isinstance(dim, Share) else Share.all(dim) for dim in dims]
        target = torch.empty([share.size for share in shares], dtype=dtype or self.dtype, device=self.device)
        shape, start = (tuple(numbers) for numbers in zip(*((each.whole, each.start) for each in shares), strict=True))
        self._tensors[name] = Slot(target, shape, start, offset=offset)
        return target

    def norm(self, name: str, size: int | Share) -> torch.Tensor:
        """The weight of a norm. A float32 one is applied before its result is rounded (rms_norm.py)."""
        dtype = torch.float32 if self.config.float32_norms else None
        return self.tensor(f"{name}.weight", size, dtype=dtype, offset=self.config.norm_offset)

    def bias(self, parts: Mapping[str, Share]) -> torch.Tensor:
        """The biases of these modules, one after the other."""
        sizes = [share.size for share in parts.values()]
        target = torch.empty(sum(sizes), dtype=self.dtype, device=self.device)
        for rows, (name, share) in zip(torch.split(target, sizes), parts.items(), strict=True):
            self._tensors[f"{name}.bias"] = Slot(rows, (share.whole,), (share.start,))
        return target

    def weight(
        self, parts: Mapping[str, Share], columns: int | Share, *, place: Place = "layer", wide: bool = False
    ) -> AnyWeight:
        """Rows of the matrices of these modules, one after the other."""
        (weight,) = self._allocate(self._matrix([parts], columns, place=place, wide=wide))
        return weight

    def feed_forward(self, index: int) -> MlpParameters | MoeParameters:
        """The MLP or the mixture of experts of a layer."""
        names, config, layer = self.config.names, self.config, f"model.layers.{index}"
        if (moe := config.moe_of(index)) is not None:
            return self._mixture(f"{layer}.{names.mixture}", moe)
        width = Share.of(self.shard.part("intermediate_size", config.intermediate_size), config.intermediate_size)
        return self._mlp(f"{layer}.{names.mlp}", width, biases=config.mlp_bias)

    def _mlp(self, name: str, width: Share, *, biases: bool = False) -> MlpParameters:
        matrices = self._gated([name], width)
        output = {f"{name}.{self.config.names.down}": Share.all(self.config.hidden_size)}
        return MlpParameters(
            gate_up=self._allocate(matrices[0])[0],
            down=self._allocate(matrices[1])[0],
            gate_up_bias=self.bias(self._gate_up(name, width)) if biases else None,
            down_bias=self.bias(output) if biases and self.shard.tp_rank == 0 else None,
            gelu=self.config.gelu,
        )

    def _mixture(self, name: str, moe: MoeConfig) -> MoeParameters:
        hidden, shard, names = self.config.hidden_size, self.shard, self.config.names
        experts, size = moe.share(shard, hidden)
        width = Share.all(size) if shard.whole_experts else Share(shard.tp_rank * size, size, shard.tp_size * size)
        held, count = Share.of(experts, moe.num_experts), moe.num_experts
        router, all_experts = f"{name}.{names.router}", f"{name}.experts"
        correction = f"{router}.e_score_correction_bias"
        gate_up_rows = Share(*(2 * number for number in width))  # if all experts are one tensor: gate and up alternate
        if names.stacked:
            gate_up, down = self._allocate(
                self._stack(f"{all_experts}.gate_up_proj", held, gate_up_rows, Share.all(hidden)),
                self._stack(f"{all_experts}.down_proj", held, Share.all(hidden), width),
            )
        else:
            gate_up, down = self._allocate(*self._gated([f"{all_experts}.{expert}" for expert in experts], width, held))
        shared = None
        if moe.shared_size:
            part = shard.part("shared experts' width", moe.shared_size)
            shared = self._mlp(f"{name}.shared_experts", Share.of(part, moe.shared_size))
        holds_down_bias = moe.biases and (shard.whole_experts or shard.tp_rank == 0)
        return MoeParameters(
            router=self.tensor(f"{router}.weight", count, hidden, dtype=torch.float32 if moe.biased else None),
            router_bias=self.tensor(correction, count, dtype=torch.float32) if moe.biased else None,
            experts=experts,
            gate_up=gate_up,
            down=down,
            shared=shared,
            logit_bias=self.tensor(f"{router}.bias", count) if moe.biases else None,
            gate_up_bias=self.tensor(f"{all_experts}.gate_up_proj_bias", held, gate_up_rows) if moe.biases else None,
            down_bias=self.tensor(f"{all_experts}.down_proj_bias", held, hidden) if holds_down_bias else None,
        )

    def _gate_up(self, name: str, width: Share) -> dict[str, Share]:
        return {f"{name}.{self.config.names.gate}": width, f"{name}.{self.config.names.up}": width}

    def _gated(self, names: Sequence[str], width: Share, experts: Share | None = None) -> tuple[Matrix, Matrix]:
        """Both matrices of an MLP, or of several experts."""
        hidden = Share.all(self.config.hidden_size)
        down = [{f"{name}.{self.config.names.down}": hidden} for name in names]
        wide = self.wide and experts is None
        return (
            self._matrix([self._gate_up(name, width) for name in names], hidden, experts=experts, wide=wide),
            self._matrix(down, width, experts=experts),
        )

    def _matrix(
        self,
        each: Sequence[Mapping[str, Share]],
        columns: int | Share,
        *,
        experts: Share | None = None,
        place: Place = "layer",
        wide: bool = False,
    ) -> Matrix:
        """A matrix, or one per expert, of the rows of these modules."""
        across, parts, rows = columns if isinstance(columns, Share) else Share.all(columns), [], 0
        for modules in each:
            rows = 0
            for name, share in modules.items():
                parts.append(Part(f"{name}.weight", share, rows))
                rows += share.size
        shape = (rows, across.size) if experts is None else (experts.size, rows, across.size)
        padded = self.shard.tp_size > 1
        return Matrix(shape, tuple(parts), across, self.dtype, self.device, place=place, wide=wide, padded=padded)

    def _stack(self, tensor: str, experts: Share, rows: Share, across: Share) -> Matrix:
        shape = experts.size, rows.size, across.size
        return Matrix(shape, (Part(tensor, rows),), across, self.dtype, self.device, stacked=experts)

    def _allocate(self, *matrices: Matrix) -> list[AnyWeight]:
        """Matrices that are multiplied by one kernel: several are those of experts."""
        stored = self._stored
        kept = [stored is not None and stored.holds(matrix) for matrix in matrices]
        if stored is not None and stored.together and not all(kept):
            stored = None
        weights = [
            stored.allocate(matrix) if stored is not None and keep else allocate_plain(matrix)
            for matrix, keep in zip(matrices, kept, strict=True)
        ]
        self._matrices += zip(matrices, weights, strict=True)
        return weights
