"""Logs the progress of long start-up jobs every few seconds; short jobs log nothing."""

import logging
import time

INTERVAL_S = 5.0


class ProgressLog:
    """Logs `done` of `total` at most every INTERVAL_S. `message` has two placeholders: "%.1f of %.1f"."""

    def __init__(self, log: logging.Logger, message: str, total: float) -> None:
        self._log = log
        self._message = message
        self._total = total
        self._done = 0.0
        self._logged_at = time.monotonic()

    def add(self, amount: float) -> None:
        """Add `amount` to what is done."""
        self._done += amount
        now = time.monotonic()
        if now - self._logged_at >= INTERVAL_S:
            self._logged_at = now
            self._log.info(self._message, self._done, self._total)
