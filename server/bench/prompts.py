"""What `pdserve bench` sends: random token ids, or the first turns of ShareGPT conversations."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...common.errors import StartupError
from .options import LONGEST, BenchOptions


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the server's model: `max_total_tokens` bounds prompt + output."""

    vocab_size: int
    special_token_ids: frozenset[int]
    max_total_tokens: int


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One request to send: token ids or text, and how many new tokens to ask for."""

    content: list[int] | str
    output_len: int

    def body(self, options: BenchOptions) -> bytes:
        sampling = {
            "max_new_tokens": self.output_len,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
        }
        field = "text" if isinstance(self.content, str) else "input_ids"
        return msgspec.json.encode({field: self.content, "sampling_params": sampling, "stream": True})


@dataclass(frozen=True, slots=True)
class Workload:
    """The prompts of a run. Warm-up prompts share no prefix with measured ones, so that they do not fill the prefix
    cache for them.
    """

    warmup: list[BenchPrompt]
    measured: list[BenchPrompt]


def make_workload(options: BenchOptions, limits: ModelLimits) -> Workload:
    """Makes the prompts of a run; equal options give equal prompts. Raises StartupError when the dataset has too few
    conversations, or the requested lengths do not fit the server.
    """
    if options.dataset == "sharegpt":
        assert options.dataset_path is not None, "checked with the flags"
        texts = read_sharegpt(options.dataset_path, limits.max_total_tokens - options.output_len)
        needed = options.warmup + options.requests
        if len(texts) < needed:
            raise StartupError(
                f"--dataset-path {options.dataset_path}: {len(texts)} usable conversations, "
                f"but --warmup + --requests are {needed}"
            )
        random.Random(options.seed).shuffle(texts)
        prompts = [BenchPrompt(text, options.output_len) for text in texts[:needed]]
        return Workload(prompts[: options.warmup], prompts[options.warmup :])
    longest = options.prefix_len + sum(lengths.longest for lengths in _lengths(options))
    if longest > limits.max_total_tokens:
        wide = (
            "--max-input-len and --max-output-len" if options.input_sigma or options.output_sigma else "--range-ratio"
        )
        raise StartupError(
            f"up to {longest} tokens a request (--prefix-len, --input-len and --output-len, with {wide}): "
            f"the server holds {limits.max_total_tokens}"
        )
    return _random_workload(options, limits)


def read_sharegpt(path: Path, max_bytes: int) -> list[str]:
    """The first human turn of every conversation with a reply, of 1 to `max_bytes` UTF-8 bytes.

    A tokenizer makes at most one token of a byte, so all of these fit the server; a few that would fit are left out.
    """
    try:
        conversations = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"--dataset-path {path}: {error}") from None
    if not isinstance(conversations, list):
        raise StartupError(f"--dataset-path {path}: expected a JSON list of conversations")
    texts = []
    for conversation in conversations:
        turns = conversation.get("conversations", []) if isinstance(conversation, dict) else []
        match turns:
            case [{"from": "human" | "user", "value": str(text)}, {"from": "gpt" | "assistant"}, *_]:
                if 0 < len(text.encode()) <= max_bytes:
                    texts.append(text)
    return texts


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Random lengths: uniform in a range around the middle, or lognormal with that median, cut to [1, longest]."""

    middle: int
    shortest: int
    longest: int
    sigma: float

    @classmethod
    def of(cls, middle: int, ratio: float, sigma: float, longest: int | None) -> "_Lengths":
        if sigma:
            return cls(middle, 1, longest or LONGEST * middle, sigma)
        return cls(middle, max(1, math.floor(middle * (1 - ratio))), math.ceil(middle * (1 + ratio)), 0.0)

    def draw(self, source: random.Random) -> int:
        if not self.sigma:
            return source.randint(self.shortest, self.longest)
        drawn = round(source.lognormvariate(math.log(self.middle), self.sigma))
        return min(max(drawn, self.shortest), self.longest)


def _lengths(options: BenchOptions) -> tuple[_Lengths, _Lengths]:
    """Of prompts without the shared prefix, and of outputs."""
    ratio = options.range_ratio
    return (
        _Lengths.of(options.input_len, ratio, options.input_sigma, options.max_input_len),
        _Lengths.of(options.output_len, ratio, options.output_sigma, options.max_output_len),
    )


def _random_workload(options: BenchOptions, limits: ModelLimits) -> Workload:
    source = random.Random(options.seed)
    allowed = [token for token in range(limits.vocab_size) if token not in limits.special_token_ids]
    if not allowed:
        raise StartupError(f"the model's {limits.vocab_size} tokens are all special")
    prefix = source.choices(allowed, k=options.prefix_len)
    inputs, outputs = _lengths(options)

    def prompt(beginning: list[int]) -> BenchPrompt:
        input_len, output_len = inputs.draw(source), outputs.draw(source)
        return BenchPrompt(beginning + source.choices(allowed, k=input_len), output_len)

    measured = [prompt(prefix) for _ in range(options.requests)]
    return Workload([prompt([]) for _ in range(options.warmup)], measured)
