"""Maps parts of checkpoint tensors to parts of a rank's weights."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .weight import AnyWeight


class Share(NamedTuple):
    """A part of a dimension of a checkpoint tensor: `size` elements of `whole`, from `start` on."""

    start: int
    size: int
    whole: int

    @staticmethod
    def of(items: range, count: int, width: int = 1) -> "Share":
        """Of `count` items, each of `width` elements."""
        return Share(items.start * width, len(items) * width, count * width)

    @staticmethod
    def all(size: int) -> "Share":
        return Share(0, size, size)


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
    def of(weight: AnyWeight, *shares: Share, transposed: bool = False) -> "Slot":
        """A part of a tensor for all of a weight. `transposed`: its last two dimensions are exchanged."""
        stored = weight.filled_as_stored
        return Slot(
            weight.values.transpose(-1, -2) if transposed and not stored else weight.values,
            tuple(share.whole for share in shares),
            tuple(share.start for share in shares),
            weight if stored else None,
            transposed and stored,
        )

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
