"""Converts a `/generate` body to checked, tokenized prompts."""

from ....common.sampling import LogprobParams
from ...text.tokenizer import Tokenizer
from ..common.calls import Call, check_prompt_logprobs, make_call, read_prompts
from ..common.fields import FieldError, check_within, parse_body
from ..common.limits import Limits
from ..common.routing import CallShape
from .models import GenerateBody, NativeSampling, is_id_batch


def parse_generate(body: bytes, limits: Limits, tokenizer: Tokenizer) -> Call[GenerateBody]:
    """Check and tokenize a body. Pure and thread-safe; long bodies are parsed off the event loop."""
    fields = parse_body(GenerateBody, body, limits.vocab_size)
    prompt_ids, batched = _read_prompts(fields, limits, tokenizer)
    shape = CallShape(len(prompt_ids), batched, samples=1)
    given = shape.spread(fields.sampling_params, "sampling_params")
    listed = isinstance(fields.sampling_params, list)
    params = [
        (sampling or NativeSampling(), f"sampling_params[{index}]." if listed else "sampling_params.")
        for index, sampling in enumerate(given)
    ]
    logprobs = _read_logprobs(fields, prompt_ids, shape)
    check_prompt_logprobs(prompt_ids, logprobs, params[0][0].samples, "logprob_start_len")
    return make_call(fields, params, prompt_ids, batched, logprobs, limits, stream=fields.stream)


def _read_prompts(fields: GenerateBody, limits: Limits, tokenizer: Tokenizer) -> tuple[list[tuple[int, ...]], bool]:
    text, input_ids = fields.text, fields.input_ids
    if (text is None) == (input_ids is None):
        given = "both were" if text is not None else "neither was"
        raise FieldError("text", f"or input_ids: give exactly one of them; {given} given")
    if text is not None:
        return read_prompts(text, "text", isinstance(text, list), limits, tokenizer), isinstance(text, list)
    assert input_ids is not None
    batched = is_id_batch(input_ids)
    return read_prompts(input_ids, "input_ids", batched, limits, tokenizer), batched


def _read_logprobs(
    fields: GenerateBody, prompts: list[tuple[int, ...]], shape: CallShape
) -> list[LogprobParams | None]:
    """Reads `return_logprob`, `top_logprobs_num` and `logprob_start_len`, in which -1 means output tokens only."""
    if fields.return_logprob is fields.top_logprobs_num is fields.logprob_start_len is None:
        return [None] * shape.prompts
    wanted = shape.spread(fields.return_logprob, "return_logprob")
    tops = shape.spread(fields.top_logprobs_num, "top_logprobs_num")
    starts = shape.spread(fields.logprob_start_len, "logprob_start_len")
    listed = isinstance(fields.logprob_start_len, list)
    logprobs: list[LogprobParams | None] = []
    for index, (ids, want, top, start) in enumerate(zip(prompts, wanted, tops, starts, strict=True)):
        name = f"logprob_start_len[{index}]" if listed else "logprob_start_len"
        first = -1 if start is None else check_within(start, name, -1, len(ids) - 1)
        logprobs.append(LogprobParams(top=top or 0, start=None if first == -1 else first) if want else None)
    return logprobs
