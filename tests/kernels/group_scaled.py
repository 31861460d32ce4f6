"""Random 4-bit weights for kernel tests."""

import torch

from pdserve.kernels.packed4.group_format import GroupScaled


def draw_group_scaled(
    rows: int,
    columns: int,
    *,
    generator: torch.Generator,
    group: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> GroupScaled:
    """Weights of about N(0, 1 / columns); scales and zero points differ between groups."""
    values = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
    groups = columns // group
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / 5 / columns**0.5
    zeros = torch.randint(17, (rows, groups), generator=generator)
    device = device or torch.device("cpu")
    weight = GroupScaled.allocate(rows, columns, group=group, dtype=dtype, device=device)
    weight.fill(values.to(device), scales.to(device), zeros.to(device))
    return weight


def draw_packed_experts(
    experts: int,
    rows: int,
    columns: int,
    *,
    generator: torch.Generator,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> GroupScaled:
    """The same for several experts."""
    weight = GroupScaled.allocate(experts, rows, columns, group=group, dtype=dtype, device=device)
    for expert in weight.experts():
        drawn = draw_group_scaled(rows, columns, generator=generator, group=group, dtype=dtype)
        assert expert.zeros is not None
        assert drawn.zeros is not None
        expert.packed.copy_(drawn.packed)
        expert.scales.copy_(drawn.scales)
        expert.zeros.copy_(drawn.zeros)
    return weight


def draw_mxfp4_experts(
    experts: int, rows: int, columns: int, *, generator: torch.Generator, device: torch.device
) -> GroupScaled:
    """Experts in MXFP4 with weights of about N(0, 1 / columns); scales differ between blocks."""
    weight = GroupScaled.allocate_mxfp4(experts, rows, columns, device=device)
    middle = 127 - round(torch.tensor(6.0 * columns).log2().item() / 2)
    for expert in weight.experts():
        values = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
        scales = torch.randint(middle - 1, middle + 2, (rows, columns // 32), generator=generator, dtype=torch.uint8)
        expert.fill(values.to(device), scales.to(device))
    return weight
