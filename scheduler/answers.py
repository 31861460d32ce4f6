"""The answers that end a request, and the reasons not to take one in."""

from collections.abc import Container

from ..configs.errors import ClientError, DuplicateRequestError, OverloadedError, RequestError, TooLargeError
from .front import Failed, Finished, FinishReason, Submit
from .intake import DecodeLimits
from .request import Request
from .reservation import pages_needed


def refusal(
    submit: Submit, known_rids: Container[str], num_pages: int, queued: int, limits: DecodeLimits
) -> RequestError | None:
    """Why a server with `num_pages` pages and `queued` prompts does not take this one; None where it does."""
    rids = (submit.rid, *submit.more_rids)
    for rid in rids:
        if rid in known_rids or rids.count(rid) > 1:
            return DuplicateRequestError(f"rid: {rid!r} is already in use; choose another")
    prompt_tokens, new_tokens = len(submit.prompt_ids), submit.sampling.max_new_tokens
    if prompt_tokens < 1:
        return ClientError("input_ids: the prompt is empty; give at least 1 token")
    samples, most_tokens = len(rids), prompt_tokens + new_tokens - 1
    if pages_needed(prompt_tokens, samples, most_tokens, limits.page_size) > num_pages:
        times = f" x {samples} samples" if samples > 1 else ""
        return TooLargeError(
            f"input_ids: prompt ({prompt_tokens} tokens) + max_new_tokens ({new_tokens}){times} exceed the KV pool "
            f"of {num_pages * limits.page_size} tokens"
        )
    if queued >= limits.max_queued_requests:
        return OverloadedError(
            f"max_queued_requests: {limits.max_queued_requests} prompts are queued already", retry_after_s=1.0
        )
    return None


def finished(request: Request, reason: FinishReason, now: float) -> Finished:
    return Finished(
        rid=request.rid,
        reason=reason,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=len(request.output_ids),
        cached_tokens=request.done.cached_tokens if request.done is not None else 0,
        timeline=request.timeline(now),
    )


def failed(rid: str, error: RequestError) -> Failed:
    return Failed(rid, error.status, error.code, str(error), error.retry_after_s)
