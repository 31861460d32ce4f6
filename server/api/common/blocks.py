"""The output of a chat as a sequence of blocks: reasoning, text and calls of tools, one after the other.

OpenAI's responses and Anthropic's messages stream their output in this form.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from ...text.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from .parsed_output import ParsedOutput

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """`text` is reasoning, text or the arguments of a call, which also has `call_id` and `name`."""

    index: int
    kind: Kind
    text: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BlockBegin:
    block: Block


@dataclass(frozen=True, slots=True)
class BlockText:
    """More text of a block."""

    block: Block
    text: str


@dataclass(frozen=True, slots=True)
class BlockEnd:
    block: Block


BlockEvent = BlockBegin | BlockText | BlockEnd


class BlockStream:
    """Makes blocks from the events of one output."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def add(self, events: Iterable[Event], parsed: ParsedOutput) -> Iterator[BlockEvent]:
        for event in events:
            match event:
                case CallBegin(index=index, name=name):
                    yield from self._begin("call", parsed.calls[index].id, name)
                case CallEnd():
                    yield from self._end()
                case Content(text=text):
                    yield from self._continue("text", text)
                case Reasoning(text=text):
                    yield from self._continue("reasoning", text)
                case CallArguments(text=text):
                    yield from self._continue("call", text)

    def finish(self) -> Iterator[BlockEvent]:
        """When the output has ended. An output without any block has one of empty text."""
        if not self.blocks:
            yield from self._begin("text")
        yield from self._end()

    def _continue(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        assert self._open is not None
        self._open.text += text
        yield BlockText(self._open, text)

    def _begin(self, kind: Kind, call_id: str = "", name: str = "") -> Iterator[BlockEvent]:
        yield from self._end()
        self._open = Block(len(self.blocks), kind, "", call_id, name)
        self.blocks.append(self._open)
        yield BlockBegin(self._open)

    def _end(self) -> Iterator[BlockEvent]:
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockEnd(block)


def blocks_of(parsed: ParsedOutput) -> list[Block]:
    """The blocks of an output that is not streamed: reasoning, text, then calls."""
    stream = BlockStream()
    events: list[Event] = [Reasoning(parsed.reasoning)] if parsed.reasoning else []
    events += [Content(parsed.content)] if parsed.content else []
    for index, call in enumerate(parsed.calls):
        events += [CallBegin(index, call.name), CallArguments(index, call.arguments), CallEnd(index)]
    list(stream.add(events, parsed))
    list(stream.finish())
    return stream.blocks
