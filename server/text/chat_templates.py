"""The Jinja environment that chat templates expect. Templates come with the weights: they are sandboxed, and one that
loops or grows ends with an error, also if it hides its growth in nested lists.
"""

import json
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache, wraps
from typing import Any, Final, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.visitor

from ...common.errors import StartupError

MOST_STEPS: Final = 1 << 19
"""Turns of loops and calls of one rendering: five for each message that a body may have (docs/http.md)."""
MOST_CHARACTERS: Final = 1 << 25
"""Of a text that a rendering makes, and elements of a list."""
WRITING_FILTERS: Final = ("format", "join", "pprint", "string", "tojson")
"""Filters that make a text of a list. Others make one of a text."""


class _Rendering(threading.local):
    """How many steps the rendering of this thread may still take."""

    steps = MOST_STEPS


_rendering = _Rendering()


class _BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree: jinja2.nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(self, *arguments: Any, **named: Any) -> Any:
        self.step()
        function = getattr(arguments[1], "__wrapped__", arguments[1])  # the sandbox wraps str.format
        if isinstance(getattr(function, "__self__", None), str):
            _check_written((*arguments[2:], *named.values()))
        return super().call(*arguments, **named)

    def step(self) -> str:
        _rendering.steps -= 1
        if _rendering.steps < 0:
            raise jinja2.TemplateRuntimeError(f"it takes more than {MOST_STEPS} turns of loops and calls")
        return ""

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        size = _size(left) + _size(right)
        if operator == "**":
            size = _size(left) * right if isinstance(right, int) else 0
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            size = _size(left) * right if isinstance(right, int) else _size(right) * left
        elif operator == "%" and isinstance(left, str):
            size = _written_size(right)
        _check_size(size)
        return super().call_binop(context, operator, left, right)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """What Jinja makes of the parts of a template, a block or a macro."""
        found, size = [], 0
        for part in parts:
            found.append(part)
            size += len(part)
            _check_size(size)
        return "".join(found)

    def concatenated(self, *parts: Any) -> str:
        return self.concat(str(_printed(part)) for part in parts)


class _Bounds(jinja2.visitor.NodeTransformer):
    """Lets each turn of a loop count as a step, and `~` check the size of its result."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - a name of jinja2
        self.generic_visit(node)
        step = jinja2.nodes.Call(jinja2.nodes.EnvironmentAttribute("step"), [], [], None, None)
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        attribute = jinja2.nodes.EnvironmentAttribute("concatenated")
        return jinja2.nodes.Call(attribute, node.nodes, [], None, None, lineno=node.lineno)


def _size(value: object) -> int:
    if isinstance(value, int):
        return value.bit_length() << 10  # a number of 32,768 bits is the largest
    return len(value) if isinstance(value, str | list | tuple) else 0


def _written_size(value: object) -> int:
    """At least the characters of a value and all that is in it, as often as it is written. A list that is in it
    several times is looked at once: a list of two references to the next one, and so on, is small.
    """
    sizes: dict[int, int] = {}
    stack = [value]
    while stack:
        one = stack[-1]
        parts = _parts(one)
        unknown = [part for part in parts if id(part) not in sizes and _parts(part)]
        if unknown and id(one) not in sizes:
            stack += unknown
            continue
        stack.pop()
        sizes[id(one)] = _characters(one) + sum(sizes.get(id(part)) or _characters(part) for part in parts)
    return sizes[id(value)]


def _characters(value: object) -> int:
    """At least those of a value without its parts, and one."""
    if isinstance(value, int):
        return 1 + value.bit_length() // 4
    return max(1, len(value)) if isinstance(value, str) else 1


def _parts(value: object) -> Collection[object]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list | tuple) else ()


def _check_written(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, list | tuple | dict):
            _check_size(_written_size(value))


def _printed(value: object) -> object:
    """Called for each value that a template prints."""
    _check_written((value,))
    return value


def _checked(write: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, for values that do not become too long."""

    @wraps(write)
    def checked(*arguments: Any, **named: Any) -> Any:
        _check_written((*arguments, *named.values()))
        return write(*arguments, **named)

    return checked


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise jinja2.TemplateRuntimeError(f"it makes a text of more than {MOST_CHARACTERS} characters")


@contextmanager
def limited_rendering() -> Iterator[None]:
    """Within it, the templates that this thread renders have their own number of steps."""
    _rendering.steps = MOST_STEPS
    yield


def variables_of(text: str) -> set[str]:
    """The variables that a template reads and does not set."""
    return jinja2.meta.find_undeclared_variables(_environment().parse(text))


class _GenerationBlock(jinja2.ext.Extension):
    """Renders only the body of `{% generation %}...{% endgeneration %}`, which marks assistant text for training."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@cache
def _environment() -> _BoundedEnvironment:
    environment = _BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        finalize=_printed,
    )
    environment.filters["tojson"] = _to_json
    environment.filters |= {name: _checked(environment.filters[name]) for name in WRITING_FILTERS}
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@cache
def compile_template(text: str) -> jinja2.Template:
    try:
        return _environment().from_string(text)
    except jinja2.TemplateError as error:
        raise StartupError(f"the model's chat template cannot be compiled: {error}") from error


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson`. Jinja's own filter escapes for HTML. The options are those of transformers; GLM's templates
    use them.
    """
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
