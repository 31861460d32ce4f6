"""Finds the tensors of a model that are stored in 4 bits, and logs the cost of expanding them."""

import logging
from collections.abc import Collection, Mapping

import torch

from ...configs.setting_types import LoadFormat
from ...kernels.int4.group_format import supports_int4
from ...memory.sizing import GIB
from ..decoders.slots import Slot
from .catalog import ModelSource
from .fp8_weights import usual_tensors
from .mxfp4_checkpoint import Mxfp4Checkpoint, stacked_experts
from .weights import SafetensorsCheckpoint, int4_checkpoint

log = logging.getLogger(__name__)


def int4_tensors(source: ModelSource, load_format: LoadFormat) -> frozenset[str]:
    """The tensors that are stored in 4 bits; with dummy weights, those that a checkpoint would have."""
    if source.config.mxfp4_experts:
        if load_format == "dummy":
            return stacked_experts(source.config.num_layers)
        return Mxfp4Checkpoint(SafetensorsCheckpoint(source.path)).packed
    if source.config.int4 is None:
        return frozenset()
    return usual_tensors(source.config) if load_format == "dummy" else int4_checkpoint(source).int4


def kept_in_int4(stored: frozenset[str], device: torch.device) -> frozenset[str]:
    """The tensors that may stay in 4 bits on this device: all of them, or none."""
    return stored if supports_int4(device) else frozenset()


def log_int4_expansion(slots: Mapping[str, Slot], stored: Collection[str], device: torch.device) -> None:
    """Log the memory that it costs to expand tensors of a rank instead of keeping them as they are stored."""
    all_targets = [slot for name, slot in slots.items() if name in stored]
    expanded = [slot.target for slot in all_targets if slot.int4 is None]
    if not expanded:
        return
    reason = "latent attention, and shards whose columns are not a multiple of 32"
    log.info(
        "4-bit weights: %d of %d tensors are dequantized to %s and take %.2f GiB more (%s)",
        len(expanded),
        len(all_targets),
        str(expanded[0].dtype).removeprefix("torch."),
        sum(target.nbytes - target.numel() / 2 for target in expanded) / GIB,
        reason if supports_int4(device) else f"{device} has no 4-bit kernels",
    )
