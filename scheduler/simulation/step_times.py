"""How long steps, transfers and messages of a pair take: a model with few numbers, measured or read from a file."""

import bisect
from collections.abc import Iterable, Sequence

import msgspec


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

    prefill_slowdown: float = 1.0
    """How many times longer a prompt step takes while another server computes on the same machine, on cores of its own:
    they share memory bandwidth and caches, and frontends and clients need CPU time too."""
    decode_slowdown: float = 1.0
    """The same of decode steps."""

    def prefill_s(self, spans: Iterable[tuple[int, int]]) -> float:
        """A step that computes these spans of tokens, [start, end) each."""
        return self.prefill_step_s + self._tokens_s(spans)

    def decode_s(self, contexts: Sequence[int], spans: Iterable[tuple[int, int]] = ()) -> float:
        """A step of requests with these contexts, beside spans of prompts that decode computes itself."""
        prompts_s = self._tokens_s(spans)
        if not contexts:
            return self.prefill_step_s + prompts_s
        return self._batch_s(len(contexts)) + self.decode_pair_s * sum(contexts) + prompts_s

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
