"""Page lists on their way to rank processes: every page travels once.

A long sequence has thousands of pages and gets one now and then, but a step names them all. So the leader and each rank
process keep the lists, as numbered tables, and a step carries what is new. Tables only grow: a list that is no longer
what was sent becomes a table with a new number. The steps come over one ordered connection, so both ends have the same
tables; were a step lost, the next one to build on it would not fit, and the rank ends.
"""

import collections
import itertools
from collections.abc import Sequence
from typing import Final

import msgspec

from ...configs.errors import PdserveError
from ..messages.ranks import RunStep, SentRow, SentStep
from ..messages.step import StepRow

FORGET_AFTER_STEPS: Final = 64
"""A table that no step has used for this long is forgotten. Requests take turns with several stages, and prompts that
come in chunks wait for each other, but seldom for so many steps; one that does is sent again.
"""


class UnknownPagesError(PdserveError):
    """A step builds on pages that this rank was never sent: a bug."""


class _Table:
    """A list of pages as the ranks have it."""

    __slots__ = ("number", "sent", "used_in")

    def __init__(self, number: int, pages: Sequence[int]) -> None:
        self.number = number
        self.sent = list(pages)
        self.used_in = 0
        """The last step."""


class SentTables:
    """The leader's end: knows what the ranks know.

    A sequence is recognised by its list, the very object, which grows from step to step (PageGrant). That says where to
    look, no more: whether the ranks have its pages is seen by comparing them. A list may change, and one that is gone
    may leave its id to another.
    """

    def __init__(self, forget_after_steps: int = FORGET_AFTER_STEPS) -> None:
        self._forget_after_steps = forget_after_steps
        self._numbers = itertools.count()
        self._steps = 0
        self._tables: collections.OrderedDict[int, _Table] = collections.OrderedDict()
        """By the id of the list; the one that was used last comes last."""
        self._forgotten: list[int] = []
        """Numbers that the next message tells the ranks to forget."""

    def __len__(self) -> int:
        return len(self._tables)

    def pack(self, step: RunStep) -> SentStep:
        """What to send of a step. It must reach the ranks, before any step that is packed later."""
        self._steps += 1
        rows = tuple(self._pack_row(row) for row in step.rows)
        self._forget_unused()
        forgotten, self._forgotten = self._forgotten, []
        return SentStep(step.command_id, rows, tuple(forgotten))

    def _pack_row(self, row: StepRow) -> SentRow:
        table, kept, new_pages = self._extend(row.pages)
        return SentRow(msgspec.structs.replace(row, pages=()), table, kept, new_pages)

    def _extend(self, pages: Sequence[int]) -> tuple[int, int, list[int]]:
        """The number of the table that holds `pages`, how many of them it held before, and the others."""
        table = self._tables.get(id(pages))
        if table is not None:
            kept = len(table.sent)
            table.sent += pages[kept:]
            if table.sent != pages:  # looks at all of them, but compares pointers: a nanosecond or two each
                self._forgotten.append(table.number)
                table = None
        if table is None:
            kept = 0
            table = self._tables[id(pages)] = _Table(next(self._numbers), pages)
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
    """A rank's end. A sequence has the same list in every step, as on rank 0: it grows, also while a step that was
    unpacked before is under way, and what is in it never changes.
    """

    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._tables)

    def unpack(self, sent: SentStep) -> RunStep:
        """The step that was packed. Raises UnknownPagesError when one before it was not unpacked here."""
        step = RunStep(sent.command_id, tuple(self._unpack_row(row, sent.command_id) for row in sent.rows))
        for number in sent.forgotten:
            if self._tables.pop(number, None) is None:
                raise UnknownPagesError(
                    f"step {sent.command_id} forgets page table {number}, which this rank does not have"
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
