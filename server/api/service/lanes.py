"""Parses and tokenizes bodies: short ones on the event loop, longer ones in threads.

Tokenizing a long text takes seconds. Each class of lengths (lane) has its own threads, so that a long text delays only
other long texts. After a long text, freed memory is returned to the system.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from ....common.errors import OverloadedError
from ....common.machine.cpus import usable_cpus
from ...observability.loop_work import LoopWork
from .generation import run_until_disconnect

INLINE_BYTES = 16 << 10
"""Bodies up to this size are parsed on the event loop: tokenizing 16 KiB takes about a millisecond."""
LONG_BYTES = 256 << 10
"""Bodies above this size go to a lane for long ones: they take about a quarter of a second or more."""
MOST_LONG_THREADS = 4
MOST_WAITING = 64
"""Most bodies in one lane: each of them is held in memory. Further ones are refused with 429."""

ResultT = TypeVar("ResultT")


class Budget:
    """How many bytes of bodies may be parsed or wait for it, in all lanes together."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._taken = 0

    def take(self, size: int) -> None:
        """Raises OverloadedError if there is no room. A single body always has room."""
        if self._taken and self._taken + size > self._max:
            raise OverloadedError(
                f"request bodies of {self._taken} bytes are being parsed, and this one has {size} bytes "
                f"(limit {self._max}: max_parsing_bytes); try again later"
            )
        self._taken += size

    def give_back(self, size: int) -> None:
        self._taken -= size


class Lane:
    """A few threads with a bounded queue of bodies."""

    def __init__(self, name: str, threads: int, budget: Budget) -> None:
        self._name = name
        self._budget = budget
        self._bodies = 0
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=f"lane-{name}")

    async def run(self, request: Request, size: int, work: Callable[[], ResultT]) -> ResultT:
        """Run `work`, which parses `size` bytes, on a thread. Raises OverloadedError when the queue is full, and
        ClientDisconnect when the client disconnects: work that has not begun is then dropped.
        """
        if self._bodies >= MOST_WAITING:
            raise OverloadedError(
                f"{self._bodies} {self._name} request bodies are being parsed (limit {MOST_WAITING}); try again later"
            )
        self._budget.take(size)
        self._bodies += 1
        working = asyncio.get_running_loop().run_in_executor(self._executor, work)
        working.add_done_callback(lambda _working: self._done(size))
        return await run_until_disconnect(working, request.receive)

    def _done(self, size: int) -> None:
        self._bodies -= 1
        self._budget.give_back(size)


class Lanes:
    """The lanes of one server."""

    def __init__(self, max_parsing_bytes: int) -> None:
        cpus, budget = usable_cpus(), Budget(max_parsing_bytes)
        self._medium = Lane("medium", max(2, cpus // 2), budget)
        self._long = Lane("long", max(1, min(MOST_LONG_THREADS, cpus // 4)), budget)
        self._tools = Lane("long /tokenize", 1, budget)

    async def run(
        self, request: Request, body: bytes, parse: Callable[[bytes], ResultT], *, is_prompt: bool = True
    ) -> ResultT:
        """Returns `parse(body)`. Long bodies of /tokenize and similar routes (`is_prompt` is false) have their own
        lane, because the context length of the model does not bound them.
        """
        if len(body) <= INLINE_BYTES:
            began_at = LoopWork.begin_piece()
            try:
                return parse(body)
            finally:
                LoopWork.of(request.scope).ended("parsing", began_at)
        if len(body) <= LONG_BYTES:
            return await self._medium.run(request, len(body), lambda: parse(body))

        def parse_and_trim() -> ResultT:
            try:
                return parse(body)
            finally:
                _trim()

        return await (self._long if is_prompt else self._tools).run(request, len(body), parse_and_trim)


def _find_trim() -> Callable[[], object]:
    """Returns a function that makes glibc return freed memory to the system. Other C libraries do not have the call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))


_trim = _find_trim()
