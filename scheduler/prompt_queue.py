"""The order in which prompts are let in: by priority, then by arrival; those that go again come first."""

import bisect
import itertools
from collections.abc import Callable, Iterator

from .request import Prompt

_Rank = tuple[int, int, int]
_Lane = list[tuple[_Rank, Prompt]]


class PromptQueue:
    """Prompts that wait for memory or for a prefill server, in a lane for each that they ask for by endpoint, and one
    for those that take any.
    """

    def __init__(self) -> None:
        self._lanes: dict[str | None, _Lane] = {}
        self._ranks: dict[Prompt, _Rank] = {}
        self._arrivals = itertools.count()
        self.tokens = 0
        """Of all of them."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._ranks)

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._ranks

    def push(self, prompt: Prompt, *, again: bool = False) -> None:
        """Add a prompt; `again` puts one that was let in before ahead of others of its priority."""
        rank = (-prompt.priority, 0 if again else 1, next(self._arrivals))
        self._ranks[prompt] = rank
        self.tokens += prompt.tokens
        bisect.insort(self._lanes.setdefault(prompt.endpoint, []), (rank, prompt))

    def remove(self, prompt: Prompt) -> None:
        """It has to be here."""
        rank, lane = self._ranks.pop(prompt), self._lanes[prompt.endpoint]
        self.tokens -= prompt.tokens
        del lane[bisect.bisect_left(lane, rank, key=lambda entry: entry[0])]
        if not lane:
            del self._lanes[prompt.endpoint]

    def in_order(self, served: Callable[[str | None], bool]) -> Iterator[Prompt]:
        """Those in lanes that are `served`, which may be removed when they have been looked at. The others cost no
        time, nor do those that are not asked for.
        """
        lanes = [lane for endpoint, lane in self._lanes.items() if served(endpoint)]
        places = [0] * len(lanes)
        while True:
            heads = [
                (lane[at], index) for index, (lane, at) in enumerate(zip(lanes, places, strict=True)) if at < len(lane)
            ]
            if not heads:
                return
            (_, prompt), index = min(heads)
            yield prompt
            places[index] += prompt in self._ranks
