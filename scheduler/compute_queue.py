"""Transfers that compute: which slices are in the next step, and which steps are under way."""

import collections
from collections.abc import Iterator

from .prefill_limits import PrefillLimits
from .transfer import PrefillRow, PrefillStep, Transfer


class ComputeQueue:
    """COMPUTING transfers, oldest first, and the steps that they are in."""

    def __init__(self, limits: PrefillLimits) -> None:
        self._limits = limits
        self._transfers: list[Transfer] = []
        self._steps: collections.deque[PrefillStep] = collections.deque()
        """Under way, oldest first."""
        self._orders = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._transfers)

    @property
    def steps(self) -> int:
        """Steps under way."""
        return len(self._steps)

    def add(self, transfer: Transfer) -> None:
        """It has its pages."""
        self._transfers.append(transfer)

    def remove(self, transfer: Transfer) -> None:
        """All of it is computed, or it has ended. Steps that it is in go on without meaning."""
        self._transfers.remove(transfer)

    def next_step(self) -> PrefillStep | None:
        """The slices of the next step: oldest first, at most `chunk_size` tokens; None when there is nothing to do, or
        enough is under way.

        A slice that does not end its prompt ends on a page border, so no page is sent twice.
        """
        rows: list[PrefillRow] = []
        budget = self._limits.chunk_size if len(self._steps) < self._limits.steps_in_flight else 0
        for transfer in self._transfers:
            start, end = transfer.given, min(transfer.prompt_tokens, transfer.given + budget)
            if start == transfer.prompt_tokens:
                continue
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
        self._orders += 1
        self._steps.append(PrefillStep(self._orders, rows))
        return self._steps[-1]

    def take(self, order: int) -> list[PrefillRow]:
        """The rows of a step that has ended."""
        step = self._steps.popleft()
        assert step.order == order, f"step {order} has ended before step {step.order}"
        return step.rows
