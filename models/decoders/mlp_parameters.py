"""The weights of one rank's MLPs and experts, and the checkpoint tensors that fill them.

Tensor parallelism divides the width of MLPs and of every expert or, with expert parallelism, distributes whole experts.
Every rank has the whole router.

Matrices that a checkpoint stores in fp8 stay in fp8 with their scales (kernels/linear/block_format.py). With a scale
per block, a matrix is expanded if a rank's columns begin or end inside a block. 4-bit matrices stay in 4 bits
(kernels/int4/group_format.py) if a rank's columns are groups of at least 32 columns; of experts, both matrices stay in
4 bits or neither does. Matrices in GGUF blocks (kernels/gguf/blocks.py) stay in blocks if a rank's columns are whole
blocks.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ...kernels.gguf.blocks import GgufBlocks, fits_blocks
from ...kernels.int4.group_format import MXFP4_GROUP, GroupScaled, group_in_memory
from ...kernels.linear.block_format import BLOCK, BlockScaled, Weight, common_row_group
from ..config.model import ModelConfig
from ..config.moe import MoeConfig
from ..config.sharding import Shard
from ..layers.moe import MlpParameters, MoeParameters
from .slots import Slot


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

    def __init__(
        self,
        config: ModelConfig,
        shard: Shard,
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8: Collection[str] = frozenset(),
        int4: Collection[str] = frozenset(),
        gguf: Mapping[str, str] | None = None,
    ) -> None:
        """`fp8` and `int4` are the checkpoint tensors to keep in fp8 and in 4 bits where possible, `gguf` those to keep
        in GGUF blocks, with their types.
        """
        self.config, self.shard = config, shard
        self.device, self.dtype = device, dtype
        self._fp8, self._int4, self._gguf = fp8, int4, gguf or {}
        self._names = names_of(config)

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def weight(
        self, *shape: int, names: Sequence[str], first_rows: Sequence[int] = (), first_column: int = 0
    ) -> Weight:
        """A matrix, or one per expert, that is filled from the tensors `names`: in fp8 or in 4 bits if all of them are.

        `first_rows` are the rows where parts begin, in the matrix and in the checkpoint; its columns are those of the
        checkpoint from `first_column` on.
        """
        if (group := self._group(shape[-1], names=names, first_column=first_column)) is not None:
            return GroupScaled.allocate(*shape, group=group, dtype=self.dtype, device=self.device)
        if not self.in_fp8(names):
            return self.tensor(*shape)
        if self.config.row_scaled_fp8:
            return BlockScaled.allocate_by_row(*shape, device=self.device)
        offset, columns = first_column % BLOCK, shape[-1]
        if offset and offset + columns > BLOCK:
            return self.tensor(*shape)
        return BlockScaled.allocate(*shape, row_group=common_row_group(first_rows), device=self.device)

    def in_blocks(self, parts: Sequence[tuple[str, int]], columns: int, *, first_column: int = 0) -> GgufBlocks | None:
        """A matrix in GGUF blocks that is filled from tensors, given with their numbers of rows; None if one of them is
        not to be kept so, or if blocks do not begin and end where the columns do.
        """
        types = [(rows, self._gguf.get(name)) for name, rows in parts]
        kept = [(rows, found) for rows, found in types if found and fits_blocks(found, columns, first_column)]
        if len(kept) < len(parts):
            return None
        # one of several ranks may have padding rows; then groups of interleaved rows would not begin with a tensor
        alone = self.shard.tp_size == 1
        return GgufBlocks.allocate(kept, columns, device=self.device, interleave=alone)

    def in_fp8(self, names: Collection[str]) -> bool:
        """Whether all of these tensors are to be kept in fp8."""
        return all(name in self._fp8 for name in names)

    def in_int4(self, names: Collection[str]) -> bool:
        """The same in 4 bits."""
        return all(name in self._int4 for name in names)

    def _group(self, columns: int, *, names: Sequence[str], first_column: int) -> int | None:
        """Columns of a group of a matrix in 4 bits; None if it is not to be kept so or cannot be divided."""
        if self.config.int4 is None or not self.in_int4(names):
            return None
        # a scale per row is valid for any number of columns
        return group_in_memory(self.config.int4.group or BLOCK, columns, first_column)

    def mlp(self, layer: str) -> MlpParameters:
        """The MLP of a layer, whose checkpoint tensors begin with `layer`."""
        size = len(self.shard.part("intermediate_size", self.config.intermediate_size))
        return MlpParameters(*self._gated([f"{layer}.{self._names.mlp}"], size))

    def mixture(self, layer: str, moe: MoeConfig) -> MoeParameters:
        """The mixture of experts of a layer."""
        hidden = self.config.hidden_size
        experts, size = moe.share(self.shard, hidden)
        if moe.biases:
            gate_up, down = self._stacked(layer, len(experts), size)
        else:
            prefixes = [f"{layer}.{name}" for name in self._names.of_experts(experts)]
            gate_up, down = self._gated(prefixes, size, len(experts), whole=self.shard.whole_experts)
        shared = None
        if moe.shared_size:
            shared = MlpParameters(*self._gated([f"{layer}.{self._names.shared}"], moe.shared_share(self.shard)))
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

    def _gated(self, prefixes: Sequence[str], size: int, *experts: int, whole: bool = False) -> tuple[Weight, Weight]:
        """The matrices of an MLP, or of several experts: a part of the width, `size` elements, or all of it."""
        names, hidden, start = self._names, self.config.hidden_size, 0 if whole else self.shard.tp_rank * size
        gate_up = [f"{prefix}.{part}.weight" for prefix in prefixes for part in (names.gate, names.up)]
        down = [f"{prefix}.{names.down}.weight" for prefix in prefixes]
        in_groups = [
            self._group(columns, names=stored, first_column=first) is not None
            for columns, stored, first in ((hidden, gate_up, 0), (size, down, start))
        ]
        if experts and any(in_groups) and not all(in_groups):
            return self.tensor(*experts, 2 * size, hidden), self.tensor(*experts, hidden, size)
        return (
            self.weight(*experts, 2 * size, hidden, names=gate_up, first_rows=(size, start)),
            self.weight(*experts, hidden, size, names=down, first_column=start),
        )

    def _stacked(self, layer: str, experts: int, size: int) -> tuple[Weight, Weight]:
        """The matrices of the experts of gpt-oss: kept in MXFP4 if a rank's columns are whole blocks."""
        gate_up, down = (experts, 2 * size, self.config.hidden_size), (experts, self.config.hidden_size, size)
        names = [f"{layer}.{self._names.mixture}.experts.{part}" for part in ("gate_up_proj", "down_proj")]
        if self.in_int4(names) and size % MXFP4_GROUP == 0 and self.config.hidden_size % MXFP4_GROUP == 0:
            return (
                GroupScaled.allocate_mxfp4(*gate_up, device=self.device),
                GroupScaled.allocate_mxfp4(*down, device=self.device),
            )
        return self.tensor(*gate_up), self.tensor(*down)


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
        names.of_experts(layer.experts), _each(layer.gate_up), _each(layer.down), strict=True
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
        part = Slot.part if name.endswith("bias") else Slot.transposed_part
        if shard.whole_experts or not unit:
            slot = part(target, dim=0, start=layer.experts.start, size=config.moe.num_experts)
        else:
            slot = part(target, dim=dim, start=unit * shard.tp_rank * share, size=unit * size)
        slots[f"mlp.experts.{name}"] = slot
    return slots


def _gated_slots(
    prefix: str, gate_up: Weight, down: Weight, names: MlpNames, shard: Shard, *, whole: bool = False
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


def split_rows(matrix: Weight, *rows: int) -> tuple[Weight, ...]:
    """Split off parts of these numbers of rows, and the rest, which may be empty."""
    ends = list(accumulate(rows))
    return tuple(matrix[start:end] for start, end in zip([0, *ends], [*ends, len(matrix)], strict=True))


def _each(experts: Weight) -> Iterator[Weight]:
    """The matrix of each expert."""
    if isinstance(experts, BlockScaled):
        for values, scales in zip(experts.values, experts.scales, strict=True):
            yield BlockScaled(values, scales, experts.row_group)
    elif isinstance(experts, GroupScaled):
        yield from experts.experts()
    else:
        assert not isinstance(experts, GgufBlocks), "GGUF files of mixtures are not supported"
        yield from experts
