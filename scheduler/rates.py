"""Measured rates. They decide whether the KV of a retracted request is copied or computed again, and whether a prompt
is computed on a prefill server or here.
"""

import collections

SAMPLES = 16
"""Number of measurements that are kept."""
REMEASURE_S = 60.0
"""After this time without a transfer, a prompt that would be computed here is sent to a prefill server instead, to
measure a transfer.
"""
LARGE = 128
"""Until larger numbers of units are measured, a rate measured for at least this many units is used for them."""


class Rate:
    """Units per second: the median of the last measurements, weighted by units.

    The median ignores single slow measurements. The weights keep short measurements, which are mostly fixed cost, from
    dominating.
    """

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples: collections.deque[tuple[float, int]] = collections.deque(maxlen=samples)
        """Units per second, and the number of units."""
        self._median: float | None = None
        """None if it has to be computed again."""

    def measured(self, units: int, seconds: float) -> None:
        """Add a measurement. Zero units or zero seconds are ignored."""
        if units > 0 and seconds > 0:
            self._samples.append((units / seconds, units))
            self._median = None

    @property
    def per_s(self) -> float | None:
        """None before the first measurement."""
        if self._median is None and self._samples:
            half = sum(units for _, units in self._samples) / 2
            for rate, units in sorted(self._samples):
                self._median = rate
                half -= units
                if half <= 0:
                    break
        return self._median

    def forget(self) -> None:
        """Drop all measurements."""
        self._samples.clear()
        self._median = None


class TransferRate(Rate):
    """Transfers per second. While all prompts are computed here, there are no transfers, and measurements get old."""

    def __init__(self) -> None:
        super().__init__()
        self._at: float | None = None
        """When the last transfer ended, or a prompt was sent to measure one again."""
        self._again = False

    def ended(self, seconds: float, now: float) -> None:
        """A transfer took `seconds`. If it was sent to measure again, old measurements are dropped."""
        if self._again:
            self.forget()
        self._at, self._again = now, False
        self.measured(1, seconds)

    def is_old(self, now: float) -> bool:
        """Whether to measure again. The slower transfers are, the less often: measuring takes at most a hundredth of
        the time.
        """
        return self._at is not None and now - self._at >= max(REMEASURE_S, 100 / (self.per_s or 1))

    def measure_again(self, now: float) -> None:
        """A prompt is sent to a prefill server to measure a transfer."""
        self._at, self._again = now, True


class RateBySize(Rate):
    """A rate that depends on the number of units: few tokens take nearly as long as many, because a step has a fixed
    cost.
    """

    def __init__(self) -> None:
        super().__init__()
        self._by_size: collections.defaultdict[int, Rate] = collections.defaultdict(Rate)
        """By the bit length of the number of units."""

    def measured(self, units: int, seconds: float) -> None:
        super().measured(units, seconds)
        self._by_size[units.bit_length()].measured(units, seconds)

    def at(self, units: int) -> float | None:
        """The rate of `units` units; None if only much smaller numbers were measured."""
        size = units.bit_length()
        larger = sorted(found for found in self._by_size if found >= size)
        smaller = sorted((found for found in self._by_size if LARGE.bit_length() <= found < size), reverse=True)
        nearest = [*larger, *smaller]
        return self._by_size[nearest[0]].per_s if nearest else None


class Rates:
    """The rates of a decode server."""

    def __init__(self) -> None:
        self.copied_pages = Rate()
        """From the GPU to host memory; the way back takes as long."""
        self.prefilled_tokens = Rate()
        """Computed by prefill servers."""
        self.transfers = TransferRate()
        """Its inverse is the time that a prefill server adds to the queue and compute time of a prompt."""
        self.local_tokens = RateBySize()
        """Computed by this server, not counting its decode steps."""

    def copy_is_cheaper(self, pages: int, tokens: int) -> bool:
        """Whether to copy to host memory and back takes less time than prefill. True until both rates are known: a copy
        is rarely slower.
        """
        pages_per_s, tokens_per_s = self.copied_pages.per_s, self.prefilled_tokens.per_s or self.local_tokens.per_s
        return pages_per_s is None or tokens_per_s is None or 2 * pages / pages_per_s <= tokens / tokens_per_s
