"""Random 4-bit weights for kernel tests."""

import torch

from pdserve.kernels.int4.group_format import GroupScaled


def draw_group_scaled(
    rows: int,
    columns: int,
    *,
    generator: torch.Generator,
    group: int = 128,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> GroupScaled:
    """Weights of about N(0, 1 / columns) whose scales and zeros differ from group to group."""
    values = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
    groups = columns // group
    scales = (torch.rand(rows, groups, generator=generator) + 0.5) / 5 / columns**0.5
    zeros = torch.randint(17, (rows, groups), generator=generator)
    device = device or torch.device("cpu")
    weight = GroupScaled.allocate(rows, columns, group=group, dtype=dtype, device=device)
    weight.fill(values.to(device), scales.to(device), zeros.to(device))
    return weight
