"""The requests to plan for: random ones, as `pdserve bench` sends them, or those of a trace."""

import csv
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from ....common.errors import StartupError
from ....scheduler.simulation.cluster import Arrival
from ...bench.command import arrival_times_s
from ...bench.options import BenchOptions
from ...bench.prompts import ModelLimits, make_workload

BLOCK_TOKENS = 512
"""Tokens of each of the `hash_ids` of a Mooncake trace."""


UNIQUE = 1 << 30
"""Token ids from this number on are in one prompt only. Ids of shared blocks are below it."""


class Load(NamedTuple):
    """`shares_prefixes`: prompts may begin alike, so caches matter."""

    arrivals: list[Arrival]
    shares_prefixes: bool
    description: str


def random_load(options: BenchOptions, limits: ModelLimits) -> Load:
    """The same prompts and arrivals as a run of `pdserve bench` with these options."""
    prompts = make_workload(options, limits).measured
    times = arrival_times_s(len(prompts), options)
    arrivals = []
    for at_s, prompt in zip(times, prompts, strict=True):
        assert not isinstance(prompt.content, str), "random prompts are token ids"
        arrivals.append(Arrival(at_s, tuple(prompt.content), prompt.output_len))
    return Load(arrivals, options.prefix_len > 0, f"{len(arrivals)} requests, {options.load}: {options.lengths}")


def read_trace(path: Path, *, most: int, speed: float, max_total_tokens: int) -> Load:
    """The first `most` requests of a trace, `speed` times as fast.

    JSON lines as of Mooncake: `timestamp` in ms, `input_length`, `output_length` and, if prompts share prefixes,
    `hash_ids` of their blocks. CSV as of Azure: TIMESTAMP, ContextTokens and GeneratedTokens.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = _csv_rows(file) if path.suffix == ".csv" else _json_rows(file)
            requests = [row for _, row in zip(range(most), rows, strict=False)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else str(error)
        raise StartupError(f"--trace {path}: {reason}") from None
    if not requests:
        raise StartupError(f"--trace {path}: no requests")
    first_s = min(at_s for at_s, _, _ in requests)
    arrivals = []
    for number, (at_s, prompt, output_tokens) in enumerate(requests):
        if len(prompt) + output_tokens > max_total_tokens:
            raise StartupError(
                f"--trace {path}: request {number + 1} has {len(prompt) + output_tokens} tokens; "
                f"a request of the measured pair has at most {max_total_tokens}"
            )
        arrivals.append(Arrival((at_s - first_s) / speed, prompt, output_tokens))
    arrivals.sort(key=lambda arrival: arrival.at_s)
    heads = [arrival.prompt[0] for arrival in arrivals]
    seconds = arrivals[-1].at_s
    rate = f", {len(arrivals) / seconds:.2f} a second" if seconds else ""
    return Load(arrivals, len(set(heads)) < len(heads), f"{len(arrivals)} requests of {path.name}{rate}")


def _json_rows(file: Any) -> Iterator[tuple[float, tuple[int, ...], int]]:
    for number, line in enumerate(file):
        if not line.strip():
            continue
        row = json.loads(line)
        length = _tokens(row["input_length"])
        ids = row.get("hash_ids") or ()
        prompt = tuple(token for block in ids for token in (int(block) % UNIQUE,) * BLOCK_TOKENS)[:length]
        yield float(row["timestamp"]) / 1000, _unique(number, prompt, length), _tokens(row["output_length"])


def _csv_rows(file: Any) -> Iterator[tuple[float, tuple[int, ...], int]]:
    for number, row in enumerate(csv.DictReader(file)):
        length = _tokens(row["ContextTokens"])
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield at_s, _unique(number, (), length), _tokens(row["GeneratedTokens"])


def _tokens(value: Any) -> int:
    if (tokens := int(value)) < 1:
        raise ValueError(f"lengths must be at least 1, got {tokens}")
    return tokens


def _unique(number: int, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Returns the prompt, extended to `length` with tokens that no other prompt has."""
    return prompt + (UNIQUE + number,) * (length - len(prompt))
