"""Experts in MXFP4 (gpt-oss), repacked for the kernels of kernels/packed4/ if a rank's columns are whole blocks of both
matrices, otherwise expanded.

Blocks of 32 elements of a row have 4-bit values, two per byte, low half first, and a shared power of two. A tensor
`NAME` of all experts, [E, in, out], is stored as `NAME_blocks` [E, out, in / 32, 16] and `NAME_scales`
[E, out, in / 32], both uint8.
"""

import math

import torch

from ...common.errors import StartupError
from ...kernels.packed4.group_format import E2M1, MXFP4_BIAS, MXFP4_GROUP, GroupScaled, supports_int4
from .format import Checkpoint, Matrix, SafetensorsFormat, Shapes, StoredCheckpoint
from .noise import draw_rows
from .packed4 import Packed4Weight
from .schemes import Scheme
from .slots import Slot

_BLOCKS, _SCALES = "_blocks", "_scales"


def values_of(blocks: torch.Tensor) -> torch.Tensor:
    """The values [..., n * 32], 0 to 15, of blocks [..., n, 16]."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)


def expand(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [..., n * 32] in float32 of values and scales [..., n]."""
    table = torch.tensor(E2M1, dtype=torch.float32, device=values.device)
    blocks = table[values.int()].view(*scales.shape, MXFP4_GROUP)
    return torch.ldexp(blocks, scales.unsqueeze(-1).int() - MXFP4_BIAS).flatten(-2)


class Mxfp4Checkpoint(StoredCheckpoint):
    def __init__(self, scheme: Scheme, files: Checkpoint) -> None:  # noqa: ARG002 - as in other formats
        super().__init__(files)
        shapes = dict(files.shapes)
        found = set()
        for name, shape in files.shapes.items():
            tensor, scales = name.removesuffix(_BLOCKS), name.removesuffix(_BLOCKS) + _SCALES
            if not name.endswith(_BLOCKS) or scales not in files.shapes:
                continue
            if len(shape) != 4 or shape[3] != MXFP4_GROUP // 2:
                raise StartupError(
                    f"tensor '{name}' has shape {list(shape)}; MXFP4 blocks are [experts, rows, groups, "
                    f"{MXFP4_GROUP // 2}]"
                )
            if files.shapes[scales] != shape[:3]:
                raise StartupError(
                    f"tensor '{scales}' has shape {list(files.shapes[scales])}; the blocks need {list(shape[:3])}"
                )
            experts, rows, groups, _ = shape
            shapes[tensor] = (experts, groups * MXFP4_GROUP, rows)
            del shapes[name], shapes[scales]
            found.add(tensor)
        self.shapes, self.tensors = shapes, frozenset(found)

    def _read_stored(self, name: str, slot: Slot) -> None:
        first, *starts = slot.start
        columns, rows = (slice(start, start + size) for start, size in zip(starts, slot.size[1:], strict=True))
        groups = slice(columns.start // MXFP4_GROUP, columns.stop // MXFP4_GROUP)
        device = slot.target.device
        for index in range(slot.size[0]):  # one expert at a time: expanded it is 8 times as large
            blocks, scales = (
                self._of_expert(name + suffix, first + index, rows).to(device) for suffix in (_BLOCKS, _SCALES)
            )
            if isinstance(slot.weight, Packed4Weight):
                (expert,) = slot.weight.operand[index : index + 1].experts()
                expert.fill(values_of(blocks[:, groups]), scales[:, groups])
            else:
                slot.target[index].copy_(expand(values_of(blocks), scales)[:, columns].t())

    def _of_expert(self, name: str, expert: int, rows: slice) -> torch.Tensor:
        whole = [slice(0, size) for size in self._files.shapes[name][2:]]
        return self._read(name, torch.uint8, slice(expert, expert + 1), rows, *whole)[0]


class Mxfp4Format(SafetensorsFormat):
    label = "4-bit"
    together = True
    reason = "shards whose columns are not a multiple of 32"
    open = Mxfp4Checkpoint

    @classmethod
    def usual(cls, shapes: Shapes) -> frozenset[str]:
        return frozenset(name for name, shape in shapes.items() if len(shape) == 3)

    def runs_on(self, device: torch.device) -> bool:
        return supports_int4(device)

    def _divides(self, matrix: Matrix) -> bool:
        return matrix.columns % MXFP4_GROUP == 0

    def allocate(self, matrix: Matrix) -> Packed4Weight:
        return Packed4Weight(GroupScaled.allocate_mxfp4(*matrix.shape, device=matrix.device))

    def draw(self, name: str, slot: Slot, spread: float) -> None:
        """Experts [E, in, out], with the nearest numbers of MXFP4 and one scale, a power of two."""
        exponent = math.floor(math.log2(spread))
        table = torch.tensor(E2M1, device=slot.target.device)
        steps = table[: len(table) // 2]
        for held, _, drawn in draw_rows(name, slot, 0.0, spread * 2.0**-exponent):
            for index, expert in zip(range(held.start, held.stop), drawn, strict=True):
                values = torch.bucketize(expert.abs(), (steps[1:] + steps[:-1]) / 2) + 8 * (expert < 0)
                if not isinstance(slot.weight, Packed4Weight):
                    slot.target[index].copy_(table[values] * 2.0**exponent)
                    continue
                (part,) = slot.weight.operand[index : index + 1].experts()
                rows = values.t().to(torch.uint8)
                scales = torch.full((len(rows), rows.shape[1] // MXFP4_GROUP), exponent + MXFP4_BIAS)
                part.fill(rows, scales.to(rows.device))


FORMAT = Mxfp4Format
