"""The leader's end of the socket to the frontend, on its own thread: status is sent while the engine loop is busy."""

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from ...transfer.control.wakeup import Wakeup
from ..messages.frontend import Status, ToFrontend, ToFrontendBatch, ToLeader

log = logging.getLogger(__name__)

STATUS_INTERVAL_S = 0.25


class FrontendLink:
    """Delivers messages of the frontend to `on_message` and sends ours in order. `send()` may be called from any
    thread.

    `on_message` runs on the link's thread. After `start_status`, a Status is sent four times a second, also while the
    engine loop hangs: its `loop_age_s` shows that.
    """

    def __init__(self, address: str, on_message: Callable[[ToLeader], None]) -> None:
        self._on_message = on_message
        self._status: Callable[[], Status] | None = None
        self._outbox: queue.SimpleQueue[Sequence[ToFrontend] | None] = queue.SimpleQueue()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._wakeup = Wakeup(self._context)
        self._closed = False
        self._thread = threading.Thread(target=self._run, args=(address,), name="frontend-link", daemon=True)
        self._thread.start()

    def start_status(self, status: Callable[[], Status]) -> None:
        """Start to send what `status` returns; it is called on the link's thread."""
        self._status = status

    def send(self, *messages: ToFrontend) -> None:
        self._outbox.put(messages)
        self._wakeup.ring()

    def close(self) -> None:
        """Send what is queued, then end the thread. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._outbox.put(None)
        self._wakeup.ring()
        self._thread.join()
        self._wakeup.close()
        self._context.term()

    def _run(self, address: str) -> None:
        socket = self._context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wakeup.receiver, zmq.POLLIN)
        encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(ToLeader)
        status_at = 0.0
        try:
            while True:
                ready = dict(poller.poll(int(STATUS_INTERVAL_S * 1000)))
                if self._wakeup.receiver in ready:
                    self._wakeup.drain()
                if socket in ready:
                    self._receive(socket, decoder)
                if not self._flush(socket, encoder):
                    return
                if self._status is not None and time.monotonic() >= status_at:
                    status_at = time.monotonic() + STATUS_INTERVAL_S
                    socket.send(encoder.encode([self._status()]))
        finally:
            socket.close()

    def _receive(self, socket: "zmq.Socket[bytes]", decoder: "msgspec.msgpack.Decoder[ToLeader]") -> None:
        while socket.poll(0):
            try:
                self._on_message(decoder.decode(socket.recv()))
            except msgspec.MsgspecError as error:
                log.error("cannot decode a message of the frontend: %s", error)

    def _flush(self, socket: "zmq.Socket[bytes]", encoder: msgspec.msgpack.Encoder) -> bool:
        """Send everything queued in one message; False after close()."""
        batch: ToFrontendBatch = []
        closing = False
        with contextlib.suppress(queue.Empty):
            while (messages := self._outbox.get_nowait()) is not None:
                batch += messages
            closing = True
        if batch:
            socket.send(encoder.encode(batch))
        return not closing
