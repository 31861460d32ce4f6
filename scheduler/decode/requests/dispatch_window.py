"""Bounds the tokens that a decode server has at one prefill server at a time.

A dispatched prompt holds pages on decode until its KV has arrived. So prompts wait in the queue of decode, where they
hold no pages, and not on prefill. The prefill server reports how many tokens keep it busy until the next prompt arrives
(`Load.window_tokens`). There are two windows of that size:

- One for short prompts. Prefill computes them beside longer ones (chunk_queue.py), so longer ones do not count.
- One for all others. Everything at the prefill server counts, also prompts of other decode servers. It is always open
  to MIN_LONG_PROMPTS, so each of several decode servers gets a share.

Prompts of a lower priority count for neither: prefill computes them later.
"""

import dataclasses
from typing import NamedTuple

from ....transfer.protocol.messages import Load

DEFAULT_TOKENS = 8192
"""Window of a prefill server that has not reported one."""
SHORT_PART = 4
"""A short prompt has at most 1 / SHORT_PART of the window."""
MIN_LONG_PROMPTS = 2
"""Long prompts that a window always admits: the computing prompt and the next one."""


class PromptKind(NamedTuple):
    """What a window depends on: the priority and the size of a prompt, which has less than 2 ** `bits` tokens."""

    priority: int
    bits: int

    @classmethod
    def of(cls, priority: int, tokens: int) -> "PromptKind":
        return cls(priority, tokens.bit_length())


@dataclasses.dataclass(slots=True)
class _Sent:
    """Prompts of one kind that are at the prefill server."""

    prompts: int = 0
    tokens: int = 0


class DispatchWindow:
    """The windows of one prefill server."""

    def __init__(self) -> None:
        self._tokens = DEFAULT_TOKENS
        self._others = 0
        self._sent: dict[PromptKind, _Sent] = {}
        self.own_tokens = 0
        """Tokens that were dispatched and whose KV has not arrived."""

    @property
    def tokens_ahead(self) -> int:
        """Tokens that prefill has to compute before a prompt that is dispatched now: ours, and those of other decode
        servers. Another thread reads this, so it must not iterate over `_sent`.
        """
        return self.own_tokens + self._others

    def tokens_before(self, tokens: int) -> int:
        """The part of `tokens_ahead` that prefill computes before a prompt of `tokens` tokens is done. A longer prompt
        counts only as `tokens` tokens, because prefill computes the shorter one beside it.
        """
        return self._others + sum(min(sent.tokens, sent.prompts * tokens) for sent in self._sent.values())

    def report(self, load: Load) -> None:
        """Take a heartbeat of the prefill server. It only tells the tokens of other decode servers: for our own tokens,
        the count in this process is newer.
        """
        self._tokens = load.window_tokens or DEFAULT_TOKENS
        self._others = max(0, load.waiting_tokens - self.own_tokens)

    def sent(self, kind: PromptKind, tokens: int) -> None:
        """A prompt was dispatched, with `tokens` tokens to compute."""
        sent = self._sent.setdefault(kind, _Sent())
        sent.prompts += 1
        sent.tokens += tokens
        self.own_tokens += tokens

    def computed(self, kind: PromptKind, tokens: int) -> None:
        """KV of `tokens` tokens has arrived."""
        self._sent[kind].tokens -= tokens
        self.own_tokens -= tokens

    def returned(self, kind: PromptKind, tokens: int) -> None:
        """A prompt is done or was given up; the KV of `tokens` tokens has not arrived."""
        sent = self._sent[kind]
        sent.prompts -= 1
        sent.tokens -= tokens
        self.own_tokens -= tokens
        if not sent.prompts:
            del self._sent[kind]

    def is_open(self, kind: PromptKind) -> bool:
        """Whether a prompt of this kind may be dispatched now."""
        ahead = [(other, sent) for other, sent in self._sent.items() if other.priority >= kind.priority]
        if self._is_short(kind):
            return sum(sent.tokens for other, sent in ahead if self._is_short(other)) < self._tokens
        if sum(sent.tokens for _, sent in ahead) + self._others < self._tokens:
            return True
        return sum(sent.prompts for other, sent in ahead if not self._is_short(other)) < MIN_LONG_PROMPTS

    def _is_short(self, kind: PromptKind) -> bool:
        return 1 << kind.bits <= self._tokens // SHORT_PART
