"""Chooses the prefill server of a prompt, by what it has cached and by its queue.

`choose` is the whole decision, a pure function of its inputs. Its reasons are counted in /metrics, and its inputs are
shown for each prefill server in /server_info.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from ....configs.setting_types import DispatchSetting

REUSE_WEIGHT = 3
"""A prompt accepts this many more tokens ahead of it on a server for each of its tokens that the server has cached.
More than one, because another server would need both time to compute the token and memory for a second copy of it.
"""

Reason = Literal["prefix", "load"]


class Candidate(NamedTuple):
    """The inputs of the choice for one server that can hold the prompt."""

    ahead: int
    """Tokens that it computes before the prompt."""
    cached: int = 0
    """Tokens of the prompt that are in its prefix cache, by its reports."""
    fullness: float = 0.0
    """The fraction of its KV pool that cached prefixes occupy."""
    is_open: bool = True
    """It takes the prompt now."""
    failed: bool = False
    """The last attempt to prefill the prompt was there."""
    sent_at: float = -math.inf
    """When it last got a prompt from us."""


class Choice(NamedTuple):
    """The number of a candidate, and why. If that server does not take the prompt now, the prompt waits for it."""

    number: int
    reason: Reason


def choose(mode: DispatchSetting, tokens: int, candidates: Sequence[Candidate]) -> Choice | None:
    """The server for a prompt of `tokens` tokens; None if no server takes it now and none is worth waiting for.

    With mode `load`, it is the open server with the fewest tokens ahead of the prompt. With mode `prefix`, cached
    tokens count as well, and a prompt waits for a server that is not open if the prefix cached there is worth it.

    Servers should fill evenly, because together they then hold more prefixes. So the emptier of two equal servers is
    chosen, and a cached prefix counts less on a fuller server. Example: server A is 60 % full, server B 20 %. If less
    than 40 % of a prompt are cached, on A only (a common system prompt), the prompt may go to either server. If more is
    cached (a conversation), A is preferred. Servers that are as full, or whose caches are unknown as with mode `load`,
    take turns.
    """
    weight = REUSE_WEIGHT if mode == "prefix" else 0
    least_full = min((candidate.fullness for candidate in candidates), default=0.0)

    def cost(number: int) -> tuple[bool, float, float, float]:
        candidate = candidates[number]
        worth = max(0.0, candidate.cached - tokens * (candidate.fullness - least_full))
        return candidate.failed, candidate.ahead - weight * worth, candidate.fullness, candidate.sent_at

    everyone = range(len(candidates))
    best = min(everyone, key=cost, default=None)
    best_open = min((number for number in everyone if candidates[number].is_open), key=cost, default=None)
    cached_there = candidates[best_open].cached if best_open is not None else 0
    if weight and best is not None and candidates[best].cached > cached_there:
        return Choice(best, "prefix")
    if best_open is None:
        return None
    return Choice(best_open, "prefix" if weight and cached_there else "load")
