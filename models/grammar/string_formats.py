"""Formats of strings in JSON schemas, where llguidance differs from validators.

Its `date` and `date-time` allow February 29 in every year. It refuses formats that JSON Schema does not define, such as
pydantic's `path` and `password`, which validators ignore.
"""

from typing import Any

_YEAR = r"([1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(\d{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
DATE_PATTERN = rf"^({_YEAR}-(0[13-9]|1[0-2])|{_YEAR}-02-([01]\d|2[0-8])|{_LEAP_YEAR}-02-29)"
"""Of texts that have the format. There is no year 0000: most libraries refuse it."""

_DEFINED = {
    *("date", "date-time", "duration", "time"),
    *("email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6"),
    *("iri", "iri-reference", "uri", "uri-reference", "uri-template", "uuid"),
    *("json-pointer", "regex", "relative-json-pointer"),
}
"""By JSON Schema 2020-12. llguidance enforces some and refuses the others."""

_VALUES = {"const", "default", "enum", "examples"}
"""Keywords whose values are no schemas."""
_NAMED = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
"""Keywords whose values map names to schemas."""


def with_exact_formats(schema: Any) -> Any:
    """A copy of a schema without unknown formats, in which dates also match DATE_PATTERN. Any: JSON."""
    if isinstance(schema, list):
        return [with_exact_formats(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: with_exact_formats(each) for name, each in value.items()}
        else:
            made[key] = value if key in _VALUES else with_exact_formats(value)
    parts = made.get("allOf", [])
    if made.get("format") in ("date", "date-time") and isinstance(parts, list):
        made["allOf"] = [*parts, {"pattern": DATE_PATTERN}]
    elif isinstance(made.get("format"), str) and made["format"] not in _DEFINED:
        del made["format"]
    return made
