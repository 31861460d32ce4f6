"""Finds stop regular expressions in a text that arrives in pieces.

Expressions have Python's syntax, without look-around and back-references. They are not matched by backtracking but
simulated as automata, in one pass over the text: the work per character is at most proportional to the size of the
expressions, which is bounded, so no expression can block the server.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from re import RegexFlag, _compiler, _parser, error  # type: ignore[attr-defined]  # the parser of `re`, not in its stubs
from typing import Any

MAX_SIZE = 512
"""Most characters and classes of an expression, with its repetitions `{m,n}` written out."""
MAX_MATCH_CHARACTERS = 4096
"""A longer match is not found: the text that may belong to a match is held back."""

END = ""
"""Instead of the next character: the text ends here, for now."""

_CHARACTERS = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}  # greedy and lazy: the first complete match counts, so they are the same


class StopRegexError(ValueError):
    """An expression that is invalid, unsupported or too large; the message says which."""


@dataclass(eq=False, slots=True)
class State:
    """A state of an automaton: consumes a character or checks a condition, if it has one, and continues with `next`."""

    accepts: Callable[[str], bool] | None = None
    condition: Callable[[str | None, str], bool] | None = None
    next: "list[State]" = field(default_factory=list)
    final: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """A match of `pattern`, [start, end) in the whole text."""

    start: int
    end: int
    pattern: str


class StopRegexes:
    """Searches a growing text for several expressions. Finds the match that ends first; of several that end at the same
    place, the longest.

    `$` and `\\b` see the end of a piece as the end of the text, as in SGLang, which searches after each token.
    """

    def __init__(self, patterns: Sequence[str]) -> None:
        self._automata = [(pattern, compile_stop_regex(pattern)) for pattern in dict.fromkeys(patterns)]
        # of each automaton, the states that the text so far leads to, with the position where their match began
        self._reached: list[dict[State, int]] = [{} for _ in self._automata]
        self._position = 0
        self._previous: str | None = None
        self._armed = False

    @property
    def held_back(self) -> int:
        """How many characters at the end of the text may belong to a match."""
        starts = [start for reached in self._reached for start in reached.values()]
        return self._position - min(starts, default=self._position)

    def push(self, text: str, armed: bool = True) -> Match | None:
        """The first match that ends in this piece. In a piece that is not `armed` none counts."""
        for character in text:
            # a match that ends here has its last character in this piece or, at first, in the one before
            if (match := self._advance(character)) is not None and self._armed:
                return match
            self._previous, self._armed = character, armed
            self._position += 1
        return self._advance(END) if text and armed else None

    def _advance(self, following: str) -> Match | None:
        """Consume a character; returns the match that ended before it. At the end of a piece nothing is consumed."""
        best: Match | None = None
        for index, (pattern, begin) in enumerate(self._automata):
            origins = (*sorted(self._reached[index].items(), key=_by_start), (begin, self._position))
            ready, start = _follow(origins, self._previous, following)
            if start is not None and (best is None or start < best.start):
                best = Match(start, self._position, pattern)
            if following != END:
                self._reached[index] = self._consume(ready, following)
        return best

    def _consume(self, ready: dict[State, int], character: str) -> dict[State, int]:
        oldest = self._position + 1 - MAX_MATCH_CHARACTERS
        reached: dict[State, int] = {}
        for state, start in ready.items():
            assert state.accepts is not None
            if start >= oldest and state.accepts(character):
                (following,) = state.next
                reached[following] = min(start, reached.get(following, start))
        return reached


def _by_start(item: tuple[State, int]) -> int:
    return item[1]


def _follow(
    origins: Iterable[tuple[State, int]], previous: str | None, following: str
) -> tuple[dict[State, int], int | None]:
    """The states that can consume the next character, and where a match that ends here began. `origins` are sorted by
    their beginning, so that every state is first seen with its earliest one.
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
    """The first state of the automaton; raises StopRegexError."""
    try:
        tree = _parser.parse(pattern)
    except (error, OverflowError, RecursionError) as problem:
        raise StopRegexError(f"is not a valid regular expression: {problem}") from None
    begin = _Builder(tree).sequence(tree, tree.state.flags, State(final=True))
    if _follow([(begin, 0)], None, END)[1] is not None:
        raise StopRegexError("matches the empty text, so it would end every output at once")
    return begin


class _Builder:
    """Makes states from the tree of `re`'s parser, from the end to the beginning. Any: the tree has no types."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._size = 0

    def sequence(self, nodes: Iterable[Any], flags: int, then: State) -> State:
        for operation, argument in reversed(list(nodes)):
            then = self._node(str(operation), (operation, argument), flags, then)
        return then

    def _node(self, name: str, node: Any, flags: int, then: State) -> State:
        self._grow()
        argument = node[1]
        if name in _CHARACTERS:
            return State(accepts=self._character(node, flags), next=[then])
        if name in _REPEATS:
            least, most, nodes = argument
            return self._repeat(least, most, nodes, flags, then)
        match name:
            case "BRANCH":
                return State(next=[self.sequence(branch, flags, then) for branch in argument[1]])
            case "SUBPATTERN":
                _, added, removed, nodes = argument
                return self.sequence(nodes, (flags | added) & ~removed, then)
            case "AT":
                return State(condition=_condition(str(argument), flags), next=[then])
        raise StopRegexError(f"has {_DESCRIBED.get(name, name)}, which is not supported")

    def _repeat(self, least: int, most: Any, nodes: Any, flags: int, then: State) -> State:
        if most is _parser.MAXREPEAT:
            loop = State()
            loop.next = [self.sequence(nodes, flags, loop), then]
            state = loop
        else:
            state = then
            for _ in range(most - least):
                self._grow()
                state = State(next=[self.sequence(nodes, flags, state), then])
        for _ in range(least):
            self._grow()
            state = self.sequence(nodes, flags, state)
        return state

    def _character(self, node: Any, flags: int) -> Callable[[str], bool]:
        """A single character, as `re` compares it: classes, categories and IGNORECASE are its own."""
        matches = _compiler.compile(_parser.SubPattern(self._tree.state, [node]), flags).match
        return lambda character: matches(character) is not None

    def _grow(self) -> None:
        self._size += 1
        if self._size > MAX_SIZE:
            raise StopRegexError(f"is too large: with its repetitions written out, it may have {MAX_SIZE} items")


_DESCRIBED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


def _condition(name: str, flags: int) -> Callable[[str | None, str], bool]:
    """What a position must be like, by the characters before and after it."""
    lines = bool(flags & RegexFlag.MULTILINE)

    def is_word(character: str | None) -> bool:
        if character is None:
            return False
        return (character.isalnum() or character == "_") and (character.isascii() or not flags & RegexFlag.ASCII)

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
