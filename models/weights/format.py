"""What a loader asks of a format: which tensors are stored in it, memory for a rank's part, and its contents.

docs/adding_a_format.md walks through it.
"""

import importlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch

from ...memory.sizing import GIB
from .schemes import Scheme
from .slots import Share, Slot
from .weight import AnyWeight

log = logging.getLogger(__name__)

Place = Literal["layer", "latent", "vocabulary"]
"""Where a matrix is used: in a layer, in latent attention, or as embedding or head."""
Shapes = Mapping[str, tuple[int, ...]]
_IN_16_BITS = ("embed_tokens.weight", "lm_head.weight", ".gate.weight", "weights_proj.weight")
"""Matrices that quantised checkpoints usually leave as they are."""


class Part(NamedTuple):
    """Rows of a matrix that a checkpoint tensor fills, from row `at` on. Those beyond its end are padding."""

    tensor: str
    rows: Share
    at: int = 0


@dataclass(frozen=True)
class Matrix:
    """A matrix [rows, columns] that a rank needs, or one per expert, and the checkpoint tensors that fill it: those of
    the first expert first.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    across: Share  # its columns
    dtype: torch.dtype  # of elements that are not kept as stored, and of scales
    device: torch.device
    place: Place = "layer"
    wide: bool = False  # up to 1.5 times as fast for few rows of x if torch multiplies and it is stored [in, out]
    padded: bool = False  # there may be rows after the parts
    stacked: Share | None = None  # these of all experts, which are one tensor [experts, columns, rows]

    @property
    def columns(self) -> int:
        return self.across.size

    @property
    def first_column(self) -> int:
        return self.across.start

    def slots(self, weight: AnyWeight) -> Iterator[tuple[str, Slot]]:
        """Tensors, and what each fills of the weight."""
        if self.stacked is not None:
            (part,) = self.parts
            yield part.tensor, Slot.of(weight, self.stacked, self.across, part.rows, transposed=True)
            return
        each = [weight] if len(self.shape) == 2 else list(weight.each())
        per_matrix = len(self.parts) // max(len(each), 1)
        for index, part in enumerate(self.parts):
            end = part.at + min(part.rows.size, part.rows.whole - part.rows.start)
            yield part.tensor, Slot.of(each[index // per_matrix][part.at : end], part.rows, self.across)


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names, whatever the file calls them."""

    @property
    def shapes(self) -> Shapes: ...

    def read_into(self, name: str, slot: Slot) -> None:
        """Fill the slot, whose `shape` is the tensor's, converted to its dtype and device. Reads only that part."""


class StoredCheckpoint(ABC):
    """A checkpoint in a format: each of its `tensors` is one, whatever tensors it is stored as."""

    shapes: Shapes
    tensors: frozenset[str]

    def __init__(self, files: Checkpoint) -> None:
        self._files = files

    def read_into(self, name: str, slot: Slot) -> None:
        """See `Checkpoint`; raises StartupError if the parts of a tensor do not fit together."""
        if name in self.tensors:
            self._read_stored(name, slot)
        else:
            self._files.read_into(name, slot)

    @abstractmethod
    def _read_stored(self, name: str, slot: Slot) -> None:
        """Fill the slot: its `weight`, if it has one, which is of this format; otherwise its target, expanded."""

    def is_filler(self, name: str) -> bool:  # noqa: ARG002 - formats override it
        """Whether this tensor may be ignored, because it changes nothing."""
        return False

    def _read(self, name: str, dtype: torch.dtype, *part: slice) -> torch.Tensor:
        """A part of a tensor of the files, by default all of it."""
        shape = self._files.shapes[name]
        part = part or tuple(slice(0, size) for size in shape)
        target = torch.empty([each.stop - each.start for each in part], dtype=dtype)
        self._files.read_into(name, Slot(target, shape, tuple(each.start for each in part)))
        return target


class Format(ABC):
    """The tensors of a checkpoint that are stored in a format."""

    label: ClassVar[str]
    places: ClassVar[tuple[Place, ...]] = ("layer",)
    """Where its matrices stay as they are stored."""
    together: ClassVar[bool] = False
    """Whether both matrices of experts stay so or neither does."""
    reason: ClassVar[str]
    """Why a matrix is expanded on a device that has kernels."""
    needs_fp8: ClassVar[bool] = False
    """Whether kernels need a GPU with fp8."""
    on_cpu: ClassVar[bool] = False
    """Whether kernels are those of a CPU, which read it only without a `dtype` of the user."""

    def __init__(self, scheme: Any, tensors: Collection[str]) -> None:
        self.scheme = scheme
        self.tensors = tensors

    @abstractmethod
    def runs_on(self, device: torch.device) -> bool:
        """Whether kernels read it there."""

    def holds(self, matrix: Matrix) -> bool:
        """Whether a rank can keep this matrix as it is stored."""
        stored = matrix.place in self.places and all(part.tensor in self.tensors for part in matrix.parts)
        return stored and self._divides(matrix)

    @abstractmethod
    def _divides(self, matrix: Matrix) -> bool:
        """Whether scales or blocks are not divided."""

    @abstractmethod
    def allocate(self, matrix: Matrix) -> AnyWeight:
        """Uninitialised, for a matrix that it `holds`."""

    def log_expansion(self, slots: Mapping[str, Slot], device: torch.device, *, keep: bool) -> None:
        """Log the memory that it costs to expand tensors of a rank instead of keeping them as they are stored. `keep`:
        they are kept where possible.
        """
        held = {name: slot for name, slot in slots.items() if name in self.tensors}
        expanded = {name: slot.target for name, slot in held.items() if slot.weight is None}
        if expanded:
            log.info(
                "%s weights: %d of %d tensors are dequantized to %s and take %.2f GiB more (%s)",
                self.label,
                len(expanded),
                len(held),
                str(next(iter(expanded.values())).dtype).removeprefix("torch."),
                sum(each.nbytes - each.numel() * self._bits(name) / 8 for name, each in expanded.items()) / GIB,
                self.reason if keep else self._missing_kernels(device),
            )

    def _bits(self, _name: str) -> float:
        """Of a stored element of a tensor."""
        return float(self.scheme.bits)

    def _missing_kernels(self, device: torch.device) -> str:
        return f"{device} has no {self.label} kernels"


class SafetensorsFormat(Format):
    """The same of safetensors files, whose config.json has a scheme."""

    @staticmethod
    @abstractmethod
    def open(scheme: Any, files: Checkpoint) -> StoredCheckpoint:
        """Raises StartupError if shapes do not fit together."""

    @classmethod
    def keeps(cls, scheme: Any) -> bool:  # noqa: ARG003 - formats override it
        """Whether kernels read this scheme somewhere; others are always expanded."""
        return True

    @classmethod
    def usual(cls, shapes: Shapes) -> frozenset[str]:
        """The tensors of a model that checkpoints usually store in this format."""
        return frozenset(n for n, shape in shapes.items() if len(shape) == 2 and not n.endswith(_IN_16_BITS))

    @abstractmethod
    def draw(self, name: str, slot: Slot, spread: float) -> None:
        """Fill the slot of one of `tensors` with random values of this standard deviation (noise.py)."""


def format_of(scheme: Scheme) -> type[SafetensorsFormat]:
    """The format of a scheme, from the file that it names."""
    found: type[SafetensorsFormat] = importlib.import_module(f".{scheme.file}", __package__).FORMAT
    return found
