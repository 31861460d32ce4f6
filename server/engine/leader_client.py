"""The frontend's end of the socket to its leader: opens requests, routes their events, keeps the latest status.

Every request ends with exactly one terminal event, also when the leader dies. If a caller leaves early, the client
sends Cancel to the leader, and the request id stays in use until the leader confirms the end.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import msgspec
import zmq

from ...common.errors import DeadlineError, DuplicateRequestError, StartupError, UnavailableError
from ...common.stuck import Watch
from ...configs.schema import AnyServerConfig, DecodeConfig
from ...scheduler.messages.frontend import (
    Cancel,
    Failed,
    Finished,
    FlushCache,
    Prefilled,
    PromptSent,
    Ready,
    StartupFailed,
    Status,
    Stop,
    Submit,
    ToFrontend,
    ToFrontendBatch,
    Tokens,
    ToLeader,
)
from ..observability.metrics import Metrics
from ..observability.recent_requests import PROBE_PREFIX, RecentRequests
from ..observability.request_log import end_line, request_name
from ..observability.stats_log import StatsLog
from ..observability.tracing import Tracing
from .inbox import Inbox, OpenRequest, RequestEvent

log = logging.getLogger("pdserve.frontend")

LeaderState = Literal["starting", "ready", "stopping", "dead"]
BATCHES_PER_TURN = 64
RETRY_AFTER_S = 2.0
WATCH_INTERVAL_S = 0.25
OVERDUE_S = 0.5
"""The frontend fails a request this long after its deadline if the leader has not: the leader may hang."""
LOGGED_STATUSES = (500, 504)
"""Failures that are logged one by one. A 503 affects many requests at once, and its cause has a log line."""


class LeaderClient:
    """Owns the PAIR socket. All methods run on the event loop that created it."""

    def __init__(
        self,
        metrics: Metrics,
        config: AnyServerConfig,
        tracing: Tracing | None = None,
        *,
        watch: Watch | None = None,
    ) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._config = config
        self.recent = RecentRequests()
        self._stats = StatsLog(config.role, config.log_stats_interval_s)
        # in Linux's abstract namespace, so that a killed frontend leaves no file behind
        self.address = f"ipc://@pdserve-{os.getpid()}-{secrets.token_hex(8)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # The leader bounds the work it accepts (429), so neither direction may block or drop here.
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # other users can see the name, but not connect
        self._socket.bind(self.address)
        self._decoder = msgspec.msgpack.Decoder(ToFrontendBatch)
        self._encoder = msgspec.msgpack.Encoder()
        self._open: dict[str, OpenRequest] = {}
        self._overdue: set[str] = set()
        """Requests that this client failed at their deadline. Their ids stay in use until the leader ends them."""
        self._started: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self.ready: Ready | None = None
        """The leader's Ready message; None while it starts."""
        self.status: Status | None = None
        """The leader's latest Status message."""
        self._status_at = time.monotonic()
        self._watch = watch or Watch()
        self._end_reason: str | None = None
        self._stopping = False
        self._then = "exits"

    @property
    def state(self) -> LeaderState:
        if self._end_reason is not None:
            return "dead"
        if self._stopping:
            return "stopping"
        return "starting" if self.ready is None else "ready"

    @property
    def loop_age_s(self) -> float:
        """Seconds since the last turn of the engine loop: the age in the latest Status plus the age of that Status."""
        reported = 0.0 if self.status is None else self.status.loop_age_s
        return reported + time.monotonic() - self._status_at

    @property
    def hashed_page_sizes(self) -> tuple[int, ...]:
        """The page sizes for which a caller hashes its prompts (prompt_hashes.py) before it calls `open`."""
        return self.status.hashed_page_sizes if self.status is not None else ()

    @property
    def open_rids(self) -> tuple[str, ...]:
        return tuple(self._open)

    async def run(self) -> None:
        """Receive until cancelled. A message that cannot be decoded or handled is logged and skipped.

        Does not use zmq.asyncio: for a single stream, its futures take as much CPU time as all other work per token.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._receive_all)
        try:
            self._receive_all()
            while True:
                self._watch.check()
                await asyncio.sleep(WATCH_INTERVAL_S)
        finally:
            loop.remove_reader(self._socket.fileno())

    async def wait_ready(self) -> Ready:
        """Wait for the leader's Ready message and return it. Raises StartupError when the leader reports one. Waits
        forever when the leader dies without a report: the caller also watches the process.
        """
        return await asyncio.shield(self._started)

    @contextlib.contextmanager
    def open(
        self,
        messages: Iterable[Submit],
        group: str | None = None,
        request_id: str | None = None,
        headers: Mapping[str, str] = {},
    ) -> Iterator[Inbox]:
        """Submit the prompts of one HTTP call to the leader, which accepts all of them or none: each later message
        names the first one in `follows`. Leaving the block cancels requests that have not ended. `headers` carry the
        trace context of the client.

        Raises UnavailableError unless the leader is healthy, and DuplicateRequestError when a request id is in use.
        """
        self.check_healthy()
        first, *others = messages
        batch = [first, *(msgspec.structs.replace(message, follows=first.rid) for message in others)]
        seen: set[str] = set()
        for rid in (rid for message in batch for rid in rids_of(message)):
            if rid in self._open or rid in self._overdue or rid in seen:
                where = "twice in this call" if rid in seen else "by a request that has not ended"
                raise DuplicateRequestError(f"rid {rid!r} is used {where}; request ids must be unique")
            seen.add(rid)
        inbox = Inbox(group, request_id)
        now = time.monotonic()
        for message in batch:
            for rid in rids_of(message):
                overdue = self._watch_deadline(rid, message)
                self._open[rid] = OpenRequest(rid, message.rid, inbox, now, len(message.prompt_ids), overdue)
                inbox.open_rids.add(rid)
            if self._tracing is not None and not message.rid.startswith(PROBE_PREFIX):
                message = self._trace(message, self._tracing, headers)
            if not self._send(message):
                for rid in rids_of(message):
                    self._dispatch(_unavailable(rid, "the leader process is not connected"))
        try:
            yield inbox
        finally:  # requests that were stopped early are cancelled already
            self._cancel(rid for rid in inbox.open_rids if not self._open[rid].stopped_early)

    def _trace(self, message: Submit, tracing: Tracing, headers: Mapping[str, str]) -> Submit:
        """Begin a span for each sample of a prompt. Returns the message with the trace context of the first span."""
        now_ns = time.time_ns()
        for rid in rids_of(message):
            self._open[rid].span = tracing.begin(rid, headers), now_ns
        first = self._open[message.rid].span
        assert first is not None
        return msgspec.structs.replace(message, traceparent=tracing.context_of(first[0]))

    def unavailable_reason(self) -> str | None:
        """Why the leader accepts no new requests; None when it does."""
        match self.state:
            case "starting":
                return "starting: the model is being loaded"
            case "stopping":
                return f"stopping: the server drains and {self._then}"
            case "dead":
                return f"leader dead: {self._end_reason}"
            case "ready":
                return None

    def check_available(self) -> Ready:
        """The leader's Ready message; raises UnavailableError unless the leader accepts new requests."""
        if (reason := self.unavailable_reason()) is not None:
            raise UnavailableError(reason, retry_after_s=RETRY_AFTER_S)
        assert self.ready is not None
        return self.ready

    def problems(self) -> list[str]:
        """Why this server is unhealthy; empty when it is healthy."""
        if (unavailable := self.unavailable_reason()) is not None:
            return [unavailable]
        reasons = list(self.status.problems) if self.status is not None else []
        silent_s = time.monotonic() - self._status_at
        if self.status is not None and self._watch.is_stuck(silent_s):
            reasons.append(f"the leader process has sent nothing for {silent_s:.0f} s")
        age_s, limit_s = self.loop_age_s, self._config.stall_timeout_s
        if age_s > limit_s:
            reasons.insert(0, f"loop stalled: no iteration for {age_s:.1f} s (stall_timeout_s is {limit_s:g})")
        if self.status is not None and (age_s := self.status.step_age_s) > limit_s:
            reasons.insert(0, f"step stalled: no result for {age_s:.1f} s (stall_timeout_s is {limit_s:g})")
        return reasons

    def check_healthy(self) -> None:
        """Raises UnavailableError when this server is unhealthy: it then accepts no new requests."""
        if problems := self.problems():
            raise UnavailableError("; ".join(problems), retry_after_s=RETRY_AFTER_S)

    def stop_early(self, rid: str) -> None:
        """End a request that is complete; no effect when the leader has ended it already."""
        if (entry := self._open.get(rid)) is not None:
            entry.stopped_early = True
            self._send(Cancel(rid, stopped=True))

    def abort(self, rid: str | None) -> list[str]:
        """Cancel every open request for which `rid` is its own id, the id of its prompt's first sample, or the id of
        its whole call. None cancels all open requests. Returns the ids of the cancelled requests.
        """
        matching = [
            entry.rid
            for entry in self._open.values()
            if rid in (None, entry.rid, entry.submitted_as, entry.inbox.group)
        ]
        self._cancel(matching)
        return matching

    def flush_cache(self) -> None:
        """Tell the leader to drop its cached prefixes. Raises UnavailableError unless the leader is ready."""
        self.check_available()
        self._send(FlushCache())

    def request_stop(self, drain_s: float, then: str = "exits") -> bool:
        """Refuse new requests from now on. Tell the leader to finish or fail the open ones within `drain_s`, and to
        exit. `then` completes the error text "the server drains and ...".

        Returns False when no leader is connected.
        """
        self._stopping, self._then = True, then
        return self._send(Stop(drain_s))

    def fail_all(self, reason: str) -> None:
        """Fail every open request with 503, because the leader has ended. Later requests are refused with 503, too."""
        if self._end_reason is None:
            self._end_reason = reason
        for rid in list(self._open):
            self._dispatch(_unavailable(rid, f"leader dead: {reason}"))
        self._overdue.clear()

    def close(self) -> None:
        """Release the socket."""
        self._socket.close()
        self._context.term()

    def _send(self, message: ToLeader) -> bool:
        """Send without waiting; returns False when no leader is connected. The send queue is unbounded."""
        # ZMQ's descriptor is edge-triggered, and a send may consume the edge of an arrival: receive afterwards
        asyncio.get_running_loop().call_soon(self._receive_all)
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _cancel(self, rids: Iterable[str]) -> None:
        for rid in rids:
            self._send(Cancel(rid))

    def _receive_all(self) -> None:
        """Receive all pending batches; yield to the event loop after every BATCHES_PER_TURN.

        A frontend that has fallen behind catches up because it finds several batches at once: each inbox merges the
        tokens of a request into one event.
        """
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):
            for _ in range(BATCHES_PER_TURN):
                self._receive(self._socket.recv(zmq.NOBLOCK))
            asyncio.get_running_loop().call_soon(self._receive_all)

    def _receive(self, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            log.error("message from the leader cannot be decoded: %s", error)
            return
        for message in batch:
            try:
                self._dispatch(message)
            except Exception:
                log.exception("message from the leader could not be handled: %s", type(message).__name__)

    def _dispatch(self, message: ToFrontend) -> None:
        match message:
            case Tokens() | Prefilled() | Finished() | Failed():
                self._deliver(message)
            case PromptSent():
                if self._tracing is not None:
                    self._tracing.prompt_sent(message)
            case Status():
                self.status, self._status_at = message, time.monotonic()
                if (line := self._stats.line(message)) is not None:
                    log.info("%s", line)
            case Ready() if not self._started.done():
                self.ready, self._status_at = message, time.monotonic()
                self._started.set_result(message)
            case StartupFailed() if not self._started.done():
                self._started.set_exception(StartupError(message.message))
                self._started.exception()  # retrieved, so that asyncio does not warn when no task waits for it

    def _watch_deadline(self, rid: str, message: Submit) -> asyncio.TimerHandle | None:
        """Start a timer that fails the request shortly after its deadline, in case the leader, which ends requests at
        their deadline, hangs. None on prefill servers.
        """
        if not isinstance(self._config, DecodeConfig):
            return None
        server_s = self._config.request_timeout_s
        deadline_s, field = server_s, "request_timeout_s"
        if message.timeout_s is not None and message.timeout_s < server_s:
            deadline_s, field = message.timeout_s, "timeout_s"
        return asyncio.get_running_loop().call_later(
            deadline_s + OVERDUE_S,
            self._end_overdue,
            rid,
            f"not finished within its deadline of {deadline_s:g} s ({field})",
        )

    def _end_overdue(self, rid: str, reason: str) -> None:
        if rid in self._open:
            self._dispatch(
                Failed(rid, DeadlineError.status, DeadlineError.code, f"{reason}; the leader process does not respond")
            )
            self._overdue.add(rid)
            self._send(Cancel(rid))

    def _deliver(self, message: RequestEvent) -> None:
        entry = self._open.get(message.rid)
        if entry is None:
            if isinstance(message, Finished | Failed):
                self._overdue.discard(message.rid)
            log.debug("event for an unknown or ended request: %s", message)
            return
        now = time.monotonic()
        match message:
            case Tokens():
                self._metrics.tokens_arrived(len(message.token_ids), entry.opened_at, entry.last_token_at, now)
                entry.last_token_at = now
                entry.output_tokens += len(message.token_ids)
            case Prefilled():
                pass
            case Finished() | Failed():
                elapsed_s = now - entry.opened_at
                if isinstance(message, Failed) and message.status in LOGGED_STATUSES:
                    name = request_name(message.rid, entry.inbox.request_id)
                    log.warning("%s failed with %d: %s", name, message.status, message.message, extra=entry.log_fields)
                elif self._config.log_requests:
                    log.info("%s", end_line(message, elapsed_s, entry.inbox.request_id), extra=entry.log_fields)
                self.recent.add(message, elapsed_s, entry.prompt_tokens, entry.output_tokens)
                del self._open[message.rid]
                if entry.overdue is not None:
                    entry.overdue.cancel()
                entry.inbox.open_rids.discard(message.rid)
                first_sample = entry.rid == entry.submitted_as
                self._metrics.request_ended(message, elapsed_s, first_sample=first_sample)
                if self._tracing is not None and entry.span is not None:
                    self._tracing.end(entry.span[0], message, entry.span[1])
        entry.inbox.put(message)


def rids_of(message: Submit) -> tuple[str, ...]:
    """The ids of the requests of a prompt: one for each sample."""
    return (message.rid, *message.more_rids)


def _unavailable(rid: str, message: str) -> Failed:
    return Failed(rid=rid, status=503, code="unavailable", message=message, retry_after_s=RETRY_AFTER_S)
