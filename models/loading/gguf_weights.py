"""Finds the tensors of a GGUF file that stay in its blocks, and logs the cost of expanding the others."""

import logging
from collections import Counter
from collections.abc import Mapping

import torch

from ...configs.setting_types import CpuKernelsSetting, DtypeSetting, LoadFormat
from ...kernels.backends.dispatch import numba_computes
from ...kernels.gguf.blocks import PACKED_TYPES, block_size
from ...memory.sizing import GIB
from ..decoders.slots import Slot
from ..formats.gguf_file import open_gguf
from .catalog import ModelSource
from .weights import GgufCheckpoint

log = logging.getLogger(__name__)


def keeps_blocks(dtype: DtypeSetting, cpu_kernels: CpuKernelsSetting, device: torch.device) -> bool:
    """Whether a server with these settings computes with the blocks of a GGUF file. Only the Numba kernels read blocks,
    and if the user sets a dtype, the weights are converted to it.
    """
    return dtype == "auto" and device.type == "cpu" and numba_computes(cpu_kernels)


def gguf_types(source: ModelSource, load_format: LoadFormat) -> dict[str, str]:
    """The matrices in types that can stay as they are, with their types; none if the weights are random."""
    if source.format != "gguf" or load_format == "dummy":
        return {}
    types = GgufCheckpoint(open_gguf(source.path), source.config).types
    return {name: type_name for name, type_name in types.items() if type_name in PACKED_TYPES}


def log_blocks(slots: Mapping[str, Slot], stored: Mapping[str, str], device: torch.device, *, keep: bool) -> None:
    """Log how much stays in blocks, and the cost of expanding other tensors. `keep`: blocks are kept if possible."""
    matrices = {name: slot for name, slot in slots.items() if name in stored}
    kept = [slot for slot in matrices.values() if slot.gguf is not None]
    if kept:
        types = Counter(slot.gguf.type_name for slot in kept if slot.gguf is not None)
        found = ", ".join(f"{count} of {name}" for name, count in types.most_common())
        log.info("GGUF weights: %.2f GiB stay quantized (%s)", sum(s.nbytes for s in kept) / GIB, found)
    expanded = {name: slot for name, slot in matrices.items() if slot.gguf is None}
    if not expanded:
        return
    reason = "shards that begin or end inside a block, or layers with other types" if keep else _reason(device)
    log.info(
        "GGUF weights: %d of %d tensors are dequantized to %s and take %.2f GiB instead of %.2f (%s)",
        len(expanded),
        len(matrices),
        str(next(iter(expanded.values())).target.dtype).removeprefix("torch."),
        sum(slot.nbytes for slot in expanded.values()) / GIB,
        sum(_stored_bytes(slot, stored[name]) for name, slot in expanded.items()) / GIB,
        reason,
    )


def _reason(device: torch.device) -> str:
    if device.type != "cpu":
        return f"{device} has no kernels for them"
    return (
        "they stay quantized with dtype = auto" if numba_computes() else "only the Numba kernels read quantized weights"
    )


def _stored_bytes(slot: Slot, type_name: str) -> float:
    elements, size_bytes = block_size(type_name)
    return slot.target.numel() / elements * size_bytes
