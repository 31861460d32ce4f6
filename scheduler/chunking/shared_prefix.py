"""Prompts that are being computed, for prompts that begin with the same tokens.

Such a prompt waits until the prefix cache has the shared pages, if they are a large part of it. Computed at the same
time, both prompts would compute these pages.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ...configs.arithmetic import round_up
from ...memory.prefix_cache import common_prefix

LEAST_TOKENS = 64
"""A prompt does not wait for fewer shared tokens: on a GPU, a further step costs more than to compute them."""

_Key = tuple[int, tuple[int, ...]]
"""Cached tokens of a prompt, and the tokens of the page behind them."""


@dataclasses.dataclass(slots=True, eq=False)
class PrefixInProgress:
    """A prompt that is being computed. Tokens [0, computed) are in the prefix cache."""

    tokens: Sequence[int]
    computed: int
    priority: int
    key: _Key = (0, ())


class AwaitedPrefix(NamedTuple):
    """A prompt has its tokens [0, end) in common with the prompt of `leader`, which computes them."""

    leader: PrefixInProgress
    end: int

    @property
    def tokens_left(self) -> int:
        """Shared tokens that are not computed yet; 0 if the wait is over."""
        return max(0, self.end - self.leader.computed)


class PrefixesInProgress:
    """The prompts that one server computes, by the page that each computes next."""

    def __init__(self, page_size: int, step_tokens: int, *, enabled: bool = True) -> None:
        """`step_tokens`: most tokens of a step. A server without a prefix cache is not `enabled`."""
        self._page_size = page_size
        self._step_tokens = step_tokens
        self._enabled = enabled
        self._leaders: dict[_Key, PrefixInProgress] = {}

    def __len__(self) -> int:
        return len(self._leaders)

    def start(self, tokens: Sequence[int], computed: int, priority: int) -> PrefixInProgress:
        """A prompt is computed from now on. Call `end` for it."""
        leader = PrefixInProgress(tokens, computed, priority)
        self._add(leader)
        return leader

    def advance(self, leader: PrefixInProgress, computed: int) -> None:
        """The prefix cache has the first `computed` tokens."""
        self._remove(leader)
        leader.computed = computed
        self._add(leader)

    def end(self, leader: PrefixInProgress) -> None:
        """The prompt is computed or given up: no prompt waits for it any more."""
        self._remove(leader)
        leader.computed = len(leader.tokens)

    def find(self, tokens: Sequence[int], cached: int, most: int, priority: int) -> AwaitedPrefix | None:
        """The prefix that a prompt should wait for; `cached` of its tokens are in the cache, and `most` may be.

        The shared tokens have to be at least half of those that the prompt lacks, and half of those that the other
        prompt computes meanwhile: a short prompt does not wait for the steps of a long one.
        """
        if not self._leaders:
            return None
        leader = self._leaders.get((cached, self._page(tokens, cached)))
        if leader is None or leader.priority < priority:
            return None
        end = common_prefix(leader.tokens, tokens, most) // self._page_size * self._page_size
        shared = end - cached
        left = len(leader.tokens) - leader.computed
        meanwhile = min(left, round_up(end - leader.computed, self._step_tokens))
        if shared < LEAST_TOKENS or 2 * shared < max(len(tokens) - cached, meanwhile):
            return None
        return AwaitedPrefix(leader, end)

    def _add(self, leader: PrefixInProgress) -> None:
        """Of several prompts that compute the same page, others wait for the first one."""
        if self._enabled:
            leader.key = leader.computed, self._page(leader.tokens, leader.computed)
            self._leaders.setdefault(leader.key, leader)

    def _remove(self, leader: PrefixInProgress) -> None:
        if self._leaders.get(leader.key) is leader:
            del self._leaders[leader.key]

    def _page(self, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(tokens[start : start + self._page_size])
