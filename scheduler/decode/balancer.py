"""Chooses the data-parallel rank of a new prompt. Each rank has pages, a prefix cache and a queue of its own.

A step takes as long as its slowest rank. Experts compute the tokens of all ranks, so ranks differ by their attention,
which reads the KV of their requests: ranks should have equally many tokens of KV. A rank that has the prefix of a
prompt in its cache is preferred as long as it has little more KV than the others.

A prompt for which its best rank has no pages takes another rank that has; if none has, it waits where the fewest tokens
wait, and moves to the first rank that has enough (the counter `prompts_moved`).
"""

from collections.abc import Sequence

from ...memory.pages import pages_for
from ..messages.frontend import Submit
from .memory.request_memory import pages_needed
from .scheduler import DecodeScheduler

MORE_SHARE = 0.25
"""A rank with a cached prefix is preferred while its KV is at most 1 + MORE_SHARE times that of the rank with the
least, plus that of the prompt.
"""


def choose_for_submit(schedulers: Sequence[DecodeScheduler], submit: Submit) -> int:
    """The number of the scheduler for a prompt. Among schedulers with enough pages: the one with the longest cached
    prefix that is not crowded, then the one with the least KV. Those with a place in the batch come first. If none has
    enough pages: the one with the shortest queue.
    """
    loads = [_kv_tokens(scheduler) for scheduler in schedulers]
    limits = schedulers[0].limits
    own = pages_for(len(submit.prompt_ids), limits.page_size) * limits.page_size
    most, samples = min(loads) * (1 + MORE_SHARE) + own, 1 + len(submit.more_rids)

    def key(number: int) -> tuple[float, ...]:
        scheduler = schedulers[number]
        cached = len(scheduler.cache.match(submit.prompt_ids, len(submit.prompt_ids)))
        queued, requests = scheduler.waiting_tokens, len(scheduler.requests)
        fits = _fits(scheduler, len(submit.prompt_ids), samples, cached)
        full = requests + samples > limits.max_running_requests
        return (not fits, 0 if fits else queued, full, loads[number] > most, -cached, loads[number], requests, queued)

    return min(range(len(schedulers)), key=key)


def rebalance(schedulers: Sequence[DecodeScheduler], now: float) -> set[int]:
    """Move prompts that wait for pages to schedulers that have enough. Returns the numbers of the schedulers that got
    a prompt.
    """
    changed: set[int] = set()
    for source in schedulers:
        while (prompt := source.first_without_memory) is not None:
            tokens, samples = prompt.tokens, len(prompt.waiting)
            lacked = prompt.refusal.pages if prompt.refusal is not None else 0
            able = [
                number
                for number, scheduler in enumerate(schedulers)
                if scheduler is not source and _fits(scheduler, tokens, samples, least=lacked)
            ]
            if not able:
                break
            number = min(able, key=lambda number: _kv_tokens(schedulers[number]))
            source.hand_over(prompt, schedulers[number], now)
            changed.add(number)
    return changed


def _kv_tokens(scheduler: DecodeScheduler) -> int:
    """Tokens of KV that the requests of a scheduler have, and that the prompts will have that wait."""
    compiling = sum(prompt.tokens for prompt in scheduler.rooms.compiling)
    return scheduler.allocator.held * scheduler.limits.page_size + scheduler.waiting_tokens + compiling


def _fits(scheduler: DecodeScheduler, tokens: int, samples: int, cached: int = 0, least: int = 0) -> bool:
    """Whether a scheduler has pages for all prompts that wait, in its queue or for their grammars, and for this one, of
    which it has `cached` pages. It needs `least` at least: with a sliding window, a rank that computes a prompt needs
    all of its pages.
    """
    limits, allocator = scheduler.limits, scheduler.allocator
    queue, compiling = scheduler.rooms.queued, scheduler.rooms.compiling
    wanted = pages_needed(tokens, samples, tokens + limits.growth_tokens, limits.page_size, limits.window) - cached
    tokens_queued = queue.tokens + sum(prompt.tokens for prompt in compiling)
    prompts = len(queue) + len(compiling)
    queued = pages_for(tokens_queued + prompts * (limits.growth_tokens + limits.page_size), limits.page_size)
    return max(wanted, least) + queued <= allocator.available + allocator.lent
