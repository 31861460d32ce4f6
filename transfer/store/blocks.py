"""What the store holds: blocks of BLOCK_TOKENS tokens, cut into cells that do not depend on the layout of a server.

A cell is one block of one KV head and a range of layers, all planes of a pool: `[plane][layer][token][bytes]`. Its key
has the hash of the block, which covers all tokens before it and the model, and everything that decides what the bytes
mean. Servers of any page size and tensor parallelism write and read the same cells. Pipeline stages write cells of
their own layers; a reader with another number of stages finds them under the layer ranges of the usual numbers of
stages (`read_plans`). Pure.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..protocol.layout import KvLayout, Plane

BLOCK_TOKENS = 32
"""Tokens of a block. A cell of a typical model is then about 0.5 MiB, which the store moves at its full rate."""
KEY_VERSION = "pdserve1"
USUAL_STAGES = (1, 2, 3, 4, 8)
"""Numbers of pipeline stages whose layer ranges a reader looks for, besides its own."""


@dataclass(frozen=True, slots=True)
class CellKind:
    """The pool of a cell: what a row is. Cells of two servers correspond if these are equal."""

    planes: tuple[Plane, ...]
    dtype: str

    def __str__(self) -> str:
        return "+".join(f"{plane.name}:{plane.token_bytes}" for plane in self.planes) + f".{self.dtype}"

    def size_bytes(self, layers: range) -> int:
        """Bytes of a cell with these layers."""
        return len(layers) * BLOCK_TOKENS * sum(plane.token_bytes for plane in self.planes)


@dataclass(frozen=True, slots=True)
class Cell:
    """A part of each block: these layers of one head. Layers and heads are global."""

    kind: CellKind
    layers: range
    head: int

    @property
    def size_bytes(self) -> int:
        return self.kind.size_bytes(self.layers)

    def key(self, block: bytes) -> str:
        """The key of this part of the block with the hash `block`."""
        return f"{KEY_VERSION}/{block.hex()}/{self.kind}/{self.layers.start}-{self.layers.stop}/{self.head}"


@dataclass(frozen=True, slots=True)
class PoolShard:
    """One pool of a rank. `stage_layers(n)` gives the layers of every stage if there are n stages, in the numbering of
    the pool; an empty list if the model cannot be divided into n stages. `writes` is set on one of the ranks that hold
    the same heads.
    """

    layout: KvLayout
    stage_layers: Callable[[int], Sequence[range]]
    writes: bool = True

    @property
    def kind(self) -> CellKind:
        return CellKind(self.layout.planes, self.layout.dtype)

    @property
    def cells(self) -> list[Cell]:
        """The cells that this rank writes."""
        return [Cell(self.kind, self.layout.layers, head) for head in self.layout.heads]


ReadPlan = tuple[tuple[int, Cell], ...]
"""Cells that hold together all KV of a rank, each with the index of its pool."""


def read_plans(pools: Sequence[PoolShard]) -> list[ReadPlan]:
    """The ways to read the KV of a rank, its own layers first."""
    plans = [tuple((index, cell) for index, pool in enumerate(pools) for cell in pool.cells)]
    for stages in USUAL_STAGES:
        plan = tuple(itertools.chain.from_iterable(_cells(index, pool, stages) for index, pool in enumerate(pools)))
        if plan and plan not in plans and len({index for index, _ in plan}) == len(pools):
            plans.append(plan)
    return plans


def _cells(index: int, pool: PoolShard, stages: int) -> Iterator[tuple[int, Cell]]:
    own = pool.layout.layers
    for head in pool.layout.heads:
        for layers in pool.stage_layers(stages):
            if layers.start < own.stop and own.start < layers.stop:
                yield index, Cell(pool.kind, layers, head)
