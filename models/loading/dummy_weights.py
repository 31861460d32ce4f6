"""Random weights instead of a checkpoint's, to benchmark a geometry without its files (`--load-format dummy`).

An element depends only on its tensor's name, its position in the tensor and the device type. So all servers of a
cluster have the same model, however each of them divides it among its ranks, and whether it keeps or expands fp8 and
4-bit tensors. Matrices are N(0, 1 / fan_in), so that activations stay of order 1 through any number of layers. Tensors
in fp8 are drawn as fp8, with scales that differ by block, without a second copy of the model.
"""

from collections.abc import Mapping

from ..weights.format import Format, SafetensorsFormat
from ..weights.noise import draw_rows
from ..weights.slots import Slot


def fill_with_noise(slots: Mapping[str, Slot], stored: Format | None = None) -> None:
    """Fill every slot (slots.py) on its device, a block of rows at a time, with values that include its
    offset. `stored` has the tensors that a checkpoint would store in its format.
    """
    for name, slot in slots.items():
        mean, spread = _distribution(name, slot.shape)
        if isinstance(stored, SafetensorsFormat) and name in stored.tensors:
            stored.draw(name, slot, spread)
            continue
        for held, _, drawn in draw_rows(name, slot, mean, spread):
            slot.target[held].copy_(drawn)


def _distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation of a tensor of this name."""
    if len(shape) == 1:
        return (0.0, 0.1) if name.endswith("bias") else (1.0, 0.1)
    return 0.0, 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5
