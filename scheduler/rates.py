"""How fast the two ways are to bring a retracted request back, as measured: its KV copied, or computed by prefill."""

import collections

SAMPLES = 16
"""How many of the last measurements count."""


class Rate:
    """Units a second: the median over the units of the last measurements.

    So one among several that was slowed down by something else does not decide, and a short one, most of which is what
    it costs to begin, counts for the few units that it was.
    """

    def __init__(self) -> None:
        self._samples: collections.deque[tuple[float, int]] = collections.deque(maxlen=SAMPLES)
        """Units a second, and how many they were."""

    def measured(self, units: int, seconds: float) -> None:
        """So many took so long. What took no time, or was nothing, says nothing."""
        if units > 0 and seconds > 0:
            self._samples.append((units / seconds, units))

    @property
    def per_s(self) -> float | None:
        """None until something was measured."""
        half = sum(units for _, units in self._samples) / 2
        for rate, units in sorted(self._samples):
            half -= units
            if half <= 0:
                return rate
        return None


class Rates:
    """Of a decode server."""

    def __init__(self) -> None:
        self.copied_pages = Rate()
        """From the GPU to host memory, which takes as long as back."""
        self.prefilled_tokens = Rate()

    def copy_is_cheaper(self, pages: int, tokens: int) -> bool:
        """Out to host memory and back, or computed by prefill. Copying until both are known: it rarely loses."""
        pages_per_s, tokens_per_s = self.copied_pages.per_s, self.prefilled_tokens.per_s
        return pages_per_s is None or tokens_per_s is None or 2 * pages / pages_per_s <= tokens / tokens_per_s
