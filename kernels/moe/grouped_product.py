"""Tells where torch's grouped product reads the ends of groups on the device."""

import torch

_CAPABILITIES = (9, 10)
"""Major compute capabilities with such a product."""


def grouped_without_wait(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `grouped_mm` of torch does not wait for the GPU, so that a CUDA graph can capture it: in bfloat16 on some
    GPUs. Elsewhere it reads the ends of groups on the host.
    """
    if device.type != "cuda":
        return dtype == torch.bfloat16
    return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in _CAPABILITIES
