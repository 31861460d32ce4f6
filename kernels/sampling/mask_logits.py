"""Keeps the logits of allowed tokens; sets the others to -inf.

    out[r, t] = logits[r, t]      if slots[r] < 0 or bit t % 32 of masks[slots[r], t // 32] is set, else -inf

Shapes: logits [B, V] float32 with contiguous rows, slots [B] int32, masks [G, ceil(V / 32)] int32; out [B, V], new: the
raw logits are still needed for log-probabilities. Lower bound: logits read and written once, masks read once.
"""

import torch

from ..backends.dispatch import Impl, launcher, use_triton


def mask_logits_reference(logits: torch.Tensor, slots: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    rows = masks.index_select(0, slots.clamp(min=0).long())
    bits = rows.unsqueeze(2).bitwise_right_shift(torch.arange(32, dtype=torch.int32, device=masks.device))
    allowed = bits.bitwise_and(1).flatten(1)[:, : logits.shape[1]].bool() | (slots < 0).unsqueeze(1)
    return logits.where(allowed, logits.new_full((), -torch.inf))


def mask_logits(logits: torch.Tensor, slots: torch.Tensor, masks: torch.Tensor, *, impl: Impl = "auto") -> torch.Tensor:
    """See the module docstring."""
    dtypes = (logits.dtype, slots.dtype, masks.dtype)
    if dtypes != (torch.float32, torch.int32, torch.int32):
        raise ValueError(f"logits must be float32, slots and masks int32, got {dtypes}")
    words = -(-logits.shape[1] // 32)
    if slots.shape != (len(logits),) or masks.ndim != 2 or masks.shape[1] != words or not len(masks):
        raise ValueError(
            f"slots {list(slots.shape)} and masks {list(masks.shape)} do not fit logits {list(logits.shape)}"
        )
    if logits.stride(1) != 1 or not masks.is_contiguous():
        raise ValueError("rows of logits and masks must be contiguous")
    if not use_triton(impl, logits.device):
        return mask_logits_reference(logits, slots, masks)
    out = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if len(logits):
        launcher("sampling.mask_logits_triton", "launch_mask_logits")(logits, slots, masks, out)
    return out
