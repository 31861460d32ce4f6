"""Computes what a server does at the moment (requests, rates, use of its pools) from two of its Status messages."""

from dataclasses import dataclass

from ...scheduler.messages.frontend import Status
from ...scheduler.messages.lifecycle import PrefillState, State

IN_PREFILL = tuple(state.value for state in (State.PREFILLING, State.VERIFYING, State.LOADING, State.COMPUTING))
RETRACTED = (State.SAVING.value, State.SAVED.value, State.RESTORING.value)
WAITING = (
    tuple(state.value for state in (State.COMPILING, State.QUEUED, State.ARRIVED, State.OPENING, State.READY))
    + RETRACTED
)
WAITING_AT_PREFILL = tuple(
    state.value for state in (PrefillState.COMPILING, PrefillState.WAITING, PrefillState.LOADING)
)


@dataclass(frozen=True)
class Activity:
    """Numbers from the later message, and rates between the two."""

    running: int
    """Requests in the decode batch; on prefill, prompts in computation."""
    waiting: int
    """Requests that wait; on prefill also prompts whose KV is being loaded from the KV store."""
    in_prefill: int
    """On decode: requests whose prompt a prefill server, or this server, computes."""
    sending: int
    """On prefill: prompts whose last KV is on its way."""
    waiting_tokens: int
    """On prefill: prompt tokens that are not computed yet."""
    prompt_tokens_per_s: float
    """On decode: tokens of prompts that have arrived, cached ones included. On prefill: computed tokens only."""
    output_tokens_per_s: float
    transfer_bytes_per_s: float
    kv_used: float
    """The share of the KV pages that are held, from 0 to 1."""
    prefix_hits: float | None
    """The share of prompt tokens that were cached, from 0 to 1; None if there were no prompts."""
    hot_hits: float | None
    """The share of the rows of evicting sequences that were in hot buffers, from 0 to 1; None without such rows."""

    @property
    def is_idle(self) -> bool:
        requests = self.running + self.waiting + self.in_prefill + self.sending
        return not requests and not self.prompt_tokens_per_s + self.output_tokens_per_s + self.transfer_bytes_per_s


def activity_between(role: str, earlier: Status, later: Status) -> Activity:
    """`later` must be newer than `earlier`, and of the same process."""
    seconds = later.taken_at - earlier.taken_at
    states, gauges = later.states, later.gauges

    def since(counter: str) -> float:
        return later.counters.get(counter, 0) - earlier.counters.get(counter, 0)

    def count(*names: str) -> int:
        return sum(states.get(name, 0) for name in names)

    prompt_tokens, reused = since("prompt_tokens"), since("prefix_tokens_reused")
    hits, misses = since("hot_hits"), since("hot_misses")
    on_decode = role == "decode"
    return Activity(
        running=count(State.RUNNING.value) if on_decode else count(PrefillState.COMPUTING.value),
        waiting=count(*WAITING) if on_decode else count(*WAITING_AT_PREFILL),
        in_prefill=count(*IN_PREFILL) if on_decode else 0,
        sending=count(PrefillState.SENDING.value),
        waiting_tokens=int(gauges.get("waiting_tokens", 0)),
        prompt_tokens_per_s=prompt_tokens / seconds,
        output_tokens_per_s=since("generation_tokens") / seconds,
        transfer_bytes_per_s=since("transfer_bytes") / seconds,
        kv_used=_share(gauges.get("kv_pages_held", 0), gauges.get("kv_pages", 0)) or 0.0,
        # `prompt_tokens` includes the reused tokens on decode, but not on prefill
        prefix_hits=_share(reused, prompt_tokens if on_decode else prompt_tokens + reused),
        hot_hits=_share(hits, hits + misses),
    )


def byte_rate(bytes_per_s: float) -> str:
    """`1.20 GB/s`, `340 MB/s`, `12 kB/s`."""
    if bytes_per_s >= 999.5e6:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    if bytes_per_s >= 999.5e3:
        return f"{bytes_per_s / 1e6:.0f} MB/s"
    return f"{bytes_per_s / 1e3:.0f} kB/s"


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
