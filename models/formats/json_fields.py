"""Reads fields of a JSON file with checks. No torch."""

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...common.errors import StartupError
from ...common.words import shortened
from .bounds import MOST_NUMBER, most_of
from .model_files import check_values, read_model_file

_MOST_BYTES = 16 << 20
_MOST_VALUES = 1 << 20
_SHOWN = 120
"""Characters of a value in an error message: a URL or a path is part of some."""

# Values have any type until one of the functions below has checked them.
Json = dict[str, Any]


def shown(value: object) -> str:
    """A value in an error message: one line, and not all of a long one."""
    return shortened(repr(value), _SHOWN)


def bare(value: object) -> str:
    """A value in an error message, without quotes where it needs none."""
    text = str(value)
    return text if text.isprintable() and len(text) <= _SHOWN else shown(text)


def read_json(path: Path) -> Json:
    """The JSON object in a file; raises StartupError if there is none."""
    text = read_model_file(path, _MOST_BYTES)
    check_values(path, text, _MOST_VALUES)
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path}: expected a JSON object")
    return value


@contextlib.contextmanager
def unusable_values(path: Path) -> Iterator[None]:
    """Raises StartupError where the block fails because a value has a type or size that no check has refused."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise StartupError(f"{path}: a field has a value that cannot be used: {shown(str(error))}") from error


def integer(path: Path, raw: Json, key: str, default: int | None = None, *, least: int = 1) -> int:
    """A whole number from `least` to the bound of the field (bounds.py); raises StartupError naming the field."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise StartupError(f"{path}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        expected = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise StartupError(f"{path}: {key} must be {expected}, got {shown(value)}")
    if value > most_of(key):
        raise StartupError(f"{path}: {key} must be at most {most_of(key)}, got {shown(value)}")
    return value


def refuse_others(path: Path, raw: Json, supported: Json) -> None:
    """Raises StartupError for a field that has another value than the supported one. Fields may be absent or null."""
    for key, wanted in supported.items():
        value = raw.get(key)
        if value is not None and value != wanted:
            raise StartupError(f"{path}: {key} {shown(value)} is not supported; supported is {wanted!r}")


def number(path: Path, raw: Json, key: str, default: float | None = None) -> float:
    """A number above zero, at most `MOST_NUMBER`; raises StartupError naming the field."""
    value = raw.get(key)
    if value is None:
        value = default
    if value is None:
        raise StartupError(f"{path}: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise StartupError(f"{path}: {key} must be a positive number, got {shown(value)}")
    if value > MOST_NUMBER:
        raise StartupError(f"{path}: {key} must be at most {MOST_NUMBER:g}, got {shown(value)}")
    return float(value)
