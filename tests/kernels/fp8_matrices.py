"""Random fp8 weights for kernel tests."""

import torch

from pdserve.kernels.linear.fp8_format import BLOCK, FP8, Fp8Matrix


def draw_block_scaled(*shape: int, generator: torch.Generator, row_group: int = BLOCK) -> Fp8Matrix:
    """Weights of about N(0, 1 / columns) on the CPU; scales differ between blocks."""
    weight = Fp8Matrix.allocate(*shape, row_group=row_group, device=torch.device("cpu"))
    weight.values.copy_((torch.randn(shape, generator=generator) * 64).clamp(-448, 448).to(FP8))
    blocks = -(-shape[-1] // BLOCK)
    drawn = torch.rand(*weight.scales.shape[:-1], blocks, generator=generator) + 0.5
    weight.scales[..., :blocks] = drawn / 64 / shape[-1] ** 0.5
    weight.scales[..., blocks:] = torch.nan  # padding is not read
    return weight


def draw_row_scaled(*shape: int, generator: torch.Generator) -> Fp8Matrix:
    """The same, with a scale per row."""
    weight = Fp8Matrix.allocate_by_row(*shape, device=torch.device("cpu"))
    weight.values.copy_((torch.randn(shape, generator=generator) * 64).clamp(-448, 448).to(FP8))
    weight.scales.copy_((torch.rand(weight.scales.shape, generator=generator) + 0.5) / 64 / shape[-1] ** 0.5)
    return weight


def moved(weight: Fp8Matrix, device: torch.device) -> Fp8Matrix:
    return Fp8Matrix(weight.values.to(device), weight.scales.to(device), weight.row_group)
