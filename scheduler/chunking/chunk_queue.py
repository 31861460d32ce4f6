"""Prompts that are computed in chunks: chooses the chunks of the next step."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from .fair_queue import FairQueue, Prioritized
from .step_rule import BASE_S, SLO_TTFT_S, Waiting, due_at


class Chunked(Prioritized, Protocol):
    """A prompt that has its pages."""

    scheduled: int
    """Tokens [0, scheduled) are computed or in a step in flight."""
    cached: int
    """Tokens [0, cached) were not computed."""

    @property
    def arrived_at(self) -> float: ...

    @property
    def slo_ttft_s(self) -> float | None: ...

    @property
    def prompt_tokens(self) -> int: ...


T = TypeVar("T", bound=Chunked)


class Chunk(NamedTuple, Generic[T]):
    """Tokens [start, end) of the prompt of its owner."""

    owner: T
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.owner.prompt_tokens


class ChunkQueue(Generic[T]):
    """The queue of prompts that are computed, and the division of a step among them.

    A step first serves the prompts of the highest priority, in the order of their deadlines (step_rule.py). Tokens that
    are left go to the next prompts in the queue.

    If a prompt ends in the step, others do not make the step longer than BASE_S if its first token is late then: they
    may get fewer tokens than there is room for.
    """

    def __init__(self, page_size: int, slo_ttft_s: float = SLO_TTFT_S) -> None:
        self._page_size = page_size
        self._slo_ttft_s = slo_ttft_s
        self._queue: FairQueue[T] = FairQueue()
        """Prompts with tokens that are in no step yet."""
        self._fully_scheduled: set[T] = set()
        """Prompts whose remaining tokens are all in steps in flight."""
        self._due_at: dict[T, float] = {}
        """When first tokens are due, of the prompts that the last step could choose from."""

    def __len__(self) -> int:
        return len(self._queue) + len(self._fully_scheduled)

    def __iter__(self) -> Iterator[T]:
        return itertools.chain(self._queue, self._fully_scheduled)

    def __contains__(self, prompt: T) -> bool:
        return prompt in self._queue or prompt in self._fully_scheduled

    @property
    def waiting(self) -> int:
        """Prompts with tokens that are in no step yet."""
        return len(self._queue)

    def add(self, prompt: T) -> None:
        """Add a prompt that has its pages."""
        self._queue.push(prompt)

    def remove(self, prompt: T) -> None:
        """Remove a prompt that is computed or has ended. Its chunks in steps in flight are ignored."""
        if prompt in self._queue:
            self._queue.remove(prompt)
        else:
            self._fully_scheduled.remove(prompt)

    def next_chunks(
        self,
        budget: int | Callable[[Iterable[Waiting]], int],
        now: float,
        tokens_per_s: float | None,
        beside_s: float = 0.0,
    ) -> list[Chunk[T]]:
        """The chunks of the next step, of at most `budget` tokens in all; empty if there is nothing to compute, or if
        the budget is less than a page. A function gets the prompts of the highest priority in their order, if the rate
        is known, and returns the budget. The step takes `beside_s` for other things.
        """
        if not len(self._queue):
            return []
        in_order = self._in_order(now, tokens_per_s)
        if not isinstance(budget, int):
            budget = budget(self._waiting(in_order, now, tokens_per_s))
        ends = self._divide(in_order, budget, now, tokens_per_s, beside_s)
        chunks = [Chunk(prompt, prompt.scheduled, end) for prompt, end in ends.items()]
        if not chunks:
            return []
        leading = chunks[0].owner.priority
        self._queue.turn({chunk.owner for chunk in chunks if chunk.owner.priority == leading})
        for chunk in chunks:
            chunk.owner.scheduled = chunk.end
            if chunk.last:
                self.remove(chunk.owner)
                self._fully_scheduled.add(chunk.owner)
        return chunks

    def _in_order(self, now: float, tokens_per_s: float | None) -> list[T]:
        """The prompts of the highest priority, by deadline; by arrival if the rate is not known."""
        priority, per_s = self._queue.first.priority, tokens_per_s or math.inf
        self._due_at = {
            each: due_at(
                each.arrived_at,
                now,
                (each.prompt_tokens - each.cached) / per_s,
                _left(each) / per_s,
                self._slo_ttft_s,
                own_s=each.slo_ttft_s,
            )
            for each in self._queue
            if each.priority == priority
        }
        return sorted(self._due_at, key=self._due_at.__getitem__)

    def _waiting(self, in_order: Iterable[T], now: float, tokens_per_s: float | None) -> Iterator[Waiting]:
        if tokens_per_s is None:
            return
        for prompt in in_order:
            yield Waiting(self._due_at[prompt] - now, _left(prompt) / tokens_per_s)

    def _divide(
        self, in_order: Iterable[T], budget: int, now: float, tokens_per_s: float | None, beside_s: float
    ) -> dict[T, int]:
        """Divide the budget of the next step: returns the end of the slice of each prompt. The queue is not empty."""
        ends: dict[T, int] = {}
        used = 0
        for prompt in self._queue if self._queue.oldest_is_due else itertools.chain(in_order, self._queue):
            start = ends.get(prompt, prompt.scheduled)
            end = self._slice(prompt, start, budget - used)
            if start < prompt.prompt_tokens and end == start:
                break  # the budget is less than a page
            ends[prompt] = end
            used += end - start
            if end == prompt.prompt_tokens and tokens_per_s is not None and prompt in self._due_at:
                on_time = int(max(BASE_S, self._due_at[prompt] - now - beside_s) * tokens_per_s)
                budget = min(budget, max(used, on_time))
        return ends

    def _slice(self, prompt: T, start: int, tokens: int) -> int:
        """The end of a slice of at most `tokens` tokens. Only the last slice of a prompt may end inside a page, so no
        page is sent twice.
        """
        end = min(prompt.prompt_tokens, start + tokens)
        return end if end == prompt.prompt_tokens else max(start, end - end % self._page_size)


def _left(prompt: Chunked) -> int:
    return prompt.prompt_tokens - prompt.scheduled
