"""Converts bodies of `/v1/completions` to checked, tokenized prompts, as generate/requests.py does for `/generate`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ....common.sampling import LogprobParams
from ...text.prompt_echo import make_echo
from ...text.tokenizer import Tokenizer
from ..common.calls import Call, check_prompt_logprobs, make_call, read_prompts
from ..common.fields import FieldError, parse_body
from ..common.grammar_fields import NamedGrammar
from ..common.limits import Limits
from .models import CompletionBody, OpenAiBody, is_prompt_batch

MOST_ECHOED = 1 << 22
MOST_RETURNED_IDS = 1 << 21
"""Characters and token ids of the prompts that the answer to a call may repeat: they are written at once, in 25 ms."""

BodyT = TypeVar("BodyT", bound=OpenAiBody)


def parse_completion(body: bytes, limits: Limits, tokenizer: Tokenizer) -> Call[CompletionBody]:
    fields = parse_body(CompletionBody, body, limits.vocab_size)
    batched = is_prompt_batch(fields.prompt)
    prompts = read_prompts(fields.prompt, "prompt", batched, limits, tokenizer)
    call = make_openai_call(fields, limits, prompts, batched, echo=bool(fields.echo))
    if not fields.echo:
        return call
    given = fields.prompt if batched else [fields.prompt]
    echoes = tuple(make_echo(item, ids, tokenizer) for item, ids in zip(given, prompts, strict=True))
    _check_repeated("echo", sum(len(echo.text) for echo in echoes), fields.samples, MOST_ECHOED, "characters")
    return replace(call, echoes=echoes)


def _check_repeated(name: str, of_prompts: int, samples: int, most: int, unit: str) -> None:
    """Raises FieldError if too much of the prompts is repeated in the answer: in each sample, and at once."""
    if of_prompts * samples > most:
        raise FieldError(
            name,
            f"asks for {of_prompts} {unit} of prompts in each of {samples} samples = {of_prompts * samples}; at most "
            f"{most} are allowed",
        )


def make_openai_call(
    fields: BodyT,
    limits: Limits,
    prompts: list[tuple[int, ...]],
    batched: bool,
    grammars: Sequence[NamedGrammar | None] | None = None,
    *,
    echo: bool = False,
) -> Call[BodyT]:
    """Makes the call of a checked body with the token ids `prompts`. With `echo`, log-probabilities, if they are asked
    for, include those of the prompt.
    """
    samples = fields.samples
    if fields.best_of not in (None, 1, samples):
        raise FieldError(
            "best_of", f"must equal n ({samples}): every sample that is drawn is returned; got {fields.best_of}"
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise FieldError("prompt_logprobs", f"is not available in a stream, got {fields.prompt_logprobs}")
    if fields.return_token_ids:
        _check_repeated("return_token_ids", sum(map(len, prompts)), samples, MOST_RETURNED_IDS, "token ids")
    params, logprobs = [(fields, "")] * len(prompts), [_logprobs(fields, echo)] * len(prompts)
    asking = "echo" if fields.prompt_logprobs is None else "prompt_logprobs"
    check_prompt_logprobs(prompts, logprobs, samples, asking)
    return make_call(fields, params, prompts, batched, logprobs, limits, stream=fields.stream, grammars=grammars)


def _logprobs(fields: OpenAiBody, echo: bool) -> LogprobParams | None:
    """The log-probabilities that the engine computes. It has one number of alternatives for output and prompt: the
    larger one.
    """
    output_top, prompt_top = fields.output_alternatives, fields.prompt_logprobs
    if output_top is None and prompt_top is None:
        return None
    of_prompt = prompt_top is not None or echo
    return LogprobParams(top=max(output_top or 0, prompt_top or 0), start=0 if of_prompt else None)
