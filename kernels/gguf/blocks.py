"""Weights as a GGUF file stores them: rows of blocks, which have integers of a few bits and their scales.

Where the processor has AVX2, AVX-512, or NEON with dot products, blocks of some types are interleaved (interleaved.py).

A matrix may consist of parts of several types: q, k and v, which are one matrix in memory, often differ. Each part has
whole rows.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .interleaved import GROUP_ROWS, interleaves, plain_rows

PACKED_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""The types that kernels read."""


@functools.cache
def block_size(type_name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return int(elements), int(size_bytes)


@functools.cache
def ggml_number(type_name: str) -> int:
    """ggml's number of a type."""
    from gguf.constants import GGMLQuantizationType

    return int(GGMLQuantizationType[type_name])


@dataclass(frozen=True)
class GgufRows:
    """Some rows of a matrix, in one type."""

    blocks: torch.Tensor  # [rows, bytes of a row] uint8, contiguous
    type_name: str
    interleaved: bool = False

    @property
    def columns(self) -> int:
        elements, size_bytes = block_size(self.type_name)
        return self.blocks.shape[1] // size_bytes * elements

    def expanded(self) -> torch.Tensor:
        """The rows in float32."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        blocks = self.blocks
        if self.interleaved:
            blocks = plain_rows(blocks, self.type_name, torch.arange(len(blocks)))
        values = dequantize(blocks.numpy().reshape(1, -1), GGMLQuantizationType[self.type_name])
        return torch.from_numpy(np.require(values, np.float32, "W")).reshape(len(self.blocks), self.columns)


@dataclass(frozen=True)
class GgufBlocks:
    """One matrix [rows, columns] in memory of the CPU. See the module docstring."""

    parts: tuple[GgufRows, ...]  # adjacent ones differ in type or in being interleaved
    columns: int

    @staticmethod
    def allocate(
        parts: Sequence[tuple[int, str]], columns: int, *, device: torch.device, interleave: bool = False
    ) -> "GgufBlocks":
        """Uninitialised; `parts` are numbers of rows and their types. With `interleave`, parts are interleaved where
        possible.
        """
        merged: list[tuple[int, str, bool]] = []
        for rows, type_name in parts:
            kind = (type_name, interleave and interleaves(type_name, rows))
            if merged and merged[-1][1:] == kind:
                rows += merged.pop()[0]
            merged.append((rows, *kind))
        held = []
        for rows, type_name, interleaved in merged:
            elements, size_bytes = block_size(type_name)
            blocks = torch.empty(rows, columns // elements * size_bytes, dtype=torch.uint8, device=device)
            held.append(GgufRows(blocks, type_name, interleaved))
        return GgufBlocks(tuple(held), columns)

    def __len__(self) -> int:
        return sum(part.blocks.shape[0] for part in self.parts)

    def __getitem__(self, wanted: slice) -> "GgufBlocks":
        """A range of rows."""
        start, stop, _ = wanted.indices(len(self))
        parts, first = [], 0
        for part in self.parts:
            size = len(part.blocks)
            if start < first + size and first < stop:
                held = part.blocks[max(0, start - first) : stop - first]
                whole = max(0, start - first) % GROUP_ROWS == 0 and len(held) % GROUP_ROWS == 0
                assert whole or not part.interleaved, "a range of interleaved rows begins and ends with a group"
                parts.append(GgufRows(held, part.type_name, part.interleaved))
            first += size
        if not parts:  # of no rows
            parts = [GgufRows(self.parts[0].blocks[:0], self.parts[0].type_name)]
        return GgufBlocks(tuple(parts), self.columns)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self), self.columns))

    @property
    def nbytes(self) -> int:
        return sum(part.blocks.nbytes for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights as kernels read them."""
        return torch.float32

    def expanded(self) -> torch.Tensor:
        """The matrix in float32."""
        return torch.cat([part.expanded() for part in self.parts])


def fits_blocks(type_name: str, columns: int, first_column: int = 0) -> bool:
    """Whether these columns of a matrix are whole blocks."""
    elements, _ = block_size(type_name)
    return columns % elements == 0 and first_column % elements == 0
