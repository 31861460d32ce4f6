"""Compiles regular expressions to automata of bounded size. The syntax is Python's, without look-around and
back-references.

This is the only module that uses private parts of `re`, because Python has no public parser of its expressions. These
parts are the same in Python 3.11 to 3.13: tests/server/text/test_regex_automata.py runs this module in other
interpreters to check that, so it has no third-party imports.
"""

from collections.abc import Callable, Sequence
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
class _State:
    """A state of an automaton. With `accepts` it consumes a character, with `condition` it checks the position; without
    both it does neither. Then the states in `next` follow.
    """

    accepts: Callable[[str], bool] | None = None
    condition: Callable[[str | None, str], bool] | None = None
    next: "list[_State]" = field(default_factory=list)
    final: bool = False


StateSet = int
"""A set of the states that consume a character: bit i is state i. Bit 0 is the beginning of the expression in a set of
states that have consumed a character, and its end in a set of states that may consume the next one.
"""
BEGIN = END_STATE = 1
MOST_SETS = 512
"""Most results that are kept for each kind of position, and for accepted characters."""


class Automaton:
    """An expression. Requests share it; what it has computed before takes one look-up per character."""

    def __init__(self, pattern: str, begin: _State, size: int, listed: int) -> None:
        self.pattern = pattern
        self.size = size
        self.listed = listed
        states = _reachable(begin)
        self._consuming = [state for state in states if state.accepts is not None]
        numbers = {id(state): number for number, state in enumerate(self._consuming, 1)}
        self._states = [(state, numbers.get(id(state), 0)) for state in states]
        self._begin = begin
        matchers: dict[Callable[[str], bool], StateSet] = {}
        for number, state in enumerate(self._consuming, 1):
            assert state.accepts is not None
            matchers[state.accepts] = matchers.get(state.accepts, 0) | 1 << number
        self._matchers = tuple(matchers.items())
        self._accepting: dict[str, StateSet] = {}
        self._conditions = tuple({state.condition: None for state in states if state.condition is not None})
        self._positions: dict[tuple[bool, ...], _Position] = {}

    def at(self, previous: str | None, following: str) -> "_Position":
        """What may follow between these characters."""
        holds = tuple([condition(previous, following) for condition in self._conditions])
        position = self._positions.get(holds)
        if position is None:
            position = self._positions[holds] = self._position(holds)
        return position

    def accepting(self, character: str) -> StateSet:
        """The states that accept this character."""
        states = self._accepting.get(character)
        if states is None:
            if len(self._accepting) == MOST_SETS:
                self._accepting.clear()
            states = 0
            for accepts, those in self._matchers:
                if accepts(character):
                    states |= those
            self._accepting[character] = states
        return states

    def _position(self, holds: tuple[bool, ...]) -> "_Position":
        """Follows all transitions that consume no character."""
        truth = dict(zip(self._conditions, holds, strict=True))
        ready = {id(state): END_STATE if state.final else 1 << number & ~1 for state, number in self._states}
        changed = True
        while changed:  # successors come first, so a second round is needed only for repetitions
            changed = False
            for state, number in self._states:
                if number or not state.next or (state.condition is not None and not truth[state.condition]):
                    continue
                found = 0
                for following in state.next:
                    found |= ready[id(following)]
                if found != ready[id(state)]:
                    ready[id(state)] = found
                    changed = True
        return _Position([ready[id(self._begin)], *(ready[id(state.next[0])] for state in self._consuming)])


class _Position:
    """Between two characters: the states that may consume the next one, for each state that has consumed the last."""

    def __init__(self, after: Sequence[StateSet]) -> None:
        self.found: dict[StateSet, StateSet] = {}
        """Results of `ready`."""
        self._after = after

    def ready(self, states: StateSet) -> StateSet:
        """The states that may follow a set of states, also those that `found` does not have yet."""
        if len(self.found) == MOST_SETS:
            self.found.clear()
        ready, rest = 0, states
        while rest:
            lowest = rest & -rest
            ready |= self._after[lowest.bit_length() - 1]
            rest ^= lowest
        self.found[states] = ready
        return ready


def _reachable(begin: _State) -> list[_State]:
    """All states, each after those that follow it (except within repetitions)."""
    states: list[_State] = []
    seen = {id(begin)}
    path = [(begin, iter(begin.next))]
    while path:
        state, following = path[-1]
        new = next((each for each in following if id(each) not in seen), None)
        if new is None:
            states.append(state)
            path.pop()
        else:
            seen.add(id(new))
            path.append((new, iter(new.next)))
    return states


@lru_cache(maxsize=64)
def compile_stop_regex(pattern: str) -> Automaton:
    """Compiles an expression; raises StopRegexError."""
    builder = _Builder()
    try:
        tree = _parser.parse(pattern)
        begin = builder.sequence(tree, tree.state.flags, _State(final=True))
    except (error, OverflowError, RecursionError) as problem:
        raise StopRegexError(f"is not a valid regular expression: {problem}") from None
    automaton = Automaton(pattern, begin, builder.size, builder.listed)
    if automaton.at(None, END).ready(BEGIN) & END_STATE:
        raise StopRegexError("matches the empty text, so it would end every output at once")
    return automaton


class _Builder:
    """Makes states from the items of an expression, from the last to the first: each state needs its successor. Items
    are typed Any, because `re` has no types for them.
    """

    def __init__(self) -> None:
        self.size = 0
        self.listed = 0
        self._matchers: dict[tuple[str, int], Callable[[str], bool]] = {}
        """Compiled matchers by item and flags. `re` needs 30 ms for a class of many characters, and an expression with
        repetitions has many copies of it."""

    def sequence(self, items: Sequence[Any], flags: int, then: _State) -> _State:
        for item in reversed(items):
            then = self._item(item, flags, then)
        return then

    def _item(self, item: Any, flags: int, then: _State) -> _State:
        self._grow()
        name, argument = str(item[0]), item[1]
        match name:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return _State(accepts=self._matcher(item, flags), next=[then])
            case "MAX_REPEAT" | "MIN_REPEAT":  # greedy and lazy do not differ, because the first complete match counts
                least, most, items = argument
                return self._repeat(least, None if most is _parser.MAXREPEAT else most, items, flags, then)
            case "BRANCH":
                return _State(next=[self.sequence(option, flags, then) for option in argument[1]])
            case "SUBPATTERN":
                _, added, removed, items = argument
                kept = flags & ~_ALPHABETS if added & _ALPHABETS else flags  # a new alphabet replaces the old one
                return self.sequence(items, (kept | added) & ~removed, then)
            case "AT":
                return _State(
                    condition=_condition(
                        str(argument), bool(flags & RegexFlag.MULTILINE), bool(flags & RegexFlag.ASCII)
                    ),
                    next=[then],
                )
        raise StopRegexError(f"has {_UNSUPPORTED.get(name, name)}, which is not supported")

    def _repeat(self, least: int, most: int | None, items: Sequence[Any], flags: int, then: _State) -> _State:
        if most is None:
            state = _State()
            state.next = [self.sequence(items, flags, state), then]
        else:
            state = then
            for _ in range(most - least):
                self._grow()
                state = _State(next=[self.sequence(items, flags, state), then])
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
        self.listed += sum(min(last, LAST_LISTED) - min(first, LAST_LISTED) for first, last in ranges)
        if self.listed > MAX_LISTED:
            raise StopRegexError(
                f"is too large: the ranges of its character classes have more than {MAX_LISTED} characters"
            )

    def _grow(self) -> None:
        self.size += 1
        if self.size > MAX_SIZE:
            raise StopRegexError(f"is too large: with repetitions written out, it has more than {MAX_SIZE} items")


@lru_cache
def _condition(name: str, lines: bool, only_ascii: bool) -> Callable[[str | None, str], bool]:
    """Returns a test of a position, such as `^` or `\\b`, which takes the characters before and after the position."""

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
