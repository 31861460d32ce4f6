"""Chooses the data-parallel rank of a new prompt. Each rank has pages, a prefix cache and a queue of its own.

A step takes as long as its slowest rank, so ranks should have equally many requests. A rank that has the prefix of a
prompt in its cache is preferred as long as it has few more requests than the others.
"""

from collections.abc import Sequence

from ..messages.frontend import Submit
from .requests.reservation import pages_needed
from .scheduler import DecodeScheduler

MORE_SHARE, MORE_REQUESTS = 0.25, 1
"""A cached prefix attracts a prompt while its rank has at most this share, and this number, of requests more than the
rank with the fewest.
"""


def choose_for_submit(schedulers: Sequence[DecodeScheduler], submit: Submit) -> int:
    """The number of the scheduler for a prompt: of those that can reserve its pages at once, one with its prefix in the
    cache, otherwise the one with the fewest requests; if none can, the one with the shortest queue.
    """
    fewest = min(len(scheduler.requests) for scheduler in schedulers)
    samples = 1 + len(submit.more_rids)

    def key(number: int) -> tuple[float, ...]:
        scheduler = schedulers[number]
        limits, tokens = scheduler.limits, len(submit.prompt_ids)
        cached = len(scheduler.cache.match(submit.prompt_ids, tokens))
        pages = pages_needed(tokens, samples, tokens + limits.growth_tokens, limits.page_size) - cached
        waiting, requests = scheduler.waiting_tokens, len(scheduler.requests)
        fits = not waiting and pages <= scheduler.pages.available + scheduler.pages.lent
        crowded = requests > fewest * (1 + MORE_SHARE) + MORE_REQUESTS
        return (not fits, 0 if fits else waiting, crowded, -cached, requests, scheduler.pages.held)

    return min(range(len(schedulers)), key=key)
