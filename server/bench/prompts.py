"""What `pdserve bench` sends: random token ids, or the first turns of ShareGPT conversations."""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...configs.errors import StartupError
from .options import BenchOptions


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
    longest = options.prefix_len + sum(_bounds(length, options.range_ratio)[1] for length in _lengths(options))
    if longest > limits.max_total_tokens:
        raise StartupError(
            f"up to {longest} tokens a request (--prefix-len, --input-len and --output-len, with --range-ratio): "
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


def _lengths(options: BenchOptions) -> tuple[int, int]:
    return options.input_len, options.output_len


def _bounds(length: int, ratio: float) -> tuple[int, int]:
    return max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))


def _random_workload(options: BenchOptions, limits: ModelLimits) -> Workload:
    source = random.Random(options.seed)
    allowed = [token for token in range(limits.vocab_size) if token not in limits.special_token_ids]
    if not allowed:
        raise StartupError(f"the model's {limits.vocab_size} tokens are all special")
    prefix = source.choices(allowed, k=options.prefix_len)

    def prompt(beginning: list[int]) -> BenchPrompt:
        input_len, output_len = (source.randint(*_bounds(length, options.range_ratio)) for length in _lengths(options))
        return BenchPrompt(beginning + source.choices(allowed, k=input_len), output_len)

    measured = [prompt(prefix) for _ in range(options.requests)]
    return Workload([prompt([]) for _ in range(options.warmup)], measured)
