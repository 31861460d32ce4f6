"""The stats line, which the server logs every few seconds while it has work (`--log-stats-interval`)."""

from ...scheduler.messages.frontend import Status
from .activity import Activity, activity_between, byte_rate


class StatsLog:
    """Makes lines from the leader's reports, which arrive a few times a second. Measures time by their `taken_at`."""

    def __init__(self, role: str, interval_s: float) -> None:
        """With an interval of 0 there are no lines."""
        self._role = role
        self._interval_s = interval_s
        self._earlier: Status | None = None

    def line(self, status: Status) -> str | None:
        """Returns the line of the interval that this report ends; None if it ends none, or the server was idle."""
        if not self._interval_s:
            return None
        earlier = self._earlier
        if earlier is None or status.taken_at < earlier.taken_at:  # the clock of this machine was set back
            self._earlier = status
            return None
        if status.taken_at - earlier.taken_at < self._interval_s:
            return None
        self._earlier = status
        activity = activity_between(self._role, earlier, status)
        if activity.is_idle:
            return None
        return decode_line(activity) if self._role == "decode" else prefill_line(activity)


def decode_line(now: Activity) -> str:
    hot = "" if now.hot_hits is None else f", hot row hits {now.hot_hits:.1%}"
    received = f", KV received {byte_rate(now.transfer_bytes_per_s)}" if now.transfer_bytes_per_s else ""
    return (
        f"stats: in {now.prompt_tokens_per_s:.1f} tokens/s, out {now.output_tokens_per_s:.1f} tokens/s; "
        f"running {now.running}, waiting {now.waiting}, in prefill {now.in_prefill}; "
        f"KV pool {now.kv_used:.1%}, prefix hits {_percent(now.prefix_hits)}{hot}{received}"
    )


def prefill_line(now: Activity) -> str:
    return (
        f"stats: prompts {now.prompt_tokens_per_s:.1f} tokens/s; "
        f"computing {now.running}, waiting {now.waiting} ({now.waiting_tokens} tokens to compute), "
        f"sending {now.sending}; "
        f"KV sent {byte_rate(now.transfer_bytes_per_s)}, KV pool {now.kv_used:.1%}, "
        f"prefix hits {_percent(now.prefix_hits)}"
    )


def _percent(share: float | None) -> str:
    """A percentage; a dash if there were no prompts in the interval."""
    return "-" if share is None else f"{share:.1%}"
