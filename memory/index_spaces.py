"""The numbers that a HiSparse cache counts with. They are all small integers and mean different things.

    TokenPosition   a token of one sequence, from 0
    HostRow         a row of the host pool: page * page_size + offset
    HotSlot         a row of one request's hot buffer, from 0
    HotRow          a row of the hot pool: hot page * page_size + offset

A sequence's pages lead from positions to host rows, a request's hot pages from slots to hot rows. Which token is in
which slot is in the tables of kernels/slot_tables.py; of a resident sequence, token p is in slot p.
"""

from collections.abc import Sequence
from typing import NewType

TokenPosition = NewType("TokenPosition", int)
HostRow = NewType("HostRow", int)
HotSlot = NewType("HotSlot", int)
HotRow = NewType("HotRow", int)


def host_row(position: TokenPosition, pages: Sequence[int], page_size: int) -> HostRow:
    return HostRow(pages[position // page_size] * page_size + position % page_size)


def token_position(row: HostRow, pages: Sequence[int], page_size: int) -> TokenPosition:
    return TokenPosition(pages.index(row // page_size) * page_size + row % page_size)


def hot_row(slot: HotSlot, hot_pages: Sequence[int], page_size: int) -> HotRow:
    return HotRow(hot_pages[slot // page_size] * page_size + slot % page_size)


def hot_slot(row: HotRow, hot_pages: Sequence[int], page_size: int) -> HotSlot:
    return HotSlot(hot_pages.index(row // page_size) * page_size + row % page_size)
