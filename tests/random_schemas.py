"""Random JSON schemas whose smallest instances are short, in the style of the JSON-Schema test suite.

Every value is bounded, so that a model of random weights finishes. `without_bounds` removes the bounds.
"""

import random
from typing import Any

_PATTERNS = ("^[a-z]{1,6}$", "^(red|green|blue)$", "^[0-9]{3}-[0-9]{2}$", "^[A-Z][a-z]{0,4}( [A-Z])?$")
_FORMATS = ("date", "ipv4", "uuid")
_BOUNDS = {"maxLength", "maxItems", "maxProperties", "maximum", "exclusiveMaximum", "pattern"}


def random_schema(seed: int) -> dict[str, Any]:
    return _Generator(random.Random(seed)).root()


def without_bounds(schema: Any) -> Any:
    """The same, but strings, arrays and numbers may be endless. Any: JSON."""
    if isinstance(schema, list):
        return [without_bounds(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_bounds(value) for key, value in schema.items() if key not in _BOUNDS}


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._definitions: dict[str, Any] = {}

    def root(self) -> dict[str, Any]:
        schema = self._object(3) if self._rng.random() < 0.7 else self._any(3)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def _any(self, depth: int) -> dict[str, Any]:
        leaves = [self._string, self._integer, self._number, self._enum, self._constant, self._simple]
        nested = [self._object, self._array, self._tuple, self._union, self._all_of, self._reference, self._types]
        if depth == 0 or self._rng.random() < 0.4:
            return self._rng.choice(leaves)()
        return self._rng.choice(nested)(depth - 1)

    def _string(self) -> dict[str, Any]:
        match self._rng.randrange(4):
            case 0:
                return {"type": "string", "pattern": self._rng.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": self._rng.choice(_FORMATS)}
            case _:
                low = self._rng.randrange(4)
                return {"type": "string", "minLength": low, "maxLength": low + self._rng.randrange(8)}

    def _integer(self) -> dict[str, Any]:
        low = self._rng.randrange(-500, 500)
        bounds = {"minimum": low, "maximum": low + self._rng.randrange(1000)}
        if self._rng.random() < 0.3:
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": low + 2 + self._rng.randrange(1000)}
        if self._rng.random() < 0.3:
            bounds = {"minimum": 0, "maximum": 1000, "multipleOf": self._rng.choice((2, 5, 7, 10))}
        return {"type": "integer", **bounds}

    def _number(self) -> dict[str, Any]:
        low = self._rng.randrange(-50, 50)
        return {"type": "number", "minimum": low, "maximum": low + 1 + self._rng.randrange(20), "multipleOf": 0.5}

    def _enum(self) -> dict[str, Any]:
        values = [None, True, False, 0, -3, 2.5, "", "a", 'with "quotes"', "ümlaut", [1, 2], {"k": "v"}]
        return {"enum": self._rng.sample(values, self._rng.randrange(1, 5))}

    def _constant(self) -> dict[str, Any]:
        return {"const": self._rng.choice([7, "fixed", None, [True], {"a": {"b": 1}}])}

    def _simple(self) -> dict[str, Any]:
        return {"type": self._rng.choice(("boolean", "null"))}

    def _types(self, depth: int) -> dict[str, Any]:
        del depth
        return {"type": ["integer", "string", "null"], "minimum": 0, "maximum": 99, "maxLength": 5}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._rng.sample(
            ["id", "name", "größe", "a b", "tags", "x", "value", "kind"], self._rng.randrange(1, 5)
        )
        required = [name for name in names if self._rng.random() < 0.6]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": required,
            "additionalProperties": False,
        }
        if self._rng.random() < 0.15:
            return {
                "type": "object",
                "patternProperties": {"^[a-z]{1,3}$": self._any(0)},
                "additionalProperties": False,
                "maxProperties": 3,
            }
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._rng.randrange(3)
        return {"type": "array", "items": self._any(depth), "minItems": low, "maxItems": low + self._rng.randrange(3)}

    def _tuple(self, depth: int) -> dict[str, Any]:
        return {
            "type": "array",
            "prefixItems": [self._any(depth) for _ in range(self._rng.randrange(1, 4))],
            "items": False,
            "minItems": 1,
        }

    def _union(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _all_of(self, depth: int) -> dict[str, Any]:
        del depth
        return {"allOf": [{"type": "integer", "minimum": -20}, {"maximum": self._rng.randrange(0, 50)}]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self._definitions)}"
        self._definitions[name] = {}
        self._definitions[name] = self._any(depth)
        return {"$ref": f"#/$defs/{name}"}
