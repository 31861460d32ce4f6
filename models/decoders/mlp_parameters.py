"""The weights of one rank's MLPs and experts, and the checkpoint tensors that fill them.

Tensor parallelism divides the width of MLPs and of every expert or, with expert parallelism, distributes whole experts.
Every rank has the whole router.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, TypeVar

import torch

from ..config.model import ModelConfig
from ..config.moe import MoeConfig
from ..config.sharding import Shard
from ..layers.moe import MlpParameters, MoeParameters
from ..weights.format import Format, Matrix, Part, Place
from ..weights.plain import allocate_plain
from ..weights.slots import Slot
from ..weights.weight import AnyWeight, Operand


@dataclass(frozen=True)
class MlpNames:
    """What checkpoints call the parts of a layer's MLP or mixture."""

    mlp: str = "mlp"
    mixture: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def of_experts(self, experts: range) -> list[str]:
        return [f"{self.mixture}.experts.{expert}" for expert in experts]

    @property
    def shared(self) -> str:
        return f"{self.mixture}.shared_experts"


MIXTRAL_NAMES = MlpNames(mixture="block_sparse_moe", gate="w1", up="w3", down="w2")


def names_of(config: ModelConfig) -> MlpNames:
    return MIXTRAL_NAMES if config.architecture == "mixtral" else MlpNames()


class WeightMemory:
    """Allocates the weights of one rank."""

    wide: ClassVar[bool] = False
    """Whether MLPs have few rows to multiply with wide matrices; see `Matrix`."""

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        device: torch.device,
        dtype: torch.dtype,
        stored: Format | None = None,
    ) -> None:
        """`stored` has the checkpoint tensors to keep as they are stored where possible."""
        self.config, self.shard = config, shard
        self.device, self.dtype = device, dtype
        self._stored = stored
        self._names = names_of(config)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def weight(
        self, *shape: int, parts: Sequence[Part], first_column: int = 0, place: Place = "layer", wide: bool = False
    ) -> AnyWeight:
        """A matrix; see `Matrix`."""
        (weight,) = self._allocate(self._matrix(shape, parts, first_column, place, wide=wide))
        return weight

    def _matrix(
        self,
        shape: tuple[int, ...],
        parts: Sequence[Part],
        first_column: int = 0,
        place: Place = "layer",
        *,
        wide: bool = False,
    ) -> Matrix:
        padded = self.shard.tp_size > 1
        return Matrix(shape, tuple(parts), self.dtype, self.device, first_column, place, wide, padded)

    def _allocate(self, *matrices: Matrix) -> list[AnyWeight]:
        """Matrices that are multiplied by one kernel: several are those of experts."""
        stored = self._stored
        kept = [stored is not None and stored.holds(matrix) for matrix in matrices]
        if stored is None or (stored.together and not all(kept)):
            return [allocate_plain(matrix) for matrix in matrices]
        return [
            stored.allocate(matrix) if keep else allocate_plain(matrix)
            for matrix, keep in zip(matrices, kept, strict=True)
        ]

    def mlp(self, layer: str) -> MlpParameters:
        """The MLP of a layer, whose checkpoint tensors begin with `layer`."""
        size = len(self.shard.part("intermediate_size", self.config.intermediate_size))
        return self._mlp(f"{layer}.{self._names.mlp}", size)

    def mixture(self, layer: str, moe: MoeConfig) -> MoeParameters:
        """The mixture of experts of a layer."""
        hidden = self.config.hidden_size
        experts, size = moe.share(self.shard, hidden)
        prefixes = [f"{layer}.{name}" for name in self._names.of_experts(experts)]
        gate_up, down = self._allocate(
            *(
                self._stacked(layer, len(experts), size)
                if moe.biases
                else self._gated(prefixes, size, len(experts), whole=self.shard.whole_experts)
            )
        )
        shared = None
        if moe.shared_size:
            shared = self._mlp(f"{layer}.{self._names.shared}", moe.shared_share(self.shard))
        holds_down_bias = moe.biases and (self.shard.whole_experts or self.shard.tp_rank == 0)
        return MoeParameters(
            router=self.tensor(moe.num_experts, hidden, dtype=torch.float32 if moe.biased else None),
            router_bias=self.tensor(moe.num_experts, dtype=torch.float32) if moe.biased else None,
            experts=experts,
            gate_up=gate_up,
            down=down,
            shared=shared,
            logit_bias=self.tensor(moe.num_experts) if moe.biases else None,
            gate_up_bias=self.tensor(len(experts), 2 * size) if moe.biases else None,
            down_bias=self.tensor(len(experts), hidden) if holds_down_bias else None,
        )

    def _mlp(self, prefix: str, size: int) -> MlpParameters:
        gate_up, down = self._gated([prefix], size)
        return MlpParameters(self._allocate(gate_up)[0], self._allocate(down)[0])

    def _gated(self, prefixes: Sequence[str], size: int, *experts: int, whole: bool = False) -> tuple[Matrix, Matrix]:
        """The matrices of an MLP, or of several experts: a part of the width, `size` elements, or all of it."""
        names, hidden, start = self._names, self.config.hidden_size, 0 if whole else self.shard.tp_rank * size
        gate_up = [
            Part(f"{prefix}.{name}.weight", size, at, start)
            for prefix in prefixes
            for name, at in ((names.gate, 0), (names.up, size))
        ]
        down = [Part(f"{prefix}.{names.down}.weight", hidden) for prefix in prefixes]
        return (
            self._matrix((*experts, 2 * size, hidden), gate_up, wide=self.wide and not experts),
            self._matrix((*experts, hidden, size), down, start),
        )

    def _stacked(self, layer: str, experts: int, size: int) -> tuple[Matrix, Matrix]:
        """The matrices of the experts of gpt-oss."""
        hidden, prefix = self.config.hidden_size, f"{layer}.{self._names.mixture}.experts"
        return (
            self._matrix((experts, 2 * size, hidden), [Part(f"{prefix}.gate_up_proj", 2 * size)]),
            self._matrix((experts, hidden, size), [Part(f"{prefix}.down_proj", hidden)]),
        )


def mlp_slots(layer: MlpParameters | MoeParameters, config: ModelConfig, shard: Shard) -> dict[str, Slot]:
    """Slots of a layer's matrices and router, by their names within the layer; biases of an MLP are not among them."""
    names = names_of(config)
    if isinstance(layer, MlpParameters):
        return _gated_slots(names.mlp, layer.gate_up, layer.down, names, shard)
    if config.moe is not None and config.moe.biases:
        return _stacked_slots(layer, config, shard)
    slots = {f"{names.mixture}.gate.weight": Slot.whole(layer.router)}
    if layer.router_bias is not None:
        slots[f"{names.mixture}.gate.e_score_correction_bias"] = Slot.whole(layer.router_bias)
    if layer.shared is not None:
        slots |= _gated_slots(names.shared, layer.shared.gate_up, layer.shared.down, names, shard)
    for prefix, gate_up, down in zip(
        names.of_experts(layer.experts), layer.gate_up.each(), layer.down.each(), strict=True
    ):
        slots |= _gated_slots(prefix, gate_up, down, names, shard, whole=shard.whole_experts)
    return slots


def _stacked_slots(layer: MoeParameters, config: ModelConfig, shard: Shard) -> dict[str, Slot]:
    """Slots of a mixture of gpt-oss: all experts are one tensor, [E, in, out]; rows of gate and up alternate."""
    assert config.moe is not None
    assert layer.logit_bias is not None
    slots = {"mlp.router.weight": Slot.whole(layer.router), "mlp.router.bias": Slot.whole(layer.logit_bias)}
    size, share = config.moe.expert_size, layer.down.shape[2]
    for name, target, dim, unit in (
        ("gate_up_proj", layer.gate_up, 2, 2),
        ("gate_up_proj_bias", layer.gate_up_bias, 1, 2),
        ("down_proj", layer.down, 1, 1),
        ("down_proj_bias", layer.down_bias, 0, 0),
    ):
        if target is None:
            continue
        if shard.whole_experts or not unit:
            place = {"dim": 0, "start": layer.experts.start, "size": config.moe.num_experts}
        else:
            place = {"dim": dim, "start": unit * shard.tp_rank * share, "size": unit * size}
        if isinstance(target, torch.Tensor):
            slots[f"mlp.experts.{name}"] = Slot.part(target, **place)
        else:
            slots[f"mlp.experts.{name}"] = Slot.transposed_part(target, **place)
    return slots


def _gated_slots(
    prefix: str, gate_up: AnyWeight, down: AnyWeight, names: MlpNames, shard: Shard, *, whole: bool = False
) -> dict[str, Slot]:
    """Slots of an MLP of which this rank has a part of the width, or all of it."""
    share = down.shape[1]
    start, size = (0, share) if whole else (shard.tp_rank * share, shard.tp_size * share)
    gate, up = split_rows(gate_up, share)
    return {
        f"{prefix}.{names.gate}.weight": Slot.part(gate, dim=0, start=start, size=size),
        f"{prefix}.{names.up}.weight": Slot.part(up, dim=0, start=start, size=size),
        f"{prefix}.{names.down}.weight": Slot.part(down, dim=1, start=start, size=size),
    }


RowsT = TypeVar("RowsT", bound=Operand)


def split_rows(matrix: RowsT, *rows: int) -> tuple[RowsT, ...]:
    """Split off parts of these numbers of rows, and the rest, which may be empty."""
    ends: list[int] = list(accumulate(rows))
    return tuple(matrix[start:end] for start, end in zip([0, *ends], [*ends, len(matrix)], strict=True))
