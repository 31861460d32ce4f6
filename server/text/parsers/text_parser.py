"""The base of parsers of an output's text, which arrives in pieces.

A subclass is a state machine: `self._step` is the current state, a method that takes characters from `self._buffer` and
returns whether it has made progress; otherwise it waits for more text. Its decisions depend on the characters alone, so
that any division of a text into pieces gives the same events.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from .events import Event, merged


def partial_marker(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` are the beginning of a marker."""
    tail = text[-max(map(len, markers)) :]
    beginnings = (at for at in range(len(tail)) if any(marker.startswith(tail[at:]) for marker in markers))
    return len(tail) - next(beginnings, len(tail))


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """The same, with the white space before it."""
    return len(text) - len(text[: len(text) - partial_marker(text, markers)].rstrip())


class TextParser(ABC):
    """Runs the states over the text."""

    def __init__(self) -> None:
        self._buffer = ""
        self._final = False
        self._events: list[Event] = []
        self._step: Callable[[], bool] = self._start

    def feed(self, text: str) -> list[Event]:
        """The events of more text."""
        self._buffer += text
        return self._run()

    def finish(self) -> list[Event]:
        """The events of text that was held back, when no more text follows."""
        self._final = True
        return self._run()

    @abstractmethod
    def _start(self) -> bool:
        """The first state."""

    def _run(self) -> list[Event]:
        self._run_states()
        events, self._events = self._events, []
        return merged(events)

    def _run_states(self) -> None:
        while self._step():
            pass

    def _take(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text
