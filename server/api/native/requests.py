"""The `/generate` call: SGLang's native request, checked against what this server can do.

A call holds one prompt (`text` or `input_ids`) or a list of them. With a list, `sampling_params` and the fields for
log-probabilities may be lists of the same length; one value stands for all (server/api/common/routing.py has `rid` and
`bootstrap_*`). Fields it knows and cannot honour are refused, because ignoring them would answer another question; so
are names in `sampling_params` that it does not know, and misspelt or misplaced ones. Other unknown fields are ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ....configs.sampling import LogprobParams, SamplingParams
from ....configs.words import counted, shown
from ....scheduler.messages.frontend import Submit
from ...text.output_text import TextRules
from ...text.tokenizer import Tokenizer
from ..common.field_names import refuse_mistakes
from ..common.fields import (
    FieldError,
    Fields,
    as_fields,
    check_boolean,
    check_integer,
    check_token_ids,
    decode_object,
)
from ..common.limits import ContextLengthError, Limits
from ..common.routing import Route, per_prompt, read_routes
from ..common.sampling_fields import (
    NEUTRAL_SAMPLING_FIELDS,
    Dialect,
    read_samples,
    read_sampling,
    read_text_rules,
    refuse_unsupported,
)

MAX_TOP_LOGPROBS = 20
DIALECT = Dialect(max_new_tokens="max_new_tokens", min_new_tokens="min_new_tokens", default_new_tokens=128)

# Known to other servers, not to this one: harmless at these values, refused at any other.
NEUTRAL_CALL_FIELDS: Mapping[str, tuple[object, ...]] = {
    "token_ids_logprob": ([],),
    "return_hidden_states": (False,),
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "lora_path": ("",),
    "custom_logit_processor": (),
    "session_params": (),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked, tokenized prompt and how to continue it."""

    route: Route
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    text_rules: TextRules
    logprobs: LogprobParams | None = None

    def submit(self, client: str = "") -> Submit:
        return Submit(
            rid=self.route.rid,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            endpoint=self.route.endpoint,
            room=self.route.room,
            timeout_s=self.route.timeout_s,
            more_rids=self.route.more_rids,
            logprobs=self.logprobs,
            priority=self.route.priority,
            client=client,
        )


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """A checked `/generate` body. `group` is the one rid given for a list of prompts; aborting it aborts them all.

    `listed`: the answer is a list, prompt by prompt and sample by sample, and stream events carry their `index`.
    """

    prompts: tuple[Prompt, ...]
    listed: bool
    stream: bool
    group: str | None = None
    text_in_logprobs: bool = False


def parse_generate(body: bytes, limits: Limits, tokenizer: Tokenizer) -> GenerateCall:
    """Check and tokenize a body. Pure and thread-safe; long bodies are parsed off the event loop."""
    fields = Fields(decode_object(body))
    refuse_unsupported(fields, NEUTRAL_CALL_FIELDS)
    prompt_ids, batched = _read_prompts(fields, limits, tokenizer)
    count = len(prompt_ids)
    sampling_fields = _sampling_fields(fields, count, batched)
    samples = read_samples(sampling_fields, limits)
    routes, group = read_routes(fields, count, batched, samples, limits)
    logprobs = _read_logprobs(fields, prompt_ids, batched)
    prompts = []
    for index, ids in enumerate(prompt_ids):
        sampling = read_sampling(sampling_fields[index], limits, len(ids), DIALECT, samples)
        rules = read_text_rules(sampling_fields[index], sampling, limits)
        prompts.append(Prompt(routes[index], ids, sampling, rules, logprobs[index]))
    call = GenerateCall(
        prompts=tuple(prompts),
        listed=batched or samples > 1,
        stream=fields.boolean("stream", False),
        group=group,
        text_in_logprobs=fields.boolean("return_text_in_logprobs", False),
    )
    for params in sampling_fields:
        refuse_mistakes(params, {}, strict=True)
    refuse_mistakes(fields, dict.fromkeys(sampling_fields[0].read, "belongs in sampling_params"))
    return call


def check_prompt(prompt_ids: tuple[int, ...], name: str, limits: Limits) -> tuple[int, ...]:
    """A prompt that is neither empty nor too long for this server."""
    if not prompt_ids:
        raise FieldError(name, "is empty; give at least one token")
    if len(prompt_ids) > limits.max_prompt_tokens:
        raise ContextLengthError(name, f"has {counted(len(prompt_ids), 'token')}; {limits.describe_prompt()}")
    return prompt_ids


def check_text(text: str, name: str, limits: Limits, tokenizer: Tokenizer) -> None:
    """Refuse a text that is too long for this server before it is tokenized."""
    tokens = tokenizer.floor.above(text, limits.max_prompt_tokens)
    if tokens is not None:
        raise ContextLengthError(name, f"has at least {tokens} tokens; {limits.describe_prompt()}")


def split_batch(value: object, field: str, batched: bool, limits: Limits) -> list[tuple[object, str]]:
    """The prompts of a field, each with the name that errors give it."""
    if not batched:
        return [(value, field)]
    assert isinstance(value, list)
    if not value:
        raise FieldError(field, "is empty; give at least one prompt")
    if len(value) > limits.max_batch_items:
        raise FieldError(field, f"holds {len(value)} prompts; at most {limits.max_batch_items} are allowed")
    return [(item, f"{field}[{index}]") for index, item in enumerate(value)]


def read_text(value: object, name: str, limits: Limits, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not isinstance(value, str):
        raise FieldError(name, f"must be a string, got {shown(value)}")
    check_text(value, name, limits, tokenizer)
    return check_prompt(tuple(tokenizer.encode(value)) if value else (), name, limits)


def read_ids(value: object, name: str, limits: Limits) -> tuple[int, ...]:
    return check_prompt(check_token_ids(value, name, limits.vocab_size), name, limits)


def _read_prompts(fields: Fields, limits: Limits, tokenizer: Tokenizer) -> tuple[list[tuple[int, ...]], bool]:
    text, input_ids = fields.raw("text"), fields.raw("input_ids")
    if (text is None) == (input_ids is None):
        given = "both were" if text is not None else "neither was"
        raise FieldError("text", f"or input_ids: give exactly one of them; {given} given")
    if text is not None:
        batched = isinstance(text, list)
        texts = split_batch(text, "text", batched, limits)
        return [read_text(item, name, limits, tokenizer) for item, name in texts], batched
    batched = isinstance(input_ids, list) and bool(input_ids) and isinstance(input_ids[0], list)
    lists = split_batch(input_ids, "input_ids", batched, limits)
    return [read_ids(item, name, limits) for item, name in lists], batched


def _sampling_fields(fields: Fields, prompts: int, batched: bool) -> list[Fields]:
    given = per_prompt(fields, "sampling_params", prompts, batched)
    if given is None:
        sampling = [fields.object("sampling_params")] * prompts
    else:
        sampling = [as_fields(value, f"sampling_params[{index}]") for index, value in enumerate(given)]
    for params in sampling:
        refuse_unsupported(params, NEUTRAL_SAMPLING_FIELDS)
    return sampling


def _read_logprobs(fields: Fields, prompts: Sequence[tuple[int, ...]], batched: bool) -> list[LogprobParams | None]:
    """`return_logprob`, `top_logprobs_num` and `logprob_start_len`, whose -1 stands for output tokens only."""

    def spread(field: str) -> list[tuple[object, str]]:
        given = per_prompt(fields, field, len(prompts), batched)
        if given is None:
            return [(fields.raw(field), field)] * len(prompts)
        return [(value, f"{field}[{index}]") for index, value in enumerate(given)]

    wanted, tops, starts = spread("return_logprob"), spread("top_logprobs_num"), spread("logprob_start_len")
    logprobs: list[LogprobParams | None] = []
    for ids, (want, want_name), (top, top_name), (start, start_name) in zip(prompts, wanted, tops, starts, strict=True):
        top_count = 0 if top is None else check_integer(top, top_name, 0, MAX_TOP_LOGPROBS)
        first = -1 if start is None else check_integer(start, start_name, -1, len(ids) - 1)
        if want is None or not check_boolean(want, want_name):
            logprobs.append(None)
        else:
            logprobs.append(LogprobParams(top=top_count, start=None if first == -1 else first))
    return logprobs
