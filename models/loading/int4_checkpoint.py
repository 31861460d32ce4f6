"""Checkpoints of 4-bit weights in AWQ, GPTQ and compressed-tensors format, repacked or expanded during loading.

    weight[i, j]  =  (value[i, j] - zero[i, j // group]) * scale[i, j // group]

Eight values are in an int32, the first in its lowest bits. A matrix [out, in] of a module is stored as

    AWQ                  qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; the values of an int32
                         are those of columns 0, 2, 4, 6, 1, 3, 5, 7
    GPTQ                 qweight [in / 8, out], qzeros [groups, out / 8], scales [groups, out]; zeros minus 1 in the
                         first of its two formats; g_idx [in], the group of each column
    compressed-tensors   weight_packed [out, in / 8], weight_scale [out, groups], weight_shape; weight_zero_point
                         [out / 8, groups] unless all zeros are 8
"""

from collections.abc import Mapping

import torch

from ...configs.arithmetic import ceil_div
from ...configs.errors import StartupError
from ..config.quantization import Int4Format
from ..decoders.slots import Slot
from .checkpoint import Checkpoint

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where an int32 of AWQ has the values of its eight columns."""
_WEIGHT, _PACKED = ".weight", 8
_SYMMETRIC_ZERO = 8
_OTHER_PARTS = ("qzeros", "scales", "g_idx", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")


class Int4Checkpoint:
    """The files of a checkpoint, with `<module>.weight` in place of the parts of quantised matrices. Modules that are
    not quantised have their weights as they are.
    """

    def __init__(self, files: Checkpoint, stored: Int4Format) -> None:
        self._files = files
        self._format = stored
        self.shapes: dict[str, tuple[int, ...]] = {}
        main = ".weight_packed" if stored.method == "compressed-tensors" else ".qweight"
        quantised = [name.removesuffix(main) for name in files.shapes if name.endswith(main)]
        self.int4 = frozenset(module + _WEIGHT for module in quantised)
        """The tensors in 4 bits."""
        parts = {f"{module}.{part}" for module in quantised for part in _OTHER_PARTS}
        for name, shape in files.shapes.items():
            if name not in parts and not name.endswith(main):
                self.shapes[name] = shape
        for module in quantised:
            packed = files.shapes[module + main]
            if len(packed) != 2:
                raise StartupError(f"tensor '{module}{main}' has shape {list(packed)}; 4-bit values are matrices")
            first, second = packed
            match stored.method:
                case "awq":
                    self.shapes[module + _WEIGHT] = (second * _PACKED, first)
                case "gptq":
                    self.shapes[module + _WEIGHT] = (second, first * _PACKED)
                case "compressed-tensors":
                    self.shapes[module + _WEIGHT] = (first, second * _PACKED)

    def is_zero_bias(self, name: str) -> bool:
        """Whether this is a bias of zeros: some GPTQ checkpoints have one for every matrix."""
        if not name.endswith(".bias") or name.removesuffix(".bias") + _WEIGHT not in self.int4:
            return False
        return not self._read(name, torch.float32, slice(0, self.shapes[name][0])).any()

    def read_into(self, name: str, slot: Slot) -> None:
        """See `Checkpoint`; raises StartupError if the parts do not fit together."""
        if name not in self.int4:
            self._files.read_into(name, slot)
            return
        module, device = name.removesuffix(_WEIGHT), slot.target.device
        rows, columns = (slice(start, start + count) for start, count in zip(slot.start, slot.size, strict=True))
        group = self._format.group or slot.shape[1]
        groups = slice(columns.start // group, ceil_div(columns.stop, group))
        self._check(module, slot.shape, group)
        values, scales, zeros = self._parts(module, rows, columns, groups, device)
        step = 1 if slot.int4 is None else slot.int4.group
        at = torch.arange(columns.start, columns.stop, step, device=device) // group - groups.start
        scales, zeros = scales[:, at], zeros[:, at]
        if slot.int4 is None:
            slot.target.copy_((values.float() - zeros) * scales)
        else:
            slot.int4.fill(values, scales, zeros)

    def _parts(
        self, module: str, rows: slice, columns: slice, groups: slice, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [rows, columns] uint8, scales and zeros [rows, groups] float32, unpacked on `device`."""

        def unpacked(part: str, *ranges: slice, dim: int) -> torch.Tensor:
            return self._unpack(f"{module}.{part}", *ranges, dim=dim, device=device)

        if self._format.method == "compressed-tensors":
            values = unpacked("weight_packed", rows, columns, dim=1)
            scales = self._read(f"{module}.weight_scale", torch.float32, rows, groups).to(device)
            if f"{module}.weight_zero_point" in self._files.shapes:
                return values, scales, unpacked("weight_zero_point", rows, groups, dim=0).float()
            return values, scales, torch.full_like(scales, _SYMMETRIC_ZERO)
        by_column = self._format.method == "awq"
        values = unpacked("qweight", columns, rows, dim=1 if by_column else 0).t()
        zeros = unpacked("qzeros", groups, rows, dim=1).t().float() + self._format.zero_offset
        return values, self._read(f"{module}.scales", torch.float32, groups, rows).to(device).t(), zeros

    def _unpack(self, name: str, *part: slice, dim: int, device: torch.device) -> torch.Tensor:
        """A part of a tensor in which eight values in dimension `dim` are one int32, as uint8."""
        inner = part[dim]
        words = slice(inner.start // _PACKED, ceil_div(inner.stop, _PACKED))
        stored = self._read(name, torch.int32, *(words if index == dim else each for index, each in enumerate(part)))
        packed = stored.to(device)
        order = _AWQ_ORDER if self._format.method == "awq" else range(_PACKED)
        values = torch.stack([(packed >> 4 * place & 15).to(torch.uint8) for place in order], dim=dim + 1)
        first = inner.start - words.start * _PACKED
        return values.flatten(dim, dim + 1).narrow(dim, first, inner.stop - inner.start)

    def _read(self, name: str, dtype: torch.dtype, *part: slice) -> torch.Tensor:
        target = torch.empty([each.stop - each.start for each in part], dtype=dtype)
        self._files.read_into(name, Slot(target, self._files.shapes[name], tuple(each.start for each in part)))
        return target

    def _check(self, module: str, shape: tuple[int, ...], group: int) -> None:
        """Raise StartupError if shapes do not fit together, or columns have groups of their own (desc_act)."""
        rows, columns = shape
        groups, words = ceil_div(columns, group), ceil_div(rows, _PACKED)
        expected: Mapping[str, tuple[int, ...]] = {"scales": (groups, rows), "qzeros": (groups, words)}
        if self._format.method == "compressed-tensors":
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
        for name in (f"{module}.g_idx", f"{module}.weight_g_idx"):
            if name in self._files.shapes:
                found_groups = self._read(name, torch.int64, slice(0, columns))
                if not found_groups.equal(torch.arange(columns) // group):
                    raise StartupError(
                        f"tensor '{name}' orders columns by activation (desc_act), which is not supported; supported "
                        "are groups of adjacent columns"
                    )
