"""What layers ask of a weight, whatever its format. docs/adding_a_format.md walks through it."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import torch

from ...kernels.layer_stack.layer_stack import Linear
from ...kernels.moe.experts import grouped_experts, routing_rows


class Operand(Protocol):
    """What kernels read: a tensor, or tensors with their scales. Of experts, the first dimension is theirs."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Self: ...


OperandT_co = TypeVar("OperandT_co", bound=Operand, covariant=True)


class Weight(ABC, Generic[OperandT_co]):
    """A matrix [rows, columns] of this rank, or one per expert, as its kernels read it."""

    filled_as_stored: ClassVar[bool] = True
    """Whether its format reads it (`StoredCheckpoint`); otherwise it is filled with elements, converted to its dtype.
    """

    def __init__(self, operand: OperandT_co) -> None:
        self.operand = operand

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture `experts`."""
        return True

    def __len__(self) -> int:
        return len(self.operand)

    def __getitem__(self, part: slice) -> Self:
        """A range of rows, or of experts."""
        return type(self)(self.operand[part])

    @property
    def shape(self) -> torch.Size:
        return self.operand.shape

    @property
    def nbytes(self) -> int:
        return self.operand.nbytes

    @property
    @abstractmethod
    def values(self) -> torch.Tensor:
        """The tensor of its elements."""

    @abstractmethod
    def expanded(self) -> torch.Tensor:
        """In float32."""

    def each(self) -> Iterator[Self]:
        """The matrix of each expert."""
        raise TypeError(f"{type(self).__name__} has no experts")

    @abstractmethod
    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight.T + bias, of x [tokens, columns]."""

    @abstractmethod
    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gelu: bool = False) -> torch.Tensor:
        """swiglu of the same: the rows are those of gate, then those of up. `gelu`: the gate is GELU."""

    def mlp(
        self,
        x: torch.Tensor,
        down: "AnyWeight",
        bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        *,
        gelu: bool,
    ) -> torch.Tensor:
        """x through a gated MLP of which this is `gate_up`."""
        return down.linear(self.gated(x, bias, gelu=gelu), down_bias)

    def experts(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, down: "AnyWeight", **options: Any
    ) -> torch.Tensor:
        """The sum of a token's experts, of which this is `gate_up`: see `grouped_experts` for the options."""
        operands: Any = self.operand, down.operand  # of classes that these kernels know
        return grouped_experts(x, weights, experts, *operands, **options)

    def routing_rows(self, x: torch.Tensor, per_token: int, down: "AnyWeight", **options: Any) -> int | None:
        """The rows of the tiles into which `experts` sorts tokens; None if it does not. See `routing_rows`."""
        operands: Any = self.operand, down.operand
        return routing_rows(x, per_token, *operands, **options)

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - formats override it
        """Rows in the dtype of the hidden state, for embeddings."""
        raise TypeError(f"{type(self).__name__} has no embeddings")

    def in_stack(self, bias: torch.Tensor | None) -> Linear | None:  # noqa: ARG002 - formats override it
        """The operand of a layer stack (kernels/layer_stack/); None if it has no such kernel."""
        return None


AnyWeight = Weight[Operand]
