"""Maps parts of checkpoint tensors to parts of a rank's weights."""

from dataclasses import dataclass, replace

import torch

from .weight import AnyWeight, Weight


@dataclass(frozen=True)
class Slot:
    """A `target` in memory, and the part that fills it of a checkpoint tensor of `shape`, from index `start` on."""

    target: torch.Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]
    weight: AnyWeight | None = None  # if given, it is filled by its format, and `target` is its values
    transposed: bool = False  # the matrices of `weight` are those of the tensor transposed
    offset: float = 0.0  # added to the values of the checkpoint

    @staticmethod
    def whole(target: torch.Tensor | AnyWeight, offset: float = 0.0) -> "Slot":
        """Filled with all of a checkpoint tensor, plus `offset`."""
        return replace(Slot.part(target, dim=0, start=0, size=len(target)), offset=offset)

    @staticmethod
    def part(target: torch.Tensor | AnyWeight, *, dim: int, start: int, size: int) -> "Slot":
        """Filled with a range of a checkpoint tensor that has `size` elements in dimension `dim`, from `start` on."""
        shape, first = list(target.shape), [0] * len(target.shape)
        shape[dim], first[dim] = size, start
        if not isinstance(target, Weight):
            return Slot(target, tuple(shape), tuple(first))
        return Slot(target.values, tuple(shape), tuple(first), target if target.filled_as_stored else None)

    @staticmethod
    def transposed_part(target: AnyWeight, *, dim: int, start: int, size: int) -> "Slot":
        """The same with the last two dimensions of the tensor exchanged; `dim` is one of the tensor."""
        if not target.filled_as_stored:
            return Slot.part(target.values.transpose(-1, -2), dim=dim, start=start, size=size)
        slot = Slot(target.values, (), (), target, transposed=True)
        shape, first = list(slot.size), [0] * len(slot.size)
        shape[dim], first[dim] = size, start
        return replace(slot, shape=tuple(shape), start=tuple(first))

    @property
    def nbytes(self) -> int:
        return self.target.nbytes if self.weight is None else self.weight.nbytes

    @property
    def size(self) -> torch.Size:
        """Of the part of the tensor."""
        if self.weight is None:
            return self.target.shape
        shape = self.weight.shape
        return torch.Size((*shape[:-2], shape[-1], shape[-2])) if self.transposed else shape

    @property
    def fills_whole(self) -> bool:
        return self.shape == tuple(self.target.shape)
