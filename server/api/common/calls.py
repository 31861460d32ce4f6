"""Calls of the generation routes: checked, tokenized prompts, which all dialects convert their bodies to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import msgspec

from ....common.sampling import LogprobParams, SamplingParams
from ....common.words import counted
from ....scheduler.messages.frontend import Submit
from ...text.output_text import TextRules
from ...text.prompt_echo import Echo
from ...text.tokenizer import Tokenizer
from .fields import FieldError, check_token_ids
from .grammar_fields import NamedGrammar
from .limits import ContextLengthError, Limits
from .parsed_output import ParsedOutput
from .routing import CallShape, RoutingFields
from .sampling_fields import SamplingFields, check_samples, check_stop_regexes

FieldsT = TypeVar("FieldsT", bound=RoutingFields)
FieldsT_co = TypeVar("FieldsT_co", bound=RoutingFields, covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[FieldsT_co]):
    """A checked call of a generation route. `group` is the single `rid` that was given for a list of prompts: aborting
    it aborts all of them.
    """

    fields: FieldsT_co
    submits: tuple[Submit, ...]
    """A message to the leader for each prompt."""
    text_rules: tuple[TextRules, ...]
    """The rules of each prompt's output."""
    stream: bool
    group: str | None
    listed: bool
    """`/generate`: the reply is a list, prompt by prompt and sample by sample, and stream events have an `index`."""
    grammars: tuple[NamedGrammar, ...] = ()
    """The different grammars of all prompts, each with the name of its field."""
    new_parsed: Callable[[], ParsedOutput] | None = None
    """For a chat: makes the object that collects the message of one output."""
    echoes: tuple[Echo, ...] = ()
    """With `echo`, the text that the output of each prompt begins with; otherwise empty."""


MOST_PROMPT_LOGPROBS = 1 << 18
"""Most log-probabilities of the prompts in the answers to a call. Those of a prompt are one message from the leader."""


def check_prompt_logprobs(
    prompts: Sequence[tuple[int, ...]], logprobs: Sequence[LogprobParams | None], samples: int, name: str
) -> None:
    """Raises FieldError if the prompts of a call have too many log-probabilities; `name` is the field that asks. The
    answer has them once for each of the `samples`.
    """
    count = samples * sum(
        (len(ids) - wanted.start) * (1 + wanted.top)
        for ids, wanted in zip(prompts, logprobs, strict=True)
        if wanted is not None and wanted.start is not None
    )
    if count > MOST_PROMPT_LOGPROBS:
        raise FieldError(
            name,
            f"asks for {count} log-probabilities of the prompt, with the alternatives of each token; at most "
            f"{MOST_PROMPT_LOGPROBS} are allowed",
        )


def make_call(
    fields: FieldsT,
    params: Sequence[tuple[SamplingFields, str]],
    prompt_ids: Sequence[tuple[int, ...]],
    batched: bool,
    logprobs: Sequence[LogprobParams | None],
    limits: Limits,
    *,
    stream: bool | None,
    grammars: Sequence[NamedGrammar | None] | None = None,
) -> Call[FieldsT]:
    """Makes a call from tokenized prompts. `params` has the sampling fields of each prompt, and their path in the body.
    `grammars` are those of the prompts' outputs; if None, they are taken from the sampling fields.
    """
    shape = CallShape(len(prompt_ids), batched, check_samples(params, limits))
    expressions = check_stop_regexes(params)
    routed, group = fields.submits(shape, limits, prompt_ids)
    named: list[NamedGrammar] = []
    shared: dict[int, SamplingParams] = {}  # by the identity of the fields: the same object may stand for all prompts
    submits, text_rules = [], []
    for index, (submit, (asked, path), wanted) in enumerate(zip(routed, params, logprobs, strict=True)):
        key = id(asked) if grammars is None else index
        if key not in shared:
            grammar = asked.grammar(path) if grammars is None else grammars[index]
            if grammar is not None:
                named.append(grammar := _with_json_options(grammar, asked, limits))
            shared[key] = asked.shared_sampling(limits, grammar[1] if grammar is not None else None, path)
        sampling = asked.sampling(shared[key], limits, len(submit.prompt_ids), path)
        submits.append(msgspec.structs.replace(submit, sampling=sampling, logprobs=wanted))
        text_rules.append(replace(asked.text_rules(sampling, limits, expressions), before=submit.prompt_ids))
    return Call(
        fields,
        tuple(submits),
        tuple(text_rules),
        bool(stream),
        group,
        listed=batched or shape.samples > 1,
        grammars=tuple({grammar[1]: grammar for grammar in named}.values()),
    )


def _with_json_options(found: NamedGrammar, asked: SamplingFields, limits: Limits) -> NamedGrammar:
    """Returns the grammar with the options of the request, or else of the server, for its JSON."""
    given = asked.json_whitespace()
    whitespace = limits.json_whitespace if given is None else given
    options = {"json_whitespace": whitespace, "closes_patterns": asked.closes_patterns()}
    return found[0], msgspec.structs.replace(found[1], **options)


def read_prompts(
    value: str | Sequence[int | str | list[int]],
    field: str,
    batched: bool,
    limits: Limits,
    tokenizer: Tokenizer,
) -> list[tuple[int, ...]]:
    """Returns the token ids of each prompt in a field, which holds one prompt or, if `batched`, a list of them."""
    if not batched:
        return [_read_prompt(value, field, limits, tokenizer)]
    if not value:
        raise FieldError(field, "is empty; give at least one prompt")
    if len(value) > limits.max_batch_items:
        raise FieldError(field, f"holds {len(value)} prompts; at most {limits.max_batch_items} are allowed")
    return [_read_prompt(item, f"{field}[{index}]", limits, tokenizer) for index, item in enumerate(value)]


LONG_TEXT_CHARACTERS = 1 << 20
"""/tokenize accepts texts up to this length even if they are too long for a prompt, so that clients can cut them."""


def check_text(text: str, name: str, limits: Limits, tokenizer: Tokenizer, *, allowed: int = 0) -> None:
    """Raises ContextLengthError for a text that is surely too long for a prompt, without tokenizing all of it. Texts of
    up to `allowed` characters always pass.
    """
    if len(text) <= allowed:
        return
    tokens = tokenizer.floor.above(text, limits.max_prompt_tokens)
    if tokens is not None:
        raise ContextLengthError(name, f"has at least {tokens} tokens; {limits.describe_prompt()}")


def check_prompt(prompt_ids: tuple[int, ...], name: str, limits: Limits) -> tuple[int, ...]:
    """Returns the prompt. Raises FieldError if it is empty, too long for this server, or has a token that the model
    does not have: a tokenizer may have more tokens than the embedding has rows.
    """
    if not prompt_ids:
        raise FieldError(name, "is empty; give at least one token")
    if (largest := max(prompt_ids)) >= limits.vocab_size:
        raise FieldError(
            name, f"has token id {largest} of the tokenizer, but the model has only 0 to {limits.vocab_size - 1}"
        )
    if len(prompt_ids) > limits.max_prompt_tokens:
        raise ContextLengthError(name, f"has {counted(len(prompt_ids), 'token')}; {limits.describe_prompt()}")
    return prompt_ids


def _read_prompt(value: object, name: str, limits: Limits, tokenizer: Tokenizer) -> tuple[int, ...]:
    if isinstance(value, list):
        return check_prompt(check_token_ids(value, name, limits.vocab_size), name, limits)
    assert isinstance(value, str), "the model of the body admits text and token ids only"
    check_text(value, name, limits, tokenizer)
    return check_prompt(tuple(tokenizer.encode(value)) if value else (), name, limits)
