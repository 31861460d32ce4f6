"""Random weights instead of a checkpoint's, to benchmark a geometry without its files (`--load-format dummy`).

An element depends only on its tensor's name, its position in the tensor and the device type. So all servers of a
cluster have the same model, however each of them divides it among its ranks, and whether it keeps or expands fp8 and
4-bit tensors. Matrices are N(0, 1 / fan_in), so that activations stay of order 1 through any number of layers. Tensors
in fp8 are drawn as fp8, with scales that differ by block, without a second copy of the model.
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping

import torch

from ...configs.arithmetic import ceil_div
from ...kernels.int4.group_format import E2M1, MXFP4_BIAS, MXFP4_GROUP
from ...kernels.linear.block_format import BLOCK, FP8, LARGEST
from ..decoders.slots import Slot

_BLOCK_ROWS = 1024
"""Rows per random seed: a rank generates few rows that it does not hold."""
_FP8_SPREAD = 64.0
"""Standard deviation of fp8 values; the largest number is at 7 of them."""
_INT4_SPREAD = 3.0
"""Standard deviation of 4-bit values; the largest is at 2.3 of them."""


def fill_with_noise(
    slots: Mapping[str, Slot], fp8: Collection[str] = (), int4: Collection[str] = (), *, row_scaled: bool = False
) -> None:
    """Fill every slot (dense_parameters.py) on its device, a block of rows at a time, with values that include its
    offset. `fp8` and `int4` are the tensors that a checkpoint would store in fp8, with a scale per block or per row
    (`row_scaled`), and in 4 bits.
    """
    for name, slot in slots.items():
        mean, spread = _distribution(name, slot.shape)
        if name in fp8:
            _fill_fp8(name, slot, spread, row_scaled=row_scaled)
            continue
        if name in int4:
            fill = _fill_int4 if len(slot.shape) == 2 else _fill_mxfp4
            fill(name, slot, spread)
            continue
        for held, _, drawn in _draw(name, slot, mean, spread):
            slot.target[held].copy_(drawn)


def _fill_fp8(name: str, slot: Slot, spread: float, *, row_scaled: bool) -> None:
    device = slot.target.device
    rows_per_scale, columns_per_scale = (1, slot.shape[1]) if row_scaled else (BLOCK, BLOCK)
    groups = ceil_div(slot.shape[0], rows_per_scale), ceil_div(slot.shape[1], columns_per_scale)
    scales = torch.empty(groups, dtype=torch.float32, device=device)
    scales.uniform_(0.75 * spread / _FP8_SPREAD, 1.25 * spread / _FP8_SPREAD, generator=_generator(name, "s", device))
    if slot.block_scaled is not None:
        slot.fill_scales(scales)
    columns = slot.start[1] + torch.arange(slot.target.shape[1], device=device)
    for held, first_row, drawn in _draw(name, slot, 0.0, _FP8_SPREAD):
        target = slot.target[held]
        values = drawn.clamp_(-LARGEST, LARGEST).to(FP8)
        if slot.block_scaled is None:
            rows = first_row + torch.arange(len(target), device=device)
            target.copy_(values.float().mul_(scales[rows // rows_per_scale][:, columns // columns_per_scale]))
        else:
            target.copy_(values)


def _fill_int4(name: str, slot: Slot, spread: float) -> None:
    """Values of 0 to 15 around a zero point of 8, with one scale."""
    scale = spread / _INT4_SPREAD
    for held, _, drawn in _draw(name, slot, 8.0, _INT4_SPREAD):
        values = drawn.round_().clamp_(0, 15)
        if slot.int4 is None:
            slot.target[held].copy_((values - 8) * scale)
            continue
        part = slot.int4[held]
        scales = torch.full((len(values), part.columns // part.group), scale, device=values.device)
        part.fill(values.to(torch.uint8), scales, torch.full_like(scales, 8))


def _fill_mxfp4(name: str, slot: Slot, spread: float) -> None:
    """Experts [E, in, out], with the nearest numbers of MXFP4 and one scale, a power of two."""
    exponent = math.floor(math.log2(spread))
    table = torch.tensor(E2M1, device=slot.target.device)
    steps = table[: len(table) // 2]
    for held, _, drawn in _draw(name, slot, 0.0, spread * 2.0**-exponent):
        for index, expert in zip(range(held.start, held.stop), drawn, strict=True):
            values = torch.bucketize(expert.abs(), (steps[1:] + steps[:-1]) / 2) + 8 * (expert < 0)
            if slot.int4 is None:
                slot.target[index].copy_(table[values] * 2.0**exponent)
                continue
            (part,) = slot.int4[index : index + 1].experts()
            rows = values.t().to(torch.uint8)
            scales = torch.full((len(rows), rows.shape[1] // MXFP4_GROUP), exponent + MXFP4_BIAS, device=rows.device)
            part.fill(rows, scales)


def _draw(name: str, slot: Slot, mean: float, spread: float) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Rows of the slot, the number of the first one in the checkpoint tensor, and their random values in float32."""
    first, last = slot.start[0], slot.start[0] + slot.size[0]
    columns = tuple(slice(start, start + size) for start, size in zip(slot.start[1:], slot.size[1:], strict=True))
    for block in range(first // _BLOCK_ROWS, ceil_div(last, _BLOCK_ROWS)):
        start, end = block * _BLOCK_ROWS, min((block + 1) * _BLOCK_ROWS, slot.shape[0])
        drawn = torch.empty((end - start, *slot.shape[1:]), dtype=torch.float32, device=slot.target.device)
        drawn.normal_(mean, spread, generator=_generator(name, block, drawn.device))
        held = slice(max(first, start), min(last, end))
        part = drawn[held.start - start : held.stop - start]
        yield slice(held.start - first, held.stop - first), held.start, part[(slice(None), *columns)]


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor of this name."""
    if len(shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    return 0.0, 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5


def _generator(name: str, block: int | str, device: torch.device) -> torch.Generator:
    seed = int.from_bytes(hashlib.blake2b(f"{name} {block}".encode(), digest_size=8).digest(), "little")
    return torch.Generator(device).manual_seed(seed)
