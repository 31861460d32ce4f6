"""Translates bodies of `/v1/responses` to chats: the items of the input become messages."""

from collections.abc import Sequence
from typing import Any

from ...text.chat_format import ChatFormat
from ...text.tokenizer import Tokenizer
from ..common.calls import Call
from ..common.fields import FieldError, fields_named, parse_body, validate, validate_item
from ..common.limits import Limits
from ..openai.chat_requests import ROUTING_AND_DISTRIBUTION, make_chat_call, renamed_grammars
from ..openai.models import MAX_MESSAGES, ChatBody
from ..openai.tool_models import FLAT_TOOL
from .models import (
    ITEMS,
    FunctionCallItem,
    FunctionCallOutput,
    FunctionChoice,
    InputMessage,
    ReasoningItem,
    ResponsesBody,
    text_of,
)

SAME_FIELDS = (*ROUTING_AND_DISTRIBUTION, "seed", "stream", "parallel_tool_calls", "chat_template_kwargs")
"""Fields with the same name and meaning in a chat."""


class ResponsesChat(ChatBody):
    """A chat whose errors name the field of `/v1/responses`."""

    def new_tokens(self) -> tuple[str, int | None, str, int | None]:
        return "max_output_tokens", self.max_tokens, "min_tokens", None


def parse_response(
    body: bytes, limits: Limits, tokenizer: Tokenizer, chat: ChatFormat
) -> tuple[Call[ChatBody], ResponsesBody]:
    """Returns the call, and the checked body, because the response repeats its settings."""
    fields = parse_body(ResponsesBody, body)
    with fields_named((r"messages.*", "input"), FLAT_TOOL):
        call = make_chat_call(_chat_of(fields, limits), limits, tokenizer, chat)
    return renamed_grammars(call, "text.format"), fields


def _chat_of(fields: ResponsesBody, limits: Limits) -> ResponsesChat:
    same = {name: getattr(fields, name) for name in SAME_FIELDS}
    others = {
        "messages": _messages(fields),
        "max_tokens": fields.max_output_tokens,
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in fields.tools or ()] or None,
        "tool_choice": _choice(fields.tool_choice),
        "response_format": _response_format(fields),
        "reasoning_effort": None if fields.reasoning is None else fields.reasoning.effort,
    }
    return validate(ResponsesChat, same | others, limits.vocab_size)


def _tool(flat: dict[str, Any]) -> dict[str, Any]:
    return {"type": flat.pop("type"), "function": flat}


def _choice(choice: str | FunctionChoice | None) -> object:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, FunctionChoice) else choice


def _response_format(fields: ResponsesBody) -> dict[str, Any] | None:
    wanted = fields.text.format if fields.text is not None else None
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.json_schema is None:
        raise FieldError("text.format.schema", "is required with json_schema")
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "schema", "schema": wanted.json_schema}}


def _messages(fields: ResponsesBody) -> list[dict[str, Any]]:
    messages = [] if fields.instructions is None else [{"role": "system", "content": fields.instructions}]
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    if len(fields.input) > MAX_MESSAGES:
        raise FieldError("input", f"holds {len(fields.input)} items; at most {MAX_MESSAGES} are allowed")
    items = [validate_item(ITEMS, item, f"input[{index}]", "message") for index, item in enumerate(fields.input)]
    return [*messages, *_merged(items)]


def _merged(items: Sequence[object]) -> list[dict[str, Any]]:
    """Converts items to messages. The reasoning, text and calls of one turn of the assistant are separate items, but
    one message.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None

    def assistant(*taken: str) -> dict[str, Any]:
        """Returns the message of the assistant's current turn. Begins a new one if it has one of the fields `taken`."""
        nonlocal turn
        if turn is None or any(name in turn for name in taken):
            turn = {"role": "assistant"}
            messages.append(turn)
        return turn

    for item in items:
        match item:
            case ReasoningItem():
                text = "".join(part.text for part in item.content or ())
                assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text or None
            case InputMessage(role="assistant"):
                assistant("content", "tool_calls")["content"] = text_of(item.content)
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                assistant().setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                turn = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
            case InputMessage():
                turn = None
                messages.append({"role": item.role, "content": text_of(item.content)})
    return [message for message in messages if "content" in message or "tool_calls" in message]
