"""Weights in 16 or 32 bits, also those that are expanded while they are loaded."""

from collections.abc import Iterator

import torch
from torch.nn.functional import embedding

from ...kernels.backends.dispatch import numba_computes
from ...kernels.linear.linear import gated_linear, linear
from ...kernels.moe.grouped_product import grouped_without_wait
from .format import Matrix
from .weight import Weight


class PlainWeight(Weight[torch.Tensor]):
    filled_as_stored = False

    @property
    def values(self) -> torch.Tensor:
        return self.operand

    def expanded(self) -> torch.Tensor:
        return self.operand.float()

    def each(self) -> Iterator["PlainWeight"]:
        return map(PlainWeight, self.operand)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return linear(x, self.operand, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gelu: bool = False) -> torch.Tensor:
        return gated_linear(x, self.operand, bias, gelu=gelu)

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        return embedding(indices, self.operand)

    @property
    def capturable(self) -> bool:
        return grouped_without_wait(self.operand.dtype, self.operand.device)


def allocate_plain(matrix: Matrix) -> PlainWeight:
    """Uninitialised."""
    *batch, rows, columns = matrix.shape
    by_torch = matrix.device.type == "cpu" and not (matrix.dtype == torch.float32 and numba_computes())
    if matrix.wide and by_torch:
        return PlainWeight(torch.empty(*batch, columns, rows, dtype=matrix.dtype, device=matrix.device).mT)
    return PlainWeight(torch.empty(matrix.shape, dtype=matrix.dtype, device=matrix.device))
