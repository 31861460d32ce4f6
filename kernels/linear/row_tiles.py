"""Rows sorted by expert and divided into tiles: the work of a grouped product."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowTiles:
    """The tokens of this rank's experts, sorted by expert; all tensors are int32, on the device. A number stands for a
    token and one of its experts: see moe/router/routing.py.

    A product with `gather` reads the row of a number's token in x, and writes results in the order of experts. A
    product without `gather` reads rows in the order of experts, and writes each result to the row of its number.
    """

    order: torch.Tensor  # [numbers]: numbers sorted by expert; undefined after the end of the last expert
    place: torch.Tensor  # [numbers]: index of each number in `order`; undefined for experts of other ranks
    ends: torch.Tensor  # [experts]: end of each expert's part of `order`
    expert: torch.Tensor  # [tiles]: expert of each tile, -1 if unused
    first: torch.Tensor  # [tiles]: index in `order` at which each tile begins
    counts: torch.Tensor  # [3]: used tiles, then two zeros: work counters of the kernels of moe/expert_tiles_cuda.py
    rows: int  # maximum rows of a tile
    per_token: int
