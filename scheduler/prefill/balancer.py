"""Chooses the data-parallel rank that computes a prompt. Each rank has pages and a prefix cache of its own."""

from collections.abc import Sequence

from .scheduler import PrefillScheduler


def choose_for_prompt(schedulers: Sequence[PrefillScheduler], prompt: Sequence[int]) -> int:
    """The number of the scheduler that would have the fewest tokens to compute, including this prompt without the part
    that its cache has.
    """

    def key(number: int) -> tuple[int, int]:
        scheduler = schedulers[number]
        cached = len(scheduler.cache.match(prompt, len(prompt) - 1)) * scheduler.limits.page_size
        return scheduler.waiting_tokens - cached, scheduler.pages.held

    return min(range(len(schedulers)), key=key)
