"""The bounds a prefill scheduler works within, and what in a transfer lies outside of them."""

import dataclasses
from collections.abc import Collection

from ...memory.pages import pages_for
from .request import PageSpace, PrefillRequest

MAX_SAMPLES = 256
"""First tokens that one transfer may ask for."""


@dataclasses.dataclass(frozen=True)
class PrefillLimits:
    """What is configured, and what the model allows."""

    page_size: int
    chunk_size: int
    max_queued_requests: int
    context_length: int
    vocab_size: int
    prefix_cache: bool = True
    stages: int = 1
    """Pipeline stages: so many steps compute at once."""
    steps_in_flight: int = 2
    """Steps given to the ranks at once: one that computes, and more so that no stage waits for the next."""

    def describe_problem(self, transfer: PrefillRequest, destination: PageSpace, num_pages: int) -> str | None:
        """One sentence when this transfer can never be served by `num_pages` pages of ours; everything in it came from
        a peer. None when it can.
        """
        length, wanted = transfer.prompt_tokens, transfer.destination
        if not 1 <= length <= self.context_length:
            return f"prompt of {length} tokens is outside [1, {self.context_length}]"
        if (token := _first_outside(transfer.prompt, self.vocab_size)) is not None:
            return f"prompt has token id {token}, outside [0, {self.vocab_size})"
        if pages_for(length, self.page_size) > num_pages:
            return f"prompt of {length} tokens exceeds prefill's KV pool of {num_pages * self.page_size} tokens"
        named = {"stop_token_ids": wanted.sampling.stop_token_ids, "logit_bias": dict(wanted.sampling.logit_bias)}
        for field, tokens in named.items():
            if (token := _first_outside(tokens, self.vocab_size)) is not None:
                return f"{field} has token id {token}, outside [0, {self.vocab_size})"
        if not 1 <= wanted.samples <= MAX_SAMPLES:
            return f"samples {wanted.samples} is outside [1, {MAX_SAMPLES}]"
        if not 0 <= wanted.output_tokens < length:
            return f"output_tokens {wanted.output_tokens} is outside [0, {length})"
        return _describe_destination(transfer, destination)


def _describe_destination(transfer: PrefillRequest, space: PageSpace) -> str | None:
    wanted, indices = transfer.destination, transfer.indices
    if not 0 <= wanted.prefix_tokens <= transfer.prompt_tokens:
        return f"prefix_tokens {wanted.prefix_tokens} is outside [0, {transfer.prompt_tokens}]"
    tokens = transfer.prompt_tokens - wanted.prefix_tokens
    if wanted.granularity == "page":
        if wanted.prefix_tokens % space.page_size:
            return f"prefix_tokens {wanted.prefix_tokens} is no multiple of the page size {space.page_size}"
        limit, needed = space.num_pages, pages_for(tokens, space.page_size)
    else:
        limit, needed = space.num_pages * space.page_size, tokens
    if len(indices) < needed:
        return f"{len(indices)} destination indices for {needed} {wanted.granularity}s"
    if (index := _first_outside(indices, limit)) is not None:
        return f"destination index {index} is outside [0, {limit})"
    return None


def _first_outside(numbers: Collection[int], end: int) -> int | None:
    """The first of these that is not in [0, end). They may be a million, so where all are there is no loop of ours."""
    if not numbers or (min(numbers) >= 0 and max(numbers) < end):
        return None
    return next(number for number in numbers if not 0 <= number < end)
