"""How a request wants its tokens chosen and its text ended: the fields that `/generate` has in `sampling_params` and
OpenAI's routes have at the top level.

`n` asks for several samples of a prompt: sample i is drawn with seed + i. Without a `seed` (or `sampling_seed`, as
SGLang calls it) a random one is drawn once per prompt, so samples differ in either case.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ....configs.sampling import SamplingParams
from ....configs.words import counted, shown
from ...text.output_text import TextRules
from .fields import FieldError, Fields, check_string, check_token_ids, check_within
from .limits import ContextLengthError, Limits

MAX_SAMPLES = 16
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIASES = 1024
MAX_SEED = (1 << 63) - 1

# Known to other servers, not to this one: harmless at these values, refused at any other.
NEUTRAL_SAMPLING_FIELDS: Mapping[str, tuple[object, ...]] = {
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "stop_regex": ([],),
    "custom_params": ({},),
    "spaces_between_special_tokens": (True, False),  # only tokenizers that we do not use know the difference
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a route calls the fields whose names differ, and how much it generates when nobody says."""

    max_new_tokens: str
    min_new_tokens: str
    default_new_tokens: int


def refuse_unsupported(fields: Fields, neutral: Mapping[str, tuple[object, ...]]) -> None:
    for field, harmless in neutral.items():
        value = fields.raw(field)
        if value is not None and value not in harmless:
            accepted = " or ".join(msgspec.json.encode(choice).decode() for choice in harmless)
            allowed = f"; only {accepted} is accepted" if harmless else ""
            raise fields.error(field, f"is not supported by this server (got {shown(value)}){allowed}")


def read_samples(prompts: Sequence[Fields], limits: Limits) -> int:
    """`n`, which all prompts of a call share."""
    samples = [fields.integer("n", 1, MAX_SAMPLES) or 1 for fields in prompts]
    for fields, count in zip(prompts, samples, strict=True):
        if count != samples[0]:
            raise fields.error("n", f"must be the same for all prompts of a call, got {samples[0]} and {count}")
    total = len(prompts) * samples[0]
    if total > limits.max_batch_items:
        raise prompts[0].error(
            "n",
            f"asks for too many results: {counted(len(prompts), 'prompt')} x {samples[0]} samples = {total}; at most "
            f"{limits.max_batch_items} (max_batch_items) are allowed",
        )
    return samples[0]


def read_sampling(
    fields: Fields, limits: Limits, prompt_tokens: int, dialect: Dialect, samples: int = 1
) -> SamplingParams:
    """Sampling parameters with every default filled in."""
    max_new_tokens = _read_max_new_tokens(fields, limits, prompt_tokens, dialect)
    return msgspec.structs.replace(
        read_distribution(fields, limits.vocab_size, limits.default_sampling),
        max_new_tokens=max_new_tokens,
        stop_token_ids=_read_stop_token_ids(fields, limits.vocab_size),
        ignore_eos=fields.boolean("ignore_eos", False),
        seed=_read_seed(fields, samples),
        presence_penalty=fields.number_within("presence_penalty", -2, 2, default=0.0),
        frequency_penalty=fields.number_within("frequency_penalty", -2, 2, default=0.0),
        logit_bias=_read_logit_bias(fields, limits.vocab_size),
        min_new_tokens=fields.integer(dialect.min_new_tokens, 0, max_new_tokens) or 0,
    )


def read_distribution(fields: Fields, vocab_size: int, default: SamplingParams) -> SamplingParams:
    """`default` with what `fields` say of the distribution that tokens are drawn from.

    These five a checkpoint may recommend (server/api/default_sampling.py); the names and ranges are the same there.
    """
    return msgspec.structs.replace(
        default,
        temperature=_read_temperature(fields, default.temperature),
        top_p=fields.number_within("top_p", 0, 1, default=default.top_p, above=True),
        top_k=_read_top_k(fields, vocab_size, default.top_k),
        min_p=fields.number_within("min_p", 0, 1, default=default.min_p),
        repetition_penalty=fields.number_within(
            "repetition_penalty", 0, 2, default=default.repetition_penalty, above=True
        ),
    )


def read_text_rules(fields: Fields, sampling: SamplingParams, limits: Limits) -> TextRules:
    """What of the output is shown, and which text ends it: `stop`, `skip_special_tokens` and `no_stop_trim`, which vLLM
    calls `include_stop_str_in_output`.
    """
    no_stop_trim = fields.boolean(fields.spelling("include_stop_str_in_output", "no_stop_trim"), False)
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else limits.eos_token_ids)
    return TextRules(
        stop_strings=_read_stop_strings(fields),
        show_stop=no_stop_trim,
        hidden_token_ids=frozenset() if no_stop_trim else frozenset(ends),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        min_new_tokens=sampling.min_new_tokens,
    )


def _read_stop_strings(fields: Fields) -> tuple[str, ...]:
    """One string or a list of them."""
    value = fields.raw("stop")
    given = [value] if isinstance(value, str) else fields.array("stop", MAX_STOP_STRINGS)
    return tuple(
        check_string(text, fields.name("stop"), MAX_STOP_CHARACTERS) for text in given or [] if text is not None
    )


def _read_max_new_tokens(fields: Fields, limits: Limits, prompt_tokens: int, dialect: Dialect) -> int:
    name = dialect.max_new_tokens
    room = limits.max_total_tokens - prompt_tokens
    if room < 1:
        raise ContextLengthError(
            fields.name(name), f"has no room after {prompt_tokens} prompt tokens: {limits.describe_total()}"
        )
    asked = fields.integer(name, 1)
    if asked is None:
        return min(dialect.default_new_tokens, limits.max_new_tokens, room)
    if asked > limits.max_new_tokens:
        raise fields.error(name, f"must be between 1 and {limits.max_new_tokens}, got {shown(asked)}")
    if asked > room:
        raise ContextLengthError(
            fields.name(name),
            f"is too large: {prompt_tokens} prompt tokens + {asked} new tokens = {prompt_tokens + asked}; "
            f"at most {room} new tokens fit: {limits.describe_total()}",
        )
    return asked


def _read_temperature(fields: Fields, default: float) -> float:
    temperature = fields.number("temperature")
    if temperature is None:
        return default
    if temperature < 0:
        raise fields.error("temperature", f"must be at least 0 (0 is greedy), got {shown(temperature)}")
    return temperature


def _read_top_k(fields: Fields, vocab_size: int, default: int | None) -> int | None:
    """None keeps the whole vocabulary, which clients write as -1 (SGLang) or 0 (vLLM, transformers)."""
    top_k = fields.integer("top_k", -1)
    if top_k is None:
        return default
    return None if top_k < 1 or top_k >= vocab_size else top_k


def _read_stop_token_ids(fields: Fields, vocab_size: int) -> tuple[int, ...]:
    given = fields.array("stop_token_ids", MAX_STOP_TOKEN_IDS)
    return () if given is None else check_token_ids(given, fields.name("stop_token_ids"), vocab_size)


def _read_seed(fields: Fields, samples: int) -> int:
    """The seed of the first sample, such that the last one's is still a seed."""
    name = fields.spelling("seed", "sampling_seed")
    seed = fields.integer(name, 0, MAX_SEED - samples + 1)
    return random.getrandbits(62) if seed is None else seed


def _read_logit_bias(fields: Fields, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """`{"token id": bias}`, in order of ids."""
    value = fields.raw("logit_bias")
    if value is None:
        return ()
    name = fields.name("logit_bias")
    if not isinstance(value, dict):
        raise FieldError(name, f"must be an object of token ids and biases, got {shown(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        raise FieldError(name, f"holds {len(value)} tokens; at most {MAX_LOGIT_BIASES} are allowed")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = _token_id_of(key, name, vocab_size)
        if token in biases:
            raise FieldError(name, f"names token {token} twice")
        biases[token] = check_within(bias, f"{name}.{token}", -100, 100)
    return tuple(sorted(biases.items()))


def _token_id_of(key: str, name: str, vocab_size: int) -> int:
    longest = len(str(vocab_size))  # also keeps int() from numbers of a million digits
    if not (key.isascii() and key.isdigit() and len(key) <= longest and int(key) < vocab_size):
        raise FieldError(name, f"must name token ids from 0 to {vocab_size - 1}, got {shown(key)}")
    return int(key)
