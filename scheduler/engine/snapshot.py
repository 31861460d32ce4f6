"""The state of an engine loop for other threads: the metrics of all its schedulers together, and of each one."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TypeVar

from ...transfer.protocol.messages import Load
from ..decode.scheduler import DecodeScheduler
from ..messages.frontend import DpRankStatus
from ..prefill.scheduler import PrefillScheduler

Number = TypeVar("Number", int, float)

NOT_ADDED = frozenset(
    {
        "remote_prefill_tokens_per_second",
        "remote_prefill_overhead_seconds",
        "local_prefill_short_tokens",
        "decode_step_seconds",
        "token_gap_limit_seconds",
    }
)
"""For these gauges, a server reports the largest value of its schedulers. Other gauges are added up."""
OF_ALL = frozenset({"kv_store_available"})
"""These gauges are 1 only if they are 1 for all schedulers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Replaced as a whole, never modified."""

    gauges: Mapping[str, float]
    counters: Mapping[str, float]
    states: Mapping[str, int]
    taken_at: float
    """Unix time."""
    dp_ranks: tuple[DpRankStatus, ...] = ()
    """Of each data-parallel rank, if there are several."""

    @staticmethod
    def of(
        schedulers: Sequence[DecodeScheduler | PrefillScheduler], more: Mapping[str, float], *, taken_at: float
    ) -> "Snapshot":
        """The state of a server with these schedulers; `more` gauges are those of the loop itself."""
        gauges = [_gauges(scheduler) for scheduler in schedulers]
        states = [scheduler.state_counts() for scheduler in schedulers]
        single = len(schedulers) == 1
        return Snapshot(
            gauges={**total_gauges(gauges), **more},
            counters=_total([scheduler.counters for scheduler in schedulers]),
            states=_total(states),
            taken_at=taken_at,
            dp_ranks=() if single else tuple(map(DpRankStatus, range(len(schedulers)), gauges, states)),
        )


def total_gauges(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The gauges of a server from those of its schedulers."""
    if len(parts) == 1:
        return dict(parts[0])
    names = set().union(*parts)
    largest = {name: max(part[name] for part in parts if name in part) for name in NOT_ADDED & names}
    smallest = {name: min(part[name] for part in parts if name in part) for name in OF_ALL & names}
    return _total(parts) | largest | smallest


def total_load(loads: Sequence[Load]) -> Load:
    """The load of a server from those of its schedulers."""
    if len(loads) == 1:
        return loads[0]
    return Load(
        waiting_requests=sum(load.waiting_requests for load in loads),
        running_requests=sum(load.running_requests for load in loads),
        waiting_tokens=sum(load.waiting_tokens for load in loads),
        accepting=all(load.accepting for load in loads),
        window_tokens=sum(load.window_tokens for load in loads),
        tokens_per_s=sum(load.tokens_per_s for load in loads),
    )


def _gauges(scheduler: DecodeScheduler | PrefillScheduler) -> dict[str, float]:
    allocator = scheduler.allocator
    return {
        "kv_pages": allocator.num_pages,
        "kv_pages_held": allocator.held,
        "kv_pages_available": allocator.available,
        **scheduler.gauges(),
    }


def _total(parts: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    if len(parts) == 1:
        return dict(parts[0])
    names = dict.fromkeys(itertools.chain.from_iterable(parts))
    return {name: sum(part[name] for part in parts if name in part) for name in names}
