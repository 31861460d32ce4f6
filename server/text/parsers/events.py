"""Events that a parser emits for the text of an output, in order. Texts of the same kind and call are concatenated."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby


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
    for _, group in groupby(filter(_has_content, events), _kind):
        first, *more = group
        if not more or isinstance(first, CallBegin | CallEnd):
            result += (first, *more)
        else:
            texts = [event.text for event in (first, *more) if not isinstance(event, CallBegin | CallEnd)]
            result.append(replace(first, text="".join(texts)))
    return result


def _has_content(event: Event) -> bool:
    return isinstance(event, CallBegin | CallEnd) or bool(event.text)


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), event.index if isinstance(event, CallArguments) else 0
