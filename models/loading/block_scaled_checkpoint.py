"""Reads checkpoints in block-scaled fp8: keeps or expands fp8, and skips unused tensors of DeepSeek and GLM."""

import re

import torch

from ...configs.arithmetic import ceil_div
from ...configs.errors import StartupError
from ...kernels.linear.block_format import BLOCK
from ..config.model import ModelConfig
from ..decoders.slots import Slot
from .checkpoint import Checkpoint

_SCALES = ("_scale_inv", "_scale")
"""Of DeepSeek and of compressed-tensors."""


class BlockScaledCheckpoint:
    """Wraps a checkpoint. A tensor with a companion `<name>_scale_inv` or `<name>_scale` is stored in blocks of fp8:

        value[i, j] = stored[i, j] * scales[i // block rows, j // block columns]

    It is expanded, unless its slot is block-scaled too: then values and scales are copied.

    In checkpoints of DeepSeek and GLM, nothing uses the extra layers for multi-token prediction and the indexers of
    layers that do not select, so these are skipped.
    """

    def __init__(self, files: Checkpoint, config: ModelConfig) -> None:
        self._files = files
        self._block = config.weight_block
        named = (suffix for suffix in _SCALES if any(name.endswith(suffix) for name in files.shapes))
        self._suffix = next(named, _SCALES[0])
        self.shapes = {
            name: shape
            for name, shape in files.shapes.items()
            if not self._is_scale(name) and not (config.mla is not None and _is_unused(name, config))
        }

    @property
    def fp8(self) -> frozenset[str]:
        """The tensors that can stay in fp8: matrices with a scale per block of 128 x 128."""
        if self._block != (BLOCK, BLOCK):
            return frozenset()
        return frozenset(name for name in self.shapes if name + self._suffix in self._files.shapes)

    def read_into(self, name: str, slot: Slot) -> None:
        """See `Checkpoint`; raises StartupError if the number of scales is not that of the blocks."""
        scales_name = name + self._suffix
        if self._block is None or scales_name not in self._files.shapes:
            self._files.read_into(name, slot)
            return
        expected = tuple(ceil_div(size, block) for size, block in zip(slot.shape, self._block, strict=True))
        found = self._files.shapes[scales_name]
        if found != expected:
            raise StartupError(
                f"tensor {scales_name!r} has shape {list(found)}; {list(slot.shape)} in blocks of {list(self._block)} "
                f"takes {list(expected)}"
            )
        device = slot.target.device
        scales = torch.empty(expected, dtype=torch.float32)
        self._files.read_into(scales_name, Slot.whole(scales))
        if slot.block_scaled is not None:
            self._files.read_into(name, Slot(slot.target, slot.shape, slot.start))
            slot.fill_scales(scales)
            return
        scales = scales.to(device)
        values = torch.empty(slot.target.shape, dtype=torch.float32, device=device)
        self._files.read_into(name, Slot(values, slot.shape, slot.start))
        rows, columns = (
            torch.arange(start, start + size, device=device) // block
            for start, size, block in zip(slot.start, slot.target.shape, self._block, strict=True)
        )
        slot.target.copy_(values.mul_(scales[rows][:, columns]))

    def _is_scale(self, name: str) -> bool:
        return self._block is not None and name.endswith(self._suffix)


def _is_unused(name: str, config: ModelConfig) -> bool:
    found = re.match(r"model\.layers\.(\d+)\.(self_attn\.indexer\.)?", name)
    if found is None:
        return False
    layer = int(found[1])
    if layer >= config.num_layers:
        return True
    return found[2] is not None and config.dsa is not None and not config.dsa.indexed[layer]
