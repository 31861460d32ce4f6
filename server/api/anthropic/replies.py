"""Replies of `/v1/messages`: whole, or as the events that Anthropic's clients assemble."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ....scheduler.messages.frontend import Finished
from ..common.calls import Call
from ..common.outputs import Delta, Output
from ..common.parsed_output import Block, BlockBegin, BlockEnd, BlockEvent, BlockText
from ..common.rendering import Rendering
from ..openai.models import ChatBody
from .errors import error_body

Json = dict[str, Any]


class MessagesRendering(Rendering):
    """One output: a list of content blocks."""

    named_events = True

    def __init__(self, call: Call[ChatBody], model_name: str) -> None:
        (submit,) = call.submits
        self._started = False
        self._envelope = {
            "id": f"msg_{submit.rid}",
            "type": "message",
            "role": "assistant",
            "model": model_name,
        }

    def events(self, index: int, output: Output, delta: Delta) -> Sequence[object]:  # noqa: ARG002 (Rendering)
        events: list[object] = []
        if not self._started:
            self._started = True
            begun: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(output)}
            events.append({"type": "message_start", "message": self._envelope | begun})
        events += map(_block_event, delta.blocks)
        if output.failed is not None:
            return [*events, error_body(output.failed.status, output.failed.message)]
        if output.ended:
            events += map(_block_event, output.message.close())
            events.append({"type": "message_delta", "delta": _ending(output), "usage": _usage(output)})
            events.append({"type": "message_stop"})
        return events

    def result(self, outputs: Sequence[Output]) -> object:
        (output,) = outputs
        output.message.close()
        content = [_content(block, block.text) for block in output.message.blocks]
        return self._envelope | {"content": content, **_ending(output), "usage": _usage(output)}


def _block_event(event: BlockEvent) -> Json:
    block = event.block
    match event:
        case BlockBegin():
            return {"type": "content_block_start", "index": block.index, "content_block": _content(block, "")}
        case BlockText(text=text):
            return {"type": "content_block_delta", "index": block.index, "delta": _delta(block, text)}
        case BlockEnd():
            return {"type": "content_block_stop", "index": block.index}


def _delta(block: Block, text: str) -> Json:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}


def _content(block: Block, text: str) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": ""}
        case "call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": _arguments(text)}


def _arguments(text: str) -> Json:
    """The arguments of a call; empty if the output ended in the middle of them, or they are nested too deeply."""
    try:
        arguments: Json = msgspec.json.decode(text or "{}", type=dict)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return arguments


def _ending(output: Output) -> Json:
    return {"stop_reason": _stop_reason(output), "stop_sequence": output.stop_string}


def _stop_reason(output: Output) -> str:
    if output.aborted is not None:
        return "abort"
    if output.stop_string is not None:
        return "stop_sequence"
    if isinstance(output.terminal, Finished) and output.terminal.reason.type == "length":
        return "max_tokens"
    return "tool_use" if output.message.calls else "end_turn"


def _usage(output: Output) -> Json:
    """Token counts. Anthropic's `input_tokens` excludes the cached tokens of the prompt, which it counts separately."""
    return {
        "input_tokens": output.prompt_tokens - output.cached_tokens,
        "cache_read_input_tokens": output.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output.completion_tokens,
    }
