"""Tiles of rows by expert: what a grouped product has to compute."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowTiles:
    """Tiles of rows by expert, on the device; see moe/routing.py."""

    order: torch.Tensor  # [n] int32: numbers of token * per_token + choice, sorted by expert
    ends: torch.Tensor  # [experts] int32: end of each expert's part of `order`
    expert: torch.Tensor  # [tiles] int32: expert of each tile, -1 if unused
    first: torch.Tensor  # [tiles] int32: where the tile begins in `order`
    rows: int  # of a tile, at most
    per_token: int
    gather: bool  # rows of x are tokens; otherwise in the order of experts
    scatter: bool  # rows of the result are numbers; otherwise in the order of experts
