"""The order in which prompts are dispatched: by priority, then by arrival; retried prompts come first.

Also how fast the queue moves, and how long it waited because prefill servers were busy.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator

from ...chunking.fair_queue import Ageing
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
        oldest of those is raised to their priority and comes next (fair_queue.py).
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


MEASURED_S = 30.0
"""The rate is measured over this much time in which prompts waited."""
CARRIED_S = 5.0
"""Measured time that is kept when the queue becomes empty. The next burst fills the queue before any prompt of it is
served, so at first only this older measurement exists.
"""
SHORTEST_S = 1.0
"""Shortest time to compute a rate from: less would measure a burst."""


@dataclasses.dataclass(slots=True)
class _Busy:
    """Since when the prefill servers at an endpoint (or all) take no prompt, and for how long in total before that."""

    since: float | None = None
    before_s: float = 0.0

    def total_s(self, now: float) -> float:
        return self.before_s + (now - self.since if self.since is not None else 0.0)


class QueuePace:
    """Measures served prompts per second of waiting time, and the busy time by endpoint. Call `note` in every turn."""

    def __init__(self) -> None:
        self._busy: dict[str | None, _Busy] = {}
        self._served: collections.deque[float] = collections.deque()
        """When prompts were served, on a clock that runs only while prompts wait."""
        self._waiting_since: float | None = None
        self._carried_s = 0.0

    def note(self, queued: int, busy: Collection[str | None], now: float) -> None:
        """`queued` prompts are left in the queue; at the endpoints in `busy`, because prefill servers take no more."""
        if not queued:
            self._busy.clear()
            self._end_wait(now)
            return
        if self._waiting_since is None:
            self._waiting_since = now
        for endpoint in {*self._busy, *busy}:
            clock = self._busy.setdefault(endpoint, _Busy())
            if endpoint not in busy:
                clock.before_s, clock.since = clock.total_s(now), None
            elif clock.since is None:
                clock.since = now

    def is_busy(self, endpoint: str | None) -> bool:
        """Whether prompts for this endpoint wait because prefill servers take no more."""
        return endpoint in self._busy and self._busy[endpoint].since is not None

    def busy_s(self, endpoint: str | None, now: float) -> float:
        """Total busy time. Only the difference between two calls has a meaning."""
        return self._busy[endpoint].total_s(now) if endpoint in self._busy else 0.0

    def served(self, now: float) -> None:
        """The KV of a prompt has arrived."""
        if self._waiting_since is not None:
            waited_s = self._waited_s(now)
            self._served.append(waited_s)
            self._forget_before(waited_s - MEASURED_S)

    def wait_s(self, queued: int, now: float, *, most_s: float) -> float:
        """Expected wait of a prompt behind `queued` others, `most_s` at most."""
        if self._waiting_since is None:
            return 0.0
        waited_s = self._waited_s(now)
        self._forget_before(waited_s - MEASURED_S)
        measured_s = min(waited_s, MEASURED_S)
        if not self._served:  # none in all this time: assume that the first is served now
            return min(most_s, max(SHORTEST_S, queued * measured_s))
        return min(most_s, queued * max(SHORTEST_S, measured_s) / len(self._served))

    def _waited_s(self, now: float) -> float:
        return self._carried_s + (now - self._waiting_since if self._waiting_since is not None else 0.0)

    def _end_wait(self, now: float) -> None:
        """The queue is empty. Keep the last CARRIED_S."""
        if self._waiting_since is None:
            return
        waited_s = self._waited_s(now)
        self._waiting_since = None
        self._carried_s = min(waited_s, CARRIED_S)
        begin = waited_s - self._carried_s
        self._forget_before(begin)
        self._served = collections.deque(served - begin for served in self._served)

    def _forget_before(self, begin: float) -> None:
        while self._served and self._served[0] < begin:
            self._served.popleft()
