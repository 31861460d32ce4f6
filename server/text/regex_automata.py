"""Compiles regular expressions to automata of bounded size. The syntax is Python's, without look-around and
back-references.

This is the only module that uses private parts of `re`, because Python has no public parser of its expressions. These
parts are the same in Python 3.11 to 3.13: tests/server/text/test_regex_automata.py runs this module in other
interpreters to check that, so it has no third-party imports.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from re import RegexFlag, _compiler, _parser, error  # type: ignore[attr-defined]  # not in the stubs
from typing import Any

MAX_SIZE = 512
"""Most items (characters, classes, groups) of an expression, with its repetitions `{m,n}` written out."""
MAX_LISTED, LAST_LISTED = 1 << 18, 0xFFFF
"""Most characters in the ranges of all classes of an expression. Only those up to U+FFFF count: `re` lists each of
them, which takes 0.1 to 0.5 us."""
END = ""
"""Stands for the next character at the end of the text that has arrived so far."""

_ALPHABETS = RegexFlag.ASCII | RegexFlag.LOCALE | RegexFlag.UNICODE
_UNSUPPORTED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


class StopRegexError(ValueError):
    """An expression that is invalid, unsupported or too large; the message says which."""


@dataclass(eq=False, slots=True)
class State:
    """A state of an automaton. With `accepts` it consumes a character, with `condition` it checks the position; without
    both it does neither. Then the states in `next` follow.
    """

    accepts: Callable[[str], bool] | None = None
    condition: Callable[[str | None, str], bool] | None = None
    next: "list[State]" = field(default_factory=list)
    final: bool = False


def follow(
    origins: Iterable[tuple[State, int]], previous: str | None, following: str
) -> tuple[dict[State, int], int | None]:
    """Follows all transitions that consume no character. Returns the states that can consume the next character, each
    with the beginning of its match, and the beginning of a match that ends here, if there is one.

    `origins` are states with the beginning of their match, sorted by it: so each state is first reached with its
    earliest beginning.
    """
    ready: dict[State, int] = {}
    seen: set[State] = set()
    matched: int | None = None
    for origin, start in origins:
        waiting = [origin]
        while waiting:
            state = waiting.pop()
            if state in seen:
                continue
            seen.add(state)
            if state.accepts is not None:
                ready[state] = start
            elif state.final:
                matched = start
            elif state.condition is None or state.condition(previous, following):
                waiting += state.next
    return ready, matched


@lru_cache(maxsize=256)
def compile_stop_regex(pattern: str) -> State:
    """Compiles an expression and returns the first state of its automaton; raises StopRegexError."""
    try:
        tree = _parser.parse(pattern)
        begin = _Builder().sequence(tree, tree.state.flags, State(final=True))
    except (error, OverflowError, RecursionError) as problem:
        raise StopRegexError(f"is not a valid regular expression: {problem}") from None
    if follow([(begin, 0)], None, END)[1] is not None:
        raise StopRegexError("matches the empty text, so it would end every output at once")
    return begin


class _Builder:
    """Makes states from the items of an expression, from the last to the first: each state needs its successor. Items
    are typed Any, because `re` has no types for them.
    """

    def __init__(self) -> None:
        self._size = 0
        self._listed = 0
        self._matchers: dict[tuple[str, int], Callable[[str], bool]] = {}
        """Compiled matchers by item and flags. `re` needs 30 ms for a class of many characters, and an expression with
        repetitions has many copies of it."""

    def sequence(self, items: Sequence[Any], flags: int, then: State) -> State:
        for item in reversed(items):
            then = self._item(item, flags, then)
        return then

    def _item(self, item: Any, flags: int, then: State) -> State:
        self._grow()
        name, argument = str(item[0]), item[1]
        match name:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return State(accepts=self._matcher(item, flags), next=[then])
            case "MAX_REPEAT" | "MIN_REPEAT":  # greedy and lazy do not differ, because the first complete match counts
                least, most, items = argument
                return self._repeat(least, None if most is _parser.MAXREPEAT else most, items, flags, then)
            case "BRANCH":
                return State(next=[self.sequence(option, flags, then) for option in argument[1]])
            case "SUBPATTERN":
                _, added, removed, items = argument
                kept = flags & ~_ALPHABETS if added & _ALPHABETS else flags  # a new alphabet replaces the old one
                return self.sequence(items, (kept | added) & ~removed, then)
            case "AT":
                return State(condition=_condition(str(argument), flags), next=[then])
        raise StopRegexError(f"has {_UNSUPPORTED.get(name, name)}, which is not supported")

    def _repeat(self, least: int, most: int | None, items: Sequence[Any], flags: int, then: State) -> State:
        if most is None:
            state = State()
            state.next = [self.sequence(items, flags, state), then]
        else:
            state = then
            for _ in range(most - least):
                self._grow()
                state = State(next=[self.sequence(items, flags, state), then])
        for _ in range(least):
            self._grow()
            state = self.sequence(items, flags, state)
        return state

    def _matcher(self, item: Any, flags: int) -> Callable[[str], bool]:
        """Returns a function that tests one character. `re` does the test, so classes, categories and IGNORECASE mean
        the same as in Python.
        """
        key = repr(item), flags
        if key not in self._matchers:
            self._count_listed(item)
            fresh = _parser.State()  # the state of the whole expression would add its flags
            matches = _compiler.compile(_parser.SubPattern(fresh, [item]), flags).match
            self._matchers[key] = lambda character: matches(character) is not None
        return self._matchers[key]

    def _count_listed(self, item: Any) -> None:
        ranges = [part for kind, part in item[1] if str(kind) == "RANGE"] if str(item[0]) == "IN" else []
        self._listed += sum(min(last, LAST_LISTED) - min(first, LAST_LISTED) for first, last in ranges)
        if self._listed > MAX_LISTED:
            raise StopRegexError(
                f"is too large: the ranges of its character classes have more than {MAX_LISTED} characters"
            )

    def _grow(self) -> None:
        self._size += 1
        if self._size > MAX_SIZE:
            raise StopRegexError(f"is too large: with repetitions written out, it has more than {MAX_SIZE} items")


def _condition(name: str, flags: int) -> Callable[[str | None, str], bool]:
    """Returns a test of a position, such as `^` or `\\b`, which takes the characters before and after the position."""
    lines, only_ascii = bool(flags & RegexFlag.MULTILINE), bool(flags & RegexFlag.ASCII)

    def is_word(character: str | None) -> bool:
        if character is None:
            return False
        return (character.isalnum() or character == "_") and (character.isascii() or not only_ascii)

    match name:
        case "AT_BEGINNING":
            return lambda previous, _: previous is None or (lines and previous == "\n")
        case "AT_BEGINNING_STRING":
            return lambda previous, _: previous is None
        case "AT_END":
            return lambda _, following: following == END or (lines and following == "\n")
        case "AT_END_STRING":
            return lambda _, following: following == END
        case "AT_BOUNDARY":
            return lambda previous, following: is_word(previous) != is_word(following)
        case "AT_NON_BOUNDARY":
            return lambda previous, following: is_word(previous) == is_word(following)
    raise StopRegexError(f"has {name}, which is not supported")
