"""The open requests of one HTTP call in the frontend, and the events that the leader sends for them."""

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...common.sampling import TokenLogprob
from ...scheduler.messages.frontend import Failed, Finished, Prefilled, Tokens

if TYPE_CHECKING:
    from opentelemetry.trace import Span

RequestEvent = Tokens | Prefilled | Finished | Failed


@dataclass(slots=True)
class Progress:
    """New events of one request: tokens in order, and its end if it has ended.

    `logprobs` has one entry per token, or none at all.
    """

    rid: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prefilled: Prefilled | None = None
    terminal: Finished | Failed | None = None


class Inbox:
    """The events of the open requests of one HTTP call.

    Events that arrive while the caller is busy are merged per request, so a slow client costs only the memory of its
    tokens.
    """

    def __init__(self, group: str | None, request_id: str | None) -> None:
        self.group = group
        self.request_id = request_id
        self.open_rids: set[str] = set()
        self._unread: dict[str, Progress] = {}
        self._waiter: asyncio.Future[None] | None = None

    async def receive(self) -> list[Progress]:
        """Wait for events and take all of them, one Progress per request with events. For one caller at a time."""
        if not self._unread:
            self._waiter = asyncio.get_running_loop().create_future()  # asyncio.Event adds a coroutine per wait
            await self._waiter
        unread, self._unread = self._unread, {}
        return list(unread.values())

    def put(self, message: RequestEvent) -> None:
        progress = self._unread.get(message.rid)
        if progress is None:
            progress = self._unread[message.rid] = Progress(message.rid)
        match message:
            case Tokens():
                progress.token_ids.extend(message.token_ids)
                progress.logprobs.extend(message.logprobs)
            case Prefilled():
                progress.prefilled = message
            case Finished() | Failed():
                progress.terminal = message
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(slots=True)
class OpenRequest:
    """A request that the leader has not ended. `submitted_as` is the `rid` of its Submit: that of the first sample."""

    rid: str
    submitted_as: str
    inbox: Inbox
    opened_at: float
    prompt_tokens: int
    overdue: asyncio.TimerHandle | None = None
    output_tokens: int = 0
    """Output tokens that have arrived so far."""
    last_token_at: float | None = None
    stopped_early: bool = False
    span: "tuple[Span, int] | None" = None
    """Span of a traced request, and the time in nanoseconds at which it began."""

    @property
    def log_fields(self) -> dict[str, str | None]:
        """Fields that log lines in JSON have in addition."""
        return {"rid": self.rid, "request_id": self.inbox.request_id}
