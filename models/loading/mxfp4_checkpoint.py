"""Checkpoints with experts in MXFP4 (gpt-oss), expanded during loading.

Blocks of 32 elements of a row have 4-bit values, two per byte, low half first, and a shared power of two. A tensor
`NAME` of all experts, [E, in, out], is stored as `NAME_blocks` [E, out, in / 32, 16] and `NAME_scales`
[E, out, in / 32], both uint8.
"""

import logging
from collections.abc import Mapping

import torch

from ...memory.sizing import GIB
from ..decoders.slots import Slot
from .checkpoint import Checkpoint

log = logging.getLogger(__name__)

BLOCK = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def expand(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [..., n * 32] in float32 of blocks [..., n, 16] and scales [..., n]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.float32, device=blocks.device)
    pairs = torch.stack((values[(blocks & 15).int()], values[(blocks >> 4).int()]), dim=-1)  # [..., n, 16, 2]
    return torch.ldexp(pairs.flatten(-2), scales.unsqueeze(-1).int() - _BIAS).flatten(-2)


class Mxfp4Checkpoint:
    """The files of a checkpoint, with the expanded tensors in place of blocks and scales."""

    def __init__(self, files: Checkpoint) -> None:
        self._files = files
        self.shapes = dict(files.shapes)
        self._packed: set[str] = set()
        for name, shape in files.shapes.items():
            tensor = name.removesuffix(_BLOCKS)
            if name.endswith(_BLOCKS) and len(shape) == 4 and tensor + _SCALES in files.shapes:
                experts, rows, groups, _ = shape
                self.shapes[tensor] = (experts, groups * BLOCK, rows)
                del self.shapes[name], self.shapes[tensor + _SCALES]
                self._packed.add(tensor)

    def read_into(self, name: str, slot: Slot) -> None:
        if name not in self._packed:
            self._files.read_into(name, slot)
            return
        first, *starts = slot.start
        columns, rows = (slice(start, start + size) for start, size in zip(starts, slot.target.shape[1:], strict=True))
        for index, target in enumerate(slot.target):  # one expert at a time: expanded it is 8 times as large
            blocks, scales = (self._read(name + suffix, first + index, rows) for suffix in (_BLOCKS, _SCALES))
            target.copy_(expand(blocks, scales)[:, columns].t())

    def _read(self, name: str, expert: int, rows: slice) -> torch.Tensor:
        shape = self._files.shapes[name]
        target = torch.empty((1, rows.stop - rows.start, *shape[2:]), dtype=torch.uint8)
        self._files.read_into(name, Slot(target, shape, (expert, rows.start, *(0 for _ in shape[2:]))))
        return target[0]

    def log_expansion(self, slots: Mapping[str, Slot]) -> None:
        """One line with the memory of this rank that the expanded experts take."""
        targets = [slots[name].target for name in slots.keys() & self._packed]
        if targets:
            packed_bytes = sum(target.numel() for target in targets) * (0.5 + 1 / BLOCK)
            held = sum(target.nbytes for target in targets) / GIB
            log.info(
                "experts in MXFP4 are expanded to %s: %.1f GiB instead of %.1f GiB",
                str(targets[0].dtype).removeprefix("torch."),
                held,
                packed_bytes / GIB,
            )
