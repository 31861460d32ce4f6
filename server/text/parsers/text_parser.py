"""The base class of parsers for the text of an output, which arrives in pieces.

The parser is the generator `_parse`. It takes characters from `self._buffer`. When it needs more of them, it yields
(`_more`), and the next piece resumes it. Its decisions depend on the characters alone: however a text is divided into
pieces, the events are the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import suppress
from typing import TypeVar

from .events import Event, merged

ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]
"""A generator that is a part of a parser. It yields whenever it needs more text."""


LONGEST_PART = 1024


class EndOfTextError(Exception):
    """A parser needs more text, and the output has ended."""


def partial_marker(text: str, markers: tuple[str, ...]) -> int:
    """Returns how many characters at the end of `text` are the beginning of a marker; `text` contains no marker."""
    tail = text[-max(map(len, markers)) :]
    beginnings = (at for at in range(len(tail)) if any(marker.startswith(tail[at:]) for marker in markers))
    return len(tail) - next(beginnings, len(tail))


class HeldSpace:
    """Holds back white space, because it is dropped if a marker follows. Reads each character once."""

    def __init__(self) -> None:
        self._held: list[str] = []

    def add(self, text: str) -> str:
        """Add text; returns all of it that is not held back."""
        shown = text.rstrip()
        space = text[len(shown) :]
        if not shown:
            self._held.append(space)
            return ""
        shown, self._held = "".join((*self._held, shown)), [space]
        return shown

    def take(self) -> str:
        """Returns the white space that was held back, and forgets it."""
        space, self._held = "".join(self._held), []
        return space


class TextParser(ABC):
    """Feeds text to the generator `_parse` and returns the events that it has found."""

    def __init__(self) -> None:
        self._buffer = ""
        self._final = False
        self._events: list[Event] = []
        self._parsing = self._parse()

    def feed(self, text: str) -> list[Event]:
        """Add text; returns the events found in it. Long text is added in parts, because tags are searched in all of
        the buffer, also where another tag is found soon.
        """
        if len(text) <= LONGEST_PART:
            self._buffer += text
            return self._run()
        found: list[Event] = []
        for at in range(0, len(text), LONGEST_PART):
            self._buffer += text[at : at + LONGEST_PART]
            found += self._run()
        return merged(found)

    def finish(self) -> list[Event]:
        """Returns the events of text that was held back. No text follows."""
        self._final = True
        return self._run()

    @abstractmethod
    def _parse(self) -> Steps[None]:
        """Parse the whole text."""

    def _more(self) -> Steps[None]:
        """Wait for more text. Raises EndOfTextError if the output has ended."""
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
