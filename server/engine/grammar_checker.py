"""Compiles grammars before requests are submitted, and refuses those that are invalid or take too long to compile."""

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from ...common.errors import OverloadedError, PdserveError, ServerError, UnavailableError
from ...common.sampling import Grammar
from ...configs.setting_types import LoadFormat
from ...models.grammar.check_messages import (
    HUNG_S,
    MAX_WAIT_S,
    STOPPED,
    WAITING_FOR_THE_MACHINE,
    Compile,
    Report,
    state_and_cpu_s,
)
from .turns import Turns

log = logging.getLogger(__name__)

MAX_COMPILE_S = 3.0
"""Of CPU time. A grammar is never refused because other processes use the CPU."""
MAX_COMPILE_BYTES = 1 << 30
START_S = 120.0
"""Most time that the compiler may take to start, in which it reads the vocabulary."""
STARTS_EARLY = True
"""Whether `start` starts the compiler. Otherwise the first grammar does."""
STARTS = 3
"""After so many starts that fail, the grammars that wait are refused."""
MAX_REMEMBERED = 1024
MAX_REMEMBERED_CHARACTERS = 32 << 20
"""Most characters of all remembered grammars. Refused grammars are remembered too, however long they are."""
MAX_WAITING = 64
"""Most grammars in compilation or waiting for it. A further one is refused with 429; if its client has fewer than
another one, the costliest of that client is refused instead.
"""
AT_ONCE = 2
"""Grammars in compilation, each of another client: one that takes seconds delays only those of its client."""
REMEMBERED_S = 60.0
"""A grammar that took too long, or that the compiler did not survive, is refused for this time, then compiled again:
the machine may have been overloaded.
"""
WATCH_S = 0.25
ENDS_S = 1.0
"""A compiler that has closed its output ends in this time, or is killed."""
STOPPED_SERVER = "the server has stopped"


@dataclass(eq=False)
class _Check:
    """A grammar in compilation or waiting for it."""

    grammar: Grammar
    result: "asyncio.Future[str | None]"
    calls: int = 0
    """Those that wait for the result."""
    alone: bool = False
    """The compiler ended or hung while this grammar was compiled, maybe because of another one."""


class GrammarChecker:
    """Compiles grammars in child processes (models/grammar/check.py), because a compilation cannot be interrupted.

    The compiler forks a process for each grammar. `start` or the first grammar starts it. A compiler that ends or hangs
    is replaced. Grammars that it was compiling are compiled once more, each alone; one that ends it again is refused.
    The compiler exits when this process does.
    """

    def __init__(
        self,
        model: str,
        load_format: LoadFormat,
        max_compile_s: float = MAX_COMPILE_S,
        max_bytes: int = MAX_COMPILE_BYTES,
    ) -> None:
        module = "pdserve.models.grammar.check"
        # -P keeps the working directory out of sys.path
        self._command = [sys.executable, "-P", "-m", module, model, load_format, str(max_bytes), str(max_compile_s)]
        self._max_compile_s = max_compile_s
        self._max_bytes = max_bytes
        self._checks: dict[Grammar, _Check] = {}
        self._turns: Turns[_Check] = Turns()
        self._alone: list[_Check] = []
        """Those that wait to be compiled with no other."""
        self._running: dict[int, tuple[str, _Check]] = {}
        """By the number of the request, with the client whose turn it is."""
        self._number = 0
        self._process: asyncio.subprocess.Process | None = None
        self._attending: asyncio.Task[None] | None = None
        self._ready = False
        self._heard_at = -math.inf
        """When the compiler last sent something."""
        self._closed = False
        self._known: OrderedDict[Grammar, tuple[str | None, float]] = OrderedDict()
        """Why a grammar is refused (None: it is accepted), and until when this result is valid."""
        self._known_characters = 0

    def start(self) -> None:
        """Start the compiler: on a busy machine, the first grammar would wait for seconds until it has started."""
        if STARTS_EARLY and self._attending is None and not self._closed:
            self._attending = asyncio.get_running_loop().create_task(self._attend())

    async def check(self, grammar: Grammar, client: str = "") -> str | None:
        """Returns why this grammar is refused, or None if it is accepted. Results are cached, and calls that wait for
        equal grammars share one compilation.

        Turns go round the clients, addresses of peers. A grammar whose calls were all cancelled before its turn is not
        compiled. Raises OverloadedError if too many grammars wait, UnavailableError after close(), and ServerError if
        the compiler cannot be started.
        """
        if self._closed:
            raise UnavailableError(STOPPED_SERVER)
        problem, until = self._known.get(grammar, (None, -math.inf))
        if time.monotonic() < until:
            self._known.move_to_end(grammar)
            return problem
        check = self._checks.get(grammar)
        if check is None:
            self._make_room(client)
            check = self._checks[grammar] = _Check(grammar, asyncio.get_running_loop().create_future())
            self._turns.add(client, check, len(grammar.text))
            self._compile_next()
        elif check in self._turns:
            self._turns.add(client, check, len(grammar.text))
        check.calls += 1
        try:
            return await asyncio.shield(check.result)  # other calls may wait for the same grammar
        finally:
            check.calls -= 1
            if not check.calls and check in self._turns:
                self._turns.remove(check)
                del self._checks[grammar]

    def close(self) -> None:
        """Kill the compiler. Calls that wait raise UnavailableError."""
        self._closed = True
        self._kill()
        self._fail_all(UnavailableError(STOPPED_SERVER))

    async def closed(self) -> None:
        """Wait until the compiler has ended after close()."""
        if self._attending is not None:
            await asyncio.wait([self._attending])

    def _make_room(self, client: str) -> None:
        if len(self._checks) < MAX_WAITING:
            return
        other = self._turns.costliest_of_another(client)
        refusal = OverloadedError(
            f"{len(self._checks)} grammars wait to be compiled (limit {MAX_WAITING}); try again later"
        )
        if other is None:
            raise refusal
        self._turns.remove(other)
        self._end(other, refusal)

    def _compile_next(self) -> None:
        """Send grammars to the compiler, or start it."""
        if self._closed:
            return
        if self._attending is None:
            self._attending = asyncio.get_running_loop().create_task(self._attend())
        while self._ready and len(self._running) < AT_ONCE:
            if any(check.alone for _, check in self._running.values()) or (self._alone and self._running):
                return
            running = {client for client, _ in self._running.values()}
            turn = ("", self._alone.pop(0)) if self._alone else self._turns.take(without=running)
            if turn is None:
                return
            self._number += 1
            self._running[self._number] = turn
            self._heard_at = time.monotonic()
            assert self._process is not None
            assert self._process.stdin is not None
            with contextlib.suppress(OSError, RuntimeError):  # it has just ended: its grammars are tried again
                self._process.stdin.write(msgspec.json.encode(Compile(self._number, turn[1].grammar)) + b"\n")

    async def _attend(self) -> None:
        """Run one compiler, from its start to its end. Starts the next one if grammars wait for it."""
        starts, waited_for = 0, True
        while waited_for and not self._closed and starts < STARTS:
            starts = 0 if await self._run_compiler() else starts + 1
            waited_for = bool(self._checks)
        self._attending = None
        if self._checks:
            self._fail_all(ServerError("the grammar compiler has failed: see the log"))

    async def _run_compiler(self) -> bool:
        """Returns whether it started."""
        started = time.monotonic()
        pipe = asyncio.subprocess.PIPE
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,  # Ctrl-C would end it with a traceback while it starts
            )
        except OSError as error:
            log.error("the grammar compiler cannot be started: %s", error)
            return False
        watching = asyncio.create_task(self._watch(process, started))
        assert process.stdout is not None
        was_ready = False
        try:
            async for line in process.stdout:
                if self._closed:
                    break  # it has answered a grammar that nobody waits for
                self._heard_at = time.monotonic()
                if not self._ready:
                    log.info("grammar compiler started in %.1f s", self._heard_at - started)
                    self._ready = was_ready = True
                self._take(msgspec.json.decode(line, type=Report))
                self._compile_next()
            with contextlib.suppress(TimeoutError):  # to kill a process that ends by itself can lose its status
                await asyncio.wait_for(process.wait(), ENDS_S)
        except ValueError as error:
            log.error("the grammar compiler has sent something else than a report: %s", error)
        finally:
            self._ready = False
            self._kill()
            assert process.stdin is not None
            process.stdin.close()
            watching.cancel()
            self._process = None
        status = await process.wait()
        if not self._closed:
            log.warning("the grammar compiler has ended with status %d", status)
            running, self._running = self._running, {}
            for _, check in running.values():
                self._try_again(check)
        return was_ready

    async def _watch(self, process: asyncio.subprocess.Process, started: float) -> None:
        """Kill the compiler if it has stopped or hangs."""
        while True:
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            try:
                state, _ = state_and_cpu_s(process.pid)
            except OSError:
                return
            late = self._running and now > self._heard_at + HUNG_S and state not in WAITING_FOR_THE_MACHINE
            if state in STOPPED or late or (not self._ready and now > started + START_S):
                log.error("the grammar compiler %s: killing it", "has not started" if not self._ready else "hangs")
                process.kill()
                return

    def _take(self, report: Report) -> None:
        """What became of a grammar."""
        if report.number is None:
            return
        _, check = self._running.pop(report.number)
        for_now = time.monotonic() + REMEMBERED_S
        match report.ended:
            case None:
                self._answer(check, report.problem, math.inf)
            case "time":
                self._answer(check, f"takes longer than {self._max_compile_s:g} s to compile, the limit", for_now)
            case "memory":
                limit = f"{self._max_bytes >> 20} MiB"
                self._answer(check, f"takes more than {limit} of memory to compile, the limit", math.inf)
            case "late":
                problem = f"the grammar compiler got too little CPU time to answer within {MAX_WAIT_S:g} s"
                self._end(check, OverloadedError(f"{problem}; try again later"))
            case "died":
                self._try_again(check)

    def _try_again(self, check: _Check) -> None:
        """The compiler has ended or hung while it compiled this grammar."""
        if check.alone:
            problem = f"ended the grammar compiler twice; it is refused for {REMEMBERED_S:g} s"
            self._answer(check, problem, time.monotonic() + REMEMBERED_S)
            return
        check.alone = True
        self._alone.append(check)

    def _answer(self, check: _Check, problem: str | None, until: float) -> None:
        grammar = check.grammar
        if self._known.pop(grammar, None) is None:
            self._known_characters += len(grammar.text)
        self._known[grammar] = problem, until
        while len(self._known) > MAX_REMEMBERED or self._known_characters > MAX_REMEMBERED_CHARACTERS:
            oldest, _ = self._known.popitem(last=False)
            self._known_characters -= len(oldest.text)
        del self._checks[grammar]
        check.result.set_result(problem)

    def _end(self, check: _Check, error: PdserveError) -> None:
        """The grammar gets no answer."""
        del self._checks[check.grammar]
        check.result.set_exception(error)
        check.result.exception()  # it was retrieved, also if all clients have left

    def _fail_all(self, error: ServerError) -> None:
        for check in list(self._checks.values()):
            self._end(check, error)
        self._turns, self._alone, self._running = Turns(), [], {}

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
