"""The limits of a prefill scheduler, and the check of a request against them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...common.arithmetic import ceil_div
from ...configs.schema import PrefillConfig
from ...memory.pages import pages_for
from ..chunking.step_rule import SLO_TTFT_S
from .request import PageSpace, PrefillRequest

MAX_SAMPLES = 256
"""Most first tokens of one request."""


@dataclasses.dataclass(frozen=True)
class PrefillLimits:
    """Limits from the configuration and from the model."""

    page_size: int
    chunk_size: int
    max_queued_requests: int
    context_length: int
    vocab_size: int
    prefix_cache: bool = True
    ranks: int = 1
    """Ranks that report every chunk."""
    stages: int = 1
    """Pipeline stages: the number of steps that compute at once."""
    steps_in_flight: int = 2
    """Most steps at the ranks: with one more than `stages`, no stage waits for the scheduler."""
    slo_ttft_s: float = SLO_TTFT_S
    window: int | None = None
    """The sliding window if all layers of the model have it. Requests hold no pages behind it."""

    @classmethod
    def of(
        cls,
        config: PrefillConfig,
        *,
        chunk_size: int,
        context_length: int,
        vocab_size: int,
        on_gpu: bool,
        window: int | None,
    ) -> "PrefillLimits":
        """The limits of each engine of a server. `chunk_size` is what its ranks have chosen."""
        return cls(
            page_size=config.page_size,
            chunk_size=chunk_size,
            max_queued_requests=ceil_div(config.max_queued_requests, config.dp_size),
            context_length=context_length,
            vocab_size=vocab_size,
            prefix_cache=config.prefix_cache,
            ranks=config.world_size // config.dp_size,
            stages=config.pp,
            steps_in_flight=config.pp + on_gpu,
            slo_ttft_s=config.slo_ttft_ms / 1000,
            window=window,
        )

    def describe_problem(self, request: PrefillRequest, space: PageSpace, num_pages: int) -> str | None:
        """Why this request of a peer can never be served with our `num_pages` pages; None if it can."""
        length, destination = request.prompt_tokens, request.destination
        if not 1 <= length <= self.context_length:
            return f"prompt of {length} tokens is outside [1, {self.context_length}]"
        if (token := _first_outside(request.token_ids, self.vocab_size)) is not None:
            return f"prompt has token id {token}, outside [0, {self.vocab_size})"
        if pages_for(length, self.page_size) > num_pages:
            return f"prompt of {length} tokens exceeds prefill's KV pool of {num_pages * self.page_size} tokens"
        named = {
            "stop_token_ids": destination.sampling.stop_token_ids,
            "logit_bias": tuple(dict(destination.sampling.logit_bias)),
        }
        for field, tokens in named.items():
            if (token := _first_outside(tokens, self.vocab_size)) is not None:
                return f"{field} has token id {token}, outside [0, {self.vocab_size})"
        if not 1 <= destination.samples <= MAX_SAMPLES:
            return f"samples {destination.samples} is outside [1, {MAX_SAMPLES}]"
        if not 0 <= destination.output_tokens < length:
            return f"output_tokens {destination.output_tokens} is outside [0, {length})"
        return _describe_destination(request, space)


def _describe_destination(request: PrefillRequest, space: PageSpace) -> str | None:
    destination = request.destination
    if not 0 <= destination.prefix_tokens <= request.prompt_tokens:
        return f"prefix_tokens {destination.prefix_tokens} is outside [0, {request.prompt_tokens}]"
    tokens = request.prompt_tokens - destination.prefix_tokens
    if destination.granularity == "page":
        if destination.prefix_tokens % space.page_size:
            return f"prefix_tokens {destination.prefix_tokens} is not a multiple of the page size {space.page_size}"
        limit, needed = space.num_pages, pages_for(tokens, space.page_size)
    else:
        limit, needed = space.num_pages * space.page_size, tokens
    if (
        problem := _describe_indices("destination", destination.granularity, request.indices, needed, limit)
    ) is not None:
        return problem
    if destination.enable_hisparse and not space.in_host_memory:
        return "enable_hisparse is set, but the decode server announced no KV pool in host memory"
    if not space.hot_pages or destination.enable_hisparse:
        return None
    limit = space.hot_pages * (1 if destination.granularity == "page" else space.page_size)
    return _describe_indices("hot", destination.granularity, request.hot_indices, needed, limit)


def _describe_indices(kind: str, granularity: str, indices: Sequence[int], needed: int, limit: int) -> str | None:
    if len(indices) < needed:
        return f"{len(indices)} {kind} indices for {needed} {granularity}s"
    if (index := _first_outside(indices, limit)) is not None:
        return f"{kind} index {index} is outside [0, {limit})"
    return None


def _first_outside(numbers: Sequence[int], end: int) -> int | None:
    """The first number outside [0, end). There may be a million numbers, in an array that numpy reads in place."""
    values = np.asarray(numbers)
    outside = values[(values < 0) | (values >= end)]
    return int(outside[0]) if len(outside) else None
