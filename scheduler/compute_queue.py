"""Transfers that compute: which slices are in the next step, and which steps are under way."""

import collections
import itertools
from collections.abc import Iterator

from .prefill_limits import PrefillLimits
from .transfer import PrefillRow, PrefillStep, Transfer
from .transfer_line import TransferLine


class ComputeQueue:
    """COMPUTING transfers in line, and the steps that they are in."""

    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._line = TransferLine()
        """Those of which something is in no step yet."""
        self._given: set[Transfer] = set()
        """Those that are in steps with all that is left of them."""
        self._steps: collections.deque[PrefillStep] = collections.deque()
        """Under way, oldest first."""
        self._orders = 0

    def __len__(self) -> int:
        return len(self._line) + len(self._given)

    def __iter__(self) -> Iterator[Transfer]:
        return itertools.chain(self._line, self._given)

    @property
    def steps(self) -> int:
        """Steps under way."""
        return len(self._steps)

    def add(self, transfer: Transfer) -> None:
        """It has its pages."""
        self._line.push(transfer)

    def remove(self, transfer: Transfer) -> None:
        """All of it is computed, or it has ended. Steps that it is in go on without meaning."""
        if transfer in self._line:
            self._line.remove(transfer)
        else:
            self._given.remove(transfer)

    def next_step(self) -> PrefillStep | None:
        """The slices of the next step, of `chunk_size` tokens at most; None when there is nothing to do, or enough is
        under way. It is the turn of the first in line; others get what that one leaves.

        A slice that does not end its prompt ends on a page border, so no page is sent twice.
        """
        rows: list[PrefillRow] = []
        budget = self._limits.chunk_size if len(self._steps) < self._limits.steps_in_flight else 0
        for transfer in self._line:
            start, end = transfer.given, min(transfer.prompt_tokens, transfer.given + budget)
            if end < transfer.prompt_tokens:
                end -= end % self._limits.page_size
            if end <= start:
                break
            assert transfer.grant is not None, f"{transfer.ref} computes without pages"
            rows.append(PrefillRow(transfer, start, end, transfer.grant.pages, end == transfer.prompt_tokens))
            transfer.given = end
            budget -= end - start
        if not rows:
            return None
        self._line.turn(rows[0].transfer)
        for row in rows:
            if row.last:
                self._line.remove(row.transfer)
                self._given.add(row.transfer)
        self._orders += 1
        self._steps.append(PrefillStep(self._orders, rows))
        return self._steps[-1]

    def take(self, order: int) -> list[PrefillRow]:
        """The rows of a step that has ended."""
        step = self._steps.popleft()
        assert step.order == order, f"step {order} has ended before step {step.order}"
        return step.rows
