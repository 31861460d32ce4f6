"""Limits the memory of request bodies that have not arrived whole: many clients may send large ones slowly."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LEAST_BYTES: Final = 64 << 10
"""What each body counts at least: buffers, and the state that inflates it."""


class ArrivingBody:
    """One body. Created in the task that reads it."""

    def __init__(self, host: str, timeout: asyncio.Timeout) -> None:
        self.host = host
        self.size = LEAST_BYTES
        self.refusal: str | None = None
        """Why it is given up."""
        self._timeout = timeout

    def give_up(self, refusal: str) -> None:
        """End the read with a TimeoutError at its next await."""
        self.refusal = refusal
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())


class ArrivingBodies:
    """If there are too many bytes, the client with most of them loses the body that has been arriving for longest. A
    client is the address of the connection. A single body always has room.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._bytes = 0
        self._hosts: dict[str, dict[ArrivingBody, None]] = {}
        """The bodies of each client, oldest first."""
        self._bytes_of: dict[str, int] = {}

    @contextmanager
    def begin(self, host: str, timeout: asyncio.Timeout) -> Iterator[ArrivingBody]:
        """A body that arrives until the end of the block. `timeout` around it ends the read of one that is given up."""
        body = ArrivingBody(host, timeout)
        self._hosts.setdefault(host, {})[body] = None
        self._count(host, body.size)
        try:
            self._make_room()
            yield body
        finally:
            self._remove(body)

    def grow(self, body: ArrivingBody, size: int) -> None:
        """The body has so many bytes now."""
        more = max(size, LEAST_BYTES) - body.size
        if body.refusal is None and more:
            body.size += more
            self._count(body.host, more)
            self._make_room()

    def _make_room(self) -> None:
        while self._bytes > self._max and (len(self._hosts) > 1 or len(next(iter(self._hosts.values()))) > 1):
            host = max(self._bytes_of, key=self._bytes_of.__getitem__)
            oldest = next(iter(self._hosts[host]))
            oldest.give_up(
                f"request bodies of {self._bytes} bytes are arriving (limit {self._max}: max_arriving_bytes), and this "
                "one, of the client with most of these, has been arriving for longest; try again later"
            )
            self._remove(oldest)

    def _remove(self, body: ArrivingBody) -> None:
        bodies = self._hosts.get(body.host, {})
        if body in bodies:
            del bodies[body]
            self._count(body.host, -body.size)
            if not bodies:
                del self._hosts[body.host], self._bytes_of[body.host]

    def _count(self, host: str, more: int) -> None:
        self._bytes += more
        self._bytes_of[host] = self._bytes_of.get(host, 0) + more
