"""The parser of one output: finds the reasoning at its beginning, then content and tool calls."""

from collections.abc import Iterable

from .call_parser import CallParser
from .events import CallArguments, CallBegin, CallEnd, Content, Event, merged
from .reasoning import ReasoningParser


class OutputParser:
    """Parses the text of one output: call `feed` for each piece, then `finish`. Both return events. The events of the
    whole output do not depend on how the text was divided into pieces. Without `reasoning` and `calls`, all text is
    content.
    """

    def __init__(
        self, reasoning: ReasoningParser | None = None, calls: CallParser | None = None, max_calls: int | None = None
    ) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._max_calls = max_calls

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.is_open

    def feed(self, text: str) -> list[Event]:
        return self._parse(self._reasoning.feed(text) if self._reasoning is not None else [Content(text)])

    def finish(self) -> list[Event]:
        events = self._parse(self._reasoning.finish() if self._reasoning is not None else [])
        return events if self._calls is None else merged([*events, *self._wanted(self._calls.finish())])

    def _parse(self, events: Iterable[Event]) -> list[Event]:
        if self._calls is None:
            return merged(events)
        found: list[Event] = []
        for event in events:
            found += self._wanted(self._calls.feed(event.text)) if isinstance(event, Content) else [event]
        return merged(found)

    def _wanted(self, events: list[Event]) -> list[Event]:
        """Drops the events of calls beyond the maximum."""
        if self._max_calls is None:
            return events
        return [
            event
            for event in events
            if not isinstance(event, CallBegin | CallArguments | CallEnd) or event.index < self._max_calls
        ]
