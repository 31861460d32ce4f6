"""Checkpoints with experts in MXFP4 (gpt-oss), repacked or expanded during loading.

Blocks of 32 elements of a row have 4-bit values, two per byte, low half first, and a shared power of two. A tensor
`NAME` of all experts, [E, in, out], is stored as `NAME_blocks` [E, out, in / 32, 16] and `NAME_scales`
[E, out, in / 32], both uint8.
"""

import torch

from ...configs.errors import StartupError
from ...kernels.int4.group_format import E2M1, MXFP4_BIAS, MXFP4_GROUP
from ..decoders.slots import Slot
from .checkpoint import Checkpoint

_BLOCKS, _SCALES = "_blocks", "_scales"


def stacked_experts(num_layers: int) -> frozenset[str]:
    """The tensors in MXFP4 of a published checkpoint."""
    return frozenset(
        f"model.layers.{layer}.mlp.experts.{part}"
        for layer in range(num_layers)
        for part in ("gate_up_proj", "down_proj")
    )


def values_of(blocks: torch.Tensor) -> torch.Tensor:
    """The values [..., n * 32], 0 to 15, of blocks [..., n, 16]."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3)


def expand(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [..., n * 32] in float32 of values and scales [..., n]."""
    table = torch.tensor(E2M1, dtype=torch.float32, device=values.device)
    blocks = table[values.int()].view(*scales.shape, MXFP4_GROUP)
    return torch.ldexp(blocks, scales.unsqueeze(-1).int() - MXFP4_BIAS).flatten(-2)


class Mxfp4Checkpoint:
    """The files of a checkpoint, with one tensor in place of blocks and scales."""

    def __init__(self, files: Checkpoint) -> None:
        """Raises StartupError if blocks and scales do not fit together."""
        self._files = files
        self.shapes = dict(files.shapes)
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
            self.shapes[tensor] = (experts, groups * MXFP4_GROUP, rows)
            del self.shapes[name], self.shapes[scales]
            found.add(tensor)
        self.packed = frozenset(found)
        """The tensors in MXFP4."""

    def read_into(self, name: str, slot: Slot) -> None:
        if name not in self.packed:
            self._files.read_into(name, slot)
            return
        first, *starts = slot.start
        columns, rows = (slice(start, start + size) for start, size in zip(starts, slot.size[1:], strict=True))
        groups = slice(columns.start // MXFP4_GROUP, columns.stop // MXFP4_GROUP)
        device = slot.target.device
        for index in range(slot.size[0]):  # one expert at a time: expanded it is 8 times as large
            blocks, scales = (
                self._read(name + suffix, first + index, rows).to(device) for suffix in (_BLOCKS, _SCALES)
            )
            if slot.int4 is not None:
                (expert,) = slot.int4[index : index + 1].experts()
                expert.fill(values_of(blocks[:, groups]), scales[:, groups])
            else:
                slot.target[index].copy_(expand(values_of(blocks), scales)[:, columns].t())

    def _read(self, name: str, expert: int, rows: slice) -> torch.Tensor:
        shape = self._files.shapes[name]
        target = torch.empty((1, rows.stop - rows.start, *shape[2:]), dtype=torch.uint8)
        self._files.read_into(name, Slot(target, shape, (expert, rows.start, *(0 for _ in shape[2:]))))
        return target[0]
