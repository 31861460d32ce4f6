"""The syntax of Python's regular expressions, as plain nodes.

The only module that uses private parts of `re`: Python has no public parser of its expressions. They are the same in
Python 3.11 to 3.13, which tests/server/text/test_regex_syntax.py checks. No third-party imports: that test runs it in
other interpreters.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from re import RegexFlag, _compiler, _parser, error  # type: ignore[attr-defined]  # not in the stubs
from typing import Any

_CHARACTERS = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}
_ALPHABETS = RegexFlag.ASCII | RegexFlag.LOCALE | RegexFlag.UNICODE


class RegexSyntaxError(ValueError):
    """The expression is invalid; the message says why."""


class RegexTooLargeError(ValueError):
    """The expression has too many nodes."""


@dataclass(frozen=True, slots=True)
class Character:
    """One character that `accepts` returns True for, with the flags of the expression."""

    accepts: Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Position:
    """A condition of a place in the text, such as AT_BEGINNING, with the flags that change its meaning."""

    name: str
    multiline: bool
    ascii: bool


@dataclass(frozen=True, slots=True)
class Repeat:
    """`nodes` at least `least` times, and at most `most` times unless that is None. Greedy or lazy."""

    least: int
    most: int | None
    nodes: "Nodes"


@dataclass(frozen=True, slots=True)
class Branch:
    options: tuple["Nodes", ...]


@dataclass(frozen=True, slots=True)
class Group:
    nodes: "Nodes"


@dataclass(frozen=True, slots=True)
class Other:
    """Anything else, by its name in `re`."""

    name: str


Node = Character | Position | Repeat | Branch | Group | Other
Nodes = tuple[Node, ...]


def parse_regex(pattern: str, max_nodes: int) -> Nodes:
    """The nodes of an expression; raises RegexSyntaxError and RegexTooLargeError."""
    try:
        tree = _parser.parse(pattern)
        return _Converter(max_nodes).sequence(tree, tree.state.flags)
    except (error, OverflowError, RecursionError) as problem:
        raise RegexSyntaxError(str(problem)) from None


class _Converter:
    """Any: the tree of `re` has no types."""

    def __init__(self, max_nodes: int) -> None:
        self._left = max_nodes

    def sequence(self, items: Iterable[Any], flags: int) -> Nodes:
        return tuple(self._node(item, flags) for item in items)

    def _node(self, item: Any, flags: int) -> Node:
        self._left -= 1
        if self._left < 0:
            raise RegexTooLargeError
        name, argument = str(item[0]), item[1]
        if name in _CHARACTERS:
            return Character(self._matcher(item, flags))
        if name in _REPEATS:
            least, most, items = argument
            return Repeat(least, None if most is _parser.MAXREPEAT else most, self.sequence(items, flags))
        match name:
            case "BRANCH":
                return Branch(tuple(self.sequence(option, flags) for option in argument[1]))
            case "SUBPATTERN":
                _, added, removed, items = argument
                kept = flags & ~_ALPHABETS if added & _ALPHABETS else flags  # these replace each other
                return Group(self.sequence(items, (kept | added) & ~removed))
            case "AT":
                return Position(str(argument), bool(flags & RegexFlag.MULTILINE), bool(flags & RegexFlag.ASCII))
        return Other(name)

    @staticmethod
    def _matcher(item: Any, flags: int) -> Callable[[str], bool]:
        """Compares a character as `re` does: classes, categories and IGNORECASE are its own."""
        fresh = _parser.State()  # that of the tree would add its flags
        matches = _compiler.compile(_parser.SubPattern(fresh, [item]), flags).match
        return lambda character: matches(character) is not None
