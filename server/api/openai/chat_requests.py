"""Converts bodies of `/v1/chat/completions` to a checked, tokenized prompt and the parser of its outputs.

`make_chat_call` takes a ChatBody, so that other dialects of chats can translate their bodies to it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ....common.errors import ClientError
from ...text.chat_format import Arguments, ChatFormat
from ...text.parsers.call_parser import Tools
from ...text.parsers.reasoning import ReasoningStyle, style_of_template
from ...text.tokenizer import Tokenizer
from ..common.calls import Call, check_prompt, check_text
from ..common.fields import FieldError, parse_body
from ..common.limits import Limits
from ..common.parsed_output import ParsedOutput
from ..common.routing import RoutingFields
from ..common.sampling_fields import DISTRIBUTION_FIELDS
from .chat_grammars import chat_grammar
from .models import ChatBody, Message, TemplateFields
from .requests import make_openai_call
from .tool_models import ToolDefinition

ROUTING_AND_DISTRIBUTION = (*RoutingFields.model_fields, *DISTRIBUTION_FIELDS)
"""Fields that bodies of other dialects share with a chat."""


def parse_chat(body: bytes, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat) -> Call[ChatBody]:
    """Checks a body, and renders its messages with the model's own chat template."""
    return make_chat_call(parse_body(ChatBody, body, limits.vocab_size), limits, tokenizer, chat)


def make_chat_call(fields: ChatBody, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat) -> Call[ChatBody]:
    if not tokenizer.has_chat_template:
        raise FieldError("messages", "cannot be rendered: the model has no chat template; use /v1/completions")
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs", f"needs logprobs to be true, got {fields.top_logprobs} without it")
    rendered = render_chat(fields, fields.messages, tokenizer, chat)
    check_text(rendered.text, "messages", limits, tokenizer)
    prompt_ids = check_prompt(encode_chat(rendered.text, tokenizer), "messages", limits)
    grammar = chat_grammar(fields, rendered.tools, chat, rendered.text, rendered.begun)
    call = make_openai_call(fields, limits, [prompt_ids], False, [grammar])
    return _with_parser(call, rendered, chat)


def renamed_grammars(call: Call[ChatBody], name: str) -> Call[ChatBody]:
    """Renames the field `response_format` of the call's grammars, for errors in dialects where it has another name."""
    grammars = [(name if field.startswith("response_format") else field, grammar) for field, grammar in call.grammars]
    return replace(call, grammars=tuple(grammars))


def _with_parser(call: Call[ChatBody], rendered: "RenderedChat", chat: ChatFormat) -> Call[ChatBody]:
    fields, tools = call.fields, rendered.tools
    separate = fields.separate_reasoning is not False and chat.reasoning is not None
    is_open = chat.reasoning is not None and chat.reasoning.is_open(rendered.text, rendered.begun)
    max_calls = 1 if fields.parallel_tool_calls is False else None
    schemas: Tools | None = {tool.function.name: tool.function.parameters or {} for tool in tools} or None
    new_id = chat.family.new_id if chat.family is not None else str

    def new_parsed() -> ParsedOutput:
        parser = chat.new_parser(schemas, separate=separate, is_open=is_open, max_calls=max_calls)
        return ParsedOutput(parser, new_id)

    kept = chat.kept_token_ids(calls=bool(tools), reasoning=separate)
    rules = tuple(
        replace(rules, kept_token_ids=kept, before=rules.before if rendered.begun else ()) for rules in call.text_rules
    )
    return replace(call, text_rules=rules, new_parsed=new_parsed)


def encode_chat(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of a rendered chat. The template writes the BOS token itself."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The prompt of a chat as text, and the tools that it offers. With `continue_final_message` the text ends with
    `begun`, the content of the last message; otherwise `begun` is empty.
    """

    text: str
    tools: Sequence[ToolDefinition]
    begun: str


def render_chat(
    fields: TemplateFields, given: Sequence[Message], tokenizer: Tokenizer, chat: ChatFormat
) -> RenderedChat:
    """Renders messages and tools with the chat template. Raises FieldError for tools if the format of the model's calls
    is not known, and for a last message that cannot be continued.
    """
    tools = fields.offered_tools()
    if tools and chat.family is None:
        raise FieldError(
            "tools",
            "are not supported by this server: the format of calls in the model's chat template is not known, or "
            "tool_parser is none; start the server with --tool-parser",
        )
    messages: list[Mapping[str, Any]] = [_for_template(message, tokenizer) for message in given]
    add_generation_prompt, begun, last = fields.add_generation_prompt is not False, "", None
    if fields.continue_final_message:
        last = messages.pop()
        if last["role"] != "assistant":
            raise FieldError("continue_final_message", f"needs an assistant's message at the end, not {last['role']}'s")
        if "tool_calls" in last:
            raise FieldError("continue_final_message", "cannot continue a message that calls tools")
        begun, add_generation_prompt = last["content"] or "", True
    listed = [tool.model_dump(exclude_none=True) for tool in tools] or None
    if not chat.has_tools and (listed or any("tool_calls" in message for message in messages)):
        messages, listed = chat.with_tools_as_text(messages, listed or ()), None
    variables = fields.template_variables()
    text = tokenizer.render_chat(messages, add_generation_prompt, variables, listed)
    if last is not None:
        answer = [*messages, {**last, "content": _BEGUN}]
        whole = partial(tokenizer.render_chat, answer, False, variables, listed)
        style = chat.reasoning or style_of_template(f"{tokenizer.chat_template}{tokenizer.tool_template}")
        text = _before_begun(text, begun, style, whole) + begun
    return RenderedChat(text, tools, begun)


_BEGUN = "\N{OBJECT REPLACEMENT CHARACTER}begun\N{OBJECT REPLACEMENT CHARACTER}"
"""Placeholder for the content of the last message: shows where a template writes it."""


def _before_begun(text: str, begun: str, style: ReasoningStyle | None, whole: Callable[[], str]) -> str:
    """Returns the prompt before `begun`, the beginning of an answer that the output continues.

    Usually this is `text`, the chat with its generation prompt. But if `text` opens the reasoning, or the style has a
    tag for answers, `begun` would be in the wrong place. Then it is the text that the template writes before the
    content of an answer (`whole` renders such a chat), unless `begun` has the tags itself.
    """
    if style is None or not (text.rstrip().endswith(style.open) or style.answer):
        return text
    if style.open in begun:
        return text.rstrip().removesuffix(style.open)
    if style.close in begun or (style.answer and style.answer in begun) or not begun.strip():
        return text
    with suppress(ClientError):
        before, found, _ = whole().rpartition(_BEGUN)
        return before if found else text
    return text


def _for_template(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns a message as chat templates expect it: without the fields that it does not have."""
    missing = None if tokenizer.template_tests_content else ""
    role = "system" if message.role == "developer" and not tokenizer.template_has_developer else message.role
    made: dict[str, Any] = {"role": role, "content": missing if message.text is None else message.text}
    if message.tool_calls:
        made["tool_calls"] = [
            {
                "type": "function",
                **({} if call.id is None else {"id": call.id}),
                "function": {"name": call.function.name, "arguments": Arguments.of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    others = {
        "tool_call_id": message.tool_call_id,
        "name": message.name if message.role == "tool" else None,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return made | {name: value for name, value in others.items() if value is not None}
