"""Replies of `/v1/responses`: whole, or as the events that OpenAI's clients assemble."""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from ....scheduler.messages.frontend import Finished
from ..common.calls import Call
from ..common.outputs import Delta, Output
from ..common.parsed_output import Block, BlockBegin, BlockEnd, BlockEvent, BlockText
from ..common.rendering import Rendering
from ..openai.models import ChatBody
from .models import ResponsesBody

Json = dict[str, Any]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
ITEM_PREFIX = {"reasoning": "rs", "text": "msg", "call": "fc"}
FINAL_EVENTS = {"completed": "completed", "failed": "failed", "incomplete": "incomplete", "cancelled": "incomplete"}


class ResponsesRendering(Rendering):
    """One output: a list of items, which are its blocks."""

    named_events = True

    def __init__(self, call: Call[ChatBody], fields: ResponsesBody, model_name: str) -> None:
        (submit,) = call.submits
        self._rid = submit.rid
        self._sequence = 0
        given = fields.model_dump(include={"tool_choice", "tools", "text"}, exclude_none=True, by_alias=True)
        self._settings: Json = {
            "id": f"resp_{submit.rid}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
            "instructions": _encoded(fields.instructions),
            "max_output_tokens": submit.sampling.max_new_tokens,
            "temperature": submit.sampling.temperature,
            "top_p": submit.sampling.top_p,
            "parallel_tool_calls": fields.parallel_tool_calls is not False,
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": _encoded(given.get("tools", [])),
            "text": _encoded({"format": given.get("text", {}).get("format", {"type": "text"})}),
            "metadata": _encoded(fields.metadata or {}),
            "previous_response_id": None,
            "background": False,
            "store": False,
            "truncation": "disabled",
        }

    def events(self, index: int, output: Output, delta: Delta) -> Sequence[object]:  # noqa: ARG002 (Rendering)
        events: list[object] = []
        if self._sequence == 0:
            events += [self._event(name, response=self._response("in_progress")) for name in ("created", "in_progress")]
        for event in delta.blocks:
            events += self._block_events(event, "completed")
        if output.ended:
            status = _status(output)
            for event in output.message.close():
                events += self._block_events(event, "completed" if status == "completed" else "incomplete")
            events.append(self._event(FINAL_EVENTS[status], response=self.result([output])))
        return events

    def result(self, outputs: Sequence[Output]) -> object:
        (output,) = outputs
        output.message.close()
        status = _status(output)
        return self._response(status, self._items(output.message.blocks, status), output)

    def _event(self, name: str, /, **fields: object) -> Json:
        event = {"type": f"response.{name}", "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    def _block_events(self, event: BlockEvent, end_status: ItemStatus) -> Iterator[Json]:
        block = event.block
        place = {"output_index": block.index, "item_id": self._item_id(block)}
        part_place = place | {"content_index": 0}
        match event:
            case BlockBegin():
                item = self._item(block, "in_progress")
                yield self._event("output_item.added", output_index=block.index, item=item)
                if block.kind != "call":
                    yield self._event("content_part.added", **part_place, part=_part(block, ""))
            case BlockText(text=text) if block.kind == "call":
                yield self._event("function_call_arguments.delta", **place, delta=text)
            case BlockText(text=text) if block.kind == "reasoning":
                yield self._event("reasoning_text.delta", **part_place, delta=text)
            case BlockText(text=text):
                yield self._event("output_text.delta", **part_place, delta=text, logprobs=[])
            case BlockEnd():
                if block.kind == "call":
                    done = {"name": block.name, "arguments": block.text}
                    yield self._event("function_call_arguments.done", **place, **done)
                elif block.kind == "reasoning":
                    yield self._event("reasoning_text.done", **part_place, text=block.text)
                else:
                    yield self._event("output_text.done", **part_place, text=block.text, logprobs=[])
                if block.kind != "call":
                    yield self._event("content_part.done", **part_place, part=_part(block, block.text))
                yield self._event("output_item.done", output_index=block.index, item=self._item(block, end_status))

    def _response(self, status: str, items: Sequence[Json] = (), output: Output | None = None) -> Json:
        failed = None if output is None else output.failed
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return self._settings | {
            "status": status,
            "output": items,
            "error": None if failed is None else {"code": "server_error", "message": failed.message},
            "incomplete_details": cut,
            "usage": None if output is None else _usage(output),
        }

    def _items(self, blocks: Sequence[Block], status: str) -> list[Json]:
        *whole, last = blocks
        last_status: ItemStatus = "completed" if status == "completed" else "incomplete"
        return [*(self._item(block, "completed") for block in whole), self._item(last, last_status)]

    def _item(self, block: Block, status: ItemStatus) -> Json:
        """The item of a block; it is empty as long as its status is in_progress."""
        item: Json = {"id": self._item_id(block), "status": status}
        text = "" if status == "in_progress" else block.text
        if block.kind == "call":
            return item | {"type": "function_call", "call_id": block.call_id, "name": block.name, "arguments": text}
        content = [] if status == "in_progress" else [_part(block, text)]
        if block.kind == "reasoning":
            return item | {"type": "reasoning", "summary": [], "content": content}
        return item | {"type": "message", "role": "assistant", "content": content}

    def _item_id(self, block: Block) -> str:
        return f"{ITEM_PREFIX[block.kind]}_{self._rid}_{block.index}"


def _encoded(setting: object) -> msgspec.Raw:
    """A setting, which may have megabytes, as JSON: three events of a stream repeat it."""
    return msgspec.Raw(msgspec.json.encode(setting))


def _part(block: Block, text: str) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(output: Output) -> str:
    if output.failed is not None:
        return "failed"
    if output.aborted is not None:
        return "cancelled"
    cut = isinstance(output.terminal, Finished) and output.terminal.reason.type == "length" and not output.complete
    return "incomplete" if cut else "completed"


def _usage(output: Output) -> Json:
    return {
        "input_tokens": output.prompt_tokens,
        "input_tokens_details": {"cached_tokens": output.cached_tokens},
        "output_tokens": output.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": output.message.reasoning_tokens},
        "total_tokens": output.prompt_tokens + output.completion_tokens,
    }
