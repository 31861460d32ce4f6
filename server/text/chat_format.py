"""How a model writes tool calls and its reasoning: detected from its chat template, or set in the configuration.

If the template does not use `tools`, the system message describes them, in the words of Qwen2.5's template, and the
model is expected to write Hermes calls.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...configs.setting_types import ReasoningParserName, ToolParserName
from .json_parts import find_excess
from .parsers.call_parser import Tools
from .parsers.families import FAMILIES, CallFamily, family_of_template
from .parsers.output_parser import OutputParser
from .parsers.reasoning import STYLES, ReasoningParser, ReasoningStyle, style_of_template
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The format of tool calls (None: unknown), the style of reasoning (None: the model does not reason), and whether
    the chat template uses `tools`.
    """

    family: CallFamily | None = None
    reasoning: ReasoningStyle | None = None
    has_tools: bool = False
    call_token_ids: frozenset[int] = frozenset()
    reasoning_token_ids: frozenset[int] = frozenset()
    """Special tokens that the parsers of calls and of reasoning need in the text."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName
    ) -> "ChatFormat":
        has_tools = tokenizer.template_has_tools
        family: CallFamily | None = None
        if tool_parser == "auto":
            family = family_of_template(tokenizer.tool_template or "") if has_tools else FAMILIES["hermes"]
        elif tool_parser != "none":
            family = FAMILIES[tool_parser]
        reasoning: ReasoningStyle | None = None
        if reasoning_parser == "auto":
            reasoning = style_of_template(f"{tokenizer.chat_template}{tokenizer.tool_template}")
        elif reasoning_parser != "none":
            reasoning = STYLES[reasoning_parser]
        return cls(
            family,
            reasoning,
            has_tools,
            tokenizer.special_tokens_in(family.parser.tags if family else ()),
            tokenizer.special_tokens_in((reasoning.open, reasoning.close) if reasoning else ()),
        )

    def new_parser(
        self, tools: Tools | None, *, separate: bool = True, is_open: bool = False, max_calls: int | None = None
    ) -> OutputParser:
        """Returns the parser of one output. Without `tools`, it treats calls as content; without `separate`, it treats
        reasoning as content. `is_open`: the output begins inside the reasoning, because the prompt has opened it.
        """
        reasoning = (
            ReasoningParser(self.reasoning, is_open=is_open) if self.reasoning is not None and separate else None
        )
        calls = None if tools is None or self.family is None else self.family.parser(tools)
        return OutputParser(reasoning, calls, max_calls)

    def kept_token_ids(self, *, calls: bool, reasoning: bool) -> frozenset[int]:
        """Special tokens that must stay in the text, because a parser that is used looks for them."""
        none: frozenset[int] = frozenset()
        return (self.call_token_ids if calls else none) | (self.reasoning_token_ids if reasoning else none)

    def with_tools_as_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Returns messages for a template without `tools`: tools, calls and their results are written as text."""
        texts = [_as_text(message) for message in messages]
        if not tools:
            return texts
        system = texts.pop(0)["content"] if texts and texts[0]["role"] in ("system", "developer") else ""
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return [{"role": "system", "content": f"{system}\n\n{_TOOLS.format(listed)}".lstrip()}, *texts]


class Arguments(dict[str, Any]):
    """The arguments of an earlier call, for a chat template. Most templates expect an object, some concatenate JSON
    text: this class behaves as both.
    """

    @classmethod
    def of(cls, text: str) -> "Arguments | str":
        """Parses the arguments. Returns text that is not a JSON object, or has too many parts, unchanged."""
        if find_excess(text.encode()) is not None:
            return text
        try:
            value = json.loads(text or "{}")
        except (ValueError, RecursionError):
            return text
        return cls(value) if isinstance(value, dict) else text

    def __str__(self) -> str:
        return json.dumps(self, ensure_ascii=False)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"] or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "content": "\n".join([content, *calls] if content else calls)} if calls else message
