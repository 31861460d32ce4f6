"""Maps parts of checkpoint tensors to parts of a rank's weights."""

from dataclasses import dataclass, replace

import torch

from ...configs.arithmetic import ceil_div
from ...kernels.gguf.blocks import GgufBlocks, GgufRows
from ...kernels.int4.group_format import GroupScaled
from ...kernels.linear.block_format import BLOCK, BlockScaled, Weight


@dataclass(frozen=True)
class Slot:
    """A `target` in memory, and the part that fills it of a checkpoint tensor of `shape`, from index `start` on."""

    target: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    block_scaled: BlockScaled | None = None  # if given, its values are `target`, and its scales are filled too
    int4: GroupScaled | None = None  # if given, it is filled, and `target` is its packed values
    gguf: GgufRows | None = None  # if given, its blocks are `target`, filled with those of the file
    transposed: bool = False  # the matrices of `int4` are those of the tensor transposed
    offset: float = 0.0  # added to the values of the checkpoint

    @staticmethod
    def whole(target: Weight, offset: float = 0.0) -> "Slot":
        """Filled with all of a checkpoint tensor, plus `offset`."""
        return replace(Slot.part(target, dim=0, start=0, size=len(target)), offset=offset)

    @staticmethod
    def part(target: Weight, *, dim: int, start: int, size: int) -> "Slot":
        """Filled with a range of a checkpoint tensor that has `size` elements in dimension `dim`, from `start` on."""
        shape, first = list(target.shape), [0] * len(target.shape)
        shape[dim], first[dim] = size, start
        if isinstance(target, BlockScaled):
            return Slot(target.values, tuple(shape), tuple(first), target)
        if isinstance(target, GroupScaled):
            return Slot(target.packed, tuple(shape), tuple(first), int4=target)
        if isinstance(target, GgufBlocks):
            (rows,) = target.parts  # a tensor of a file has one type
            return Slot(rows.blocks, tuple(shape), tuple(first), gguf=rows)
        return Slot(target, tuple(shape), tuple(first))

    @staticmethod
    def transposed_part(target: Weight, *, dim: int, start: int, size: int) -> "Slot":
        """The same with the last two dimensions of the tensor exchanged; `dim` is one of the tensor."""
        if isinstance(target, torch.Tensor):
            return Slot.part(target.transpose(-1, -2), dim=dim, start=start, size=size)
        assert isinstance(target, GroupScaled)
        slot = Slot(target.packed, (), (), int4=target, transposed=True)
        shape, first = list(slot.size), [0] * len(slot.size)
        shape[dim], first[dim] = size, start
        return replace(slot, shape=tuple(shape), start=tuple(first))

    @property
    def nbytes(self) -> int:
        if self.int4 is not None:
            return self.int4.nbytes
        return self.target.nbytes if self.block_scaled is None else self.block_scaled.nbytes

    @property
    def size(self) -> torch.Size:
        """Of the part of the tensor."""
        if self.gguf is not None:
            return torch.Size((len(self.gguf.blocks), self.gguf.columns))
        if self.int4 is None:
            return self.target.shape
        shape = self.int4.shape
        return torch.Size((*shape[:-2], shape[-1], shape[-2])) if self.transposed else shape

    def fill_scales(self, scales: torch.Tensor) -> None:
        """Fill the scales of an fp8 target from those of the whole checkpoint tensor: of blocks, or [rows, 1]."""
        assert self.block_scaled is not None
        if self.block_scaled.by_row:
            self.block_scaled.scales.copy_(scales[self.start[0] : self.start[0] + len(self.target)])
            return
        row_group, target = self.block_scaled.row_group, self.block_scaled.scales
        rows = (self.start[0] + row_group * torch.arange(len(target), device=scales.device)) // BLOCK
        first = self.start[1] // BLOCK
        blocks = ceil_div(self.target.shape[1], BLOCK)
        target[:, :blocks].copy_(scales[rows, first : first + blocks])

    @property
    def fills_whole(self) -> bool:
        return self.shape == tuple(self.target.shape)
