"""OpenAI's `/v1/completions` and `/v1/chat/completions` requests, on the same core as `/generate`.

Sampling fields stand at the top level; `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `stop_token_ids`,
`ignore_eos`, `skip_special_tokens`, `no_stop_trim`, `rid`, `priority`, `timeout_s`, `bootstrap_*` and, for chat,
`chat_template_kwargs`, `add_generation_prompt` and `continue_final_message` are accepted as extensions. Fields that
would change the answer and are not implemented are refused, and so are misspelt ones; other unknown fields are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ....configs.sampling import LogprobParams
from ....configs.words import shown
from ...text.prompt_echo import Echo, make_echo
from ...text.tokenizer import Tokenizer
from ..common.field_names import refuse_mistakes
from ..common.fields import FieldError, Fields, as_fields, check_integer, decode_object
from ..common.limits import Limits
from ..common.routing import read_routes
from ..common.sampling_fields import (
    NEUTRAL_SAMPLING_FIELDS,
    Dialect,
    read_samples,
    read_sampling,
    read_text_rules,
    refuse_unsupported,
)
from ..native.requests import MAX_TOP_LOGPROBS, Prompt, check_prompt, check_text, read_ids, read_text, split_batch

DEFAULT_COMPLETION_TOKENS = 128
DEFAULT_CHAT_TOKENS = 1024
MAX_MESSAGES = 4096

# Known to OpenAI, SGLang or vLLM, not to this server: harmless at these values, refused at any other.
NEUTRAL_FIELDS: Mapping[str, tuple[object, ...]] = {
    **NEUTRAL_SAMPLING_FIELDS,
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "documents": ([],),
    "chat_template": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "prompt_embeds": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "return_hidden_states": (False,),
    "lora_path": ("",),
    "custom_logit_processor": (),
}

NEUTRAL_MESSAGE_FIELDS: Mapping[str, tuple[object, ...]] = {"tool_calls": ([],), "function_call": ()}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})

# Names that `/generate` has for the same thing.
OTHER_NAMES = {
    "max_new_tokens": "is for /generate; here it is max_tokens",
    "min_new_tokens": "is for /generate; here it is min_tokens",
    "sampling_params": "is for /generate; here its fields stand at the top level",
}


@dataclass(frozen=True, slots=True)
class OpenAiCall:
    """A checked body of either route."""

    prompts: tuple[Prompt, ...]
    stream: bool
    include_usage: bool
    group: str | None = None
    echoes: tuple[Echo, ...] = ()
    """What the answers to each prompt begin with; empty when they do not begin with their prompts."""


def parse_completion(body: bytes, limits: Limits, tokenizer: Tokenizer) -> OpenAiCall:
    """`prompt` is a string, a list of strings, a list of token ids or a list of such lists."""
    fields = Fields(decode_object(body))
    value = fields.raw("prompt")
    if value is None:
        raise FieldError("prompt", "is required")
    batched = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    items = split_batch(value, "prompt", batched, limits)
    prompts = [
        read_ids(item, name, limits) if isinstance(item, list) else read_text(item, name, limits, tokenizer)
        for item, name in items
    ]
    refuse_unsupported(fields, {"add_special_tokens": (True,)})
    echo = fields.boolean("echo", False)
    logprobs = _read_completion_logprobs(fields, echo)
    call = _read_call(fields, limits, prompts, batched, DEFAULT_COMPLETION_TOKENS, logprobs)
    if not echo:
        return call
    echoes = [make_echo(item, ids, tokenizer) for (item, _), ids in zip(items, prompts, strict=True)]
    return replace(call, echoes=tuple(echoes))


def parse_chat(body: bytes, limits: Limits, tokenizer: Tokenizer) -> OpenAiCall:
    """`messages` are rendered with the model's own chat template."""
    fields = Fields(decode_object(body))
    if not tokenizer.has_chat_template:
        raise FieldError("messages", "cannot be rendered: the model has no chat template; use /v1/completions")
    given = fields.array("messages", MAX_MESSAGES)
    if not given:
        raise FieldError("messages", "is required and must not be empty")
    refuse_unsupported(fields, {"add_special_tokens": (False,), "echo": (False,)})
    text = read_chat(fields, given, tokenizer)
    check_text(text, "messages", limits, tokenizer)
    prompt_ids = check_prompt(encode_chat(text, tokenizer), "messages", limits)
    return _read_call(fields, limits, [prompt_ids], False, DEFAULT_CHAT_TOKENS, _read_chat_logprobs(fields))


def encode_chat(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of a rendered chat. The template writes the BOS token itself."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def read_chat(fields: Fields, given: list[object], tokenizer: Tokenizer) -> str:
    """The text of a chat. With `continue_final_message` the answer goes on with the last message's own words."""
    messages = [_read_message(message, f"messages[{index}]") for index, message in enumerate(given)]
    variables = _read_template_variables(fields)
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    begun = ""
    if fields.boolean("continue_final_message", False):
        last = messages.pop()
        if last["role"] != "assistant":
            raise FieldError("continue_final_message", f"needs an assistant's message at the end, not {last['role']}'s")
        begun, add_generation_prompt = last["content"], True
    return tokenizer.render_chat(messages, add_generation_prompt, variables) + begun


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
    _check_best_of(fields, samples)
    routes, group = read_routes(fields, len(prompts), batched, samples, limits)
    max_tokens = fields.spelling("max_completion_tokens", "max_tokens")
    dialect = Dialect(max_tokens, min_new_tokens="min_tokens", default_new_tokens=default_new_tokens)
    checked = []
    for route, ids in zip(routes, prompts, strict=True):
        sampling = read_sampling(fields, limits, len(ids), dialect, samples)
        checked.append(Prompt(route, ids, sampling, read_text_rules(fields, sampling, limits), logprobs))
    call = OpenAiCall(
        prompts=tuple(checked),
        stream=fields.boolean("stream", False),
        include_usage=fields.object("stream_options").boolean("include_usage", False),
        group=group,
    )
    refuse_mistakes(fields, OTHER_NAMES)
    return call


def _check_best_of(fields: Fields, samples: int) -> None:
    """`best_of` would draw so many samples and return the best `n`; here nothing is drawn to be thrown away."""
    best_of = fields.integer("best_of", 1)
    if best_of not in (None, 1, samples):
        raise FieldError("best_of", f"must equal n ({samples}): every sample that is drawn is returned; got {best_of}")


def _read_completion_logprobs(fields: Fields, echo: bool) -> LogprobParams | None:
    """`logprobs` is the number of alternatives; clients that want none also write false. An echo has them too."""
    value = fields.raw("logprobs")
    if value is None or value is False:
        return None
    return LogprobParams(top=check_integer(value, "logprobs", 0, MAX_TOP_LOGPROBS), start=0 if echo else None)


def _read_chat_logprobs(fields: Fields) -> LogprobParams | None:
    """`logprobs` is a switch here, and `top_logprobs` the number of alternatives."""
    top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if not fields.boolean("logprobs", False):
        if top:
            raise FieldError("top_logprobs", f"needs logprobs to be true, got {top} without it")
        return None
    return LogprobParams(top=top)


def _read_template_variables(fields: Fields) -> dict[str, object]:
    """`chat_template_kwargs`: what the model's template knows beyond messages, such as Qwen3's `enable_thinking`."""
    value = fields.raw("chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise FieldError("chat_template_kwargs", f"must be an object, got {shown(value)}")
    for name in sorted(value.keys() & RESERVED_VARIABLES):
        raise FieldError(f"chat_template_kwargs.{name}", "is not the template's to be given; it is a field of its own")
    return value


def _read_message(value: object, path: str) -> dict[str, str]:
    """A message with its content as one string; content parts other than text, and calls of tools, are refused."""
    message = as_fields(value, path)
    refuse_unsupported(message, NEUTRAL_MESSAGE_FIELDS)
    role = message.string("role", 64)
    if role is None:
        raise message.error("role", "is required")
    if role.lower() not in ROLES:
        raise message.error("role", f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    content = message.raw("content")
    if isinstance(content, list):
        parts = [as_fields(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
        for part in parts:
            if part.raw("type") != "text" or not isinstance(part.raw("text"), str):
                raise part.error("type", f"must be text with a string in text, got {shown(part.raw('type'))}")
        content = "".join(str(part.raw("text")) for part in parts)
    if not isinstance(content, str):
        raise message.error("content", f"must be a string or an array of text parts, got {shown(content)}")
    return {"role": role.lower(), "content": content}
