"""A GGUF file: its metadata, its tensor directory, and its tensors as stored rows or as float32 rows. No torch.

The header is parsed here instead of with `gguf.GGUFReader`, which makes a numpy object of every vocabulary entry: 2.8 s
for SmolLM2 against 0.1 s, in each process of a server. The `gguf` library dequantises block formats.
"""

import functools
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...common.arithmetic import round_up
from ...common.errors import StartupError
from .json_fields import shown
from .model_files import open_model_file

MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]

_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT, _MOST_ALIGNMENT = 32, 1 << 20
_CHUNK_ELEMENTS = 1 << 17  # dequantised at a time: temporaries fit the cache, and are small compared with the model

_MOST_TENSORS, _MOST_DIMENSIONS, _MOST_VALUES, _LONGEST_STRING = 1 << 16, 4, 1 << 22, 1 << 24
"""Far more than a model has. `_MOST_VALUES` are those of all arrays together: each takes up to a hundred bytes."""
_LENGTH = struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class GgufTensor:
    """Location of one tensor. `shape` is row-major (the file stores it reversed); `type_id` is ggml's number."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    type_name: str
    offset: int
    size_bytes: int


def open_gguf(path: Path) -> "GgufFile":
    """A cached `GgufFile`: a process needs the header several times while it starts, and parses it only once."""
    try:
        found = path.stat()
    except OSError:
        return GgufFile(path)  # which raises
    return _open_version(path, found.st_mtime_ns, found.st_size)


def forget_gguf() -> None:
    """Release the header that `open_gguf` keeps, with its vocabulary. Call it when all is loaded."""
    _open_version.cache_clear()


@functools.lru_cache(maxsize=1)
def _open_version(path: Path, _mtime_ns: int, _size_bytes: int) -> "GgufFile":
    return GgufFile(path)


class GgufFile:
    """A parsed header and a read-only mapping of the file; raises StartupError if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, MetadataValue] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with open_model_file(path) as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise StartupError(f"model {path}: cannot be read: {error}") from error
        self._position = self._values = 0
        try:
            self._parse()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise StartupError(f"model {path}: the GGUF header is damaged or cut off ({error})") from error

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", "unknown"))

    def read_bytes(self, tensor: GgufTensor, start: int, count: int) -> bytes:
        """`count` stored bytes of a tensor from byte `start` on, fewer at its end."""
        end = min(start + count, tensor.size_bytes)
        return self._data[tensor.offset + start : tensor.offset + end]

    def stored_rows(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The bytes of each row of a tensor, in the mapping of the file. A vector is a single row."""
        rows = math.prod(tensor.shape[:-1])
        return np.frombuffer(self._data, np.uint8, count=tensor.size_bytes, offset=tensor.offset).reshape(rows, -1)

    def read_rows(
        self, tensor: GgufTensor, row_multiple: int = 1, wanted: range | None = None
    ) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """The tensor, or its rows `wanted`, dequantised piece by piece: (first row, rows as float32).

        A vector is a single row. Every piece but the last has a multiple of `row_multiple` rows. Raises StartupError
        for types that the library cannot dequantise.
        """
        # here, because the frontend reads GGUF metadata but no tensors
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        columns, stored = tensor.shape[-1], self.stored_rows(tensor)
        step = max(_CHUNK_ELEMENTS // (columns * row_multiple), 1) * row_multiple
        wanted = wanted if wanted is not None else range(len(stored))
        for first in wanted[::step]:
            piece = stored[first : min(first + step, wanted.stop)]
            # as one long row: the library processes 16 rows at a time, which is slow for narrow matrices
            try:
                values = dequantize(piece.reshape(1, -1), GGMLQuantizationType(tensor.type_id))
            except NotImplementedError:
                raise StartupError(
                    f"model {self.path}: tensor {shown(tensor.name)} is of type {tensor.type_name}, which is not "
                    "supported"
                ) from None
            yield first, np.require(values, np.float32, "W").reshape(len(piece), columns)  # a copy if it is the mapping

    def _parse(self) -> None:
        magic = self._data[:4]
        if magic != b"GGUF":
            raise StartupError(f"model {self.path}: not a GGUF file (it starts with {magic!r})")
        self._position = 4
        version = self._unpack("I")
        if version not in _SUPPORTED_VERSIONS:
            raise StartupError(f"model {self.path}: GGUF version {version}; supported are 2 and 3, little-endian")
        tensor_count = self._count("tensors", _MOST_TENSORS)
        metadata_count = self._count("metadata fields", _MOST_VALUES)
        for _ in range(metadata_count):
            (key,) = self._strings(1)
            self.metadata[key] = self._value(int(self._unpack("I")))
        entries = [self._directory_entry() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MOST_ALIGNMENT:
            raise StartupError(
                f"model {self.path}: general.alignment is {shown(alignment)}, expected a positive integer of at most "
                f"{_MOST_ALIGNMENT}"
            )
        data_start = round_up(self._position, alignment)
        for name, shape, type_id, offset in entries:
            self._add_tensor(name, shape, type_id, data_start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> None:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            ggml_type = GGMLQuantizationType(type_id)
        except ValueError:
            raise StartupError(f"model {self.path}: tensor {shown(name)} has unknown ggml type {type_id}") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if not shape or 0 in shape:
            raise StartupError(f"model {self.path}: tensor {shown(name)} has the shape {list(shape)}, without elements")
        if shape[-1] % block_elements:
            raise StartupError(
                f"model {self.path}: tensor {shown(name)} has rows of {shape[-1]} elements, "
                f"not a multiple of {ggml_type.name}'s {block_elements}"
            )
        size_bytes = math.prod(shape) // block_elements * block_bytes
        if offset + size_bytes > len(self._data):
            raise StartupError(
                f"model {self.path}: the file is cut off: tensor {shown(name)} ends at byte {offset + size_bytes}, "
                f"the file has {len(self._data)}"
            )
        self.tensors[name] = GgufTensor(name, shape, type_id, str(ggml_type.name), offset, size_bytes)

    def _count(self, what: str, most: int) -> int:
        """A number of things that follow."""
        count = int(self._unpack("Q"))
        if count > most:
            raise StartupError(f"model {self.path}: the GGUF header must have at most {most} {what}, and has {count}")
        return count

    def _directory_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        (name,) = self._strings(1)
        dimensions = int(self._unpack("I"))
        if dimensions > _MOST_DIMENSIONS:
            raise StartupError(
                f"model {self.path}: tensor {shown(name)} must have at most {_MOST_DIMENSIONS} dimensions, and has "
                f"{dimensions}"
            )
        shape = tuple(int(self._unpack("Q")) for _ in range(dimensions))
        return name, shape[::-1], int(self._unpack("I")), int(self._unpack("Q"))

    def _value(self, kind: int) -> MetadataValue:
        if kind == _STRING:
            return self._strings(1)[0]
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise StartupError(f"model {self.path}: unknown GGUF metadata type {kind}")
        return self._unpack(_SCALARS[kind])

    def _array(self) -> MetadataValue:
        kind = int(self._unpack("I"))
        count = self._count("values of arrays", _MOST_VALUES - self._values)
        self._values += count
        if kind == _STRING:
            return self._strings(count)
        if kind not in _SCALARS:
            raise StartupError(f"model {self.path}: GGUF arrays of type {kind} are not supported")
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return list(values)

    def _strings(self, count: int) -> list[str]:
        """In one loop: a vocabulary has hundreds of thousands, which every process of a server reads."""
        data, position, end = self._data, self._position, len(self._data)
        found = []
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(data, position)
            start = position + _LENGTH.size
            position = start + length
            if position > end or length > _LONGEST_STRING:
                raise IndexError(f"a string of {length} bytes at byte {start}")
            found.append(data[start:position].decode("utf-8"))
        self._position = position
        return found

    def _unpack(self, code: str) -> int | float | bool:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._position)
        self._position += struct.calcsize(f"<{code}")
        assert isinstance(value, int | float)
        return value
