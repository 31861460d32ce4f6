"""The base class of parsers that find tool calls in the text of an output, which arrives in pieces.

Text that only looks like a call becomes content. That is no longer possible after CallBegin was emitted: a call that
turns out to be broken later ends there, and its arguments may be invalid JSON.
"""

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, ClassVar

from ....common.words import whole_characters
from .events import CallArguments, CallBegin, CallEnd, Content
from .text_parser import EndOfTextError, HeldSpace, Steps, TextParser, partial_marker

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each function's parameters, by the function's name."""

LONGEST_NAME = 256


class NotACallError(Exception):
    """The text is not a call, or not a valid one."""


def find_first(text: str, markers: tuple[str, ...]) -> tuple[int, str] | None:
    """Returns the position of the first marker in a text, and the marker. No marker may be a prefix of another."""
    return min(((at, marker) for marker in markers if (at := text.find(marker)) >= 0), default=None)


def is_one_word(name: str) -> bool:
    """Whether a name has characters, and none of them is white space."""
    return len(name.split()) == 1


class CallParser(TextParser):
    """Finds calls in a text that arrives in pieces. White space around calls is dropped."""

    markers: ClassVar[tuple[str, ...]]
    """Strings with which a call, or a list of calls, begins within other text."""
    tags: ClassVar[tuple[str, ...]] = ()
    """All strings of the format that a tokenizer may have as special tokens: they must stay in the text."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._unsure: list[str] = []
        """Text taken since the marker, and white space before it. It becomes content if no call follows."""
        self._calls = 0
        self._in_call = False
        self._after_call = False

    def _parse(self) -> Steps[None]:
        steps = self._beginning()
        while True:
            try:
                yield from steps
            except NotACallError:
                self._give_up()
            except EndOfTextError:
                self._consume(len(self._buffer))
                self._give_up()
                return
            self._unsure = []
            steps = self._content_and_calls()

    def _beginning(self) -> Steps[None]:
        """Parse calls at the beginning of the output, in formats that need no marker there."""
        yield from ()

    def _content_and_calls(self) -> Steps[None]:
        """Parse content up to the next marker, and the calls after it."""
        space = HeldSpace()
        while (found := find_first(self._buffer, self.markers)) is None:
            partial = 0 if self._final else partial_marker(self._buffer, self.markers)
            self._emit_content(space.add(self._take(len(self._buffer) - partial)))
            if self._final:
                self._emit_content(space.take())
            yield from self._more()
        at, marker = found
        self._emit_content(space.add(self._take(at)))
        self._unsure = [space.take()]
        self._consume(len(marker))
        yield from self._parse_calls(marker)

    @abstractmethod
    def _parse_calls(self, marker: str) -> Steps[None]:
        """Parse the calls after a marker. Raises NotACallError if something else follows."""

    def _consume(self, count: int) -> str:
        """Take text from the buffer. Until a call begins, remember it, because it becomes content if none does."""
        text = self._take(count)
        if not self._in_call:
            self._unsure.append(text)
        return text

    def _put_back(self, text: str) -> None:
        """Put text that was taken back into the buffer."""
        self._buffer = text + self._buffer

    def _skip_space(self) -> Steps[str]:
        """Take white space; returns the next character."""
        while True:
            self._consume(len(self._buffer) - len(self._buffer.lstrip()))
            if self._buffer:
                return self._buffer[0]
            yield from self._more()

    def _tag(self, *tags: str) -> Steps[str]:
        """Take white space and one of `tags`, which is returned. Raises NotACallError if something else follows."""
        yield from self._skip_space()
        while (tag := next(filter(self._buffer.startswith, tags), None)) is None:
            if self._final or not any(tag.startswith(self._buffer) for tag in tags):
                raise NotACallError
            yield from self._more()
        return self._consume(len(tag))

    def _optional_tag(self, tag: str) -> Steps[None]:
        with suppress(NotACallError):
            yield from self._tag(tag)

    def _until(self, *ends: str) -> Steps[tuple[str, str]]:
        """Take the text before the first of `ends`, and that end. Text is taken as it arrives, so that each character
        is searched once.
        """
        before: list[str] = []
        while (found := find_first(self._buffer, ends)) is None:
            before.append(self._consume(len(self._buffer) - partial_marker(self._buffer, ends)))
            yield from self._more()
        before.append(self._consume(found[0]))
        return "".join(before), self._consume(len(found[1]))

    def _soon(self, *ends: str) -> Steps[tuple[str, str]]:
        """The same, but for at most LONGEST_NAME characters before the end. Raises NotACallError, and takes nothing, if
        there are more.
        """
        while (found := find_first(self._buffer, ends)) is None or found[0] > LONGEST_NAME:
            if len(self._buffer) > LONGEST_NAME + max(map(len, ends)):
                raise NotACallError
            yield from self._more()
        return self._consume(found[0]), self._consume(len(found[1]))

    def _skip_to(self, *tags: str) -> Steps[str]:
        """Take the text up to the first of `tags`, and that tag, which is returned."""
        _, tag = yield from self._until(*tags)
        return tag

    def _name_until(self, *ends: str) -> Steps[tuple[str, str]]:
        """Take the name before the first of `ends`, and that end. Returns both, the name without surrounding white
        space.
        """
        name, end = yield from self._soon(*ends)
        return name.strip(), end

    def _begin(self, name: str) -> None:
        self._events.append(CallBegin(self._calls, whole_characters(name)))
        self._calls += 1
        self._in_call, self._unsure = True, []

    def _argue(self, text: str) -> None:
        self._events.append(CallArguments(self._calls - 1, whole_characters(text)))

    def _end(self) -> None:
        self._events.append(CallEnd(self._calls - 1))
        self._in_call, self._after_call = False, True

    def _give_up(self) -> None:
        """Handle text that is not a call: end a call that has begun, and emit the text since the marker as content."""
        if self._in_call:
            self._end()
        unsure = "".join(self._unsure)
        if unsure.strip() or not self._after_call:
            self._emit_content(unsure)

    def _emit_content(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        self._events.append(Content(text))
