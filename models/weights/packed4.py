"""Weights in 4 bits with a scale and a zero point per group of columns: AWQ, GPTQ and compressed-tensors.

    weight[i, j]  =  (value[i, j] - zero[i, j // group]) * scale[i, j // group]

Eight values are in an int32, the first in its lowest bits. A matrix [out, in] of a module is stored as

    AWQ                  qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; the values of an int32
                         are those of columns 0, 2, 4, 6, 1, 3, 5, 7
    GPTQ                 qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out]; zeros minus 1 in the
                         first of its two formats; g_idx [in], the group of each column
    compressed-tensors   weight_packed [out, in / 8], weight_scale [out, groups], weight_shape; weight_zero_point
                         [out / 8, groups] unless all zeros are 8

A matrix is repacked for the kernels of kernels/packed4/ if a rank's columns are groups of at least 32 columns; of
experts, both matrices are or neither is. Others are expanded, and matrices of latent attention always.
"""

from collections.abc import Iterator, Mapping

import torch

from ...common.arithmetic import ceil_div
from ...common.errors import StartupError
from ...kernels.backends.dispatch import use_triton
from ...kernels.linear.swiglu import swiglu
from ...kernels.packed4.group_format import GroupScaled, group_in_memory, supports_int4
from ...kernels.packed4.int4_linear import choose_method, int4_gated_linear, int4_linear
from .format import Checkpoint, Matrix, SafetensorsFormat, StoredCheckpoint
from .noise import draw_rows
from .schemes import Packed4Scheme
from .slots import Slot
from .weight import Weight

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where an int32 of AWQ has the values of its eight columns."""
_WEIGHT, _PACKED = ".weight", 8
_SYMMETRIC_ZERO = 8
_OTHER_PARTS = ("qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_ROW_GROUP = 128
"""Columns of a group in memory if a checkpoint has a scale per row, which is valid for any number of columns."""
_SPREAD = 3.0
"""Standard deviation of random 4-bit values; the largest is at 2.3 of them."""


class Packed4Weight(Weight[GroupScaled]):
    @property
    def values(self) -> torch.Tensor:
        return self.operand.packed

    def expanded(self) -> torch.Tensor:
        return self.operand.expanded()

    def each(self) -> Iterator["Packed4Weight"]:
        return map(type(self), self.operand.experts())

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return int4_linear(x, self.operand, bias)

    def gated(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, gelu: bool = False) -> torch.Tensor:
        assert not gelu, "GELU is not supported for 4-bit weights"
        if use_triton("auto", x.device) and choose_method(x, self.operand) == "cuda":
            return int4_gated_linear(x, self.operand, bias)
        return swiglu(self.linear(x, bias))


class Packed4Checkpoint(StoredCheckpoint):
    """Modules that are not quantised have their weights as they are."""

    def __init__(self, scheme: Packed4Scheme, files: Checkpoint) -> None:
        super().__init__(files)
        self._scheme = scheme
        main = ".weight_packed" if scheme.method == "compressed-tensors" else ".qweight"
        quantised = [name.removesuffix(main) for name in files.shapes if name.endswith(main)]
        self.tensors = frozenset(module + _WEIGHT for module in quantised)
        parts = {f"{module}.{part}" for module in quantised for part in _OTHER_PARTS}
        shapes = {n: shape for n, shape in files.shapes.items() if n not in parts and not n.endswith(main)}
        for module in quantised:
            packed = files.shapes[module + main]
            if len(packed) != 2:
                raise StartupError(f"tensor '{module}{main}' has shape {list(packed)}; 4-bit values are matrices")
            first, second = packed
            match scheme.method:
                case "awq":
                    shapes[module + _WEIGHT] = (second * _PACKED, first)
                case "gptq":
                    shapes[module + _WEIGHT] = (second, first * _PACKED)
                case "compressed-tensors":
                    shapes[module + _WEIGHT] = (first, second * _PACKED)
            self._check(module, shapes[module + _WEIGHT])
        self.shapes = shapes

    def is_filler(self, name: str) -> bool:
        """A bias of zeros: some GPTQ checkpoints have one for every matrix."""
        if not name.endswith(".bias") or name.removesuffix(".bias") + _WEIGHT not in self.tensors:
            return False
        return not self._read(name, torch.float32).any()

    def _read_stored(self, name: str, slot: Slot) -> None:
        module, device = name.removesuffix(_WEIGHT), slot.target.device
        rows, columns = (slice(start, start + count) for start, count in zip(slot.start, slot.size, strict=True))
        group = self._scheme.group or slot.shape[1]
        groups = slice(columns.start // group, ceil_div(columns.stop, group))
        self._check_order(module, slot.shape[1], group)
        values, scales, zeros = self._parts(module, rows, columns, groups, device)
        held = slot.weight.operand if isinstance(slot.weight, Packed4Weight) else None
        step = 1 if held is None else held.group
        at = torch.arange(columns.start, columns.stop, step, device=device) // group - groups.start
        scales, zeros = scales[:, at], zeros[:, at]
        if held is None:
            slot.target.copy_((values.float() - zeros) * scales)
        else:
            held.fill(values, scales, zeros)

    def _parts(
        self, module: str, rows: slice, columns: slice, groups: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [rows, columns] uint8, scales and zeros [rows, groups] float32, unpacked on `device`."""

        def unpacked(part: str, *ranges: slice, dim: int) -> torch.Tensor:
            return self._unpack(f"{module}.{part}", *ranges, dim=dim, device=device)

        if self._scheme.method == "compressed-tensors":
            values = unpacked("weight_packed", rows, columns, dim=1)
            scales = self._read(f"{module}.weight_scale", torch.float32, rows, groups).to(device)
            if f"{module}.weight_zero_point" in self._files.shapes:
                return values, scales, unpacked("weight_zero_point", rows, groups, dim=0).float()
            return values, scales, torch.full_like(scales, _SYMMETRIC_ZERO)
        by_column = self._scheme.method == "awq"
        values = unpacked("qweight", columns, rows, dim=1 if by_column else 0).t()
        zeros = unpacked("qzeros", groups, rows, dim=1).t().float() + self._scheme.zero_offset
        return values, self._read(f"{module}.scales", torch.float32, groups, rows).to(device).t(), zeros

    def _unpack(self, name: str, *part: slice, dim: int, device: torch.device) -> torch.Tensor:
        """A part of a tensor in which eight values in dimension `dim` are one int32, as uint8."""
        inner = part[dim]
        words = slice(inner.start // _PACKED, ceil_div(inner.stop, _PACKED))
        stored = self._read(name, torch.int32, *(words if index == dim else each for index, each in enumerate(part)))
        packed = stored.to(device)
        order = _AWQ_ORDER if self._scheme.method == "awq" else range(_PACKED)
        values = torch.stack([(packed >> 4 * place & 15).to(torch.uint8) for place in order], dim=dim + 1)
        first = inner.start - words.start * _PACKED
        return values.flatten(dim, dim + 1).narrow(dim, first, inner.stop - inner.start)

    def _check(self, module: str, shape: tuple[int, ...]) -> None:
        """Raise StartupError if the shapes of the parts of a matrix do not fit together."""
        rows, columns = shape
        group = self._scheme.group or columns
        groups, words = ceil_div(columns, group), ceil_div(rows, _PACKED)
        expected: Mapping[str, tuple[int, ...]] = {"scales": (groups, rows), "qzeros": (groups, words)}
        if self._scheme.method == "compressed-tensors":
            expected = {"weight_scale": (rows, groups)}
            if f"{module}.weight_zero_point" in self._files.shapes:
                expected = {**expected, "weight_zero_point": (words, groups)}
        for part, wanted in expected.items():
            found = self._files.shapes.get(f"{module}.{part}")
            if found != wanted:
                raise StartupError(
                    f"tensor '{module}.{part}' has shape {None if found is None else list(found)}; "
                    f"{list(shape)} in groups of {group} columns takes {list(wanted)}"
                )

    def _check_order(self, module: str, columns: int, group: int) -> None:
        """Raise StartupError if columns have groups of their own (desc_act)."""
        for name in (f"{module}.g_idx", f"{module}.weight_g_idx"):
            if name in self._files.shapes:
                found_groups = self._read(name, torch.int64, slice(0, columns))
                if not found_groups.equal(torch.arange(columns) // group):
                    raise StartupError(
                        f"tensor '{name}' orders columns by activation (desc_act), which is not supported; supported "
                        "are groups of adjacent columns"
                    )


class Packed4Format(SafetensorsFormat):
    label = "4-bit"
    together = True
    reason = "latent attention, and shards whose columns are not a multiple of 32"
    open = Packed4Checkpoint

    def runs_on(self, device: torch.device) -> bool:
        return supports_int4(device)

    def _divides(self, matrix: Matrix) -> bool:
        return self._group(matrix) is not None

    def _group(self, matrix: Matrix) -> int | None:
        return group_in_memory(self.scheme.group or _ROW_GROUP, matrix.columns, matrix.first_column)

    def allocate(self, matrix: Matrix) -> Packed4Weight:
        group = self._group(matrix)
        assert group is not None, "held matrices are not divided inside of groups"
        return Packed4Weight(GroupScaled.allocate(*matrix.shape, group=group, dtype=matrix.dtype, device=matrix.device))

    def draw(self, name: str, slot: Slot, spread: float) -> None:
        """Values of 0 to 15 around a zero point of 8, with one scale."""
        scale = spread / _SPREAD
        for held, _, drawn in draw_rows(name, slot, 8.0, _SPREAD):
            values = drawn.round_().clamp_(0, 15)
            if not isinstance(slot.weight, Packed4Weight):
                slot.target[held].copy_((values - 8) * scale)
                continue
            part = slot.weight.operand[held]
            scales = torch.full((len(values), part.columns // part.group), scale, device=values.device)
            part.fill(values.to(torch.uint8), scales, torch.full_like(scales, 8))


FORMAT = Packed4Format
