"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Ends a text at the first stop string, also across pieces, and never shows a part of one.

    The stop string that is complete first counts; of several that end with the same character, the longest. Work per
    character is proportional to the number of stop strings, not to their lengths: each one has a Knuth-Morris-Pratt
    automaton, whose state is the length of its longest prefix that the text ends with. It is built no further than its
    state has come: a call may have a million characters of stop strings, and its outputs begin on the event loop.
    """

    def __init__(self, stops: Sequence[str], show_stop: bool = False) -> None:
        self.matched: str | None = None
        self._stops = [(stop, [0]) for stop in sorted(set(stops), key=len, reverse=True)]
        """Each with its borders so far: for a prefix, the length of its longest proper prefix that is also its suffix.
        """
        self._lengths = [0] * len(self._stops)
        self._held_back = ""
        self._show_stop = show_stop

    def push(self, text: str, armed: bool = True) -> str:
        """Add a piece; returns the text that can be shown now. Must not be called after a match. A stop string that
        ends in a piece that is not `armed` is ordinary text.
        """
        assert self.matched is None, "text after a stop string"
        if not self._stops:
            return text
        pending = self._held_back + text
        for end, character in enumerate(text, len(self._held_back) + 1):
            matched = self.follow(character)
            if matched is not None and armed:
                self.matched = matched
                self._held_back = ""
                return pending[:end] if self._show_stop else pending[: end - len(matched)]
        shown = len(pending) - self.begun
        self._held_back = pending[shown:]
        return pending[:shown]

    def finish(self) -> str:
        """The text held back, when no more text follows."""
        held_back, self._held_back = self._held_back, ""
        return held_back

    @property
    def begun(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._lengths, default=0)

    def follow(self, character: str) -> str | None:
        """Advance every automaton by one character; returns the longest stop string that this character completes."""
        matched = None
        for index, (stop, borders) in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
                if length > len(borders):
                    borders.append(_next_border(stop, borders))
            if length == len(stop):
                matched = matched or stop
                length = borders[-1]
            self._lengths[index] = length
        return matched


def _next_border(stop: str, borders: Sequence[int]) -> int:
    """The border of the prefix that is one character longer than those that `borders` has."""
    end, length = len(borders), borders[-1]
    while length and stop[length] != stop[end]:
        length = borders[length - 1]
    return length + (stop[length] == stop[end])
