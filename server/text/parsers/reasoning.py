"""Separates the reasoning of a model from its answer.

The output begins with the reasoning, between two tags. The opening tag is at the end of the prompt or at the beginning
of the output. White space around the reasoning is dropped.
"""

import re
from dataclasses import dataclass

from .events import Content, Event, Reasoning
from .text_parser import HeldSpace, Steps, TextParser, partial_marker

LONGEST_CONTENT_TYPE = 64


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The tags of reasoning.

    With `always`, the output begins with reasoning even if neither the prompt nor the output has the opening tag.
    `answer` is the tag of an answer without reasoning, and `again` the tag between two pieces of reasoning; empty if
    the style has none. If `header_end` is set, `close` and `answer` end with it, and a content type may precede it.
    """

    open: str
    close: str
    always: bool = False
    answer: str = ""
    again: str = ""
    header_end: str = ""

    def is_open(self, prompt: str, begun: str = "") -> bool:
        """Whether the output after `prompt` begins inside the reasoning. `begun` is the beginning of the answer that
        the client has written (`continue_final_message`); `prompt` ends with it.
        """
        if begun and (self.open in begun or self.close in begun):
            return begun.rfind(self.open) > begun.rfind(self.close)
        if begun:
            return prompt.removesuffix(begun).rstrip().endswith(self.open)
        end = prompt.rstrip()
        return end.endswith(self.open) or (self.always and not end.endswith(self.close))

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with the closing tag: templates write empty reasoning to switch it off."""
        return prompt.rstrip().endswith(self.close)


THINK = ReasoningStyle("<think>", "</think>")
BRACKETS = ReasoningStyle("[THINK]", "[/THINK]")
_ANALYSIS, _FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CHANNELS = ReasoningStyle(
    open=_ANALYSIS,
    close=f"<|end|><|start|>assistant{_FINAL}",
    answer=_FINAL,
    again=f"<|end|><|start|>assistant{_ANALYSIS}",
    header_end="<|message|>",
)
STYLES = {
    "deepseek-r1": ReasoningStyle("<think>", "</think>", always=True),
    "deepseek-v3": THINK,
    "glm45": THINK,
    "gpt-oss": CHANNELS,
    "mistral": BRACKETS,
    "qwen3": THINK,
}


def style_of_template(template: str) -> ReasoningStyle | None:
    """Returns the style whose tags occur in a chat template: templates open the next reasoning, or write or remove the
    tags of earlier reasoning.
    """
    styles = (THINK, BRACKETS, CHANNELS)
    return next((style for style in styles if style.open in template or style.close in template), None)


class _Tag:
    """Finds a tag, which may have a content type: gpt-oss writes `final <|constrain|>json<|message|>` before JSON."""

    def __init__(self, text: str, header_end: str) -> None:
        self._beginning = text.removesuffix(header_end)
        beginning, end, longest = re.escape(self._beginning), re.escape(header_end), LONGEST_CONTENT_TYPE
        self.pattern = re.compile(f"{beginning}.{{0,{longest}}}?{end}" if end else beginning, re.DOTALL)
        self._without_end = (
            re.compile(f"{beginning}.{{0,{longest + len(header_end) - 1}}}\\Z", re.DOTALL) if end else None
        )

    def partial(self, text: str) -> int:
        """How many characters at the end of `text` may be the beginning of the tag. `text` has no complete tag."""
        if self._without_end is not None and (found := self._without_end.search(text)) is not None:
            return len(text) - found.start()
        return partial_marker(text, (self._beginning,))


class ReasoningParser(TextParser):
    """Finds the reasoning in a text that arrives in pieces. `is_open`: the text begins inside the reasoning, without an
    opening tag.
    """

    def __init__(self, style: ReasoningStyle, *, is_open: bool) -> None:
        super().__init__()
        self._style = style
        self.is_open = is_open
        self._is_over = False

    def feed(self, text: str) -> list[Event]:
        """Add text; returns the reasoning and content found in it."""
        return [Content(text)] if self._is_over else super().feed(text)

    def _parse(self) -> Steps[None]:
        yield from self._opening_tag()
        if self.is_open:
            yield from self._skip_space()
            yield from self._reasoning()
            yield from self._skip_space()
        self._events.append(Content(self._take(len(self._buffer))))
        self._is_over = True

    def _opening_tag(self) -> Steps[None]:
        """Take the opening tag or the tag of an answer at the beginning of the text, if there is one. Keep white space
        before other text.
        """
        opening = self._style.open
        answer = _Tag(self._style.answer, self._style.header_end) if self._style.answer else None
        space: list[str] = []
        while True:
            begun = self._buffer.lstrip()
            space.append(self._take(len(self._buffer) - len(begun)))
            if begun.startswith(opening):
                self._buffer = begun[len(opening) :]
                self.is_open = True
                return
            if answer is not None and (found := answer.pattern.match(begun)) is not None:
                self._buffer = begun[found.end() :]
                return
            may_follow = opening.startswith(begun) or (answer is not None and answer.partial(begun) == len(begun))
            if self._final or not may_follow:
                self._buffer = "".join((*space, begun))
                return
            yield from self._more()

    def _skip_space(self) -> Steps[None]:
        while not (rest := self._buffer.lstrip()):
            self._buffer = ""
            yield from self._more()
        self._buffer = rest

    def _reasoning(self) -> Steps[None]:
        """Parse all reasoning up to the closing tag. Pieces that `again` separates are joined by a line break."""
        close, again, space = _Tag(self._style.close, self._style.header_end), self._style.again, HeldSpace()
        begun = False
        while True:
            end = close.pattern.search(self._buffer)
            between = self._buffer.find(again) if again else -1
            if between >= 0 and (end is None or between < end.start()):
                begun = begun or between > 0
                self._events.append(Reasoning(space.add(self._take(between))))
                space.take()
                self._buffer = self._buffer.removeprefix(again)
                if begun:
                    self._buffer = "\n" + self._buffer
                else:  # an empty piece
                    yield from self._skip_space()
                continue
            if end is not None:
                break
            partial = 0  # characters at the end that may be the beginning of a tag: they wait for more text
            if not self._final:
                partial = max(close.partial(self._buffer), partial_marker(self._buffer, (again,)) if again else 0)
            begun = begun or partial < len(self._buffer)
            self._events.append(Reasoning(space.add(self._take(len(self._buffer) - partial))))
            if self._final:
                self._events.append(Reasoning(space.take()))
            yield from self._more()
        self._events.append(Reasoning(space.add(self._buffer[: end.start()])))
        self._buffer = self._buffer[end.end() :]
        self.is_open = False
