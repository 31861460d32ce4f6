"""The order in which prompts are dispatched: by priority, then by arrival; retried prompts come first."""

import bisect
import itertools
from collections.abc import Callable, Iterator

from ..requests.ageing import Ageing
from ..requests.dispatch_window import PromptKind
from ..requests.request import Prompt

_Position = tuple[int, int, int]
_Lane = list[tuple[_Position, Prompt]]
_LaneKey = tuple[str | None, int]

MAX_HELD = 32
"""Most prompts that a turn may skip within their lanes, because each waits for a prefix or for one server only."""


class PromptQueue:
    """Prompts that wait for memory or for a prefill server. Prompts with the same endpoint and of the same size
    (`PromptKind.bits`) form a lane: a dispatch window that is closed to the first of a lane is closed to the whole
    lane.
    """

    def __init__(self) -> None:
        self._lanes: dict[_LaneKey, _Lane] = {}
        self._positions: dict[Prompt, _Position] = {}
        self._arrivals = itertools.count()
        self._ageing = Ageing()
        self.tokens = 0
        """Of all prompts in the queue."""

    def __len__(self) -> int:
        return len(self._positions)

    def __iter__(self) -> Iterator[Prompt]:
        return iter(self._positions)

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt in self._positions

    @property
    def first(self) -> Prompt | None:
        """The prompt that comes first, whether it may be sent or not."""
        return min((lane[0] for lane in self._lanes.values()), default=(None, None))[1]

    def push(self, prompt: Prompt, *, again: bool = False) -> None:
        """Add a prompt; with `again`, before all others of its priority that were not dispatched before."""
        self._positions[prompt] = position = -prompt.priority, 0 if again else 1, next(self._arrivals)
        self.tokens += prompt.tokens
        bisect.insort(self._lanes.setdefault(_lane_of(prompt), []), (position, prompt))

    def remove(self, prompt: Prompt) -> None:
        """Remove a prompt, which has to be in the queue."""
        position, key = self._positions.pop(prompt), _lane_of(prompt)
        lane = self._lanes[key]
        self.tokens -= prompt.tokens
        del lane[bisect.bisect_left(lane, position, key=lambda entry: entry[0])]
        if not lane:
            del self._lanes[key]

    def take(self, prompt: Prompt) -> None:
        """Remove a prompt that is dispatched. When enough prompts have overtaken older ones of lower priorities, the
        oldest of those is raised to their priority and comes next (ageing.py).
        """
        self.remove(prompt)
        lowest = min((lane[-1][1].priority for lane in self._lanes.values()), default=prompt.priority)
        priority = self._ageing.passed(prompt.priority, lowest)
        if priority is None:
            return
        passed = [waiting for waiting in self._positions if waiting.priority < priority]
        oldest = min(passed, key=lambda waiting: waiting.prompt_id)
        self.remove(oldest)
        oldest.raise_priority(priority)
        self.push(oldest, again=True)

    def in_order(self, may_send: Callable[[Prompt], bool | None]) -> Iterator[Prompt]:
        """Yield the prompts for which `may_send` is True, in order; the caller may take each one.

        False closes the lane for this turn, so the prompts behind cost no time. None skips only this prompt, which
        waits for a prefix or for one server: prompts behind it may still be sent. After MAX_HELD skipped prompts, None
        closes the lane too.
        """
        held = 0
        seen: set[Prompt] = set()
        closed: set[_LaneKey] = set()
        while True:
            heads: list[tuple[_Position, Prompt]] = []
            for key, lane in self._lanes.items():
                if key in closed:
                    continue
                for head in lane:
                    if head[1] in seen:
                        continue
                    sendable = may_send(head[1])
                    if sendable is not None or held >= MAX_HELD:
                        break
                    seen.add(head[1])
                    held += 1
                else:
                    sendable = False
                if sendable:
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
