"""Finds stop regular expressions, and stop strings beside them, in a text that arrives in pieces.

Expressions are simulated as automata (regex_automata.py) in one pass over the text, without backtracking. The work per
character is bounded by the size of all expressions together (MAX_SIZE): at most a quarter of a millisecond.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .regex_automata import BEGIN, END, END_STATE, Automaton, StateSet
from .stop_strings import StopStrings

MAX_MATCH_CHARACTERS = 4096
"""Longer matches are not found. The limit bounds the text that is held back because it may belong to a match."""


@dataclass(frozen=True, slots=True)
class Match:
    """A match of the expression or stop string `name`: [start, end) in the whole text."""

    start: int
    end: int
    name: str


class StopRegexes:
    """Ends a text at the first match of an expression or a stop string, also across pieces, and never shows a part of
    the match. The match that ends first counts; of several that end at the same place, the longest. `matched` is the
    pattern or the stop string.

    `$` and `\\b` treat the end of a piece as the end of the text, as in SGLang, which searches after each token.
    """

    def __init__(self, strings: Sequence[str], expressions: Iterable[Automaton], show_stop: bool = False) -> None:
        self.matched: str | None = None
        self._show_stop = show_stop
        self._strings = StopStrings(strings)
        self._string_match: Match | None = None
        """Match of the stop string that ends at `_position`, if one does."""
        self._automata = list(dict.fromkeys(expressions))
        # for each automaton: the states that the text so far has reached, by the position where their match began, in
        # order; each state is in one set only
        self._reached: list[list[tuple[int, StateSet]]] = [[] for _ in self._automata]
        self._position = 0
        self._held_back = ""
        """The last characters of the text, up to `_position`, which are not shown yet because they may be in a match.
        """
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
        starts = [reached[0][0] for reached in self._reached if reached]
        shown = min([*starts, self._position - self._strings.begun]) - begin
        self._held_back = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """The text held back, when no more text follows."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    def _search(self, text: str, armed: bool) -> Match | None:
        """Returns the first match that this piece completes. A match counts if the piece of its last character is
        `armed`.
        """
        for character in text:
            # _advance() finds a match that ends before `character`: for the first one, that is in the piece before, and
            # `_armed` is still the value of that piece
            if (match := self._advance(character)) is not None and self._armed:
                return match
            self._previous, self._armed = character, armed
            self._position += 1
        return self._advance(END) if text and armed else None

    def _advance(self, following: str) -> Match | None:
        """Consume the character `following`; returns the match that ended before it. END, at the end of a piece, is not
        consumed.
        """
        best = self._string_match
        for index, automaton in enumerate(self._automata):
            start, reached = self._follow(automaton, self._reached[index], following)
            if start is not None and (best is None or start < best.start):
                best = Match(start, self._position, automaton.pattern)
            if following != END:
                self._reached[index] = reached
        if following != END:
            self._string_match = self._consume_in_strings(following)
        return best

    def _follow(
        self, automaton: Automaton, reached: list[tuple[int, StateSet]], following: str
    ) -> tuple[int | None, list[tuple[int, StateSet]]]:
        """Returns the beginning of the match that ends before `following`, and the states that consume this character.
        A state that several beginnings reach belongs to the first.
        """
        position = automaton.at(self._previous, following)
        rest = automaton.accepting(following) if following != END else 0
        oldest = self._position + 1 - MAX_MATCH_CHARACTERS
        matched: int | None = None
        after: list[tuple[int, StateSet]] = []
        found = position.found.get
        for start, states in (*reached, (self._position, BEGIN)):
            ready = found(states)
            if ready is None:
                ready = position.ready(states)
            if ready & END_STATE and matched is None:
                matched = start
            consumed = ready & rest
            if consumed and start >= oldest:
                after.append((start, consumed))
                rest ^= consumed
        return matched, after

    def _consume_in_strings(self, character: str) -> Match | None:
        """Returns the match of the longest stop string that ends with this character."""
        end, string = self._position + 1, self._strings.follow(character)
        return None if string is None else Match(end - len(string), end, string)
