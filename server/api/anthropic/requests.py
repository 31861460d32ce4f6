"""Translates bodies of `/v1/messages` to chats in OpenAI's dialect."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ...text.chat_format import ChatFormat
from ...text.tokenizer import Tokenizer
from ..common.calls import LONG_TEXT_CHARACTERS, Call, check_text
from ..common.fields import FieldError, fields_named, parse_body, validate, validate_item
from ..common.limits import Limits
from ..openai.chat_requests import (
    ROUTING_AND_DISTRIBUTION,
    encode_chat,
    make_chat_call,
    renamed_grammars,
    render_chat,
)
from ..openai.models import ChatBody
from ..openai.tool_models import FLAT_TOOL
from .models import (
    BLOCKS_OF_ROLE,
    CountTokensBody,
    CountTokensReply,
    InputMessage,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)

SAME_FIELDS = (*ROUTING_AND_DISTRIBUTION, "seed", "stream", "max_tokens")
"""Fields with the same name and meaning in a chat."""
OTHER_NAMES = (FLAT_TOOL, ("continue_final_message", "messages"))
"""Names of fields in a chat, with their names here, for `fields_named`."""


def parse_message(body: bytes, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat) -> Call[ChatBody]:
    fields = parse_body(MessagesBody, body)
    others = {"stop": fields.stop_sequences, "response_format": _response_format(fields)}
    same = {name: getattr(fields, name) for name in SAME_FIELDS}
    with fields_named(*OTHER_NAMES):
        body_of_chat = validate(ChatBody, _chat_fields(fields) | same | others, limits.vocab_size)
        call = make_chat_call(body_of_chat, limits, tokenizer, chat)
    return renamed_grammars(call, "output_config.format")


def count_tokens(body: bytes, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat) -> CountTokensReply:
    """Count the tokens of a prompt. It may be longer than the context, but not longer than a million characters."""
    given = parse_body(CountTokensBody, body)
    with fields_named(*OTHER_NAMES):
        fields = validate(ChatBody, _chat_fields(given))
        text = render_chat(fields, fields.messages, tokenizer, chat).text
    check_text(text, "messages", limits, tokenizer, allowed=LONG_TEXT_CHARACTERS)
    return {"input_tokens": len(encode_chat(text, tokenizer))}


def _chat_fields(fields: CountTokensBody) -> dict[str, Any]:
    """The fields of a chat that its prompt depends on."""
    messages = [] if fields.system is None else [{"role": "system", "content": _text(fields.system)}]
    for index, message in enumerate(fields.messages):
        messages += _messages(message, f"messages[{index}]")
    choice = fields.tool_choice
    tools = [
        {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": schema}}
        for tool in fields.tools or ()
        for schema in (tool.input_schema,)
    ]
    thinks = fields.thinking and fields.thinking.type != "disabled"
    thinking = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}  # Qwen3 and GLM; DeepSeek
    return {
        "messages": messages,
        "continue_final_message": fields.messages[-1].role == "assistant",
        "tools": tools or None,
        "tool_choice": _choice(fields),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "chat_template_kwargs": {**thinking, **(fields.chat_template_kwargs or {})} or None,
        "reasoning_effort": None if fields.output_config is None else fields.output_config.effort,
    }


def _choice(fields: CountTokensBody) -> object:
    choice = fields.tool_choice
    if choice is None:
        return None
    if choice.type != "tool":
        return {"any": "required"}.get(choice.type, choice.type)
    if choice.name is None:
        raise FieldError("tool_choice.name", "is required with tool")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(fields: MessagesBody) -> dict[str, Any] | None:
    wanted = None if fields.output_config is None else fields.output_config.format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise FieldError("output_config.format", 'must be {"type": "json_schema", "schema": {...}}')
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted["schema"]}}


def _messages(message: InputMessage, path: str) -> list[dict[str, Any]]:
    """Translates a message. The tool results in it become messages before it, as OpenAI's dialect requires."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    blocks = [
        validate_item(BLOCKS_OF_ROLE[message.role], block, f"{path}.content[{index}]")
        for index, block in enumerate(message.content)
    ]
    results = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content or "")}
        for block in blocks
        if isinstance(block, ToolResultBlock)
    ]
    made: dict[str, Any] = {"role": message.role}
    if thinking := "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock)):
        made["reasoning_content"] = thinking
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": msgspec.json.encode(block.input).decode()},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    if calls:
        made["tool_calls"] = calls
    if texts or not (calls or results):
        made["content"] = _text(texts)
    return [*results, made] if "content" in made or calls else results


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)
