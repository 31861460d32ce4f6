"""uvicorn's HTTP protocol with a limit on how long a client may leave its answer unread."""

import array
import asyncio
import fcntl
import logging
import termios
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger("pdserve.front")


class PatientHttpProtocol(HttpToolsProtocol):
    """Closes a connection whose client has taken nothing for `patience_s` while an answer waits to be sent.

    Without it, a client that stops reading holds its request, its KV pages and a send buffer for as long as it likes.
    The application hears of it as of any other disconnect. A slow client is left alone as long as it takes something.
    """

    patience_s: ClassVar[float] = 30.0
    _waiting: asyncio.TimerHandle | None = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._stop_waiting()
        self._waiting = self.loop.call_later(self.patience_s, self._check_progress, self._unread_bytes())

    def _check_progress(self, unread_bytes: int) -> None:
        if self._unread_bytes() < unread_bytes:
            self._wait()
            return
        self._waiting = None
        log.warning("client %s has read nothing for %g s: connection closed", self.client, self.patience_s)
        self.transport.abort()

    def _unread_bytes(self) -> int:
        """What waits in our buffer and in the kernel's, which a slow client empties for long before ours moves."""
        in_kernel = array.array("i", [0])
        fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, in_kernel)
        return self.transport.get_write_buffer_size() + in_kernel[0]

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None
