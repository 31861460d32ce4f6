"""How much of a decode server's work one prefill server has at a time.

A prompt that is sent holds pages on decode until its KV has arrived. So prompts wait in decode's queue, where they hold
none, rather than behind others on prefill. The prefill server reports how many tokens it wants to have
(`Load.window_tokens`): enough to compute while the next prompt is on its way. There are two windows of that size:

- One for short prompts. Prefill computes them beside longer ones (compute_queue.py), so longer ones do not close it.
- One for all others, which is closed by everything that is there, that of other decode servers included. It is always
  open to a few: with other decode servers at work, too, each has its share.

Prompts of a lower priority close neither: prefill computes them later.
"""

from typing import NamedTuple

from ....transfer.protocol.messages import Load

DEFAULT_TOKENS = 8192
"""Of the window of a prefill server that has not reported its own."""
SHORT_PART = 4
"""Short prompts are at most this part of the window."""
MIN_LONG_PROMPTS = 2
"""Prompts that are not short, which a window is always open to: one that computes, and the next."""


class PromptKind(NamedTuple):
    """What windows tell prompts apart by. Their tokens are less than 2 ** `bits`."""

    priority: int
    bits: int

    @classmethod
    def of(cls, priority: int, tokens: int) -> "PromptKind":
        return cls(priority, tokens.bit_length())


class _Sent:
    """Prompts of one kind that are with the prefill server."""

    __slots__ = ("prompts", "tokens")

    def __init__(self) -> None:
        self.prompts = 0
        self.tokens = 0


class DispatchWindow:
    """Of one decode server, towards one prefill server."""

    def __init__(self) -> None:
        self._tokens = DEFAULT_TOKENS
        self._others = 0
        self._sent: dict[PromptKind, _Sent] = {}

    @property
    def own_tokens(self) -> int:
        """Tokens that were sent and have not come back as KV."""
        return sum(sent.tokens for sent in self._sent.values())

    @property
    def tokens_ahead(self) -> int:
        """What a prompt sent now would find there: ours, and those of other decode servers."""
        return self.own_tokens + self._others

    def report(self, load: Load) -> None:
        """The prefill server says what it has. Of ours we know better: the report is as old as a heartbeat."""
        self._tokens = load.window_tokens or DEFAULT_TOKENS
        self._others = max(0, load.waiting_tokens - self.own_tokens)

    def sent(self, kind: PromptKind, tokens: int) -> None:
        """A prompt, of which so many tokens are to be computed, is on its way."""
        sent = self._sent.setdefault(kind, _Sent())
        sent.prompts += 1
        sent.tokens += tokens

    def computed(self, kind: PromptKind, tokens: int) -> None:
        """KV of so many tokens has arrived."""
        self._sent[kind].tokens -= tokens

    def returned(self, kind: PromptKind, tokens: int) -> None:
        """A prompt is done or was given up; so many of its tokens had not arrived."""
        sent = self._sent[kind]
        sent.prompts -= 1
        sent.tokens -= tokens
        if not sent.prompts:
            del self._sent[kind]

    def is_open(self, kind: PromptKind) -> bool:
        """Whether a prompt of this kind may be sent now."""
        ahead = [(other, sent) for other, sent in self._sent.items() if other.priority >= kind.priority]
        if self._is_short(kind):
            return sum(sent.tokens for other, sent in ahead if self._is_short(other)) < self._tokens
        if sum(sent.tokens for _, sent in ahead) + self._others < self._tokens:
            return True
        return sum(sent.prompts for other, sent in ahead if not self._is_short(other)) < MIN_LONG_PROMPTS

    def _is_short(self, kind: PromptKind) -> bool:
        return 1 << kind.bits <= self._tokens // SHORT_PART
