"""Computes slow masks on threads beside the steps: the rows that need them sit out the steps until then."""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...models.grammar.compiler import MASK_THREADS
from ...models.grammar.dialects import GrammarError
from ...models.grammar.masks import GrammarLimitError, GrammarStateError
from ..messages.ranks import MaskReady, PrepareMask
from .step_grammars import StepGrammars

log = logging.getLogger(__name__)


class MaskThreads:
    """The slow masks of the rank that samples."""

    def __init__(self, grammars: StepGrammars, rank: int, report: Callable[[MaskReady], None]) -> None:
        self._grammars = grammars
        self._rank = rank
        self._report = report
        self._threads = ThreadPoolExecutor(MASK_THREADS, "masks")

    def prepare(self, command: PrepareMask) -> None:
        """Compute a mask, then report it."""
        self._threads.submit(self._prepare, command)

    def drop(self, key: int) -> None:
        """The request of this state does not run any more."""
        self._grammars.drop(key)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, command: PrepareMask) -> None:
        rank, number = self._rank, command.number
        try:
            ready = MaskReady(rank, number, self._grammars.prepare(command.token, command.draw))
        except (GrammarError, GrammarStateError) as error:
            ready = MaskReady(rank, number, problem=str(error), too_complex=isinstance(error, GrammarLimitError))
        except Exception as error:
            log.exception("a mask cannot be computed")
            ready = MaskReady(rank, number, problem=f"{type(error).__name__}: {error}")
        self._report(ready)
