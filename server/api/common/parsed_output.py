"""The message of one output as it grows: content, reasoning and calls of tools."""

from collections.abc import Callable
from dataclasses import dataclass

from ...text.parsers.events import CallArguments, CallBegin, Content, Event, Reasoning
from ...text.parsers.output_parser import OutputParser


@dataclass(slots=True)
class ToolCall:
    """A call of a tool; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


class ParsedOutput:
    """Collects the events of a parser. `new_id` makes the id of a call."""

    def __init__(self, parser: OutputParser, new_id: Callable[[], str]) -> None:
        self.calls: list[ToolCall] = []
        self.reasoning_tokens = 0
        """Tokens up to the end of the reasoning, with its tags."""
        self._parser = parser
        self._new_id = new_id
        self._content: list[str] = []
        self._reasoning: list[str] = []

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    def push(self, text: str, tokens: int = 0) -> list[Event]:
        """The events of more text, which came with `tokens` tokens."""
        was_open = self._parser.in_reasoning
        events = self._parser.feed(text) if text else []
        if was_open or self._parser.in_reasoning:
            self.reasoning_tokens += tokens
        return self._collect(events)

    def finish(self) -> list[Event]:
        """The events of text that was held back."""
        return self._collect(self._parser.finish())

    def _collect(self, events: list[Event]) -> list[Event]:
        for event in events:
            match event:
                case Content(text=text):
                    self._content.append(text)
                case Reasoning(text=text):
                    self._reasoning.append(text)
                case CallBegin(name=name):
                    self.calls.append(ToolCall(self._new_id(), name))
                case CallArguments(index=index, text=text):
                    self.calls[index].arguments += text
        return events
