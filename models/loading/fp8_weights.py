"""Finds the tensors of a model that are stored in fp8 with scales that kernels read, and logs the cost of expansion."""

import functools
import logging
from collections.abc import Collection, Mapping

import torch

from ...configs.setting_types import LoadFormat
from ...kernels.linear.block_format import BLOCK, supports_fp8
from ...memory.sizing import GIB
from ..config.model import ModelConfig
from ..decoders.dense_parameters import DecoderParameters
from ..decoders.latent_parameters import LatentParameters
from ..decoders.slots import Slot
from .block_scaled_checkpoint import BlockScaledCheckpoint
from .catalog import ModelSource
from .row_scaled_checkpoint import RowScaledCheckpoint
from .weights import SafetensorsCheckpoint

log = logging.getLogger(__name__)

_IN_16_BITS = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", "weights_proj.weight")
"""Matrices that checkpoints of these families do not quantise."""


def fp8_tensors(source: ModelSource, load_format: LoadFormat) -> frozenset[str]:
    """The tensors with a scale per block of 128 x 128, per row or per matrix; with dummy weights, those that a
    checkpoint would have.
    """
    if source.config.weight_block != (BLOCK, BLOCK) and not source.config.row_scaled_fp8:
        return frozenset()
    if load_format == "dummy":
        return usual_tensors(source.config)
    files = SafetensorsCheckpoint(source.path)
    if source.config.row_scaled_fp8:
        return RowScaledCheckpoint(files).fp8
    return BlockScaledCheckpoint(files, source.config).fp8


def kept_in_fp8(stored: frozenset[str], device: torch.device) -> frozenset[str]:
    """The tensors that stay in fp8 on this device: all of them, or none."""
    return stored if supports_fp8(device) else frozenset()


def log_expansion(slots: Mapping[str, Slot], stored: Collection[str], device: torch.device) -> None:
    """Log the memory that it costs to expand tensors of a rank instead of keeping them as they are stored."""
    fp8 = {name: slot for name, slot in slots.items() if name in stored}
    expanded = [slot for slot in fp8.values() if slot.block_scaled is None]
    if not expanded:
        return
    reason = "kv_b_proj, and shards that begin or end inside a block of columns"
    log.info(
        "fp8 weights: %d of %d tensors are dequantized to %s and take %.2f GiB more (%s)",
        len(expanded),
        len(fp8),
        str(expanded[0].target.dtype).removeprefix("torch."),
        sum(slot.target.nbytes - slot.target.numel() for slot in expanded) / GIB,
        reason if supports_fp8(device) else f"{device} has no fp8 kernels",
    )


@functools.lru_cache(maxsize=4)
def usual_tensors(config: ModelConfig) -> frozenset[str]:
    """The matrices that quantised checkpoints of a model have in fewer than 16 bits.

    Cached, because plans ask for the same model with several layouts, and each call takes a second for a model with
    many experts.
    """
    parameters = DecoderParameters if config.mla is None else LatentParameters
    slots = parameters.allocate(config, device=torch.device("meta"), dtype=torch.bfloat16).slots()
    return frozenset(name for name, slot in slots.items() if len(slot.shape) == 2 and not name.endswith(_IN_16_BITS))
