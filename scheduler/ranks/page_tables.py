"""Page lists in steps to rank processes: every page id is sent once.

A long sequence has thousands of pages and rarely gets a new one, but a step names them all. So the leader and each rank
process keep the lists as numbered tables, and a step has only the new pages. Tables only grow: a list that has changed
otherwise becomes a new table. Steps are sent over one ordered connection, so both ends have the same tables. If a step
were lost, the next one would not match, and the rank would exit.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from ...common.errors import PdserveError
from ..messages.ranks import RunStep, SentRow, SentStep
from ..messages.step import StepRow

FORGET_AFTER_STEPS: Final = 64
"""A table is dropped when no step has used it for this long. A request may skip steps, with several stages or between
chunks of its prompt; if it skips that many, its table is sent again.
"""


class UnknownPagesError(PdserveError):
    """A step extends a page table that this rank does not have: a bug."""


@dataclasses.dataclass(slots=True)
class _Table:
    """A list of pages that the ranks have."""

    number: int
    sent: list[int]
    used_in: int = 0
    """The last step that used it."""


class SentTables:
    """The leader's end: tracks the tables of the ranks.

    A table is found by the id() of the page list of a sequence (PageGrant), which is the same object in every step. The
    pages are compared as well, because a list may change and the id of a deleted list may be reused.
    """

    def __init__(self, forget_after_steps: int = FORGET_AFTER_STEPS) -> None:
        self._forget_after_steps = forget_after_steps
        self._numbers = itertools.count()
        self._steps = 0
        self._tables: collections.OrderedDict[int, _Table] = collections.OrderedDict()
        """By the id() of the list, in the order of their last use."""
        self._forgotten: list[int] = []
        """Numbers of the tables that the next message tells the ranks to drop."""

    def pack(self, step: RunStep) -> SentStep:
        """The message for a step. It must reach the ranks before any step that is packed later."""
        self._steps += 1
        rows = tuple(self._pack_row(row) for row in step.rows)
        self._forget_unused()
        forgotten, self._forgotten = self._forgotten, []
        return SentStep(step.command_id, rows, tuple(forgotten), step.ranks)

    def _pack_row(self, row: StepRow) -> SentRow:
        table, kept, new_pages = self._extend(row.pages)
        return SentRow(msgspec.structs.replace(row, pages=()), table, kept, new_pages)

    def _extend(self, pages: Sequence[int]) -> tuple[int, int, list[int]]:
        """The number of the table for `pages`, how many pages the ranks have of it, and the new pages."""
        table = self._tables.get(id(pages))
        if table is not None:
            kept = len(table.sent)
            table.sent += pages[kept:]
            if table.sent != pages:  # compares pointers: 1 to 2 ns per page
                self._forgotten.append(table.number)
                table = None
        if table is None:
            kept = 0
            table = self._tables[id(pages)] = _Table(next(self._numbers), list(pages))
        table.used_in = self._steps
        self._tables.move_to_end(id(pages))
        return table.number, kept, table.sent[kept:]

    def _forget_unused(self) -> None:
        while self._tables:
            oldest = next(iter(self._tables.values()))
            if oldest.used_in > self._steps - self._forget_after_steps:
                return
            self._tables.popitem(last=False)
            self._forgotten.append(oldest.number)


class KnownTables:
    """A rank's end. As in the leader, a sequence has the same list object in every step. The list grows, also while an
    earlier step is in flight; its existing entries never change.
    """

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def unpack(self, sent: SentStep) -> RunStep:
        """The step that was packed. Raises UnknownPagesError if an earlier step was not unpacked here."""
        rows = tuple(self._unpack_row(row, sent.command_id) for row in sent.rows)
        step = RunStep(sent.command_id, rows, sent.ranks)
        for number in sent.forgotten:
            if self._tables.pop(number, None) is None:
                raise UnknownPagesError(
                    f"step {sent.command_id} drops page table {number}, which this rank does not have"
                )
        return step

    def _unpack_row(self, sent: SentRow, command_id: int) -> StepRow:
        pages = self._tables.setdefault(sent.table, [])
        if len(pages) != sent.kept:
            raise UnknownPagesError(
                f"step {command_id} extends table {sent.table} of {sent.kept} pages; this rank has {len(pages)} of them"
            )
        pages += sent.new_pages
        return msgspec.structs.replace(sent.row, pages=pages)
