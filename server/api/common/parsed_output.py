"""The message of a chat as it grows: a sequence of blocks, each of which is reasoning, text or a tool call."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from ...text.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from ...text.parsers.output_parser import OutputParser

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """A part of a message. Its text is reasoning, content, or the JSON arguments of a call, which also has an id, a
    name and a number.
    """

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    call_index: int = 0
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


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


class ParsedOutput:
    """Divides the text of one output into blocks. `new_id` makes the ids of calls."""

    def __init__(self, parser: OutputParser, new_id: Callable[[], str]) -> None:
        self.blocks: list[Block] = []
        self.reasoning_tokens = 0
        """Number of tokens up to the end of the reasoning, including its tags."""
        self._parser = parser
        self._new_id = new_id
        self._open: Block | None = None

    @property
    def content(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "text")

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.kind == "reasoning")

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def push(self, text: str, tokens: int = 0) -> list[Event]:
        """Add text, which came with `tokens` tokens; returns the events that the parser finds in it."""
        was_open = self._parser.in_reasoning
        events = self._parser.feed(text) if text else []
        if was_open or self._parser.in_reasoning:
            self.reasoning_tokens += tokens
        return events

    def finish(self) -> list[Event]:
        """Returns the events that the parser finds in text that was held back. No text follows."""
        return self._parser.finish()

    def collect(self, events: Iterable[Event]) -> list[BlockEvent]:
        """Add events of the parser to the blocks; returns how the blocks have changed."""
        found: list[BlockEvent] = []
        for event in events:
            match event:
                case Content(text=text):
                    found += self._continue("text", text)
                case Reasoning(text=text):
                    found += self._continue("reasoning", text)
                case CallBegin(index=index, name=name):
                    found += self._begin("call", self._new_id(), name, index)
                case CallArguments(text=text):
                    found += self._continue("call", text)
                case CallEnd():
                    found += self._end()
        return found

    def close(self) -> list[BlockEvent]:
        """End the last block, because the output has ended. An output without any block gets an empty text block."""
        begun = [] if self.blocks else self._begin("text")
        return [*begun, *self._end()]

    def _continue(self, kind: Kind, text: str) -> list[BlockEvent]:
        begun = [] if self._open is not None and self._open.kind == kind else self._begin(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        return [*begun, BlockText(self._open, text)]

    def _begin(self, kind: Kind, call_id: str = "", name: str = "", call_index: int = 0) -> list[BlockEvent]:
        ended = self._end()
        self._open = Block(len(self.blocks), kind, call_id, name, call_index)
        self.blocks.append(self._open)
        return [*ended, BlockBegin(self._open)]

    def _end(self) -> list[BlockEvent]:
        block, self._open = self._open, None
        return [] if block is None else [BlockEnd(block)]
