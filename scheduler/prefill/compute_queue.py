"""Transfers that compute: which slices are in the next step, which steps are under way, and how long they take."""

import collections
import itertools
from collections.abc import Iterable, Iterator

from ..rates import Rate
from .fair_queue import FairQueue
from .limits import PrefillLimits
from .request import PrefillRequest, PrefillRow, PrefillStep


class ComputeQueue:
    """COMPUTING transfers in line, and the steps that they are in.

    The highest priority has the step. Half of it is for its oldest transfer, so nobody needs more than twice the steps
    that first come, first served would take; the other half for those that need least, so a short prompt does not wait
    for the long ones before it. What they leave goes to the next ones in line. Where a short prompt ends in the
    step, it goes to other short ones alone, and the step is the shorter for it.
    """

    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._line = FairQueue()
        """Those of which something is in no step yet."""
        self._given: set[PrefillRequest] = set()
        """Those that are in steps with all that is left of them."""
        self._steps: collections.deque[tuple[PrefillStep, float]] = collections.deque()
        """Under way, oldest first, and when each was given."""
        self._ended_at: collections.deque[float] = collections.deque(maxlen=limits.stages)
        """When the last steps have ended: as many as the pipeline has stages."""
        self._owed = 0
        """Tokens of steps that the oldest is owed: its half may be no whole page."""
        self._commands = 0
        self.rate = Rate()
        """Tokens a second, while there is something to compute."""

    def __len__(self) -> int:
        return len(self._line) + len(self._given)

    def __iter__(self) -> Iterator[PrefillRequest]:
        return itertools.chain(self._line, self._given)

    @property
    def steps(self) -> int:
        """Steps under way."""
        return len(self._steps)

    @property
    def running(self) -> set[PrefillRequest]:
        """Those that are in steps under way. The others wait."""
        return {row.transfer for step, _ in self._steps for row in step.rows}

    def computing_for(self, seconds: float, now: float) -> list[PrefillRequest]:
        """Those in the step that ends next, if that has been under way for so long."""
        if not self._steps or now - self._steps[0][1] < seconds:
            return []
        return [row.transfer for row in self._steps[0][0].rows]

    def add(self, transfer: PrefillRequest) -> None:
        """It has its pages."""
        self._line.push(transfer)

    def remove(self, transfer: PrefillRequest) -> None:
        """All of it is computed, or it has ended. Steps that it is in go on without meaning."""
        if transfer in self._line:
            self._line.remove(transfer)
        else:
            self._given.remove(transfer)

    def next_step(self, now: float) -> PrefillStep | None:
        """The slices of the next step, of `chunk_size` tokens at most; None when there is nothing to do, or enough is
        under way.
        """
        if len(self._steps) >= self._limits.steps_in_flight or not len(self._line):
            return None
        ends = self._share_out()
        rows = [_row(transfer, end) for transfer, end in ends.items()]
        leading = rows[0].transfer.priority
        self._line.turn({row.transfer for row in rows if row.transfer.priority == leading})
        for row in rows:
            row.transfer.given = row.end
            if row.last:
                self._line.remove(row.transfer)
                self._given.add(row.transfer)
        self._commands += 1
        step = PrefillStep(self._commands, rows)
        self._steps.append((step, now))
        return step

    def take(self, command_id: int, now: float) -> list[PrefillRow]:
        """The rows of a step that has ended. Their transfers have computed since it began: when it was given, or when
        the pipeline was done with the step before it.
        """
        step, given_at = self._steps.popleft()
        assert step.command_id == command_id, f"step {command_id} has ended before step {step.command_id}"
        entered_at = self._ended_at[0] if len(self._ended_at) == self._limits.stages else given_at
        last_ended_at = self._ended_at[-1] if self._ended_at else given_at
        self._ended_at.append(now)
        for transfer in {row.transfer for row in step.rows}:
            transfer.compute_s += now - max(given_at, entered_at, transfer.computed_at)
            transfer.computed_at = now
        self.rate.measured(sum(row.end - row.start for row in step.rows), now - max(given_at, last_ended_at))
        return step.rows

    def _share_out(self) -> dict[PrefillRequest, int]:
        """Up to which token each transfer is computed in the next step; there is somebody in line."""
        first, budget = self._line.first, self._limits.chunk_size
        ends: dict[PrefillRequest, int] = {}
        if not self._line.oldest_is_due:
            self._owed = min(budget, self._owed + budget // 2)
            kept = self._slice(first, first.given, self._owed) - first.given
            leading = [transfer for transfer in self._line if transfer.priority == first.priority]
            shortest_first = sorted(leading, key=lambda transfer: transfer.left)
            budget = kept + self._fill(ends, shortest_first, budget - kept)
            if any(end == transfer.prompt_tokens for transfer, end in ends.items() if transfer is not first):
                budget -= kept - self._fill(ends, [first], kept)
                self._fill(ends, shortest_first, budget, whole=True)
                budget = 0
        self._fill(ends, self._line, budget)
        self._owed = max(0, self._owed - (ends.get(first, first.given) - first.given))
        return ends

    def _fill(
        self, ends: dict[PrefillRequest, int], transfers: Iterable[PrefillRequest], budget: int, *, whole: bool = False
    ) -> int:
        """Give them, in this order, what they lack of up to `budget` tokens, or only `whole` prompts. What is left."""
        for transfer in transfers:
            start = ends.get(transfer, transfer.given)
            end = self._slice(transfer, start, budget)
            if start < transfer.prompt_tokens and (end == start or (whole and end < transfer.prompt_tokens)):
                break  # not even a page
            ends[transfer] = end
            budget -= end - start
        return budget

    def _slice(self, transfer: PrefillRequest, start: int, tokens: int) -> int:
        """Where a slice of at most so many tokens ends. One that does not end its prompt ends on a page border, so no
        page is sent twice.
        """
        end = min(transfer.prompt_tokens, start + tokens)
        return end if end == transfer.prompt_tokens else max(start, end - end % self._limits.page_size)


def _row(transfer: PrefillRequest, end: int) -> PrefillRow:
    assert transfer.grant is not None, f"{transfer.ref} computes without pages"
    return PrefillRow(transfer, transfer.given, end, transfer.grant.pages, end == transfer.prompt_tokens)
