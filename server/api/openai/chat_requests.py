"""Bodies of `/v1/chat/completions` as a checked, tokenized prompt and the parser of its outputs.

`make_chat_call` takes the body as a model, so that other chat dialects can translate theirs to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...text.chat_format import Arguments, ChatFormat
from ...text.parsers.call_parser import Tools
from ...text.tokenizer import Tokenizer
from ..common.fields import FieldError, parse_body
from ..common.limits import Limits
from ..common.parsed_output import ParsedOutput
from ..native.requests import Call, check_prompt, check_text
from .chat_grammars import chat_grammar
from .models import ChatBody, Message, TemplateFields
from .requests import make_openai_call
from .tool_models import ToolDefinition


def parse_chat(body: bytes, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat) -> Call:
    """`messages` are rendered with the model's own chat template."""
    return make_chat_call(parse_body(ChatBody, body, limits.vocab_size), limits, tokenizer, chat)


def make_chat_call(fields: ChatBody, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat) -> Call:
    if not tokenizer.has_chat_template:
        raise FieldError("messages", "cannot be rendered: the model has no chat template; use /v1/completions")
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs", f"needs logprobs to be true, got {fields.top_logprobs} without it")
    tools = fields.offered_tools()
    check_known_format(tools, chat)
    rendered = render_chat(fields, fields.messages, tools, tokenizer, chat)
    check_text(rendered.text, "messages", limits, tokenizer)
    prompt_ids = check_prompt(encode_chat(rendered.text, tokenizer), "messages", limits)
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    call = make_openai_call(fields, limits, [prompt_ids], False, top_logprobs)
    if (grammar := chat_grammar(fields, tools, chat, rendered.text, rendered.begun)) is not None:
        (submit,) = call.submits
        sampling = msgspec.structs.replace(submit.sampling, grammar=grammar[1])
        call = replace(
            call,
            submits=(msgspec.structs.replace(submit, sampling=sampling),),
            text_rules=(fields.text_rules(sampling, limits),),
            grammars=(grammar,),
        )
    return _with_parser(call, fields, tools, rendered, chat)


def renamed_grammars(call: Call, name: str) -> Call:
    """The call of another dialect, where `response_format` has this name."""
    grammars = [(name if field.startswith("response_format") else field, grammar) for field, grammar in call.grammars]
    return replace(call, grammars=tuple(grammars))


def _with_parser(
    call: Call, fields: ChatBody, tools: Sequence[ToolDefinition], rendered: "RenderedChat", chat: ChatFormat
) -> Call:
    separate = fields.separate_reasoning is not False and chat.reasoning is not None
    is_open = chat.reasoning is not None and chat.reasoning.is_open(rendered.text, rendered.begun)
    max_calls = 1 if fields.parallel_tool_calls is False else None
    schemas: Tools | None = {tool.function.name: tool.function.parameters or {} for tool in tools} or None
    new_id = chat.family.new_id if chat.family is not None else str

    def new_parsed() -> ParsedOutput:
        parser = chat.new_parser(schemas, separate=separate, is_open=is_open, max_calls=max_calls)
        return ParsedOutput(parser, new_id)

    kept = chat.kept_token_ids(calls=bool(tools), reasoning=separate)
    rules = tuple(replace(rules, kept_token_ids=kept) for rules in call.text_rules)
    return replace(
        call, text_rules=rules, new_parsed=new_parsed, include_reasoning=fields.include_reasoning is not False
    )


def check_known_format(tools: Sequence[ToolDefinition], chat: ChatFormat) -> None:
    if tools and chat.family is None:
        raise FieldError(
            "tools",
            "are not supported by this server: the format of calls in the model's chat template is not known, or "
            "tool_parser is none; start the server with --tool-parser",
        )


def encode_chat(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of a rendered chat. The template writes the BOS token itself."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text of a chat. With `continue_final_message` it ends with `begun`, the content of the last message."""

    text: str
    begun: str = ""


def render_chat(
    fields: TemplateFields,
    given: Sequence[Message],
    tools: Sequence[ToolDefinition],
    tokenizer: Tokenizer,
    chat: ChatFormat,
) -> RenderedChat:
    messages: list[Mapping[str, Any]] = [_for_template(message, tokenizer) for message in given]
    add_generation_prompt, begun = fields.add_generation_prompt is not False, ""
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
    variables = fields.chat_template_kwargs or {}
    return RenderedChat(tokenizer.render_chat(messages, add_generation_prompt, variables, listed) + begun, begun)


def _for_template(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """A message as chat templates expect it: fields that it does not have are absent."""
    missing = None if tokenizer.template_tests_content else ""
    made: dict[str, Any] = {"role": message.role, "content": missing if message.text is None else message.text}
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
