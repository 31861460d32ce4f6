"""Finds a prompt that is being computed and begins with the same tokens as a new prompt.

If the shared pages are a large part of the new prompt, it waits until they are in the prefix cache. Without the wait,
both prompts would compute these pages.

`leader` means the prompt that computes the shared pages here, not the leader process.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ...common.arithmetic import round_up
from ...memory.prefix_cache import common_prefix

LEAST_TOKENS = 64
"""A prompt does not wait for fewer shared tokens: on a GPU, a further step costs more than to compute them."""

_Key = tuple[int, tuple[int, ...]]
"""The number of cached tokens of a prompt, and the tokens of its next page."""


@dataclasses.dataclass(slots=True, eq=False)
class PrefixInProgress:
    """A prompt that is being computed. Tokens [0, computed) are in the prefix cache."""

    tokens: Sequence[int]
    computed: int
    priority: int
    key: _Key = (0, ())


class AwaitedPrefix(NamedTuple):
    """A prompt shares its tokens [0, end) with `leader`, which is computing them."""

    leader: PrefixInProgress
    end: int

    @property
    def tokens_left(self) -> int:
        """Shared tokens that are not computed yet; 0 if the wait is over."""
        return max(0, self.end - self.leader.computed)


class PrefixesInProgress:
    """The prompts that one server computes, by the next page of each. A new prompt lacks the same page if it shares
    that prefix, so one lookup finds the prompt to wait for.
    """

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

    def cached(self, leader: PrefixInProgress, computed: int) -> None:
        """The prefix cache has the first `computed` tokens."""
        self._remove(leader)
        leader.computed = computed
        self._add(leader)

    def end(self, leader: PrefixInProgress) -> None:
        """The prompt is computed or given up: no prompt waits for it any more."""
        self._remove(leader)
        leader.computed = len(leader.tokens)

    def find(self, tokens: Sequence[int], cached: int, most: int, priority: int) -> AwaitedPrefix | None:
        """The prefix that a prompt should wait for, or None. `cached` of its tokens are in the cache; at most `most`
        may come from there.

        The shared tokens must be at least half of the tokens that the prompt lacks, and at least half of the tokens
        that the leader computes until it has them: a short prompt does not wait for the steps of a long one.
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
        """Register a leader. If several prompts compute the same page, others wait for the one registered first."""
        if self._enabled:
            leader.key = leader.computed, self._page(leader.tokens, leader.computed)
            self._leaders.setdefault(leader.key, leader)

    def _remove(self, leader: PrefixInProgress) -> None:
        if self._leaders.get(leader.key) is leader:
            del self._leaders[leader.key]

    def _page(self, tokens: Sequence[int], start: int) -> tuple[int, ...]:
        return tuple(tokens[start : start + self._page_size])
