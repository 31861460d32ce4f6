"""Writes a generation response: JSON or an event stream.

If the client disconnects, its requests are cancelled at once, also while no token is sent.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ....scheduler.messages.frontend import Finished, FinishReason, Submit
from ...engine.inbox import Inbox, Progress
from ...engine.leader_client import LeaderClient
from ...engine.prompt_hashes import hash_prompts
from ...observability.loop_work import LoopWork
from ...observability.request_ids import client_request_id, trace_context
from ..common.errors import EngineError, request_id_header
from ..common.outputs import Delta, Output
from ..common.rendering import Rendering

INLINE_SIZE = 20_000
"""Of what is written on the event loop (`Output.unwritten`): about 10 ms."""
_WRITING = ThreadPoolExecutor(1, "writing")
"""One thread for all responses: several would take turns with each other before the event loop has its own."""
DONE_EVENT = b"data: [DONE]\n\n"

ResultT = TypeVar("ResultT")


class GenerationResponse(Response):
    """Submits requests to the leader and sends their outputs to the client.

    `outputs` has one entry for every sample of every message. If a request fails before the first byte is sent, the
    whole call ends with an HTTP error. If it fails later, its output ends with an error event, and the other outputs
    continue.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        leader: LeaderClient,
        messages: Sequence[Submit],
        outputs: Sequence[Output],
        rendering: Rendering,
        *,
        stream: bool,
        group: str | None = None,
    ) -> None:
        unbuffered = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"} if stream else {}
        super().__init__(headers=request_id_header(group or outputs[0].rid) | unbuffered)
        self._leader = leader
        self._messages = messages
        self._outputs = outputs
        self._indices = {output.rid: index for index, output in enumerate(outputs)}
        self._rendering = rendering
        self._stream = stream
        self._group = group
        self._remaining = len(outputs)
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = trace_context(scope)
        self._work = LoopWork.of(scope)
        messages = await hash_prompts(self._messages, self._leader.hashed_page_sizes)
        with self._leader.open(messages, self._group, client_request_id(scope), headers) as inbox:
            work = self._stream_events(inbox, send) if self._stream else self._send_whole(inbox, send)
            with suppress(ClientDisconnect):
                await run_until_disconnect(asyncio.ensure_future(work), receive)

    async def _send_whole(self, inbox: Inbox, send: Send) -> None:
        while self._remaining:
            received = await inbox.receive()
            began_at = LoopWork.begin_piece()
            self._advance(received)
            self._work.ended("output", began_at)
        if sum(output.unwritten for output in self._outputs) > INLINE_SIZE:
            body = await _in_thread(self._result)
        else:
            began_at = LoopWork.begin_piece()
            body = self._result()
            self._work.ended("the response", began_at)
        self.headers.update({"Content-Type": "application/json", "Content-Length": str(len(body))})
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream_events(self, inbox: Inbox, send: Send) -> None:
        while self._remaining:
            received = await inbox.receive()
            began_at = LoopWork.begin_piece()
            deltas, size = self._advance(received)
            if size > INLINE_SIZE:
                self._work.ended("output", began_at)
                encoded = await _in_thread(partial(self._encoded, deltas))
            else:
                encoded = self._encoded(deltas)
                self._work.ended("output", began_at)
            if not encoded:
                continue
            if not self._started:
                self._started = True
                headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": encoded, "more_body": True})
        closing = _encode_events(self._rendering.closing_events(self._outputs), self._rendering)
        await send({"type": "http.response.body", "body": closing + _end_of_stream(self._rendering)})

    def _encoded(self, deltas: Sequence[tuple[int, Delta]]) -> bytes:
        """The events for the new parts of outputs."""
        events: list[object] = []
        for index, delta in deltas:
            output = self._outputs[index]
            if new := self._rendering.events(index, output, delta):
                output.unwritten = 0
                events += new
        return _encode_events(events, self._rendering)

    def _result(self) -> bytes:
        """The whole response."""
        return msgspec.json.encode(self._rendering.result(self._outputs))

    def _advance(self, received: Sequence[Progress]) -> tuple[list[tuple[int, Delta]], int]:
        """Add events to their outputs. Returns the new part of each output, with the output's index, and how much work
        it is to write them (`Output.unwritten`). An output that a stop string has completed is ended in the leader.

        Raises EngineError for a failure before the first byte is sent.
        """
        deltas, unwritten = [], 0
        for progress in received:
            index = self._indices[progress.rid]
            output = self._outputs[index]
            was_complete = output.complete
            deltas.append((index, output.advance(progress)))
            unwritten += output.unwritten
            if progress.terminal is not None:
                self._remaining -= 1
                if output.failed is not None and not self._started:
                    raise EngineError(output.failed)
            elif output.complete and not was_complete:
                self._leader.stop_early(output.rid)
        return deltas, unwritten


async def _in_thread(write: Callable[[], bytes]) -> bytes:
    """Returns `write()`, which takes long. The outputs do not change meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_WRITING, write)


def prefill_leg(outputs: Sequence[Output], rendering: Rendering, *, stream: bool) -> Response:
    """Returns the response of a prefill server to a body that a router sends to both servers. It has no tokens and does
    not wait for the prefill.

    The decode server asks for the prefill, responds to the client, and retries if necessary. A failure of the transfer
    or of the decode server is not a failure of this server, and waiting for it would delay the router and its client.
    """
    events: list[object] = []
    for index, output in enumerate(outputs):
        end = Finished(output.rid, FinishReason("length", length=0), output.prompt_tokens, 0, 0, timeline={})
        delta = output.advance(Progress(output.rid, terminal=end))
        events += rendering.events(index, output, delta) if stream else ()
    if not stream:
        return Response(msgspec.json.encode(rendering.result(outputs)), media_type="application/json")
    events += rendering.closing_events(outputs)
    return Response(_encode_events(events, rendering) + _end_of_stream(rendering), media_type="text/event-stream")


def _encode_events(events: Iterable[object], rendering: Rendering) -> bytes:
    encode = msgspec.json.encode
    if not rendering.named_events:
        return b"".join([b"data: %b\n\n" % encode(event) for event in events])
    encoded = []
    for event in events:
        assert isinstance(event, dict), "a named event has a type"
        encoded.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode(event)))
    return b"".join(encoded)


def _end_of_stream(rendering: Rendering) -> bytes:
    return b"" if rendering.named_events else DONE_EVENT


async def run_until_disconnect(working: "asyncio.Future[ResultT]", receive: Receive) -> ResultT:
    """Returns the result of `working`. If the client disconnects first, cancels `working` and raises ClientDisconnect.

    Must be called after the whole body has been read, because it consumes the messages of `receive`.
    """
    watching = asyncio.ensure_future(_wait_disconnect(receive))
    futures: set[asyncio.Future[Any]] = {working, watching}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for future in futures:
            future.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
