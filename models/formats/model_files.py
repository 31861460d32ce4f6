"""Opens the files of a model, which may come from anyone: only regular ones, and of bounded size. No torch."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from ...common.errors import StartupError

_MOST_HEADER_BYTES, _MOST_HEADER_VALUES = 100 << 20, 1 << 20  # the former is the safetensors format's own limit
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_model_file(path: Path) -> BinaryIO:
    """Raises StartupError for what cannot be opened, and for what is not a regular file: a FIFO would never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # the latter: a name with a null character
        reason = error.strerror if isinstance(error, OSError) else error
        raise StartupError(f"{path}: cannot be read: {reason}") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise StartupError(f"{path}: must be a regular file, and is {_KINDS.get(stat.S_IFMT(mode), 'something else')}")
    return os.fdopen(descriptor, "rb")


def read_model_file(path: Path, most_bytes: int) -> bytes:
    """The content of a file of at most `most_bytes`; raises StartupError."""
    with open_model_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise StartupError(f"{path}: must have at most {most_bytes} bytes, and has {size}")
        try:
            return file.read()
        except OSError as error:
            raise StartupError(f"{path}: cannot be read: {error.strerror}") from error


def safetensors_header(path: Path, file: BinaryIO) -> bytes:
    """The header of a safetensors file, read from its beginning: JSON, not checked. Raises StartupError."""
    size = int.from_bytes(file.read(8), "little")
    if size > _MOST_HEADER_BYTES:
        raise StartupError(f"model {path}: not a safetensors file (a header of {size} bytes)")
    header = file.read(size)
    check_values(path, header, _MOST_HEADER_VALUES)
    return header


def check_values(path: Path | str, text: bytes, most: int) -> None:
    """Raise StartupError if a JSON text may have more values than `most`: each takes a hundred bytes in Python. A value
    follows a bracket or a comma, so there are at most as many as there are of these.
    """
    if (found := sum(map(text.count, (b",", b"[", b"{")))) > most:
        raise StartupError(f"{path}: must have at most {most} JSON values, and may have {found}")


def is_inside(name: str) -> bool:
    """Whether a file name, which a repository gives, stays below its directory."""
    parts = name.split("/")
    plain = "\\" not in name and not any(ord(character) < 32 for character in name)
    return plain and not any(part in ("", ".", "..") for part in parts)
