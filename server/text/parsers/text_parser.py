"""The base of parsers of an output's text, which arrives in pieces.

A parser is a generator, `_parse`. It takes characters from `self._buffer` and yields, with `_more`, where it needs more
of them. Its decisions depend on the characters alone, so that any division of a text into pieces gives the same events.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import suppress
from typing import TypeVar

from .events import Event, merged

ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]
"""A part of a parser, which yields where it waits for more text."""


class EndOfTextError(Exception):
    """A parser needs more text, and the output has ended."""


def partial_marker(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` are the beginning of a marker."""
    tail = text[-max(map(len, markers)) :]
    beginnings = (at for at in range(len(tail)) if any(marker.startswith(tail[at:]) for marker in markers))
    return len(tail) - next(beginnings, len(tail))


class HeldSpace:
    """Holds back white space that may stand before a marker. Each character is looked at once."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """More text; returns what is not held back."""
        shown = text.rstrip()
        space = text[len(shown) :]
        if not shown:
            self._held.append(space)
            return ""
        shown, self._held = "".join((*self._held, shown)), [space]
        return shown

    def take(self) -> str:
        """The white space that was held back."""
        space, self._held = "".join(self._held), []
        return space


class TextParser(ABC):
    """Runs a parser over the text."""

    def __init__(self) -> None:
        self._buffer = ""
        self._final = False
        self._events: list[Event] = []
        self._parsing = self._parse()

    def feed(self, text: str) -> list[Event]:
        """The events of more text."""
        self._buffer += text
        return self._run()

    def finish(self) -> list[Event]:
        """The events of text that was held back, when no more text follows."""
        self._final = True
        return self._run()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Parse the whole text."""

    def _more(self) -> Steps[None]:
        """Wait for more text. Raises EndOfTextError if there is none."""
        if self._final:
            raise EndOfTextError
        yield

    def _run(self) -> list[Event]:
        with suppress(EndOfTextError):
            next(self._parsing, None)
        events, self._events = self._events, []
        return merged(events)

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text
