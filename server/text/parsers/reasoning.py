"""Separates the reasoning of a model from its answer.

Reasoning stands between two tags at the beginning of the output. The opening tag is the last text of the prompt, or the
first of the output. White space around the reasoning is dropped.
"""

from dataclasses import dataclass

from .events import Content, Event, Reasoning
from .text_parser import TextParser, held_back


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

    def feed(self, text: str) -> list[Event]:
        """Reasoning and content in more text."""
        return [Content(text)] if self._step == self._content else super().feed(text)

    def _start(self) -> bool:
        """An opening tag at the beginning, that of an answer, or none."""
        begun, style = self._buffer.lstrip(), self._style
        if begun.startswith(style.open):
            self._buffer = begun[len(style.open) :]
            self.is_open = True
        elif style.answer and begun.startswith(style.answer):
            self._buffer = begun[len(style.answer) :]
        elif not self._final and (style.open.startswith(begun) or style.answer.startswith(begun)):
            return False
        self._step = self._space_before if self.is_open else self._content
        return True

    def _space_before(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._step = self._reasoning if self.is_open else self._content
        return True

    def _reasoning(self) -> bool:
        text, close, _ = self._buffer.partition(self._style.close)
        if close:
            self._events.append(Reasoning(text.rstrip()))
            self._buffer = self._buffer[len(text) + len(close) :]
            self.is_open = False
            self._step = self._space_before
            return True
        held = 0 if self._final else held_back(text, (self._style.close,))
        self._events.append(Reasoning(self._take(len(text) - held)))
        return False

    def _content(self) -> bool:
        self._events.append(Content(self._take(len(self._buffer))))
        return False
