"""Sampling and stop fields: in `sampling_params` of `/generate`, at the top level of OpenAI's routes.

`n` asks for several samples of a prompt: sample i is drawn with seed + i. Without a `seed` (SGLang: `sampling_seed`), a
random seed is drawn once per prompt. So the samples of a prompt differ in either case.
"""

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from annotated_types import MaxLen
from pydantic import BeforeValidator, PlainValidator

from ....common.sampling import Grammar, SamplingParams
from ....common.words import counted, shown
from ...text.output_text import TextRules
from ...text.regex_automata import MAX_LISTED, MAX_SIZE, Automaton, StopRegexError, compile_stop_regex
from .fields import (
    Body,
    Boolean,
    FieldError,
    Integer,
    Number,
    TokenIds,
    Within,
    check_token_ids,
    check_within,
    optional,
    problem,
)
from .grammar_fields import GrammarFields
from .limits import ContextLengthError, Limits

MAX_SAMPLES = 16
MAX_STOP_TOKEN_IDS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_REGEXES = 8
MAX_SIZE_OF_CALL = 4 * MAX_SIZE
MAX_STOP_REGEXES_OF_CALL = 128
"""Most different ones. The smallest takes 0.1 ms to compile."""
MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_SEED = (1 << 63) - 1


def stop_strings(value: object, most: int = MAX_STOP_STRINGS) -> list[str] | None:
    """Validates a string or a list of strings, of which nulls are dropped."""
    strings = [value] if isinstance(value, str) else value
    if strings is None:
        return None
    if not isinstance(strings, list):
        raise problem(f"must be a string or an array of strings, got {shown(strings)}")
    if len(strings) > most:
        raise problem(f"holds {len(strings)} items; at most {most} are allowed")
    checked = [text for text in strings if text is not None]
    for text in checked:
        if not isinstance(text, str):
            raise problem(f"must be a string, got {shown(text)}")
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise problem(f"must have 1 to {MAX_STOP_CHARACTERS} characters, got {len(text)}")
    return checked


def _stop_regexes(value: object) -> list[str] | None:
    """The same for regular expressions, which `check_stop_regexes` compiles."""
    return stop_strings(value, MAX_STOP_REGEXES)


def _few_biases(value: object) -> object:
    """Counts before each of them is checked."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise problem(f"holds {len(value)} tokens; at most {MAX_LOGIT_BIASES} are allowed")
    return value


class DistributionFields(Body):
    """The distribution that tokens are drawn from. A checkpoint may recommend these five (default_sampling.py)."""

    temperature: Annotated[Number, Within(0, note=" (0 is greedy)")] | None = optional(
        "0 is greedy. Default: the model's recommendation, or 1."
    )
    top_p: Annotated[Number, Within(0, 1, above=True)] | None = optional("Default: the model's recommendation, or 1.")
    top_k: Annotated[Integer, Within(-1)] | None = optional(
        "-1 or 0: the whole vocabulary. Default: the model's recommendation, or the whole vocabulary."
    )
    min_p: Annotated[Number, Within(0, 1)] | None = optional("Default: the model's recommendation, or 0.")
    repetition_penalty: Annotated[Number, Within(0, 2, above=True)] | None = optional(
        "Counts prompt and output. Default: the model's recommendation, or 1."
    )

    def distribution(self, default: SamplingParams, vocab_size: int) -> SamplingParams:
        """`default`, changed by the fields that are set."""
        changed = {name: value for name in DISTRIBUTION_FIELDS if (value := getattr(self, name)) is not None}
        if "top_k" in changed and not 1 <= changed["top_k"] < vocab_size:
            changed["top_k"] = None
        return msgspec.structs.replace(default, **changed) if changed else default


DISTRIBUTION_FIELDS = tuple(DistributionFields.model_fields)


ONLY_IN_CHATS: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "stop_regex": ([],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "no_stop_trim": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "logprobs": (False,),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "structured_outputs": ({},),
}
"""Fields of a chat that change its output and that `/v1/responses` and `/v1/messages` do not have, for their
`Body.unsupported`.
"""


class SamplingFields(DistributionFields, GrammarFields):
    """What both dialects share; `max_new_tokens` and `min_new_tokens` have other names in OpenAI's."""

    unsupported = {  # noqa: RUF012 (a ClassVar of Body)
        "custom_params": ({},),
        "spaces_between_special_tokens": (True, False),  # our tokenizers make no difference
    }
    n: Annotated[Integer, Within(1, MAX_SAMPLES)] | None = optional(
        "Samples of each prompt. They share its prefill; sample i has seed + i. Default 1."
    )
    seed: Annotated[Integer, Within(-1, MAX_SEED)] | None = optional(
        "The same seed gives the same tokens, in any batch. Default, and -1 as in vLLM: random."
    )
    sampling_seed: Annotated[Integer, Within(-1, MAX_SEED)] | None = optional("SGLang's name of `seed`.")
    stop: Annotated[list[str] | None, PlainValidator(stop_strings, json_schema_input_type=str | list[str] | None)] = (
        optional(f"Up to {MAX_STOP_STRINGS} strings of up to {MAX_STOP_CHARACTERS} characters.")
    )
    stop_regex: Annotated[
        list[str] | None, PlainValidator(_stop_regexes, json_schema_input_type=str | list[str] | None)
    ] = optional(
        f"Up to {MAX_STOP_REGEXES} regular expressions in Python's syntax, without look-around and back-references."
    )
    stop_token_ids: Annotated[TokenIds, MaxLen(MAX_STOP_TOKEN_IDS)] | None = optional("Token ids that end the output.")
    ignore_eos: Boolean | None = optional("Continue after the model's end token. Default false.")
    no_stop_trim: Boolean | None = optional("Keep the stop string or stop token in the text. Default false.")
    include_stop_str_in_output: Boolean | None = optional("vLLM's name of `no_stop_trim`.")
    skip_special_tokens: Boolean | None = optional("Leave special tokens out of the text. Default true.")
    presence_penalty: Annotated[Number, Within(-2, 2)] | None = optional("Counts output. Default 0.")
    frequency_penalty: Annotated[Number, Within(-2, 2)] | None = optional("Counts output. Default 0.")
    logit_bias: Annotated[dict[str, Annotated[Number, Within(-100, 100)]] | None, BeforeValidator(_few_biases)] = (
        optional(f"A bias for each token id, up to {MAX_LOGIT_BIASES}.")
    )

    @property
    def samples(self) -> int:
        return self.n or 1

    @property
    def default_new_tokens(self) -> int | None:
        """Most new tokens if the request sets no maximum; fewer if fewer fit. None: as many as fit."""
        return 128

    @abstractmethod
    def new_tokens(self) -> tuple[str, int | None, str, int | None]:
        """Name and value of the maximum, then of the minimum, of new tokens; the names depend on the dialect."""

    def shared_sampling(self, limits: Limits, grammar: Grammar | None, path: str) -> SamplingParams:
        """What the prompts with these fields have in common, with every default filled in; `path` goes before the names
        of fields in errors.
        """
        return msgspec.structs.replace(
            self.distribution(limits.default_sampling, limits.vocab_size),
            stop_token_ids=()
            if self.stop_token_ids is None
            else check_token_ids(self.stop_token_ids, f"{path}stop_token_ids", limits.vocab_size),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._biases(f"{path}logit_bias", limits.vocab_size),
            grammar=grammar,
        )

    def sampling(self, shared: SamplingParams, limits: Limits, prompt_tokens: int, path: str) -> SamplingParams:
        """The sampling parameters of one prompt; `shared` is the result of `shared_sampling`."""
        most_name, most, fewest_name, fewest = self.new_tokens()
        max_new_tokens = self._max_new_tokens(path + most_name, most, limits, prompt_tokens)
        return msgspec.structs.replace(
            shared,
            max_new_tokens=max_new_tokens,
            seed=self._seed(path),
            min_new_tokens=check_within(
                fewest or 0, path + fewest_name, 0, max_new_tokens, f"{most_name} is {max_new_tokens}"
            ),
        )

    def text_rules(self, sampling: SamplingParams, limits: Limits, compiled: Mapping[str, Automaton]) -> TextRules:
        """Which text ends the output, and what of the output is shown. `compiled` has the stop expressions."""
        keep_stop = bool(
            self.no_stop_trim if self.include_stop_str_in_output is None else self.include_stop_str_in_output
        )
        eos_ends = not sampling.ignore_eos or sampling.grammar is not None
        ends = set(sampling.stop_token_ids) | (limits.eos_token_ids if eos_ends else set())
        return TextRules(
            stop_strings=tuple(self.stop or ()),
            stop_regexes=tuple(compiled[pattern] for pattern in self.stop_regex or ()),
            show_stop=keep_stop,
            hidden_token_ids=frozenset() if keep_stop else frozenset(ends),
            skip_special_tokens=self.skip_special_tokens is not False,
            min_new_tokens=sampling.min_new_tokens,
        )

    def _max_new_tokens(self, name: str, asked: int | None, limits: Limits, prompt_tokens: int) -> int:
        room = limits.max_total_tokens - prompt_tokens
        if room < 1:
            raise ContextLengthError(
                name, f"must be at least 1, but {prompt_tokens} prompt tokens leave none: {limits.describe_total()}"
            )
        if asked is None:
            return min(self.default_new_tokens or room, limits.max_new_tokens, room)
        check_within(asked, name, 1, limits.max_new_tokens, limits.describe_output())
        if asked > room:
            raise ContextLengthError(
                name,
                f"is too large: {prompt_tokens} prompt tokens + {asked} new tokens = {prompt_tokens + asked}; "
                f"at most {room} new tokens fit: {limits.describe_total()}",
            )
        return asked

    def _seed(self, path: str) -> int:
        """The seed of the first sample. Leaves room for that of the last one, which is larger by n - 1."""
        name, seed = ("sampling_seed", self.sampling_seed) if self.seed is None else ("seed", self.seed)
        if seed is None or seed == -1:
            return random.getrandbits(62)
        return check_within(seed, path + name, 0, MAX_SEED - self.samples + 1)

    def _biases(self, name: str, vocab_size: int) -> tuple[tuple[int, float], ...]:
        """Token ids and biases, in order of ids."""
        if not self.logit_bias:
            return ()
        longest = len(str(vocab_size))  # refuses numbers of a million digits before int() parses them
        biases: dict[int, float] = {}
        for key, bias in self.logit_bias.items():
            if not (key.isascii() and key.isdigit() and len(key) <= longest and int(key) < vocab_size):
                raise FieldError(name, f"must name token ids from 0 to {vocab_size - 1}, got {shown(key)}")
            if int(key) in biases:
                raise FieldError(name, f"names token {int(key)} twice")
            biases[int(key)] = bias
        return tuple(sorted(biases.items()))


def check_stop_regexes(params: Sequence[tuple[SamplingFields, str]]) -> Mapping[str, Automaton]:
    """Compiles the stop expressions of a call: outputs begin on the event loop, which must not do it. `params` are
    those of `check_samples`. Raises FieldError.

    The size of a prompt's expressions bounds the work for each character of its output; the number and the sizes of all
    different ones bound the time that it takes to compile them.
    """
    compiled: dict[str, Automaton] = {}
    items = listed = 0
    for fields, path in params:
        name, own = f"{path}stop_regex", 0
        for pattern in dict.fromkeys(fields.stop_regex or ()):
            if pattern not in compiled:
                try:
                    automaton = compiled[pattern] = compile_stop_regex(pattern)
                except StopRegexError as error:
                    raise FieldError(name, f"{shown(pattern)} {error}") from None
                items += automaton.size
                listed += automaton.listed
            own += compiled[pattern].size
        for count, most, what in (
            (own, MAX_SIZE, "items"),
            (items, MAX_SIZE_OF_CALL, "items in all prompts"),
            (listed, MAX_LISTED, "characters in ranges of classes"),
            (len(compiled), MAX_STOP_REGEXES_OF_CALL, "different expressions in all prompts"),
        ):
            if count > most:
                raise FieldError(name, f"is too large: it has {count} {what} in total; at most {most} are allowed")
    return compiled


def check_samples(params: Sequence[tuple[SamplingFields, str]], limits: Limits) -> int:
    """Returns `n`, which must be the same for all prompts of a call. `params` has the fields of each prompt and their
    path in the body. Raises FieldError.
    """
    (first, first_path), total = params[0], len(params) * params[0][0].samples
    for fields, path in params:
        if fields.samples != first.samples:
            raise FieldError(
                f"{path}n", f"must be the same for all prompts of a call, got {first.samples} and {fields.samples}"
            )
    if total > limits.max_batch_items:
        raise FieldError(
            f"{first_path}n",
            f"asks for too many results: {counted(len(params), 'prompt')} x {first.samples} samples = {total}; at most "
            f"{limits.max_batch_items} (max_batch_items) are allowed",
        )
    return first.samples
