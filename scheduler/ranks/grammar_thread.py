"""Compiles grammars for requests that wait for them, on a thread beside the steps."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from ...models.grammar.compiler import GrammarCompiler
from ...models.grammar.dialects import GrammarError
from ..messages.ranks import GrammarReady, PrepareGrammar

log = logging.getLogger(__name__)


class GrammarThread:
    """The grammar compilations of the rank that samples."""

    def __init__(self, compiler: GrammarCompiler, rank: int, report: Callable[[GrammarReady], None]) -> None:
        self._compiler = compiler
        self._rank = rank
        self._report = report
        self._thread = ThreadPoolExecutor(1, "grammar")
        self._pending: dict[int, list[Future[None]]] = {}
        """What is to be done for each command."""

    def prepare(self, command: PrepareGrammar) -> None:
        """Compile a grammar, then report it. A cached one is reported at once."""
        if self._compiler.is_cached(command.grammar):
            self._compile(command)
        else:
            work = self._pending[command.number] = []  # first: `_finish` may remove it at once
            work.append(self._thread.submit(self._compile, command))
            work.append(self._thread.submit(self._finish, command))

    def drop(self, number: int) -> None:
        """Nobody waits for this grammar any more. A compilation that has begun ends: llguidance cannot stop it."""
        for work in self._pending.pop(number, ()):
            work.cancel()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _finish(self, command: PrepareGrammar) -> None:
        self._pending.pop(command.number, None)
        self._compiler.add_matchers(command.grammar)

    def _compile(self, command: PrepareGrammar) -> None:
        problem = None
        try:
            self._compiler.compile(command.grammar)
        except GrammarError as error:
            problem = str(error)
        except Exception as error:
            log.exception("a grammar cannot be compiled")
            problem = f"cannot be compiled: {type(error).__name__}: {error}"
        self._report(GrammarReady(self._rank, command.number, problem, self._compiler.is_slow(command.grammar)))
