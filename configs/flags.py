"""Command-line flags, generated from the configuration schema.

`page_size` is `--page-size`, `verify_kv` is `--verify-kv` / `--no-verify-kv`. Values stay text here: the schema parses
and checks them like values from a file.
"""

import argparse
from collections.abc import Collection, Iterable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from .schema import AnyServerConfig

ALIASES = {
    "model": ("--model-path",),
    "bootstrap_port": ("--disaggregation-bootstrap-port",),
    "kv_dtype": ("--kv-cache-dtype",),
    "chunk_size": ("--chunked-prefill-size",),
    "tool_parser": ("--tool-call-parser",),
    "log_stats_interval_s": ("--log-stats-interval",),
}
"""Spellings of SGLang, and shorter ones."""

_LIMITS = {"ge": "at least", "gt": "above", "le": "up to"}


def add_flags(parser: argparse._ActionsContainer, fields: Mapping[str, FieldInfo], names: Iterable[str]) -> None:
    """One flag per field; a flag that is not given is absent from the namespace."""
    for name in names:
        kind = _plain_type(fields[name])
        added = parser.add_argument(
            flag_of(name),
            *ALIASES.get(name, ()),
            dest=name,
            action=argparse.BooleanOptionalAction
            if kind is bool
            else "append"
            if get_origin(kind) is tuple
            else "store",
            default=argparse.SUPPRESS,
            help=describe(name, fields[name]).replace("%", "%%"),
        )
        if kind is not bool:
            added.metavar = _metavar(name, kind)


def given_flags(namespace: argparse.Namespace, names: Collection[str]) -> dict[str, str | bool]:
    """The given flags among `names`, by field name. Values of a repeated list flag are joined."""
    return {
        name: ",".join(value) if isinstance(value, list) else value
        for name, value in vars(namespace).items()
        if name in names
    }


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


def describe(name: str, field: FieldInfo) -> str:
    """Meaning, default and range of a field, for --help."""
    default = default_of(field)
    limits = "" if get_origin(_plain_type(field)) is Literal else limits_of(field)  # choices are in the metavar
    notes = [note for note in (default and f"default: {default}", limits) if note]
    return f"{meaning_of(name, field)} ({'; '.join(notes)})" if notes else meaning_of(name, field)


def meaning_of(name: str, field: FieldInfo) -> str:
    return field.description or name.removesuffix("_s").replace("_", " ")


def default_of(field: FieldInfo) -> str:
    """The default as one would type it; empty if there is none."""
    if field.default is None or field.default == ():
        return ""
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
    if name.endswith("file"):
        return "FILE"
    return {int: "N", float: "X", SecretStr: "SECRET"}.get(kind, name.upper())
