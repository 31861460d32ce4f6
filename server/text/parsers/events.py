"""Events that a parser emits for the text of an output, in order. Texts of the same kind and call are concatenated."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call. The calls of an output are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of a call's arguments, which are a JSON object when the call has ended normally."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a tool call. Follows every CallBegin, also if the output ends in the middle of the call."""

    index: int


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """The same events, without empty text and with adjacent text of one kind joined."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        match event, last:
            case (Content(text=""), _) | (Reasoning(text=""), _) | (CallArguments(text=""), _):
                pass
            case Content(), Content():
                result[-1] = Content(last.text + event.text)
            case Reasoning(), Reasoning():
                result[-1] = Reasoning(last.text + event.text)
            case CallArguments(), CallArguments() if last.index == event.index:
                result[-1] = CallArguments(event.index, last.text + event.text)
            case _:
                result.append(event)
    return result
