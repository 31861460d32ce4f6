"""A TCP port on which ZeroMQ clients get messages that all of them share.

No client has a queue: it has a place in the messages of the server, and at most SEND_BYTES of them and the one after
are on their way to it. What one client can cost is therefore known, whether it reads or not.
"""

import logging
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

from ...common.logs import rate_limited
from ...transfer.control.bind import listen_tcp
from ...transfer.protocol.zmtp import GREETING, ZmtpError, ZmtpReader, command, ready

log = logging.getLogger(__name__)
_noise = rate_limited(log)

SEND_BYTES: Final = 64 << 10
"""Messages that are prepared for a client at once. The next ones follow when the kernel has taken these."""
WRITES_PER_TURN: Final = 4
SOCKET_BYTES: Final = 256 << 10
"""Send buffer of a connection in the kernel, which would grow to megabytes without a limit."""
READ_BYTES: Final = 4096
ACCEPTS_PER_TURN: Final = 32
HANDSHAKE_S: Final = 10.0
"""A connection that has not completed the handshake by then is closed."""
PATIENCE_S: Final = 30.0
"""A client that reads nothing for this time, while messages wait for it, is disconnected."""
_MOST_PIECES: Final = 256
"""Of one sendmsg(), which takes 1,024 at most (IOV_MAX)."""


class ZmtpClient:
    """One connection."""

    __slots__ = (
        "accepted_at",
        "active_at",
        "host",
        "next_batch",
        "pieces",
        "reader",
        "socket",
        "subscriptions",
        "waits",
    )

    def __init__(self, connection: socket.socket, host: str, now: float) -> None:
        self.socket = connection
        self.host = host
        self.reader = ZmtpReader()
        self.pieces: deque[bytes | memoryview] = deque()
        """What is on its way."""
        self.next_batch: int | None = None
        """Its place: the sequence of the batch that it gets next, or None if it has not asked for any."""
        self.subscriptions = 0
        """Those that match."""
        self.waits = False
        """There are pieces: it is not read until the kernel has taken them."""
        self.accepted_at = self.active_at = now


class ZmtpPort:
    """Owns the listening socket and its clients. All calls come from one thread, which passes on what the selector
    reports: its `data` are callables.

    `received(client, frames)` is called for each message of a client; `following(client)` returns the pieces of the
    next message for a client, or none. Raises StartupError if the port is taken; port 0 is any free one.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        address: tuple[str, int],
        name: str,
        flag: str,
        socket_type: str,
        max_clients: int,
        *,
        received: Callable[[ZmtpClient, list[bytes]], None],
        following: Callable[[ZmtpClient], Sequence[bytes]],
    ) -> None:
        self._selector = selector
        self._name = name
        self._ready = ready(socket_type)
        self._max_clients = max_clients
        self._received = received
        self._following = following
        self._clients: dict[int, ZmtpClient] = {}
        self._listening = listen_tcp(*address, name, flag, backlog=4 * ACCEPTS_PER_TURN)
        self.port: int = self._listening.getsockname()[1]
        selector.register(self._listening, selectors.EVENT_READ, self._accept)

    def send_all(self) -> None:
        """Send what is new to all clients with a place that can take more."""
        for client in list(self._clients.values()):
            if client.next_batch is not None and not client.waits:
                self._send(client)

    def is_sending(self) -> bool:
        """Whether messages wait for a client."""
        return any(client.waits for client in self._clients.values())

    def close_silent(self, now: float) -> None:
        """Disconnect clients that do not complete the handshake or do not read."""
        for client in list(self._clients.values()):
            if not client.reader.is_ready and now > client.accepted_at + HANDSHAKE_S:
                self._close(client, f"no ZMTP handshake within {HANDSHAKE_S:g} s")
            elif client.waits and now > client.active_at + PATIENCE_S:
                self._close(client, f"it has read nothing for {PATIENCE_S:g} s")

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._close(client)
        self._selector.unregister(self._listening)
        self._listening.close()

    def _accept(self, _events: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # mostly no descriptors
                _noise.warning("%s: a connection cannot be accepted: %s", self._name, error)
                self._make_room()
                return
            connection.setblocking(False)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if len(self._clients) >= self._max_clients:
                self._make_room()
            client = ZmtpClient(connection, address[0], time.monotonic())
            self._clients[connection.fileno()] = client
            self._selector.register(connection, selectors.EVENT_READ, lambda _, of=client: self._turn(of))
            client.pieces.append(GREETING)
            self._send(client)

    def _make_room(self) -> None:
        """Close a connection of the host that has most of them: the one that has done nothing for longest."""
        hosts = Counter(client.host for client in self._clients.values())
        if hosts:
            (host, _), *_ = hosts.most_common(1)
            silent = min((one for one in self._clients.values() if one.host == host), key=lambda one: one.active_at)
            self._close(silent, f"more than {self._max_clients} connections")

    def _turn(self, client: ZmtpClient) -> None:
        """The client has sent something, or can take more."""
        if client.waits:
            self._send(client)
            return
        try:
            data = client.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(client)
            return
        client.active_at = time.monotonic()
        client.reader.feed(data)
        self._send(client)

    def _read_messages(self, client: ZmtpClient) -> None:
        """Take the messages that have arrived. A request is taken when the one before it is answered."""
        while not client.pieces and (message := client.reader.next()) is not None:
            match message:
                case ("", frames):
                    self._received(client, frames)
                    client.pieces.extend(self._following(client))
                case ("greeting", _):
                    client.pieces.append(self._ready)
                case ("PING", [data]):
                    client.pieces.append(command("PONG", data[2:18]))  # after the time to live
                case _:
                    pass  # READY, ERROR, PONG

    def _send(self, client: ZmtpClient) -> None:
        """Send what the kernel takes, up to WRITES_PER_TURN times SEND_BYTES."""
        try:
            for _ in range(WRITES_PER_TURN):
                self._fill(client)
                if not client.pieces or not _write(client):
                    break
            else:
                self._fill(client)
        except ZmtpError as error:
            self._close(client, str(error))
            return
        except OSError:
            self._close(client)
            return
        if bool(client.pieces) != client.waits:
            client.waits = bool(client.pieces)
            events = selectors.EVENT_WRITE if client.waits else selectors.EVENT_READ
            self._selector.modify(client.socket, events, self._selector.get_key(client.socket).data)

    def _fill(self, client: ZmtpClient) -> None:
        """Prepare what follows, up to SEND_BYTES and one message."""
        self._read_messages(client)
        size = sum(map(len, client.pieces))
        while client.reader.is_ready and size < SEND_BYTES and len(client.pieces) < _MOST_PIECES:
            pieces = self._following(client)
            if not pieces:
                return
            client.pieces.extend(pieces)
            size += sum(map(len, pieces))

    def _close(self, client: ZmtpClient, why: str = "") -> None:
        if self._clients.pop(client.socket.fileno(), None) is None:
            return
        if why:
            _noise.warning("%s: the connection of %s was closed: %s", self._name, client.host, why)
        self._selector.unregister(client.socket)
        client.socket.close()


def _write(client: ZmtpClient) -> bool:
    """Returns whether the kernel has taken all pieces."""
    pieces = client.pieces
    try:
        sent = client.socket.sendmsg(list(pieces))
    except BlockingIOError:
        return False
    client.active_at = time.monotonic()
    while pieces and sent >= len(pieces[0]):
        sent -= len(pieces.popleft())
    if sent:
        pieces[0] = memoryview(pieces[0])[sent:]
    return not pieces
