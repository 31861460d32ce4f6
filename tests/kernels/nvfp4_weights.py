"""Random NVFP4 weights for kernel tests."""

import torch

from pdserve.kernels.nvfp4.nvfp4 import Nvfp4Matrix
from pdserve.kernels.nvfp4.nvfp4_experts import Nvfp4Experts


def draw_nvfp4(
    rows: int, columns: int, *, generator: torch.Generator, device: torch.device | None = None
) -> Nvfp4Matrix:
    weight = Nvfp4Matrix.allocate(rows, columns, device=device or torch.device("cpu"))
    _fill(weight, generator)
    return weight


def draw_nvfp4_experts(
    count: int, rows: int, columns: int, *, generator: torch.Generator, device: torch.device
) -> Nvfp4Experts:
    weight = Nvfp4Experts.allocate(count, rows, columns, device=device)
    for expert in weight.experts():
        _fill(expert, generator)
    return weight


def _fill(weight: Nvfp4Matrix | Nvfp4Experts, generator: torch.Generator) -> None:
    """Scales of all sizes, also subnormal ones, so that one misplaced changes the result."""
    rows, columns = weight.shape
    values = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 0x50, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    factors = torch.rand(rows, generator=generator) / columns**0.5
    device = weight.packed.device
    weight.fill(values.to(device), scales.to(device).view(torch.float8_e4m3fn), factors)
