"""The order in which prompts are let in: by priority, then by arrival; those that go again come first."""

import bisect
import itertools
from collections.abc import Callable, Iterator

from ..requests.ageing import Ageing
from ..requests.dispatch_window import PromptKind
from ..requests.request import Prompt

_Rank = tuple[int, int, int]
_Lane = list[tuple[_Rank, Prompt]]
_LaneKey = tuple[str | None, int]


class PromptQueue:
    """Prompts that wait for memory or for a prefill server. Those that ask for the same endpoint and are of the same
    size (`PromptKind.bits`) form a lane: when a dispatch window is closed to the first of a lane, it is to all of it.
    """

    def __init__(self) -> None:
        self._lanes: dict[_LaneKey, _Lane] = {}
        self._ranks: dict[Prompt, _Rank] = {}
        self._arrivals = itertools.count()
        self._ageing = Ageing()
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
        self._ranks[prompt] = rank = -prompt.priority, 0 if again else 1, next(self._arrivals)
        self.tokens += prompt.tokens
        bisect.insort(self._lanes.setdefault(_lane_of(prompt), []), (rank, prompt))

    def remove(self, prompt: Prompt) -> None:
        """It has to be here."""
        rank, key = self._ranks.pop(prompt), _lane_of(prompt)
        lane = self._lanes[key]
        self.tokens -= prompt.tokens
        del lane[bisect.bisect_left(lane, rank, key=lambda entry: entry[0])]
        if not lane:
            del self._lanes[key]

    def take(self, prompt: Prompt) -> None:
        """Remove one that is let in. When enough have been let in before older ones of lower priorities, the oldest of
        those becomes as urgent as they were, and the next.
        """
        self.remove(prompt)
        lowest = min((lane[-1][1].priority for lane in self._lanes.values()), default=prompt.priority)
        priority = self._ageing.passed(prompt.priority, lowest)
        if priority is None:
            return
        passed = [waiting for waiting in self._ranks if waiting.priority < priority]
        oldest = min(passed, key=lambda waiting: waiting.prompt_id)
        self.remove(oldest)
        oldest.raise_priority(priority)
        self.push(oldest, again=True)

    def in_order(self, may_send: Callable[[Prompt], bool]) -> Iterator[Prompt]:
        """Those that may be sent, which may be taken when they have been looked at. A lane whose next prompt may not be
        sent is left, so neither prompts behind it nor those that are not asked for cost time.
        """
        seen: set[Prompt] = set()
        closed: set[_LaneKey] = set()
        while True:
            heads: list[tuple[_Rank, Prompt]] = []
            for key, lane in self._lanes.items():
                head = next((entry for entry in lane if entry[1] not in seen), None) if key not in closed else None
                if head is not None and may_send(head[1]):
                    heads.append(head)
                else:
                    closed.add(key)
            if not heads:
                return
            _, prompt = min(heads)
            seen.add(prompt)
            yield prompt


def _lane_of(prompt: Prompt) -> _LaneKey:
    return prompt.endpoint, PromptKind.of(0, prompt.tokens).bits
