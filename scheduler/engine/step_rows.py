"""The rows of a step as the ranks get them."""

from collections.abc import Callable, Sequence

import msgspec

from ...common.sampling import LogprobParams, SamplingParams
from ...memory.index_spaces import RequestSlot
from ..chunking.chunk_queue import Chunk
from ..decode.requests.request import LocalPrompt
from ..decode.rooms.batch import DecodeRow
from ..messages.step import Draw, StepRow
from ..prefill.request import PrefillRequest


def decode_row(row: DecodeRow) -> StepRow:
    """One token of a running request. Prompt ids would be most of the message, so they are sent only for penalties."""
    request = row.request
    return StepRow(
        token_ids=() if row.token is None else (row.token,),
        start=row.position,
        pages=row.pages,
        draws=(request.draw(row.output_index, joined=row.joined),),
        prompt_ids=request.prompt_ids if request.counts_tokens else (),
        top_logprobs=request.logprobs.top if request.logprobs is not None else None,
        follows=row.follows,
        hot_slot=row.hot_slot,
    )


def local_row(chunk: Chunk[LocalPrompt]) -> StepRow:
    """A chunk that a decode server computes itself."""
    prompt = chunk.owner.prompt
    return _prompt_row(
        prompt.token_ids,
        chunk.start,
        chunk.end,
        chunk.owner.pages,
        listed=lambda: prompt.token_ids,
        sampling=prompt.first_sampling,
        draws=prompt.samples if chunk.last else 0,
        outputs=prompt.output_tokens,
        logprobs=prompt.waiting[0].logprobs,
        hot_slot=chunk.owner.hot_slot,
    )


def prefill_row(chunk: Chunk[PrefillRequest]) -> StepRow:
    """A chunk of a prefill server."""
    request, start, end = chunk
    destination = request.destination
    return _prompt_row(
        request.token_ids,
        start,
        end,
        request.granted.pages,
        listed=lambda: request.listed_ids,
        sampling=destination.sampling,
        draws=destination.samples if chunk.last else 0,
        outputs=destination.output_tokens,
        logprobs=destination.logprobs,
    )


def _prompt_row(
    ids: Sequence[int],
    start: int,
    end: int,
    pages: Sequence[int],
    *,
    listed: Callable[[], Sequence[int]],
    sampling: SamplingParams,
    draws: int,
    outputs: int,
    logprobs: LogprobParams | None,
    hot_slot: RequestSlot | None = None,
) -> StepRow:
    """Tokens [start, end) of a prompt. The last chunk draws the first token of each sample, with seed + 0, + 1, ...

    The whole prompt would be most of the message, so it is sent only for penalties and prompt log-probabilities. The
    last `outputs` of the ids are output of a retracted request: penalties and grammars count them as output. `listed`
    returns the ids as a sequence that messages may have.
    """
    scored_from = logprobs.start if logprobs is not None and not outputs else None
    counts = draws > 0 and sampling.counts_tokens
    output = tuple(ids[len(ids) - outputs :]) if counts or (draws > 0 and sampling.grammar is not None) else ()
    whole = listed() if counts or scored_from is not None else ()
    samplings = [msgspec.structs.replace(sampling, seed=sampling.seed + index) for index in range(draws)]
    return StepRow(
        token_ids=tuple(ids[start:end]),
        start=start,
        pages=pages,
        draws=tuple(Draw(sampling, outputs, output) for sampling in samplings),
        prompt_ids=whole[: len(whole) - outputs],
        top_logprobs=logprobs.top if logprobs is not None else None,
        prompt_logprobs_from=scored_from,
        hot_slot=hot_slot,
    )
