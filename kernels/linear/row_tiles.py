"""Rows sorted by expert, in tiles: what a grouped product has to compute."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowTiles:
    """Where the tokens of this rank's experts are; all tensors are int32, on the device. See moe/router/routing.py.

    A product with `gather` reads tokens in the order of experts and leaves its results in that order. One without
    reads rows in the order of experts and writes results by number.
    """

    order: torch.Tensor  # [numbers]: sorted by expert; behind the last expert's end undefined
    place: torch.Tensor  # [numbers]: where each one is in `order`; undefined for experts of other ranks
    ends: torch.Tensor  # [experts]: end of each expert's part of `order`
    expert: torch.Tensor  # [tiles]: expert of each tile, -1 if unused
    first: torch.Tensor  # [tiles]: where each tile begins in `order`
    counts: torch.Tensor  # [3]: used tiles, and zeros: two products count there what their blocks have taken
    rows: int  # of a tile, at most
    per_token: int
