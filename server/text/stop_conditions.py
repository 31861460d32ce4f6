"""Ends a text at the first stop string or stop regular expression, also across pieces."""

from collections.abc import Sequence

from .stop_regexes import StopRegexes
from .stop_strings import StopStrings


class StopConditions:
    """`StopStrings` with regular expressions beside the strings. The match that ends first counts; `matched` is the
    stop string, or the pattern of the expression.
    """

    def __init__(self, strings: Sequence[str], regexes: Sequence[str], show_stop: bool = False) -> None:
        self.matched: str | None = None
        self._strings = StopStrings(strings)
        self._regexes = StopRegexes(regexes)
        self._show_stop = show_stop
        self._pending = ""
        self._shown = 0
        self._clear_of_strings = 0  # characters that belong to no stop string
        # all positions are those in the whole text; it is shown up to `_shown`, and `_pending` follows

    def push(self, text: str, armed: bool = True) -> str:
        """As `StopStrings.push`."""
        assert self.matched is None, "text after a stop condition"
        self._pending += text
        self._clear_of_strings += len(self._strings.push(text, armed))
        matches = []
        if (string := self._strings.matched) is not None:
            matches.append((self._clear_of_strings + len(string), self._clear_of_strings, string))
        if (match := self._regexes.push(text, armed)) is not None:
            matches.append((match.end, match.start, match.pattern))
        if matches:
            end, start, self.matched = min(matches)
            shown, self._pending = self._pending[: max(0, (end if self._show_stop else start) - self._shown)], ""
            return shown
        length = self._shown + len(self._pending)
        return self._show_up_to(min(self._clear_of_strings, length - self._regexes.held_back))

    def finish(self) -> str:
        """The text held back, when no more text follows."""
        return self._show_up_to(self._shown + len(self._pending))

    def _show_up_to(self, position: int) -> str:
        count = max(0, position - self._shown)
        shown, self._pending = self._pending[:count], self._pending[count:]
        self._shown += len(shown)
        return shown
