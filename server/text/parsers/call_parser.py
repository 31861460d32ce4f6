"""The base of parsers that find calls of tools in the text of an output, piece by piece.

Text that only looks like a call becomes content. After a CallBegin that is no longer possible: a call that is broken
later ends there, and its arguments may be invalid JSON.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ....configs.words import whole_characters
from .events import CallArguments, CallBegin, CallEnd, Content
from .text_parser import TextParser, held_back

Tools = Mapping[str, Mapping[str, Any]]
"""The parameters of each function, a JSON schema, by its name."""

LONGEST_NAME = 256


def find_first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """The first marker in a text, after its position. No marker begins another."""
    return min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None)


class CallParser(TextParser):
    """Finds calls in a text that arrives in pieces. White space around calls is dropped."""

    markers: ClassVar[tuple[str, ...]]
    """What begins a call, or a list of calls, in ordinary text."""
    tags: ClassVar[tuple[str, ...]] = ()
    """All strings of the format that a tokenizer may have as special tokens: they must stay in the text."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._unsure = ""
        """Text since a marker that becomes content if no call follows."""
        self._calls = 0
        self._in_call = False
        self._after_call = False

    def _run_states(self) -> None:
        super()._run_states()
        if self._final:
            self._consume(len(self._buffer))
            self._give_up()

    def _start(self) -> bool:
        """The first state; formats that have no marker decide here whether the output is a call."""
        self._step = self._content
        return True

    def _content(self) -> bool:
        """Text up to the next marker."""
        found = find_first(self._buffer, self.markers)
        if found is None:
            held = 0 if self._final else held_back(self._buffer, self.markers)
            self._emit_content(self._take(len(self._buffer) - held))
            return False
        at, marker = found
        text = self._take(at)
        shown = text.rstrip()
        self._emit_content(shown)
        self._unsure = text[len(shown) :]
        self._step = self._marker(marker)
        return True

    @abstractmethod
    def _marker(self, marker: str) -> Callable[[], bool]:
        """The state that follows a marker, which is still in the buffer."""

    def _consume(self, count: int) -> str:
        """Take text that becomes content again if no call follows."""
        text = self._take(count)
        if not self._in_call:
            self._unsure += text
        return text

    def _skip_space(self) -> str:
        """Take white space; returns the next character, "" if it has not arrived."""
        self._consume(len(self._buffer) - len(self._buffer.lstrip()))
        return self._buffer[:1]

    def _match(self, text: str) -> bool | None:
        """Take `text` if the buffer begins with it; None if that is not certain yet."""
        if self._buffer.startswith(text):
            self._consume(len(text))
            return True
        return None if not self._final and text.startswith(self._buffer) else False

    def _until(self, *ends: str, longest: int | None = None) -> tuple[str, str] | None:
        """Take the text before the first of `ends`, and that end. Returns None if it has not arrived, and gives up if
        the text is longer than `longest`.
        """
        found = find_first(self._buffer, ends)
        if found is None or (longest is not None and found[0] > longest):
            if longest is not None and len(self._buffer) > longest + max(map(len, ends)):
                self._give_up()
            return None
        text = self._consume(found[0])
        self._consume(len(found[1]))
        return text, found[1]

    def _begin(self, name: str) -> None:
        self._events.append(CallBegin(self._calls, whole_characters(name)))
        self._calls += 1
        self._in_call, self._unsure = True, ""

    def _argue(self, text: str) -> None:
        self._events.append(CallArguments(self._calls - 1, whole_characters(text)))

    def _end(self) -> None:
        self._events.append(CallEnd(self._calls - 1))
        self._in_call, self._after_call = False, True

    def _give_up(self) -> None:
        """No call follows here: what was taken since the marker is content. A call that has begun ends."""
        if self._in_call:
            self._end()
        text, self._unsure = self._unsure, ""
        self._step = self._content
        if text.strip() or not self._after_call:
            self._emit_content(text)

    def _emit_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        self._events.append(Content(text))
