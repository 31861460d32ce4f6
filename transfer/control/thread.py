"""The control thread of a server: it owns all sockets and sleeps in one poller.

Other threads post work to it (`send`). It reports events by calling `on_event`, which should only put the event into a
queue and return. No message of a peer and no exception of a callback ends the thread: errors are logged and counted.
"""

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from ...common.logs import rate_limited
from ..mooncake.infiniband import port_states
from ..protocol.messages import AnyMessage, InstanceId, Load
from ..protocol.wire import MAX_FRAME_BYTES, Body, IntArray, encode
from .events import Event, PeerSnapshot
from .reliable_channel import is_sequenced
from .session import Timing
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

MESSAGES_PER_TURN = 4096
"""Messages read from one socket before the next socket is read."""
SEND_QUEUE_MESSAGES = 10_000
"""ZMQ's own queue per peer. A channel has at most its window in flight, so only heartbeats can fill this queue."""
MAX_SOCKETS = 8192
"""ZMQ sockets in one process. Decode has three per prefill endpoint."""
REMEMBERED_WARNINGS = 1024
LAST_WORDS_S = 1.0
"""How long close() waits for paired peers to acknowledge the messages sent before."""

COUNTERS = (
    "messages_sent",
    "messages_received",
    "messages_resent",
    "messages_out_of_order",
    "heartbeats_received",
    "malformed",
    "complaints_received",
    "unknown_peer",
    "refused",
    "authentication_failures",
    "connections_cut",
    "peers_up",
    "peers_lost",
    "peers_closed",
    "sends_dropped_by_zmq",
    "sends_to_unknown_instance",
    "sends_over_limit",
    "event_errors",
    "handler_errors",
)


class Control(ABC):
    """The thread and all that does not depend on its peers. `start()` once, `close()` once.

    `send`, `peers`, `stats` and `progress_age_s` may be called from any thread; the rest runs on the control thread.
    """

    def __init__(
        self,
        *,
        role: str,
        on_event: Callable[[Event], None],
        load: Callable[[], Load],
        timing: Timing,
        clock: Callable[[], float],
    ) -> None:
        self.timing = timing
        self._on_event = on_event
        self._load = load
        self._clock = clock
        # With one I/O thread, the end of a connection is always reported before events of its successor.
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._poller = zmq.Poller()
        self._work: deque[Callable[[], None]] = deque()
        self._wakeup = Wakeup(self._context)
        self._poller.register(self._wakeup.receiver, zmq.POLLIN)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{role}-control", daemon=True)
        self._turned_at = clock()
        self._soon = False
        """Work is left that the poller does not report: the next iteration does not sleep."""
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._snapshot: list[PeerSnapshot] = []
        self._warned: set[tuple[str, str]] = set()
        # Log lines that peers can cause without limit.
        self._noise = rate_limited(logger)
        self._refusals = rate_limited(logger)
        self._errors = rate_limited(logger)

    def start(self) -> None:
        self._turned_at = self._clock()
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all connections; peers notice at once. Do not call it from `on_event`.

        Messages sent before are still delivered, if a paired peer acknowledges them within LAST_WORDS_S: the last
        request of a draining server ends with a message. Other messages are dropped. Takes a bounded time; may be
        called twice.
        """
        self._stopping.set()
        self._wakeup.ring()
        if self._thread.ident is None:
            self._release()
            return
        self._thread.join(timeout=5.0)
        if self._thread.is_alive():
            logger.error("the control thread did not end within 5 s: %s", self._thread.name)

    def send(self, instance: InstanceId, message: AnyMessage, *arrays: IntArray) -> None:
        """Deliver `message` to this instance once, in order. Returns at once; raises WireError if it cannot be encoded.

        While the instance is lost, the message waits in the channel and is delivered if the same instance comes back;
        it is dropped if the instance is closed or unknown. Do not write to the arrays afterwards.
        """
        assert is_sequenced(message), f"{type(message).__name__} is sent by the control thread only"
        self._post(partial(self._send_numbered, instance, message, encode(message, *arrays)))

    def peers(self) -> list[PeerSnapshot]:
        """All peers as of the last iteration of the loop."""
        return self._snapshot

    def stats(self) -> dict[str, int]:
        """Counters since the start, by name."""
        return dict(self._counts)

    def progress_age_s(self) -> float:
        """Time since the last iteration of the loop; well below a second while the thread is healthy."""
        return self._clock() - self._turned_at

    @abstractmethod
    def _turn(self) -> None:
        """One iteration of the loop: sleep in the poller, then handle what is ready."""

    @abstractmethod
    def _flush(self) -> None:
        """Deliver what was sent before close()."""

    @abstractmethod
    def _send_numbered(self, instance: InstanceId, message: AnyMessage, body: Body) -> None: ...

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._guard(self._turn):
                    self._stopping.wait(self.timing.tick_s)
            self._guard(self._flush)
        finally:
            self._release()

    def _emit(self, event: Event) -> None:
        try:
            self._on_event(event)
        except Exception:
            self._counts["event_errors"] += 1
            self._errors.exception("error while handling event %s", type(event).__name__)

    def _guard(self, action: Callable[[], None]) -> bool:
        """Run it; count and log an exception. Returns whether there was none."""
        try:
            action()
        except Exception:
            self._counts["handler_errors"] += 1
            self._errors.exception("error in the control loop; it continues")
            return False
        return True

    def _current_load(self) -> Load:
        try:
            load = self._load()
            return msgspec.structs.replace(load, accepting=False) if self._stopping.is_set() else load
        except Exception:
            self._counts["event_errors"] += 1
            self._errors.exception("load() failed")
            return Load()

    def _rdma_ports(self) -> dict[str, str]:
        try:
            return port_states()
        except OSError as error:  # a device has just been removed
            logger.debug("the states of RDMA ports cannot be read: %s", error)
            return {}

    def _first_time(self, peer: str, what: str) -> bool:
        """Whether this warning about this peer is the first one. The record is cleared when it reaches
        REMEMBERED_WARNINGS.
        """
        if len(self._warned) >= REMEMBERED_WARNINGS:
            self._warned.clear()
        known = (peer, what) in self._warned
        self._warned.add((peer, what))
        return not known

    def _post(self, action: Callable[[], None]) -> None:
        self._work.append(action)
        self._wakeup.ring()

    def _configure(self, socket: zmq.Socket[bytes]) -> None:
        """Options of all sockets to peers."""
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        # Keepalive closes connections to machines that are down, but not to processes that are stopped.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 2)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)

    @staticmethod
    def _receive_frames(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
        """The next message without copying it; None if there is none."""
        try:
            return socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _release(self) -> None:
        self._wakeup.close()
        self._context.destroy(linger=0)
