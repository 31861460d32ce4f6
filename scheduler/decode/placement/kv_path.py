"""Decides where prefill writes the KV rows of a prompt (HiSparse): to host memory, or to a hot buffer on the GPU.

`choose_path` is the whole decision, a pure function of its inputs. Its reasons are counted in /metrics. The choice is
sent as `enable_hisparse` of the KvDestination.

host    The request gets its hot buffer when its KV has arrived: a fully resident one is filled from host memory first.
device  The request has a fully resident hot buffer before its prompt is sent, and takes its first step as soon as its
        KV has arrived. Its rows are copied to host memory meanwhile (`HisparseMemory.receive_rows`).
"""

import dataclasses
from typing import NamedTuple

from ....transfer.protocol.messages import KvPath


@dataclasses.dataclass(frozen=True, slots=True)
class PathInputs:
    """What the path of one prompt depends on."""

    peer_writes_both: bool
    """The prefill server can write to either memory."""
    samples: int
    """Requests that wait for the prompt. Only one of them can have the hot buffer."""
    new_tokens: int
    """Most tokens that the request generates. Prefill samples the first one, so with fewer than 2 it runs no step."""
    pages: int
    """Hot pages for its rows and the next one."""
    first_pages: int
    """Hot pages that every hot buffer reserves."""
    free_pages: int
    """Pages of the hot pool that are free, without lent ones."""
    free_slots: int
    """Request slots without a hot buffer."""
    ahead: int
    """Requests whose KV is on its way to host memory: they may need a slot before this one."""
    settled: bool
    """No step in flight accesses a free hot page."""


SLOTS_KEPT = 8
"""Beside the slots for requests `ahead`, so many more free slots must keep their first pages. A hot buffer that prefill
writes gives up no page until the rows have arrived, so requests that arrive meanwhile need other pages.
"""


class PathChoice(NamedTuple):
    """The path of a prompt, and why."""

    path: KvPath
    reason: str


def choose_path(inputs: PathInputs) -> PathChoice:
    """The path is "device" if a fully resident hot buffer is free now and prefill can write to it."""
    if not inputs.peer_writes_both:
        return PathChoice("host", "peer")
    if inputs.samples > 1:
        return PathChoice("host", "samples")
    if inputs.new_tokens < 2:
        return PathChoice("host", "one_token")
    kept = min(inputs.free_slots - 1, inputs.ahead + SLOTS_KEPT) * inputs.first_pages
    if inputs.free_slots <= inputs.ahead or max(inputs.pages, inputs.first_pages) > inputs.free_pages - kept:
        return PathChoice("host", "hot_rows")
    if not inputs.settled:
        return PathChoice("host", "in_use")
    return PathChoice("device", "resident")
