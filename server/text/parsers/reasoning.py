"""Separates the reasoning of a model from its answer.

Reasoning stands between two tags at the beginning of the output. The opening tag is the last text of the prompt, or the
first of the output. White space around the reasoning is dropped.
"""

from dataclasses import dataclass

from .events import Content, Event, Reasoning
from .text_parser import Steps, TextParser, held_back


@dataclass(frozen=True, slots=True)
class ReasoningStyle:
    """The tags, and whether an output begins with reasoning although neither it nor the prompt has the opening tag.
    `answer` is the tag of an answer without reasoning, where there is one.
    """

    open: str
    close: str
    always: bool = False
    answer: str = ""

    def is_open(self, prompt: str, begun: str = "") -> bool:
        """Whether the output that follows `prompt` begins with reasoning. `begun` is the end of the prompt that the
        client wrote as the beginning of the output.
        """
        if begun:
            return begun.rfind(self.open) > begun.rfind(self.close)
        end = prompt.rstrip()
        return end.endswith(self.open) or (self.always and not end.endswith(self.close))

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with reasoning, as it does where the template switches it off."""
        return prompt.rstrip().endswith(self.close)


THINK = ReasoningStyle("<think>", "</think>")
BRACKETS = ReasoningStyle("[THINK]", "[/THINK]")
_FINAL = "<|channel|>final<|message|>"
CHANNELS = ReasoningStyle("<|channel|>analysis<|message|>", f"<|end|><|start|>assistant{_FINAL}", answer=_FINAL)
STYLES = {
    "deepseek-r1": ReasoningStyle("<think>", "</think>", always=True),
    "deepseek-v3": THINK,
    "glm45": THINK,
    "gpt-oss": CHANNELS,
    "mistral": BRACKETS,
    "qwen3": THINK,
}


def style_of_template(template: str) -> ReasoningStyle | None:
    """The style of a chat template: it writes or removes the closing tag of earlier reasoning, or opens the next."""
    styles = (THINK, BRACKETS, CHANNELS)
    return next((style for style in styles if style.open in template or style.close in template), None)


class ReasoningParser(TextParser):
    """Finds the reasoning in a text that arrives in pieces. `is_open`: the text begins with it."""

    def __init__(self, style: ReasoningStyle, *, is_open: bool) -> None:
        super().__init__()
        self._style = style
        self.is_open = is_open
        self._is_over = False

    def feed(self, text: str) -> list[Event]:
        """Reasoning and content in more text."""
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
        """An opening tag at the beginning, that of an answer, or none."""
        opening, answer = self._style.open, self._style.answer
        while True:
            begun = self._buffer.lstrip()
            if begun.startswith(opening):
                self._buffer = begun[len(opening) :]
                self.is_open = True
                return
            if answer and begun.startswith(answer):
                self._buffer = begun[len(answer) :]
                return
            if self._final or not (opening.startswith(begun) or answer.startswith(begun)):
                return
            yield from self._more()

    def _skip_space(self) -> Steps[None]:
        while not (rest := self._buffer.lstrip()):
            self._buffer = ""
            yield from self._more()
        self._buffer = rest

    def _reasoning(self) -> Steps[None]:
        tag = self._style.close
        while tag not in self._buffer:
            held = 0 if self._final else held_back(self._buffer, (tag,))
            self._events.append(Reasoning(self._take(len(self._buffer) - held)))
            yield from self._more()
        text, _, self._buffer = self._buffer.partition(tag)
        self._events.append(Reasoning(text.rstrip()))
        self.is_open = False
