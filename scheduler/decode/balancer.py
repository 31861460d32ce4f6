"""Chooses the data-parallel rank of a new prompt. Each rank has pages, a prefix cache and a queue of its own.

A step takes as long as its slowest rank, so ranks should have equally many requests. A rank that has the prefix of a
prompt in its cache is preferred as long as it has few more requests than the others.
"""

from collections.abc import Sequence

from ...memory.pages import pages_for
from ..messages.frontend import Submit
from .requests.reservation import pages_needed
from .scheduler import DecodeScheduler

MORE_SHARE, MORE_REQUESTS = 0.25, 1
"""A rank with a cached prefix is preferred while its requests are at most 1 + MORE_SHARE times those of the rank with
the fewest, plus MORE_REQUESTS.
"""


def choose_for_submit(schedulers: Sequence[DecodeScheduler], submit: Submit) -> int:
    """The number of the scheduler for a prompt. Among schedulers with enough pages: the one with the longest cached
    prefix that is not crowded, then the one with the fewest requests. If none has enough pages: the one with the
    shortest queue.
    """
    counts = [len(scheduler.requests) for scheduler in schedulers]
    fewest = min(counts)
    samples = 1 + len(submit.more_rids)

    def key(number: int) -> tuple[float, ...]:
        scheduler = schedulers[number]
        cached = len(scheduler.cache.match(submit.prompt_ids, len(submit.prompt_ids)))
        queued, requests = scheduler.waiting_tokens, counts[number]
        fits = _fits(scheduler, len(submit.prompt_ids), samples, cached)
        crowded = requests > fewest * (1 + MORE_SHARE) + MORE_REQUESTS
        return (not fits, 0 if fits else queued, crowded, -cached, requests, queued, scheduler.pages.held)

    return min(range(len(schedulers)), key=key)


def rebalance(schedulers: Sequence[DecodeScheduler], now: float) -> set[int]:
    """Move prompts that wait for pages to schedulers that have enough. Returns the numbers of the schedulers that got
    a prompt.
    """
    changed: set[int] = set()
    for source in schedulers:
        while (prompt := source.first_without_memory) is not None:
            able = [
                number
                for number, scheduler in enumerate(schedulers)
                if scheduler is not source and _fits(scheduler, prompt.tokens, len(prompt.waiting))
            ]
            if not able:
                break
            number = min(able, key=lambda number: len(schedulers[number].requests))
            source.hand_over(prompt, schedulers[number], now)
            changed.add(number)
    return changed


def _fits(scheduler: DecodeScheduler, tokens: int, samples: int, cached: int = 0) -> bool:
    """Whether a scheduler has pages for all prompts in its queue and for this one, of which it has `cached` pages."""
    limits, pages, queue = scheduler.limits, scheduler.pages, scheduler.dispatcher.queue
    wanted = pages_needed(tokens, samples, tokens + limits.growth_tokens, limits.page_size, limits.window) - cached
    queued = pages_for(queue.tokens + len(queue) * (limits.growth_tokens + limits.page_size), limits.page_size)
    return wanted + queued <= pages.available + pages.lent
