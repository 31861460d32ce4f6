"""Finds stop regular expressions, and stop strings beside them, in a text that arrives in pieces.

Expressions have Python's syntax, without look-around and back-references. They are not matched by backtracking but
simulated as automata, in one pass over the text: the work per character is at most proportional to the size of the
expressions, which is bounded, so no expression can block the server.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from .regex_syntax import (
    Branch,
    Character,
    Group,
    Node,
    Nodes,
    Position,
    RegexSyntaxError,
    RegexTooLargeError,
    Repeat,
    parse_regex,
)

MAX_SIZE = 512
"""Most characters and classes of an expression, with its repetitions `{m,n}` written out."""
MAX_MATCH_CHARACTERS = 4096
"""A longer match is not found: the text that may belong to a match is held back."""

END = ""
"""Instead of the next character: the text ends here, for now."""

_TOO_LARGE = f"is too large: with its repetitions written out, it may have {MAX_SIZE} items"


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
    """A match of the expression or stop string `name`: [start, end) in the whole text."""

    start: int
    end: int
    name: str


class StopRegexes:
    """Ends a text at the first match of an expression or a stop string, also across pieces, and never shows a part of
    the match. The one that ends first counts; of several that end at the same place, the longest. `matched` is the
    pattern or the stop string.

    `$` and `\\b` see the end of a piece as the end of the text, as in SGLang, which searches after each token.
    """

    def __init__(self, strings: Sequence[str], patterns: Sequence[str], show_stop: bool = False) -> None:
        self.matched: str | None = None
        self._show_stop = show_stop
        self._automata = [
            *((string, _literal(string)) for string in dict.fromkeys(strings)),
            *((pattern, compile_stop_regex(pattern)) for pattern in dict.fromkeys(patterns)),
        ]
        # of each automaton, the states that the text so far leads to, with the position where their match began
        self._reached: list[dict[State, int]] = [{} for _ in self._automata]
        self._position = 0
        self._held_back = ""
        """The end of the text, up to `_position`, that is not shown yet."""
        self._previous: str | None = None
        self._armed = False

    def push(self, text: str, armed: bool = True) -> str:
        """As `StopStrings.push`."""
        assert self.matched is None, "text after a stop condition"
        begin = self._position - len(self._held_back)
        pending = self._held_back + text
        if (match := self._search(text, armed)) is not None:
            self.matched, self._held_back = match.name, ""
            return pending[: (match.end if self._show_stop else match.start) - begin]
        starts = [start for reached in self._reached for start in reached.values()]
        shown = min(starts, default=self._position) - begin
        self._held_back = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """The text held back, when no more text follows."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def _search(self, text: str, armed: bool) -> Match | None:
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
        for index, (name, begin) in enumerate(self._automata):
            origins = (*sorted(self._reached[index].items(), key=_by_start), (begin, self._position))
            ready, start = _follow(origins, self._previous, following)
            if start is not None and (best is None or start < best.start):
                best = Match(start, self._position, name)
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
        nodes = parse_regex(pattern, MAX_SIZE)
    except RegexSyntaxError as problem:
        raise StopRegexError(f"is not a valid regular expression: {problem}") from None
    except RegexTooLargeError:
        raise StopRegexError(_TOO_LARGE) from None
    begin = _Builder().sequence(nodes, State(final=True))
    if _follow([(begin, 0)], None, END)[1] is not None:
        raise StopRegexError("matches the empty text, so it would end every output at once")
    return begin


def _literal(text: str) -> State:
    """The first state of an automaton that matches only `text`."""
    state = State(final=True)
    for character in reversed(text):
        state = State(accepts=character.__eq__, next=[state])
    return state


class _Builder:
    """Makes states from the nodes of an expression, from the end to the beginning."""

    def __init__(self) -> None:
        self._size = 0

    def sequence(self, nodes: Nodes, then: State) -> State:
        for node in reversed(nodes):
            then = self._node(node, then)
        return then

    def _node(self, node: Node, then: State) -> State:
        self._grow()
        match node:
            case Character(accepts):
                return State(accepts=accepts, next=[then])
            case Repeat(least, most, nodes):
                return self._repeat(least, most, nodes, then)
            case Branch(options):
                return State(next=[self.sequence(option, then) for option in options])
            case Group(nodes):
                return self.sequence(nodes, then)
            case Position():
                return State(condition=_condition(node), next=[then])
        raise StopRegexError(f"has {_DESCRIBED.get(node.name, node.name)}, which is not supported")

    def _repeat(self, least: int, most: int | None, nodes: Nodes, then: State) -> State:
        """Greedy and lazy repetitions are the same: the first complete match counts."""
        if most is None:
            loop = State()
            loop.next = [self.sequence(nodes, loop), then]
            state = loop
        else:
            state = then
            for _ in range(most - least):
                self._grow()
                state = State(next=[self.sequence(nodes, state), then])
        for _ in range(least):
            self._grow()
            state = self.sequence(nodes, state)
        return state

    def _grow(self) -> None:
        self._size += 1
        if self._size > MAX_SIZE:
            raise StopRegexError(_TOO_LARGE)


_DESCRIBED = {
    "ASSERT": "look-around",
    "ASSERT_NOT": "look-around",
    "GROUPREF": "a back-reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repetition",
}


def _condition(position: Position) -> Callable[[str | None, str], bool]:
    """What a position must be like, by the characters before and after it."""
    lines = position.multiline

    def is_word(character: str | None) -> bool:
        if character is None:
            return False
        return (character.isalnum() or character == "_") and (character.isascii() or not position.ascii)

    match position.name:
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
    raise StopRegexError(f"has {position.name}, which is not supported")
