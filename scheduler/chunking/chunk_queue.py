"""Prompts that are computed in chunks: chooses the chunks of the next step."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from .fair_queue import FairQueue, Prioritized


class Chunked(Prioritized, Protocol):
    """A prompt that has its pages."""

    scheduled: int
    """Tokens [0, scheduled) are computed or in a step in flight."""

    @property
    def prompt_tokens(self) -> int: ...


T = TypeVar("T", bound=Chunked)


class Chunk(NamedTuple, Generic[T]):
    """Tokens [start, end) of a prompt."""

    prompt: T
    start: int
    end: int

    @property
    def last(self) -> bool:
        return self.end == self.prompt.prompt_tokens


class ChunkQueue(Generic[T]):
    """The queue of prompts that are computed, and the division of a step among them.

    A step first serves the prompts of the highest priority. Half of its tokens go to the oldest of them, so no prompt
    needs more than twice the steps of first come, first served. The other half goes to those with the fewest tokens
    left, so a short prompt does not wait behind long ones. Tokens that are left go to the next prompts in the queue.

    If a short prompt ends in the step, tokens that are left go only to other prompts that end in it too: the step is
    shorter, and their first tokens come sooner.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._queue: FairQueue[T] = FairQueue()
        """Prompts with tokens that are in no step yet."""
        self._fully_scheduled: set[T] = set()
        """Prompts whose remaining tokens are all in steps in flight."""
        self._owed = 0
        """Tokens that earlier steps owe to the first prompt: its half of a step may be less than a page, and slices are
        whole pages.
        """

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

    def next_chunks(self, budget: int) -> list[Chunk[T]]:
        """The chunks of the next step, of at most `budget` tokens in all; empty if there is nothing to compute, or if
        the budget is less than a page.
        """
        if not len(self._queue):
            return []
        chunks = [Chunk(prompt, prompt.scheduled, end) for prompt, end in self._divide(budget).items()]
        if not chunks:
            return []
        leading = chunks[0].prompt.priority
        self._queue.turn({chunk.prompt for chunk in chunks if chunk.prompt.priority == leading})
        for chunk in chunks:
            chunk.prompt.scheduled = chunk.end
            if chunk.last:
                self._queue.remove(chunk.prompt)
                self._fully_scheduled.add(chunk.prompt)
        return chunks

    def _divide(self, budget: int) -> dict[T, int]:
        """Divide the budget of the next step: returns the end of the slice of each prompt. The queue is not empty."""
        first = self._queue.first
        ends: dict[T, int] = {}
        if not self._queue.oldest_is_due:
            self._owed = min(budget, self._owed + budget // 2)
            kept = self._slice(first, first.scheduled, self._owed) - first.scheduled
            leading = [prompt for prompt in self._queue if prompt.priority == first.priority]
            shortest_first = sorted(leading, key=lambda prompt: prompt.prompt_tokens - prompt.scheduled)
            budget = kept + self._fill(ends, shortest_first, budget - kept)
            if any(end == prompt.prompt_tokens for prompt, end in ends.items() if prompt is not first):
                budget -= kept - self._fill(ends, [first], kept)
                self._fill(ends, shortest_first, budget, whole=True)
                budget = 0
        self._fill(ends, self._queue, budget)
        self._owed = max(0, self._owed - (ends.get(first, first.scheduled) - first.scheduled))
        return ends

    def _fill(self, ends: dict[T, int], prompts: Iterable[T], budget: int, *, whole: bool = False) -> int:
        """Add slices of these prompts to `ends`, in this order, up to `budget` tokens in all. With `whole`, add only
        slices that complete their prompt. Returns the rest of the budget.
        """
        for prompt in prompts:
            start = ends.get(prompt, prompt.scheduled)
            end = self._slice(prompt, start, budget)
            if start < prompt.prompt_tokens and (end == start or (whole and end < prompt.prompt_tokens)):
                break  # the budget is less than a page, or with `whole` less than the rest of this prompt
            ends[prompt] = end
            budget -= end - start
        return budget

    def _slice(self, prompt: T, start: int, tokens: int) -> int:
        """The end of a slice of at most `tokens` tokens. Only the last slice of a prompt may end inside a page, so no
        page is sent twice.
        """
        end = min(prompt.prompt_tokens, start + tokens)
        return end if end == prompt.prompt_tokens else max(start, end - end % self._page_size)
