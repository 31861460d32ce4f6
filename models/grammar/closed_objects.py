"""Closes objects of JSON schemas: an object then has no properties besides those that its schema names.

Without `additionalProperties`, JSON Schema allows further properties, and models invent them until `max_new_tokens`.
An object is closed if its schema has `properties` and none of the keywords in _OPENING. What counts is its merged
schema: with the members of `allOf`, the target of `$ref`, and one of `anyOf` or `oneOf`.

A schema that allows a value still allows one afterwards: the same, without the properties that the schema does not
name. So a property that several merged schemas describe is left as it is: closed, each of these schemas could exclude
what another one requires.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import unquote

MAX_LISTED = 100_000
"""Names in all merged schemas together. Merging may take quadratic time: beyond this, a schema is left as it is."""

_OPENING = {
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "not", "if", "then", "else"),
    *("dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef"),
}
_ITEMS = ("items", "prefixItems", "additionalItems")
_DESCRIBING = {*_OPENING, *_ITEMS, "properties", "patternProperties", "required", "minProperties", "const", "enum"}
"""Keywords about properties and items."""

_Use = Literal["closed", "merged", "shared"] | int
"""How a schema is used: alone (`closed`), merged with others, or, at any depth, in a property that several merged
schemas describe (`shared`). A number: as an alternative of the schema with this id.
"""


class _NotClosedError(Exception):
    """The schema is too large, or has references that are not followed."""


@dataclass(slots=True)
class _Merged:
    """What merged schemas say about the properties and items of a value."""

    named: dict[str, list[Any]] = field(default_factory=dict)
    """The schemas of properties."""
    required: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, list[Any]] = field(default_factory=dict)
    further: list[Any] = field(default_factory=list)
    items: list[Any] = field(default_factory=list)
    has_properties: bool = False
    is_open: bool = False

    def children(self) -> Iterator[Any]:
        for values in (*self.named.values(), *self.patterns.values(), self.further, self.items):
            yield from values


def close_objects(schema: dict[str, Any], *, with_patterns: bool = False) -> None:
    """Close the objects of a schema, in place. `with_patterns`: also those that have only `patternProperties`."""
    closer = _Closer(schema, with_patterns)
    try:
        closer.find_uses()
        changes = list(closer.changes())
    except (_NotClosedError, RecursionError):
        return
    for node, added in changes:
        node.update(added)


class _Closer:
    def __init__(self, root: dict[str, Any], with_patterns: bool) -> None:
        self._root = root
        self._with_patterns = with_patterns
        self._nodes: dict[int, dict[str, Any]] = {}
        self._uses: dict[int, set[_Use]] = {}
        self._merged: dict[int, _Merged] = {}
        self._listed = 0

    def find_uses(self) -> None:
        """Find all schemas that describe values, and how they are used."""
        pending: list[tuple[Any, _Use]] = [(self._root, "closed")]
        while pending:
            node, use = pending.pop()
            if not isinstance(node, dict) or use in self._uses.setdefault(id(node), set()):
                continue
            if node is not self._root and isinstance(node.get("$id"), str):
                raise _NotClosedError  # references in it are relative to it
            self._nodes[id(node)] = node
            self._uses[id(node)].add(use)
            own, parts, alternatives = _own(node), self._parts(node), _alternatives(node)
            branches = [branch for listed in alternatives for branch in listed]
            if use == "shared":
                pending += [(each, "shared") for each in (*own.children(), *parts, *branches)]
                continue
            pending += [(each, "closed") for each in own.children()]
            pending += [(each, "shared") for each in self._shared(node, own, parts, alternatives)]
            if use == "closed" and _is_alias(node):
                pending += [(each, "closed") for each in (*parts, *branches)]
                continue
            pending += [(each, "merged") for each in parts]
            closes_branches = use == "closed" and len(alternatives) == 1
            pending += [(each, id(node) if closes_branches else "merged") for each in branches]

    def changes(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The schemas to change, and the keywords that they get."""
        definitions: dict[str, Any] = {}
        names: dict[int, str] = {}
        for node in self._nodes.values():
            if self._uses[id(node)] != {"closed"}:
                continue
            alternatives = _alternatives(node)
            if _is_alias(node):
                if "$ref" in node and (name := self._definition(node, definitions, names)) is not None:
                    yield node, {"$ref": f"#/$defs/{name}"}
            elif len(alternatives) == 1:
                others = [_own(node), *map(self._merge, self._parts(node))]
                for branch in alternatives[0]:
                    if isinstance(branch, dict) and self._uses[id(branch)] == {id(node)}:
                        yield branch, self._closing(branch, self._join([*others, self._merge(branch)]))
            else:
                yield node, self._closing(node, self._merge(node))
        if definitions:
            yield self._root, {"$defs": {**self._root.get("$defs", {}), **definitions}}

    def _definition(self, node: dict[str, Any], definitions: dict[str, Any], names: dict[int, str]) -> str | None:
        """The name of a closed definition for a reference to a schema that other schemas are merged with elsewhere."""
        target, existing = self._target(node["$ref"]), self._root.get("$defs", {})
        if not isinstance(target, dict) or len(self._uses[id(target)]) == 1 or not isinstance(existing, dict):
            return None
        if id(target) not in names:
            name = f"closed-{len(names)}"
            added = self._closing({}, self._merge(target))
            if not added or name in existing:
                return None
            definitions[name] = {"$ref": node["$ref"], **added}
            names[id(target)] = name
        return names[id(target)]

    def _closing(self, node: dict[str, Any], merged: _Merged) -> dict[str, Any]:
        """The keywords that close a schema, if it can be closed."""
        types = node.get("type", "object")
        if merged.is_open or (isinstance(types, str | list) and "object" not in types):
            return {}
        if not (self._with_patterns if merged.patterns else merged.has_properties):
            return {}
        made: dict[str, Any] = {"additionalProperties": False}
        for key, names in (("properties", {**merged.named, **merged.required}), ("patternProperties", merged.patterns)):
            given = node.get(key, {})
            if not isinstance(given, dict):
                return {}
            if names:
                made[key] = {**given, **{name: True for name in names if name not in given}}
        return made

    def _parts(self, node: dict[str, Any]) -> list[Any]:
        """The schemas that a schema is merged with."""
        members = node.get("allOf")
        found = list(members) if isinstance(members, list) else []
        return [self._target(node["$ref"]), *found] if "$ref" in node else found

    def _target(self, reference: object) -> Any:
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise _NotClosedError
        found: Any = self._root
        for step in reference.split("/")[1:]:
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (LookupError, ValueError, TypeError):
                raise _NotClosedError from None
        return found

    def _merge(self, node: Any) -> _Merged:
        """A schema merged with its parts and all of its alternatives."""
        if not isinstance(node, dict):
            return _Merged()
        found = self._merged.get(id(node))
        if found is None:
            self._merged[id(node)] = _Merged(is_open=True)  # for a schema that refers to itself
            others = [*self._parts(node), *(branch for listed in _alternatives(node) for branch in listed)]
            found = self._merged[id(node)] = self._join([_own(node), *map(self._merge, others)])
        return found

    def _join(self, schemas: list[_Merged]) -> _Merged:
        empty = _Merged()
        schemas = [each for each in schemas if each != empty]
        if len(schemas) == 1:
            return schemas[0]
        for each in schemas:
            self._count(each)
            for name, values in each.named.items():
                empty.named.setdefault(name, []).extend(values)
            for name, values in each.patterns.items():
                empty.patterns.setdefault(name, []).extend(values)
            empty.required |= each.required
            empty.further += each.further
            empty.items += each.items
            empty.has_properties |= each.has_properties
            empty.is_open |= each.is_open
        return empty

    def _count(self, merged: _Merged) -> None:
        self._listed += len(merged.named) + len(merged.patterns) + len(merged.required) + len(merged.items) + 1
        if self._listed > MAX_LISTED:
            raise _NotClosedError

    def _shared(
        self, node: dict[str, Any], own: _Merged, parts: list[Any], alternatives: list[list[Any]]
    ) -> Iterator[Any]:
        """The schemas of properties and items that several merged schemas describe."""
        if own.patterns and len(own.named) + len(own.patterns) > 1:
            yield from own.children()
        if len(parts) + len(alternatives) == 0 or _is_alias(node):
            return
        merged = [own, *map(self._merge, parts), *(self._join([*map(self._merge, each)]) for each in alternatives)]
        if any(each.patterns or each.further for each in merged):
            for each in merged:
                yield from each.children()
        described: dict[str, list[Any]] = {}
        for each in merged:
            self._count(each)
            for name, values in each.named.items():
                if name in described:
                    yield from (*described[name], *values)
                described[name] = values
        if sum(bool(each.items) for each in merged) > 1:
            for each in merged:
                yield from each.items


def _own(node: dict[str, Any]) -> _Merged:
    """What a schema says itself, without its parts and alternatives."""
    made = _Merged(has_properties="properties" in node, is_open=not _OPENING.isdisjoint(node))
    for key, found in (("properties", made.named), ("patternProperties", made.patterns)):
        if isinstance(values := node.get(key), dict):
            found.update({name: [value] for name, value in values.items()})
    if isinstance(further := node.get("additionalProperties"), dict):
        made.further = [further]
    for key in _ITEMS:
        value = node.get(key)
        made.items += value if isinstance(value, list) else [value] if isinstance(value, dict) else []
    required, least = node.get("required"), node.get("minProperties", 0)
    if isinstance(required, list):
        made.required = {name: None for name in required if isinstance(name, str)}
    literals = node.get("enum")
    literals = [node.get("const"), *(literals if isinstance(literals, list) else ())]
    made.is_open |= any(isinstance(literal, dict) for literal in literals)
    made.is_open |= not isinstance(least, int) or least > len(made.required)
    return made


def _alternatives(node: dict[str, Any]) -> list[list[Any]]:
    return [listed for key in ("anyOf", "oneOf") if isinstance(listed := node.get(key), list)]


def _is_alias(node: dict[str, Any]) -> bool:
    """Whether a schema says nothing about properties besides a reference, one member or one list of alternatives."""
    members = node.get("allOf", [])
    applied = ("$ref" in node) + len(members if isinstance(members, list) else []) + len(_alternatives(node))
    return applied == 1 and _DESCRIBING.isdisjoint(node)
