"""Accepts the connections of an HTTP server, many in each turn of the event loop.

libuv, on which uvloop is built, accepts one connection per turn. Beside hundreds of running streams a turn takes
milliseconds, so that a burst of a thousand clients would wait for seconds before their requests are read.
"""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Final

log = logging.getLogger("pdserve.http")

ACCEPTS_PER_TURN: Final = 32
"""Running streams are served between two turns: reading this many requests takes about as long as their tokens."""
MOST_OPENING: Final = 1024
"""TLS handshakes at once: for a further one, the oldest is given up. None of them has a place in max_connections."""
HANDSHAKE_S: Final = 10.0
"""Most time of a TLS handshake."""
PAUSE_S: Final = 0.5
"""How long nothing is accepted after an error, such as a lack of descriptors."""
UNSENT_BYTES: Final = 64 << 10
"""Of a connection, bytes in the kernel that were not sent. The kernel would take megabytes for a client that reads
nothing, and the work for its next requests would be done.
"""


class Acceptor:
    """Owns the listening socket. Stands in the place of an asyncio.Server."""

    def __init__(
        self,
        listening: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        *,
        backlog: int,
        ssl_context: ssl.SSLContext | None,
        make_room: Callable[[], bool] = lambda: True,
    ) -> None:
        """`make_room` closes an idle connection if there are too many. It returns False if none is idle: then the new
        one is closed.
        """
        self._make_room = make_room
        self._listening = listening
        self._new_protocol = new_protocol
        self._ssl = ssl_context
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[None], None] = {}
        """Oldest first."""
        self._paused: asyncio.TimerHandle | None = None
        listening.setblocking(False)
        listening.listen(backlog)
        self._resume()

    def close(self) -> None:
        """Accept no more, and close the listening socket. Open connections stay."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        if self._paused is not None:
            self._paused.cancel()
        for task in self._opening:
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until the connections that were being opened at close() are open or gone."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _resume(self) -> None:
        self._paused = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                connection, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # mostly no descriptors or no memory
                log.error("no connection is accepted for %g s: %s", PAUSE_S, error)
                self._loop.remove_reader(self._listening)
                self._paused = self._loop.call_later(PAUSE_S, self._resume)
                return
            if not self._make_room():
                connection.close()
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            if len(self._opening) >= MOST_OPENING:
                oldest = next(iter(self._opening))
                del self._opening[oldest]
                oldest.cancel()
            task = self._loop.create_task(self._open(connection))
            self._opening[task] = None
            task.add_done_callback(partial(self._opened, connection))

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._new_protocol,
                connection,
                ssl=self._ssl,
                ssl_handshake_timeout=None if self._ssl is None else HANDSHAKE_S,
            )
        except (OSError, ssl.SSLError) as error:  # the client has left, or speaks no TLS
            log.debug("a connection could not be opened: %s", error)
            connection.close()

    def _opened(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._opening.pop(task, None)
        if task.cancelled():  # maybe before it began
            connection.close()
