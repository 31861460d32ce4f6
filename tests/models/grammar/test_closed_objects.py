"""Closed objects of JSON schemas, compared with the `jsonschema` library over all values of a small universe."""

import itertools
import json
import random
import time
from typing import Any

import jsonschema
import pytest

from pdserve.models.grammar.closed_objects import close_objects
from tests.examples import examples

INTEGER = {"type": "integer"}
A, B = ({"properties": {name: INTEGER}} for name in "ab")
DEFINED = {"$defs": {"A": A}}
REF = {"$ref": "#/$defs/A"}


def closed(schema: dict[str, Any], *, with_patterns: bool = False) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(schema))
    close_objects(made, with_patterns=with_patterns)
    return made


def is_valid(schema: Any, value: Any) -> bool:
    return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.mark.parametrize(
    ("schema", "allowed", "excluded"),
    [
        (A, [{"a": 1}, {}, 5], [{"b": 1}]),
        ({"type": "object"}, [{"b": 1}], []),
        ({"type": "object", "properties": {}}, [{}], [{"b": 1}]),
        ({**A, "additionalProperties": True}, [{"a": 1, "b": 1}], []),
        ({**A, "patternProperties": {"^x": True}}, [{"a": 1, "b": 1}], []),
        ({**A, "required": ["a", "b"]}, [{"a": 1, "b": 2}], [{"a": 1}, {"a": 1, "b": 1, "c": 1}]),
        ({**A, "minProperties": 2}, [{"a": 1, "b": 2}], []),
        ({**A, "required": ["a"], "minProperties": 1}, [{"a": 1}], [{"a": 1, "b": 2}]),
        ({**A, "enum": [{"b": 1}]}, [{"b": 1}], []),
        ({**A, "dependentRequired": {"a": ["b"]}}, [{"a": 1, "b": 1}], []),
        ({**A, "if": {"required": ["a"]}, "then": {"required": ["b"]}}, [{"a": 1, "b": 1}], []),
        ({**A, "not": {"maxProperties": 1}}, [{"a": 1, "b": 1}], []),
        ({"allOf": [A, B]}, [{"a": 1, "b": 1}], [{"c": 1}]),
        ({"allOf": [A, {**B, "additionalProperties": True}]}, [{"c": 1}], []),
        ({"allOf": [A, {"const": {"c": 1}}]}, [{"c": 1}], []),
        ({**DEFINED, **REF}, [{"a": 1}], [{"b": 1}]),
        ({**DEFINED, **REF, **B}, [{"a": 1, "b": 1}], [{"c": 1}]),
        ({**DEFINED, "allOf": [REF], "required": ["b"]}, [{"b": 1}], [{"b": 1, "c": 1}]),
        ({**DEFINED, "allOf": [REF, B], "items": REF}, [{"b": 1}, [{"a": 1}]], [{"c": 1}, [{"b": 1}]]),
        ({**DEFINED, "allOf": [{**REF, "title": "x"}]}, [{"a": 1}], [{"b": 1}]),
        ({"anyOf": [A, B, {"type": "null"}]}, [{"a": 1}, {"b": 1}, None], [{"a": 1, "b": 1}, {"c": 1}]),
        ({**A, "anyOf": [B, {"required": ["a"]}]}, [{"a": 1, "b": 1}, {"a": 1}], [{"a": 1, "c": 1}]),
        ({**A, "anyOf": [{**B, "required": ["b"]}, {"properties": {"c": INTEGER}}]}, [{"c": 1}], [{"b": "x", "c": 1}]),
        ({"properties": {"a": A, "b": {"items": A}}}, [{"a": {"a": 1}}], [{"a": {"b": 1}}, {"b": [{"b": 1}]}]),
        ({"additionalProperties": A}, [{"x": {"a": 1}}], [{"x": {"b": 1}}]),
        ({"properties": {"a": {"$ref": "#"}}}, [{"a": {"a": {}}}], [{"a": {"b": {}}}]),
        (
            {"allOf": [{"properties": {"a": A}}, {"properties": {"a": {**B, "required": ["b"]}}}]},
            [{"a": {"a": 1, "b": 1}}],
            [{"b": 1}],
        ),
        ({"allOf": [{"items": A}, {"items": {**B, "required": ["b"]}}]}, [[{"a": 1, "b": 1}]], []),
        ({"$ref": "other.json", **A}, [], []),
        ({"properties": {"a": {"$id": "x", **A}}}, [{"b": 1}], []),
    ],
)
def test_objects_are_closed_after_merging(schema: dict[str, Any], allowed: list[Any], excluded: list[Any]) -> None:
    made = closed(schema)
    assert [value for value in allowed if not is_valid(made, value)] == []
    assert [value for value in excluded if is_valid(made, value)] == []
    if not allowed:
        assert made == schema


def test_objects_with_patterns_are_closed_on_request() -> None:
    schema = {"patternProperties": {"^x": INTEGER}, "allOf": [A, {"patternProperties": {"^y": INTEGER}}]}
    assert is_valid(closed(schema), {"b": 1})
    made = closed(schema, with_patterns=True)
    assert is_valid(made, {"a": 1, "x1": 1, "y1": 1})
    assert not is_valid(made, {"b": 1})
    assert not is_valid(made, {"y1": "text"})


def test_names_in_the_schema_keep_their_order() -> None:
    schema = {**DEFINED, "allOf": [REF, {"properties": {"c": True, "b": True}}], "required": ["b", "d"]}
    assert list(closed(schema)["properties"]) == ["a", "c", "b", "d"]


@pytest.mark.parametrize("shape", ["uses", "chain", "deep"])
def test_time_and_size_do_not_grow_with_the_square_of_the_schema(shape: str) -> None:
    schema: dict[str, Any] = A
    base = {"properties": {f"k{index}": True for index in range(3000)}}
    if shape == "uses":
        uses = {f"u{index}": {"allOf": [{"$ref": "#/$defs/base"}, A]} for index in range(2000)}
        schema = {"$defs": {"base": base}, "properties": uses}
    elif shape == "chain":
        chain: dict[str, Any] = {
            f"d{index}": {"properties": {f"k{index}": True}, "allOf": [{"$ref": f"#/$defs/d{index + 1}"}, A]}
            for index in range(400)
        }
        schema = {"$defs": {**chain, "d400": A}, "properties": {"x": {"$ref": "#/$defs/d0"}}}
    else:
        for _ in range(300):
            schema = {"properties": {"a": schema}, "allOf": [{"required": ["a"]}]}
    begun = time.process_time()
    made = closed(schema)
    assert time.process_time() - begun < 2  # about 0.1 s
    assert len(json.dumps(made)) < 3 * len(json.dumps(schema))


LEAVES: list[Any] = [True, INTEGER, {"const": 1}, {"type": ["integer", "object"]}, {"type": "object"}, False]
RARE: dict[str, list[Any]] = {
    "additionalProperties": [True, False, INTEGER, A],
    "patternProperties": [{"^b": True}, {"^b": B}],
    "minProperties": [0, 1, 2],
    "maxProperties": [1, 2],
    "enum": [[{"z": 1}, {"a": 1}, 1]],
    "propertyNames": [{"pattern": "^[az]"}],
    "dependentRequired": [{"a": ["z"]}],
    "dependentSchemas": [{"a": {"required": ["z"]}}],
    "not": [{"required": ["b"]}, {"maxProperties": 1}],
    "if": [{"required": ["a"]}],
    "then": [{"required": ["z"]}],
}


class Schemas:
    """Random schemas. In place, they refer to later definitions only, so that no schema refers to itself."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def document(self) -> dict[str, Any]:
        return {**self._object(2, 0), "$defs": {"0": self._object(1, 1), "1": self._object(1, 2)}}

    def _any(self, depth: int, definition: int) -> Any:
        chosen = self._rng.random()
        if chosen < 0.15 and definition < 2:
            return {"$ref": f"#/$defs/{self._rng.randrange(definition, 2)}"}
        return self._object(depth, definition) if depth >= 0 and chosen < 0.7 else self._rng.choice(LEAVES)

    def _object(self, depth: int, definition: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        if self._rng.random() < 0.7:
            names = self._rng.sample("ab", self._rng.choice((1, 1, 2)))
            made["properties"] = {name: self._any(depth - 1, 0) for name in names}
        if self._rng.random() < 0.3:
            made["required"] = self._rng.sample("abz", self._rng.choice((1, 1, 2)))
        for key in ("allOf", "allOf", "anyOf", "oneOf"):
            if depth > 0 and self._rng.random() < 0.15:
                made[key] = [self._any(depth - 1, definition) for _ in range(self._rng.choice((1, 2, 2)))]
        if definition < 2 and self._rng.random() < 0.1:
            made["$ref"] = f"#/$defs/{self._rng.randrange(definition, 2)}"
        if self._rng.random() < 0.15:
            key = self._rng.choice(list(RARE))
            made[key] = self._rng.choice(RARE[key])
        return made


SMALL: list[Any] = [1, {}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}]
LARGE: list[Any] = [*SMALL, {"z": 1}, *({"a": inner} for inner in ({}, {"a": 1}, {"z": 1}, {"a": 1, "z": 1}))]
ABSENT = object()
UNIVERSE: list[Any] = [1] + [
    {name: value for name, value in zip("abz", values, strict=True) if value is not ABSENT}
    for values in itertools.product([*LARGE, ABSENT], [*SMALL, ABSENT], [1, ABSENT])
]


def is_part(part: Any, whole: Any) -> bool:
    """Whether `part` is `whole` without some properties, at any depth."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and is_part(value, whole[name]) for name, value in part.items())
    return bool(part == whole)


def allowed_values(schema: dict[str, Any]) -> list[Any]:
    """The values that a schema allows. Alternatives of oneOf may overlap here; the compiler refuses such schemas."""
    validator = jsonschema.Draft202012Validator(json.loads(json.dumps(schema).replace('"oneOf"', '"anyOf"')))
    return [value for value in UNIVERSE if validator.is_valid(value)]


def test_closed_schemas_allow_a_part_of_every_value_and_nothing_else() -> None:
    changed = 0
    for seed in range(examples(3000, 200)):
        schema = Schemas(seed).document()
        made = closed(schema, with_patterns=seed % 2 == 0)
        before, after = allowed_values(schema), allowed_values(made)
        assert [value for value in after if value not in before] == [], (seed, schema)
        assert [value for value in before if not any(is_part(part, value) for part in after)] == [], (seed, schema)
        changed += len(after) < len(before)
    assert changed > seed // 4
