"""How long steps, transfers and messages of a pair take: a model with few numbers, measured or read from a file."""

import bisect
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec

Role = Literal["prefill", "decode"]
Servers = Annotated[int, msgspec.Meta(ge=0)]
Factor = Annotated[float, msgspec.Meta(gt=0)]


class Interference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How steps slow each other down while so many prefill and decode servers of one machine compute at once.

    The factors are how many times longer a step takes than its share of the cores explains: servers share memory
    bandwidth and caches, and their frontends and clients need CPU time too.
    """

    prefills: Servers
    decodes: Servers
    prefill: Factor = 1.0
    decode: Factor = 1.0

    def factor(self, role: Role) -> float:
        return self.prefill if role == "prefill" else self.decode

    def has(self, role: Role) -> bool:
        return bool(self.prefills if role == "prefill" else self.decodes)

    def distance(self, prefills: int, decodes: int) -> tuple[float, int]:
        """How far this measurement is from so many servers: first the difference of the share of prefill servers, then
        the difference of the numbers.
        """
        ours, theirs = self.prefills + self.decodes, prefills + decodes
        return abs(self.prefills / ours - prefills / theirs), abs(ours - theirs)


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Times in seconds.

    A prompt step takes `prefill_step_s`, plus `prefill_token_s` per token, plus `prefill_pair_s` per token and token of
    context before it. A decode step takes the time of its number of requests in `decode_steps`, plus `decode_pair_s`
    per request and token of its context. Both are those of one server that has its device to itself.
    """

    prefill_token_s: float
    decode_steps: tuple[tuple[int, float], ...]
    """Requests and seconds, ascending; times between two entries are interpolated."""
    prefill_step_s: float = 0.0
    prefill_pair_s: float = 0.0
    decode_pair_s: float = 0.0
    write_s: float = 0.001
    """A write of KV, whatever its size."""
    kv_token_s: float = 0.0
    """Writing the KV of one token; a prefill server writes one chunk at a time."""
    message_s: float = 0.001
    """A control message, one way."""
    response_s: float = 0.0
    """From the sampled token to the client, and from the client to the scheduler, together."""
    interference: tuple[Interference, ...] = ()
    """Of servers that share a machine, as measured."""

    def prefill_s(self, spans: Iterable[tuple[int, int]]) -> float:
        """A step that computes these spans of tokens, [start, end) each."""
        return self.prefill_step_s + self._tokens_s(spans)

    def decode_s(self, contexts: Sequence[int], spans: Iterable[tuple[int, int]] = ()) -> float:
        """A step of requests with these contexts, beside spans of prompts that decode computes itself."""
        prompts_s = self._tokens_s(spans)
        if not contexts:
            return self.prefill_step_s + prompts_s
        return self._batch_s(len(contexts)) + self.decode_pair_s * sum(contexts) + prompts_s

    def interference_factor(self, role: Role, prefills: int, decodes: int) -> float:
        """How many times longer a step takes than its share of the cores explains, while so many servers compute. If
        these numbers were not measured, the factor of the most similar ones.
        """
        if prefills + decodes == 1:
            return 1.0
        measured = [each for each in self.interference if each.has(role)]
        return min(measured, key=lambda each: each.distance(prefills, decodes)).factor(role) if measured else 1.0

    def _tokens_s(self, spans: Iterable[tuple[int, int]]) -> float:
        seconds = 0.0
        for start, end in spans:
            tokens = end - start
            seconds += tokens * (self.prefill_token_s + self.prefill_pair_s * (start + tokens / 2))
        return seconds

    def _batch_s(self, requests: int) -> float:
        """Interpolated; beyond the last entry, in proportion to the last two, or to the last one."""
        at = bisect.bisect_left(self.decode_steps, (requests, 0.0))
        if at < len(self.decode_steps) and self.decode_steps[at][0] == requests:
            return self.decode_steps[at][1]
        if at == 0:
            return self.decode_steps[0][1]
        if len(self.decode_steps) == 1:
            size, seconds = self.decode_steps[0]
            return seconds * requests / size
        at = min(at, len(self.decode_steps) - 1)
        (size, seconds), (next_size, next_seconds) = self.decode_steps[at - 1], self.decode_steps[at]
        return max(seconds, seconds + (next_seconds - seconds) * (requests - size) / (next_size - size))
