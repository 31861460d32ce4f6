"""The messages that end a request, and the reasons to refuse one."""

from collections.abc import Container

from ...common.errors import (
    ClientError,
    DuplicateRequestError,
    GrammarTooComplexError,
    RequestError,
    ServerError,
    TooLargeError,
    UnavailableError,
)
from ..messages.frontend import Failed, Finished, FinishReason, Submit
from .memory.request_memory import pages_needed
from .requests.limits import DecodeLimits
from .requests.request import Request


def refusal(
    submit: Submit,
    known_rids: Container[str],
    num_pages: int,
    limits: DecodeLimits,
    *,
    local: bool,
) -> RequestError | None:
    """The error for a prompt that this server, with `num_pages` pages, can never serve; None if it can.

    With `local`, this server is the one that can compute the longest prompts. It then reserves pages for the whole
    prompt and its growth, also behind a sliding window.
    """
    page_size, window = limits.page_size, limits.window
    rids = (submit.rid, *submit.more_rids)
    for rid in rids:
        if rid in known_rids or rids.count(rid) > 1:
            return DuplicateRequestError(f"rid: {rid!r} is already in use; choose another")
    prompt_tokens, new_tokens = len(submit.prompt_ids), submit.sampling.max_new_tokens
    if prompt_tokens < 1:
        return ClientError("the prompt is empty; give at least 1 token")
    samples, most_tokens = len(rids), prompt_tokens + new_tokens - 1
    needed = pages_needed(prompt_tokens, samples, most_tokens, page_size, window)
    if local:
        at_first = min(most_tokens, prompt_tokens + limits.growth_tokens)
        needed = max(needed, pages_needed(prompt_tokens, samples, at_first, page_size))
    if needed > num_pages:
        times = f" for each of {samples} samples" if samples > 1 else ""
        return TooLargeError(
            f"the prompt ({prompt_tokens} tokens) and up to {new_tokens} new tokens{times} exceed the KV pool of "
            f"{num_pages * page_size} tokens"
        )
    return None


def too_long(
    tokens: int, output_tokens: int, prefill_tokens: float, *, local: bool, window: int | None
) -> RequestError:
    """The error for a prompt that is too long for every server. The largest limit is `prefill_tokens`: the KV pool of a
    prefill server or, with `local`, a pool of this server (its KV pool with a `window`, otherwise its hot pool). With
    `output_tokens`, the prompt was short enough when it was submitted, and has grown since.
    """
    pool = f"prefill's KV pool of {prefill_tokens:.0f} tokens"
    if local:
        kind = "hot" if window is None else "KV"
        pool = f"this server's {kind} pool, in which it computes prompts of up to {prefill_tokens:.0f} tokens"
    if output_tokens:
        return UnavailableError(f"the request has grown to {tokens} tokens and lost its KV; they exceed {pool}")
    return TooLargeError(f"the prompt ({tokens} tokens) exceeds {pool}")


def finished(request: Request, reason: FinishReason, now: float) -> Finished:
    return Finished(
        rid=request.rid,
        reason=reason,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=len(request.output_ids),
        cached_tokens=request.done.cached_tokens if request.done is not None else 0,
        timeline=request.timeline(now),
        kv_path=request.kv_path,
        stored_tokens=request.done.stored_tokens if request.done is not None else 0,
        host_tokens=request.host_tokens,
    )


def failed(rid: str, error: RequestError) -> Failed:
    return Failed(rid, error.status, error.code, str(error), error.retry_after_s)


def grammar_failure(problem: str, too_complex: bool) -> RequestError:
    """Why a request ends whose grammar cannot be followed."""
    if too_complex:
        return GrammarTooComplexError(f"the grammar has become too complex at this output: {problem}")
    return ServerError(f"the grammar cannot be followed: {problem}")
