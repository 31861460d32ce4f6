"""The leader's end of the socket to the frontend.

Every thread sends its messages itself, under a lock. A thread just for sending would first have to get the GIL, and
tokens would wait for that. The link's own thread waits for messages of the frontend on the descriptor of the socket,
without using the socket itself. It also sends the status, even while the engine loop is busy.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import zmq

from ...common.errors import PdserveError
from ..messages.frontend import Failed, Finished, Prefilled, PromptSent, Status, ToFrontend, Tokens, ToLeader

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.25
_ENCODING_ERRORS = (msgspec.MsgspecError, TypeError, ValueError, OverflowError)
LINGER_MS = 1000
"""How long close() waits for the frontend to read."""


class UnsentError(PdserveError):
    """Messages that cannot be encoded: the reasons, by the rid of their request."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{rid}: {reason}" for rid, reason in reasons.items()))
        self.reasons = reasons


class FrontendLink:
    """Delivers messages of the frontend to `on_message`, which may be called on any thread, and sends ours in order.
    `send()` may be called from any thread and does not wait.

    After `start_status`, a Status is sent four times a second, even while the engine loop hangs: `Status.loop_age_s`
    then shows that it hangs.
    """

    def __init__(self, address: str, on_message: Callable[[ToLeader], None]) -> None:
        self._on_message = on_message
        self._status: Callable[[], Status] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToLeader)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._closing = os.eventfd(0)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="frontend-link", daemon=True)
        self._thread.start()

    def start_status(self, status: Callable[[], Status]) -> None:
        """Start to send what `status` returns; it is called on the link's thread."""
        self._status = status

    def send(self, *messages: ToFrontend) -> None:
        """Send the messages as one batch. If some cannot be encoded, send those of other requests, and raise
        UnsentError.
        """
        reasons: dict[str, str] = {}
        with self._lock:
            try:
                payload = self._encoder.encode(messages)
            except _ENCODING_ERRORS:
                reasons = self._problems(messages)
                payload = self._encoder.encode([each for each in messages if _rid_of(each) not in reasons])
            self._socket.send(payload)
            self._receive()  # the descriptor signals an arrival once, and a send may consume the signal
        if reasons:
            raise UnsentError(reasons)

    def _problems(self, messages: Iterable[ToFrontend]) -> dict[str, str]:
        """Why messages cannot be encoded, by the rid of their request. Raises if a message is about no request."""
        found: dict[str, str] = {}
        for message in messages:
            try:
                self._encoder.encode(message)
            except _ENCODING_ERRORS as error:
                rid = _rid_of(message)
                if rid is None:
                    raise
                found[rid] = f"{type(message).__name__} cannot be sent: {error}"
        return found

    def lost(self) -> None:
        """The frontend has exited: close() drops what is queued instead of waiting for a reader."""
        with self._lock:
            if not self._closed:
                self._socket.setsockopt(zmq.LINGER, 0)

    def close(self) -> None:
        """Send what is queued, then end the thread. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        os.eventfd_write(self._closing, 1)
        self._thread.join()
        os.close(self._closing)
        self._socket.close()
        self._context.term()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket.fileno(), select.POLLIN)
        poller.register(self._closing, select.POLLIN)
        status_at = 0.0
        while True:
            ready = poller.poll(STATUS_INTERVAL_S * 1000)
            if any(descriptor == self._closing for descriptor, _ in ready):
                return
            with self._lock:
                self._receive()
            if self._status is not None and time.monotonic() >= status_at:
                status_at = time.monotonic() + STATUS_INTERVAL_S
                try:
                    self.send(self._status())
                except Exception:  # without this thread, an idle leader would not receive anything
                    log.exception("the status cannot be sent")

    def _receive(self) -> None:
        """Deliver all that has arrived. The caller holds the lock."""
        while int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # costs less than an exception
            payload = self._socket.recv(zmq.NOBLOCK)
            try:
                self._on_message(self._decoder.decode(payload))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                log.error("cannot decode a message of the frontend: %s", error)


def _rid_of(message: ToFrontend) -> str | None:
    """The request of a message, if it is about one."""
    return message.rid if isinstance(message, Tokens | Prefilled | Finished | Failed | PromptSent) else None
