"""Parses and tokenizes bodies: short ones on the event loop, longer ones in threads.

Tokenizing a long text takes seconds. Each class of lengths (lane) has its own threads, so that a long text delays only
other long texts. After a long text, freed memory is returned to the system.
"""

import asyncio
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from ...configs.errors import OverloadedError
from .generation import run_until_disconnect

INLINE_BYTES = 16 << 10
"""Bodies up to this size are parsed on the event loop: tokenizing 16 KiB takes about a millisecond."""
LONG_BYTES = 256 << 10
"""Bodies above this size go to a lane for long ones: they take about a quarter of a second or more."""
MOST_LONG_THREADS = 4
MOST_WAITING = 64
"""Most bodies in one lane: each of them is held in memory. Further ones are refused with 429."""

ResultT = TypeVar("ResultT")


class Lane:
    """A few threads with a bounded queue of bodies."""

    def __init__(self, name: str, threads: int) -> None:
        self._name = name
        self._bodies = 0
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"lane-{name}")

    async def run(self, request: Request, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` on a thread. Raises OverloadedError when the queue is full, and ClientDisconnect when the client
        disconnects: work that has not begun is then dropped.
        """
        if self._bodies >= MOST_WAITING:
            raise OverloadedError(
                f"{self._bodies} {self._name} request bodies are being parsed (limit {MOST_WAITING}); try again later"
            )
        self._bodies += 1
        working = asyncio.get_running_loop().run_in_executor(self._executor, work)
        working.add_done_callback(self._done)
        return await run_until_disconnect(working, request.receive)

    def _done(self, _working: "asyncio.Future[ResultT]") -> None:
        self._bodies -= 1


class Lanes:
    """The lanes of one server."""

    def __init__(self) -> None:
        cpus = len(os.sched_getaffinity(0))
        self._medium = Lane("medium", max(2, cpus // 2))
        self._long = Lane("long", max(1, min(MOST_LONG_THREADS, cpus // 4)))
        self._tools = Lane("long /tokenize", 1)

    async def run(
        self, request: Request, body: bytes, parse: Callable[[bytes], ResultT], *, is_prompt: bool = True
    ) -> ResultT:
        """Returns `parse(body)`. Long bodies of /tokenize and similar routes (`is_prompt` is false) have their own
        lane, because the context length of the model does not bound them.
        """
        if len(body) <= INLINE_BYTES:
            return parse(body)
        if len(body) <= LONG_BYTES:
            return await self._medium.run(request, lambda: parse(body))

        def parse_and_trim() -> ResultT:
            try:
                return parse(body)
            finally:
                _trim()

        return await (self._long if is_prompt else self._tools).run(request, parse_and_trim)


def _find_trim() -> Callable[[], object]:
    """Returns a function that makes glibc return freed memory to the system. Other C libraries do not have the call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))


_trim = _find_trim()
