"""Bodies of `/v1/completions` and `/v1/chat/completions` as checked, tokenized prompts, as for `/generate`."""

from dataclasses import replace

from ....configs.sampling import LogprobParams
from ...text.prompt_echo import make_echo
from ...text.tokenizer import Tokenizer
from ..common.fields import FieldError, parse_body
from ..common.limits import Limits
from ..native.requests import Call, check_prompt, check_text, make_call, read_prompts
from .models import ChatBody, CompletionBody, Message, OpenAiBody, StreamOptions, TemplateFields, is_prompt_batch


def parse_completion(body: bytes, limits: Limits, tokenizer: Tokenizer) -> Call:
    fields = parse_body(CompletionBody, body, limits.vocab_size)
    batched = is_prompt_batch(fields.prompt)
    prompts = read_prompts(fields.prompt, "prompt", batched, limits, tokenizer)
    call = _make_call(fields, limits, prompts, batched, fields.logprobs, echo=bool(fields.echo))
    if not fields.echo:
        return call
    given = fields.prompt if batched else [fields.prompt]
    return replace(
        call, echoes=tuple(make_echo(item, ids, tokenizer) for item, ids in zip(given, prompts, strict=True))
    )


def parse_chat(body: bytes, limits: Limits, tokenizer: Tokenizer) -> Call:
    """`messages` are rendered with the model's own chat template."""
    fields = parse_body(ChatBody, body, limits.vocab_size)
    if not tokenizer.has_chat_template:
        raise FieldError("messages", "cannot be rendered: the model has no chat template; use /v1/completions")
    if fields.top_logprobs and not fields.logprobs:
        raise FieldError("top_logprobs", f"needs logprobs to be true, got {fields.top_logprobs} without it")
    text = render_chat(fields, fields.messages, tokenizer)
    check_text(text, "messages", limits, tokenizer)
    prompt_ids = check_prompt(encode_chat(text, tokenizer), "messages", limits)
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    return _make_call(fields, limits, [prompt_ids], False, top_logprobs)


def encode_chat(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of a rendered chat. The template writes the BOS token itself."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def render_chat(fields: TemplateFields, given: list[Message], tokenizer: Tokenizer) -> str:
    """The text of a chat. With `continue_final_message` it ends with the last message's content."""
    messages = [{"role": message.role, "content": message.text} for message in given]
    add_generation_prompt, begun = fields.add_generation_prompt is not False, ""
    if fields.continue_final_message:
        last = messages.pop()
        if last["role"] != "assistant":
            raise FieldError("continue_final_message", f"needs an assistant's message at the end, not {last['role']}'s")
        begun, add_generation_prompt = last["content"], True
    return tokenizer.render_chat(messages, add_generation_prompt, fields.chat_template_kwargs or {}) + begun


def _make_call(
    fields: OpenAiBody,
    limits: Limits,
    prompts: list[tuple[int, ...]],
    batched: bool,
    top_logprobs: int | None,
    *,
    echo: bool = False,
) -> Call:
    """`top_logprobs` are the alternatives of each output token, None without log-probabilities; with `echo`, of prompt
    tokens too.
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
