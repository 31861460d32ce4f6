"""Command-line flags, generated from fields: of the configuration schema, and of the options of commands.

`page_size` is `--page-size`, `verify_kv` is `--verify-kv` / `--no-verify-kv`. Values stay text here: the schema parses
and checks them like values from a file, and `read_options` does it for the options of a command.
"""

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator, SecretStr, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from ..common.errors import StartupError
from .load import explain
from .schema import AnyServerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

OptionsT = TypeVar("OptionsT", bound="DataclassInstance")


@dataclass(frozen=True)
class Flag:
    """What the name and the type of a field do not say about its flag, in `Annotated`. A `switch` has no `--no-...`."""

    name: str | None = None
    short: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    metavar: str | None = None
    default: str | None = None
    """The default, as `--help` shows it."""
    switch: bool = False


ALIASES = {
    "model": ("--model-path",),
    "bootstrap_port": ("--disaggregation-bootstrap-port",),
    "kv_dtype": ("--kv-cache-dtype",),
    "chunk_size": ("--chunked-prefill-size",),
    "tool_parser": ("--tool-call-parser",),
    "log_stats_interval_s": ("--log-stats-interval",),
}
"""Spellings of SGLang, and shorter ones."""

_LIMITS = {"ge": "at least", "gt": "above", "le": "up to", "lt": "below"}


def add_flags(parser: argparse._ActionsContainer, fields: Mapping[str, FieldInfo], names: Iterable[str]) -> None:
    """One flag per field; a flag that is not given is absent from the namespace."""
    for name in names:
        kind, given = _plain_type(fields[name]), _flag(fields[name])
        action: Any = "append" if get_origin(kind) is tuple else "store"
        if kind is bool:
            action = "store_true" if given.switch else argparse.BooleanOptionalAction
        added = parser.add_argument(
            *given.short,
            flag_name(name, fields[name]),
            *given.also,
            *ALIASES.get(name, ()),
            dest=name,
            action=action,
            default=argparse.SUPPRESS,
            help=describe(name, fields[name]).replace("%", "%%"),
        )
        if kind is not bool:
            added.metavar = given.metavar or _metavar(name, kind)


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings, or the name of a preset; flags win")


def given_flags(namespace: argparse.Namespace, names: Collection[str]) -> dict[str, str | bool]:
    """The given flags among `names`, by field name. Values of a repeated list flag are joined."""
    return {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if name in names
    }


@cache
def fields_of(options: "type[DataclassInstance]") -> Mapping[str, FieldInfo]:
    """The fields of options, a dataclass."""
    hints = get_type_hints(options, include_extras=True)
    return {
        field.name: FieldInfo.from_annotation(hints[field.name])
        if field.default is MISSING
        else FieldInfo.from_annotated_attribute(hints[field.name], field.default)
        for field in fields(options)
    }


def from_text(parse: Callable[[str], object]) -> BeforeValidator:
    """Parses the value of a flag; in Python, options are given parsed values."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def read_options(options: type[OptionsT], given: Mapping[str, object]) -> OptionsT:
    """The options, from values by field name. Raises StartupError with one line per wrong value."""
    try:
        return TypeAdapter(options).validate_python(given)
    except ValidationError as error:
        problems = (_explain(fields_of(options), problem) for problem in error.errors())
        raise StartupError("\n".join(problems)) from None


def _explain(fields: Mapping[str, FieldInfo], problem: ErrorDetails) -> str:
    name = str(problem["loc"][0])
    out_of_range = problem["type"].startswith(("greater_than", "less_than"))
    message = f"must be {limits_of(fields[name])}" if out_of_range else explain(problem, fields[name])
    separator = " " if message.startswith("must ") else ": "
    return f"{flag_name(name, fields[name])}{separator}{message}, got {problem['input']!r}"


def to_flags(config: AnyServerConfig) -> list[str]:
    """Arguments that give another process the same settings, except secrets, which go through the environment."""
    arguments = []
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        if name == "role" or name not in config.model_fields_set or value is None or _plain_type(field) is SecretStr:
            continue
        if isinstance(value, bool):
            arguments.append(flag_of(name) if value else flag_of(f"no_{name}"))
        else:
            # `--name=value`, because a value may start with a dash
            arguments.append(f"{flag_of(name)}={','.join(value) if isinstance(value, tuple) else value}")
    return arguments


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def flag_name(name: str, field: FieldInfo) -> str:
    return _flag(field).name or flag_of(name)


def describe(name: str, field: FieldInfo) -> str:
    """Meaning, default and range of a field, for --help."""
    default = default_of(field) if (given := _flag(field).default) is None else given
    limits = "" if get_origin(_plain_type(field)) is Literal else limits_of(field)  # choices are in the metavar
    notes = [note for note in (default and f"default: {default}", limits) if note]
    return f"{meaning_of(name, field)} ({'; '.join(notes)})" if notes else meaning_of(name, field)


def meaning_of(name: str, field: FieldInfo) -> str:
    return field.description or name.removesuffix("_s").replace("_", " ")


def default_of(field: FieldInfo) -> str:
    """The default as one would type it; empty if there is none."""
    if field.default is None or field.default == () or _flag(field).switch:
        return ""
    if isinstance(field.default, float):
        return f"{field.default:g}"
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def limits_of(field: FieldInfo) -> str:
    """`1 to 1024`, `at least 1`, `above 0, up to 60`, `a, b or c`: the allowed values; empty if all are."""
    kind = _plain_type(field)
    if get_origin(kind) is Literal:
        *choices, last = map(str, get_args(kind))
        return f"{', '.join(choices)} or {last}" if choices else last
    limits = {name: getattr(rule, name) for rule in field.metadata for name in _LIMITS if hasattr(rule, name)}
    if limits.keys() == {"ge", "le"}:
        return f"{limits['ge']} to {limits['le']}"
    return ", ".join(f"{_LIMITS[name]} {limit}" for name, limit in limits.items())


def _flag(field: FieldInfo) -> Flag:
    return next((given for given in field.metadata if isinstance(given, Flag)), Flag())


# Any: annotations have no common base class.
def _plain_type(field: FieldInfo) -> Any:
    """The field's type without `| None` and without validators."""
    kind = field.annotation
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _metavar(name: str, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(kind)) + "}"
    if get_origin(kind) is tuple:
        return {"bootstrap_allow": "HOST", "cors_origin": "ORIGIN"}.get(name, "HOST:PORT")
    if name.endswith("port"):
        return "PORT"
    if name.endswith("host"):
        return "HOST"
    if name.endswith("file") or kind is Path:
        return "FILE"
    if name.endswith("url"):
        return "URL"
    for unit in ("_ms", "_s"):
        if name.endswith(unit):
            return unit.removeprefix("_").upper()
    return {int: "N", float: "X", SecretStr: "SECRET"}.get(kind, name.upper())
