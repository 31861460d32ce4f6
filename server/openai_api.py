"""OpenAI's `/v1/completions` and `/v1/chat/completions` requests, on the same core as `/generate`.

Sampling fields stand at the top level; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`,
`ignore_eos`, `rid`, `priority`, `timeout_s` and `bootstrap_*` are accepted as extensions. Fields that would change the
answer and are not implemented are refused.
"""

from dataclasses import dataclass

from ..configs.sampling import LogprobParams
from .fields import FieldError, Fields, as_fields, check_integer, decode_object, shown
from .generate import MAX_TOP_LOGPROBS, Prompt, check_prompt, read_ids, read_text, split_batch
from .limits import Limits
from .routing import read_routes
from .sampling_fields import (
    NEUTRAL_SAMPLING_FIELDS,
    Dialect,
    read_samples,
    read_sampling,
    read_text_rules,
    refuse_unsupported,
)
from .tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 128
DEFAULT_CHAT_TOKENS = 1024
MAX_MESSAGES = 4096

NEUTRAL_FIELDS: dict[str, tuple[object, ...]] = NEUTRAL_SAMPLING_FIELDS | {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True, slots=True)
class OpenAiCall:
    """A checked body of either route."""

    prompts: tuple[Prompt, ...]
    stream: bool
    include_usage: bool
    group: str | None = None


def parse_completion(body: bytes, limits: Limits, tokenizer: Tokenizer) -> OpenAiCall:
    """`prompt` is a string, a list of strings, a list of token ids or a list of such lists."""
    fields = Fields(decode_object(body))
    value = fields.raw("prompt")
    if value is None:
        raise FieldError("prompt", "is required")
    batched = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = []
    for item, name in split_batch(value, "prompt", batched, limits):
        is_text = not isinstance(item, list)
        prompts.append(read_text(item, name, limits, tokenizer) if is_text else read_ids(item, name, limits))
    logprobs = _read_completion_logprobs(fields)
    return _read_call(fields, limits, prompts, batched, DEFAULT_COMPLETION_TOKENS, logprobs)


def parse_chat(body: bytes, limits: Limits, tokenizer: Tokenizer) -> OpenAiCall:
    """`messages` are rendered with the model's own chat template."""
    fields = Fields(decode_object(body))
    if not tokenizer.has_chat_template:
        raise FieldError("messages", "cannot be rendered: the model has no chat template; use /v1/completions")
    given = fields.array("messages", MAX_MESSAGES)
    if not given:
        raise FieldError("messages", "is required and must not be empty")
    messages = [_read_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    rendered = tokenizer.render_chat(messages, add_generation_prompt=True)
    # the template writes the BOS token itself
    prompt_ids = check_prompt(tuple(tokenizer.encode(rendered, add_special_tokens=False)), "messages", limits)
    return _read_call(fields, limits, [prompt_ids], False, DEFAULT_CHAT_TOKENS, _read_chat_logprobs(fields))


def _read_call(
    fields: Fields,
    limits: Limits,
    prompts: list[tuple[int, ...]],
    batched: bool,
    default_new_tokens: int,
    logprobs: LogprobParams | None,
) -> OpenAiCall:
    refuse_unsupported(fields, NEUTRAL_FIELDS)
    samples = read_samples([fields] * len(prompts), limits)
    routes, group = read_routes(fields, len(prompts), batched, samples, limits)
    max_tokens = "max_completion_tokens" if fields.raw("max_completion_tokens") is not None else "max_tokens"
    dialect = Dialect(max_tokens, min_new_tokens="min_tokens", default_new_tokens=default_new_tokens)
    checked = []
    for route, ids in zip(routes, prompts, strict=True):
        sampling = read_sampling(fields, limits, len(ids), dialect, samples)
        checked.append(Prompt(route, ids, sampling, read_text_rules(fields, sampling, limits), logprobs))
    return OpenAiCall(
        prompts=tuple(checked),
        stream=fields.boolean("stream", False),
        include_usage=fields.object("stream_options").boolean("include_usage", False),
        group=group,
    )


def _read_completion_logprobs(fields: Fields) -> LogprobParams | None:
    """`logprobs` is the number of alternatives; clients that want none also write false."""
    value = fields.raw("logprobs")
    if value is None or value is False:
        return None
    return LogprobParams(top=check_integer(value, "logprobs", 0, MAX_TOP_LOGPROBS))


def _read_chat_logprobs(fields: Fields) -> LogprobParams | None:
    """`logprobs` is a switch here, and `top_logprobs` the number of alternatives."""
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if not fields.boolean("logprobs", False):
        if top:
            raise FieldError("top_logprobs", f"needs logprobs to be true, got {top} without it")
        return None
    return LogprobParams(top=top)


def _read_message(value: object, path: str) -> dict[str, object]:
    """A message with its content as one string; content parts other than text are refused."""
    message = as_fields(value, path)
    role = message.string("role", 64)
    if role is None:
        raise message.error("role", "is required")
    content = message.raw("content")
    if isinstance(content, list):
        parts = [as_fields(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
        for part in parts:
            if part.raw("type") != "text" or not isinstance(part.raw("text"), str):
                raise part.error("type", f"must be text with a string in text, got {shown(part.raw('type'))}")
        content = "".join(str(part.raw("text")) for part in parts)
    if not isinstance(content, str):
        raise message.error("content", f"must be a string or an array of text parts, got {shown(content)}")
    return {"role": role, "content": content}
