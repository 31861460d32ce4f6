"""Bodies of `/v1/completions` as checked, tokenized prompts, as for `/generate`."""

from dataclasses import replace

from ....configs.sampling import LogprobParams
from ...text.prompt_echo import make_echo
from ...text.tokenizer import Tokenizer
from ..common.fields import FieldError, parse_body
from ..common.limits import Limits
from ..native.requests import Call, make_call, read_prompts
from .models import CompletionBody, OpenAiBody, StreamOptions, is_prompt_batch


def parse_completion(body: bytes, limits: Limits, tokenizer: Tokenizer) -> Call:
    fields = parse_body(CompletionBody, body, limits.vocab_size)
    batched = is_prompt_batch(fields.prompt)
    prompts = read_prompts(fields.prompt, "prompt", batched, limits, tokenizer)
    call = make_openai_call(fields, limits, prompts, batched, fields.logprobs, echo=bool(fields.echo))
    if not fields.echo:
        return call
    given = fields.prompt if batched else [fields.prompt]
    return replace(
        call, echoes=tuple(make_echo(item, ids, tokenizer) for item, ids in zip(given, prompts, strict=True))
    )


def make_openai_call(
    fields: OpenAiBody,
    limits: Limits,
    prompts: list[tuple[int, ...]],
    batched: bool,
    top_logprobs: int | None,
    *,
    echo: bool = False,
) -> Call:
    """The call of a checked body; `prompts` are its token ids. `top_logprobs` are the alternatives of each output
    token, None without log-probabilities; with `echo`, of prompt tokens too.
    """
    samples = fields.samples
    if fields.best_of not in (None, 1, samples):
        raise FieldError(
            "best_of", f"must equal n ({samples}): every sample that is drawn is returned; got {fields.best_of}"
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise FieldError("prompt_logprobs", f"is not available in a stream, got {fields.prompt_logprobs}")
    count, logprobs = len(prompts), _logprobs(top_logprobs, fields.prompt_logprobs, echo)
    call = make_call(fields, [(fields, "")] * count, prompts, batched, [logprobs] * count, limits, stream=fields.stream)
    options = fields.stream_options or StreamOptions()
    return replace(
        call,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        return_token_ids=bool(fields.return_token_ids),
        top_logprobs=top_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )


def _logprobs(output_top: int | None, prompt_top: int | None, echo: bool) -> LogprobParams | None:
    """What the engine computes for both: it has one number of alternatives."""
    if output_top is None and prompt_top is None:
        return None
    of_prompt = prompt_top is not None or echo
    return LogprobParams(top=max(output_top or 0, prompt_top or 0), start=0 if of_prompt else None)
