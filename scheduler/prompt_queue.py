"""The order in which prompts are let in: by priority, then by arrival; those that go again come first."""

import bisect
import itertools

from .request import Prompt

_Rank = tuple[int, int, int]


class PromptQueue:
    """Prompts that wait for memory or for a prefill server."""

    def __init__(self) -> None:
        self._entries: list[tuple[_Rank, Prompt]] = []
        self._ranks: dict[Prompt, _Rank] = {}
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, prompt: Prompt, *, again: bool = False) -> None:
        """Add a prompt; `again` puts one that was let in before ahead of others of its priority."""
        rank = (-prompt.priority, 0 if again else 1, next(self._arrivals))
        self._ranks[prompt] = rank
        bisect.insort(self._entries, (rank, prompt))

    def remove(self, prompt: Prompt) -> None:
        rank = self._ranks.pop(prompt)
        index = bisect.bisect_left(self._entries, rank, key=lambda entry: entry[0])
        del self._entries[index]

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._ranks

    def in_order(self) -> list[Prompt]:
        return [prompt for _, prompt in self._entries]
