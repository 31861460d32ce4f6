"""Bodies of `/v1/completions` as checked, tokenized prompts, as for `/generate`."""

from dataclasses import replace

from ....configs.sampling import LogprobParams
from ...text.prompt_echo import make_echo
from ...text.tokenizer import Tokenizer
from ..common.fields import FieldError, parse_body
from ..common.limits import Limits
from ..native.requests import Call, make_call, read_prompts
from .models import CompletionBody, OpenAiBody, is_prompt_batch


def parse_completion(body: bytes, limits: Limits, tokenizer: Tokenizer) -> Call:
    fields = parse_body(CompletionBody, body, limits.vocab_size)
    batched = is_prompt_batch(fields.prompt)
    prompts = read_prompts(fields.prompt, "prompt", batched, limits, tokenizer)
    logprobs = None
    if fields.logprobs is not None:
        logprobs = LogprobParams(top=fields.logprobs, start=0 if fields.echo else None)
    call = make_openai_call(fields, limits, prompts, batched, logprobs)
    if not fields.echo:
        return call
    given = fields.prompt if batched else [fields.prompt]
    return replace(
        call, echoes=tuple(make_echo(item, ids, tokenizer) for item, ids in zip(given, prompts, strict=True))
    )


def make_openai_call(
    fields: OpenAiBody, limits: Limits, prompts: list[tuple[int, ...]], batched: bool, logprobs: LogprobParams | None
) -> Call:
    """The call of a checked body; `prompts` are its token ids."""
    samples = fields.samples
    if fields.best_of not in (None, 1, samples):
        raise FieldError(
            "best_of", f"must equal n ({samples}): every sample that is drawn is returned; got {fields.best_of}"
        )
    count = len(prompts)
    call = make_call(fields, [(fields, "")] * count, prompts, batched, [logprobs] * count, limits, stream=fields.stream)
    return replace(call, include_usage=fields.stream_options is not None and bool(fields.stream_options.include_usage))
