"""The messages that end a request, and some of the errors in them."""

from ...common.errors import (
    GrammarTooComplexError,
    RequestError,
    ServerError,
    TooLargeError,
    UnavailableError,
)
from ..messages.frontend import Failed, Finished, FinishReason
from .requests.request import Request


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
