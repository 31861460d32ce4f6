"""Moves blocks between the pools of a rank and staging memory: where each cell is staged, and the copies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..data.local_pool import LocalPool
from .agent import Item
from .blocks import BLOCK_TOKENS, Cell, CellKind, ReadPlan
from .codec import HEADER_BYTES, slot_bytes


@dataclass(frozen=True, slots=True)
class _Group:
    """Cells of one pool that have the same layers; their slots are adjacent, block by block and head by head."""

    pool: int
    kind: CellKind
    layers: range
    heads: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        return slot_bytes(self.kind.size_bytes(self.layers))

    @property
    def block_bytes(self) -> int:
        return len(self.heads) * self.slot_bytes

    def cells(self) -> Iterator[Cell]:
        return (Cell(self.kind, self.layers, head) for head in self.heads)


def _groups(plan: ReadPlan) -> list[_Group]:
    heads: dict[tuple[int, CellKind, range], list[int]] = {}
    for index, cell in plan:
        heads.setdefault((index, cell.kind, cell.layers), []).append(cell.head)
    return [_Group(*group, tuple(of_group)) for group, of_group in heads.items()]


class StagedCells:
    """The cells of a plan in staging memory: block i of a batch has its slots at the same place in every batch."""

    def __init__(self, pools: Sequence[LocalPool], plan: ReadPlan, memory: torch.Tensor) -> None:
        self._pools = pools
        self._memory = memory
        self._groups = _groups(plan)
        self.most_blocks = len(memory) // self.bytes_of(plan)
        """Blocks of a batch."""

    @staticmethod
    def bytes_of(plan: ReadPlan) -> int:
        """Staging memory of one block."""
        return sum(group.block_bytes for group in _groups(plan))

    @property
    def cells(self) -> int:
        """Cells of a block."""
        return sum(len(group.heads) for group in self._groups)

    def items(self, blocks: Sequence[bytes]) -> list[Item]:
        """The items of a batch of blocks, block by block."""
        starts = self._starts(len(blocks))
        return [
            Item(
                cell.key(block),
                start + index * group.block_bytes + number * group.slot_bytes,
                cell.size_bytes,
            )
            for index, block in enumerate(blocks)
            for group, start in zip(self._groups, starts, strict=True)
            for number, cell in enumerate(group.cells())
        ]

    def gather(self, count: int, pages: Sequence[int], start: int) -> None:
        """Copy `count` blocks, from token `start` of `pages` on, to staging memory."""
        for group, at in zip(self._groups, self._starts(count), strict=True):
            pool = self._pools[group.pool]
            planes = pool.memory.read_tokens(pages, start, start + count * BLOCK_TOKENS)
            for staged, plane in zip(self._planes(group, at, count), planes, strict=True):
                layers = _part(group.layers, pool.layout.layers)
                rows = plane[layers]
                rows = rows.view(*rows.shape[:2], count, BLOCK_TOKENS, -1).permute(2, 1, 0, 3, 4)
                _widest(staged).copy_(_widest(rows))

    def scatter(self, count: int, pages: Sequence[int], start: int, staged_blocks: int, *, skip: int) -> None:
        """Copy the first `count` of `staged_blocks` blocks from staging memory to `pages`, from token `start` on, but
        not their first `skip` tokens.
        """
        for index, pool in enumerate(self._pools):
            layout = pool.layout
            planes = [
                torch.empty(
                    (layout.num_layers, layout.num_heads, count, BLOCK_TOKENS, plane.token_bytes), dtype=torch.uint8
                )
                for plane in layout.planes
            ]
            for group, at in zip(self._groups, self._starts(staged_blocks), strict=True):
                if group.pool != index:
                    continue
                common = range(max(layout.layer_start, group.layers.start), min(layout.layer_end, group.layers.stop))
                for staged, plane in zip(self._planes(group, at, count), planes, strict=True):
                    rows = staged[:, :, _part(common, group.layers)].permute(2, 1, 0, 3, 4)
                    _widest(plane[_part(common, layout.layers)]).copy_(_widest(rows))
            pool.memory.write_tokens(pages, start + skip, [plane.flatten(2, 3)[:, :, skip:] for plane in planes])

    def _starts(self, count: int) -> list[int]:
        """Where each group begins in a batch of `count` blocks."""
        starts, start = [], 0
        for group in self._groups:
            starts.append(start)
            start += count * group.block_bytes
        return starts

    def _planes(self, group: _Group, at: int, count: int) -> list[torch.Tensor]:
        """A view `[block, head, layer, token, byte]` of each plane of a group."""
        views, offset = [], at + HEADER_BYTES
        for size in (plane.token_bytes for plane in group.kind.planes):
            shape = (count, len(group.heads), len(group.layers), BLOCK_TOKENS, size)
            strides = (group.block_bytes, group.slot_bytes, BLOCK_TOKENS * size, size, 1)
            views.append(self._memory.as_strided(shape, strides, offset))
            offset += len(group.layers) * BLOCK_TOKENS * size
        return views


def _part(wanted: range, held: range) -> slice:
    return slice(wanted.start - held.start, wanted.stop - held.start)


def _widest(rows: torch.Tensor) -> torch.Tensor:
    """The same bytes as larger elements, which are copied faster."""
    for dtype in (torch.int64, torch.int32):
        if all(number % dtype.itemsize == 0 for number in (rows.shape[-1], rows.storage_offset(), *rows.stride()[:-1])):
            return rows.view(dtype)
    return rows
