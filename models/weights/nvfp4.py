"""Weights in NVFP4: values of 4 bits, a scale in fp8 per 16 columns, and a factor per matrix.

    weight[i, j]  =  E2M1[value[i, j]] * scale[i, j // 16] * factor

Two values of adjacent columns are in a byte, the first in its low half. A matrix [out, in] of a module is stored as

    compressed-tensors   weight_packed [out, in / 2], weight_scale [out, in / 16], weight_global_scale, the inverse of
                         the factor
    ModelOpt             weight [out, in / 2], weight_scale [out, in / 16], weight_scale_2, the factor

Scales of activations and of KV are ignored: activations are not quantised. A matrix is repacked for the kernels of
kernels/nvfp4/ if a rank's columns are whole groups; of experts, both matrices are or neither is. Others are expanded,
and matrices of latent attention always.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...common.errors import StartupError
from ...kernels.backends.dispatch import use_triton
from ...kernels.nvfp4.nvfp4 import GROUP, Nvfp4Matrix, nvfp4_linear, supports_nvfp4
from ...kernels.nvfp4.nvfp4_experts import Nvfp4Experts, nvfp4_experts, nvfp4_tile_rows
from ...kernels.packed4.group_format import E2M1
from .format import Checkpoint, Matrix, SafetensorsFormat, StoredCheckpoint
from .noise import draw_rows
from .schemes import Nvfp4Scheme
from .slots import Slot
from .weight import AnyWeight, Weight

_INVERSE = ".weight_global_scale"
_PARTS = {"compressed-tensors": (".weight_packed", _INVERSE), "modelopt": (".weight", ".weight_scale_2")}
"""The tensors of values and of the factor."""
_UNUSED = ("input_scale", "input_global_scale", "k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale")


class Nvfp4Weight(Weight[Nvfp4Matrix | Nvfp4Experts]):
    @property
    def values(self) -> torch.Tensor:
        return self.operand.packed

    def expanded(self) -> torch.Tensor:
        return self.operand.expanded()

    def each(self) -> Iterator["Nvfp4Weight"]:
        assert isinstance(self.operand, Nvfp4Experts)
        return map(Nvfp4Weight, self.operand.experts())

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert isinstance(self.operand, Nvfp4Matrix)
        return nvfp4_linear(x, self.operand, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gelu: bool = False) -> torch.Tensor:
        assert isinstance(self.operand, Nvfp4Matrix)
        assert not gelu, "GELU is not supported for NVFP4 weights"
        return nvfp4_linear(x, self.operand, bias, gated=True)

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        down: AnyWeight,
        *,
        first: int = 0,
        num_experts: int | None = None,
        shared: Callable[[], torch.Tensor] | None = None,
        routing: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        assert isinstance(down, Nvfp4Weight)
        assert isinstance(self.operand, Nvfp4Experts)
        assert isinstance(down.operand, Nvfp4Experts)
        assert not any(option is not None for option in others.values()), "experts of NVFP4 have no biases and no limit"
        return nvfp4_experts(
            x,
            weights,
            experts,
            self.operand,
            down.operand,
            first=first,
            num_experts=num_experts,
            shared=shared,
            routing=routing,
        )

    def routing_rows(self, x: torch.Tensor, per_token: int, down: AnyWeight, **options: Any) -> int | None:  # noqa: ARG002
        return nvfp4_tile_rows(len(x) * per_token, options["num_experts"]) if use_triton("auto", x.device) else None


class Nvfp4Checkpoint(StoredCheckpoint):
    def __init__(self, scheme: Nvfp4Scheme, files: Checkpoint) -> None:
        super().__init__(files)
        self._packed, self._factor = _PARTS[scheme.method]
        packed, factor = self._packed, self._factor
        modules = [n.removesuffix(factor) for n in files.shapes if n.endswith(factor)]
        self.tensors = frozenset(f"{module}.weight" for module in modules)
        parts = {module + part for module in modules for part in (packed, ".weight_scale", factor)}
        shapes = {name: shape for name, shape in files.shapes.items() if name not in parts and not _is_unused(name)}
        for module in modules:
            shapes[f"{module}.weight"] = self._check(module)
        self.shapes = shapes

    def _check(self, module: str) -> tuple[int, ...]:
        """The shape of a matrix; raises StartupError if its parts do not fit together."""
        packed, factor = self._packed, self._factor
        found = {part: self._files.shapes.get(module + part) for part in (packed, ".weight_scale", factor)}
        stored = found[packed]
        if stored is None or len(stored) != 2:
            raise StartupError(f"tensor '{module}{packed}' has shape {_shown(stored)}; NVFP4 values are matrices")
        rows, columns = stored[0], 2 * stored[1]
        scales = (rows, columns // GROUP)
        if found[".weight_scale"] != scales or columns % GROUP:
            raise StartupError(
                f"tensor '{module}.weight_scale' has shape {_shown(found['.weight_scale'])}; [{rows}, {columns}] in "
                f"groups of {GROUP} columns takes {list(scales)}"
            )
        if found[factor] not in ((), (1,)):
            raise StartupError(f"tensor '{module}{factor}' has shape {_shown(found[factor])}; a matrix has one factor")
        return rows, columns

    def _read_stored(self, name: str, slot: Slot) -> None:
        module = name.removesuffix(".weight")
        rows, columns = (slice(start, start + size) for start, size in zip(slot.start, slot.size, strict=True))
        groups = slice(columns.start // GROUP, -(-columns.stop // GROUP))
        device = slot.target.device
        half = GROUP // 2
        stored = self._read(module + self._packed, torch.uint8, rows, slice(groups.start * half, groups.stop * half))
        values = torch.stack((stored & 15, stored >> 4), dim=-1).flatten(-2).to(device)
        scales = self._read(f"{module}.weight_scale", torch.float8_e4m3fn, rows, groups).to(device)
        factor = self._read(module + self._factor, torch.float32).view(()).to(device)
        if self._factor == _INVERSE:
            factor = 1 / factor
        if isinstance(slot.weight, Nvfp4Weight):
            slot.weight.operand.fill(values, scales, factor)
            return
        table = torch.tensor(E2M1, dtype=torch.float32, device=device)
        wide = table[values.int()].mul_((scales.float() * factor).repeat_interleave(GROUP, 1))
        first = columns.start - groups.start * GROUP
        slot.target.copy_(wide[:, first : first + slot.size[1]])


class Nvfp4Format(SafetensorsFormat):
    label = "NVFP4"
    together = True
    reason = "latent attention, and shards whose columns are not a multiple of 16"
    open = Nvfp4Checkpoint

    def runs_on(self, device: torch.device) -> bool:
        return supports_nvfp4(device)

    def _divides(self, matrix: Matrix) -> bool:
        return matrix.columns % GROUP == 0 and matrix.first_column % GROUP == 0

    def allocate(self, matrix: Matrix) -> Nvfp4Weight:
        kind = Nvfp4Experts if len(matrix.shape) == 3 else Nvfp4Matrix
        return Nvfp4Weight(kind.allocate(*matrix.shape, device=matrix.device))

    def draw(self, name: str, slot: Slot, spread: float) -> None:
        """The nearest values of numbers of standard deviation 2, with one scale."""
        table = torch.tensor(E2M1, device=slot.target.device)
        steps = table[: len(table) // 2]
        for held, _, drawn in draw_rows(name, slot, 0.0, 2.0):
            values = torch.bucketize(drawn.abs(), (steps[1:] + steps[:-1]) / 2) + 8 * (drawn < 0)
            if not isinstance(slot.weight, Nvfp4Weight):
                slot.target[held].copy_(table[values] * (spread / 2))
                continue
            scales = torch.ones(len(values), values.shape[1] // GROUP, device=values.device).to(torch.float8_e4m3fn)
            slot.weight.operand[held].fill(values.to(torch.uint8), scales, spread / 2)


def _is_unused(name: str) -> bool:
    return name.endswith(tuple(f".{part}" for part in _UNUSED))


def _shown(shape: tuple[int, ...] | None) -> list[int] | None:
    return None if shape is None else list(shape)


FORMAT = Nvfp4Format
