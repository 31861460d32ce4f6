"""QUEUED prompts, in the order in which they are dispatched: by priority, then by arrival; retried prompts come first.

Also how fast the queue moves, and how long it waited because prefill servers were busy.
"""

import bisect
import collections
import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence

from ...chunking.fair_queue import Overtakes
from ..requests.request import Prompt

Position = tuple[int, int, int]
Lane = list[tuple[Position, Prompt]]
LaneKey = tuple[str | None, int]


class PromptQueue:
    """Prompts that wait for memory or for a prefill server. Prompts with the same endpoint and of the same size
    (`PromptKind.bits`) form a lane: a dispatch window that is closed to the first of a lane is closed to the whole
    lane.
    """

    def __init__(self) -> None:
        self.lanes: dict[LaneKey, Lane] = {}
        self._positions: dict[Prompt, Position] = {}
        self._arrivals = itertools.count()
        self._overtakes: Overtakes[Prompt] = Overtakes()
        self.pace = QueuePace()
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
        return min((lane[0] for lane in self.lanes.values()), default=(None, None))[1]

    def push(self, prompt: Prompt, now: float, *, again: bool = False) -> None:
        """Add a prompt; with `again`, before all others of its priority that were not dispatched before."""
        prompt.busy_s_when_queued = self.pace.busy_s(prompt.endpoint, now)
        self._insert(prompt, again=again)

    def _insert(self, prompt: Prompt, *, again: bool) -> None:
        self._positions[prompt] = position = -prompt.priority, 0 if again else 1, next(self._arrivals)
        self.tokens += prompt.tokens
        bisect.insort(self.lanes.setdefault(_lane_of(prompt), []), (position, prompt))

    def remove(self, prompt: Prompt) -> None:
        """Remove a prompt, which has to be in the queue."""
        self._overtakes.pop(prompt, None)
        position, key = self._positions.pop(prompt), _lane_of(prompt)
        lane = self.lanes[key]
        self.tokens -= prompt.tokens
        del lane[bisect.bisect_left(lane, position, key=lambda entry: entry[0])]
        if not lane:
            del self.lanes[key]

    def leave(self, prompt: Prompt, now: float) -> None:
        """Remove a prompt that goes on. Its requests have waited for prefill servers while these were busy."""
        self.remove(prompt)
        busy_s = self.pace.busy_s(prompt.endpoint, now) - prompt.busy_s_when_queued
        for request in prompt.waiting:
            request.prefill_wait_s += busy_s

    def take(self, prompt: Prompt, now: float, blocked: Sequence[Prompt] = ()) -> None:
        """Remove a prompt that is dispatched. It overtakes those that are `blocked`, which came before it and do not
        fit, and the oldest of a lower priority.
        """
        self.leave(prompt, now)
        overtaken = dict.fromkeys(blocked)
        if prompt.priority > min((lane[-1][1].priority for lane in self.lanes.values()), default=prompt.priority):
            overtaken[next(other for other in self._positions if other.priority < prompt.priority)] = None
        for other in overtaken:
            priority = self._overtakes.add(other, prompt.priority)
            if priority is not None and priority > other.priority:
                self._raise(other, priority)

    def is_due(self, prompt: Prompt) -> bool:
        """Whether so many others have overtaken a prompt that it is next."""
        return self._overtakes.is_due(prompt)

    def _raise(self, prompt: Prompt, priority: int) -> None:
        """Give a prompt this priority, and the first place there. It stays due."""
        overtakes = self._overtakes[prompt]
        self.remove(prompt)
        prompt.raise_priority(priority)
        self._insert(prompt, again=True)
        self._overtakes[prompt] = overtakes


def _lane_of(prompt: Prompt) -> LaneKey:
    return prompt.endpoint, prompt.kind().bits


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
        self.waiting_since: float | None = None
        self._carried_s = 0.0

    def note(self, queued: int, busy: Collection[str | None], now: float) -> None:
        """`queued` prompts are left in the queue; at the endpoints in `busy`, because prefill servers take no more."""
        if not queued:
            self._busy.clear()
            self._end_wait(now)
            return
        if self.waiting_since is None:
            self.waiting_since = now
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
        if self.waiting_since is not None:
            waited_s = self._waited_s(now)
            self._served.append(waited_s)
            self._forget_before(waited_s - MEASURED_S)

    def wait_s(self, queued: int, now: float, *, most_s: float) -> float:
        """Expected wait of a prompt behind `queued` others, `most_s` at most."""
        if self.waiting_since is None:
            return 0.0
        waited_s = self._waited_s(now)
        self._forget_before(waited_s - MEASURED_S)
        measured_s = min(waited_s, MEASURED_S)
        if not self._served:  # none in all this time: assume that the first is served now
            return min(most_s, max(SHORTEST_S, queued * measured_s))
        return min(most_s, queued * max(SHORTEST_S, measured_s) / len(self._served))

    def _waited_s(self, now: float) -> float:
        return self._carried_s + (now - self.waiting_since if self.waiting_since is not None else 0.0)

    def _end_wait(self, now: float) -> None:
        """The queue is empty. Keep the last CARRIED_S."""
        if self.waiting_since is None:
            return
        waited_s = self._waited_s(now)
        self.waiting_since = None
        self._carried_s = min(waited_s, CARRIED_S)
        begin = waited_s - self._carried_s
        self._forget_before(begin)
        self._served = collections.deque(served - begin for served in self._served)

    def _forget_before(self, begin: float) -> None:
        while self._served and self._served[0] < begin:
            self._served.popleft()
