"""The settings of `pdserve bench`, as flags and as one checked object. Light: every command imports it."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ...common.errors import StartupError
from ...configs.load import SECRET_VARIABLES, secrets_in
from ..terminal.options import DECODE_URL, SYSTEM_TLS, TlsOptions, add_tls_flags, read_tls_options, server_url

Dataset = Literal["random", "sharegpt"]
DEFAULT_CONCURRENCY = 8
SEARCH_REQUESTS = 300
FIRST_RATE_PER_S = 1.0
LONGEST = 16
"""Lognormal lengths are cut to this multiple of their median: with a sigma of 1, one in 360 is."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to send, how fast, and what to do with the result.

    Exactly one of two is set: `concurrency` (requests in flight; the end of one starts the next) or `rate_per_s`
    (Poisson arrivals, independent of the requests in flight; inf sends all at once). With `find_rate` it is the first
    rate of a search (search.py).
    """

    url: str = DECODE_URL
    requests: int = 64
    concurrency: int | None = DEFAULT_CONCURRENCY
    rate_per_s: float | None = None
    dataset: Dataset = "random"
    dataset_path: Path | None = None
    input_len: int = 256
    output_len: int = 64
    range_ratio: float = 0.0
    input_sigma: float = 0.0
    output_sigma: float = 0.0
    max_input_len: int | None = None
    max_output_len: int | None = None
    prefix_len: int = 0
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    warmup: int = 2
    timeout_s: float = 600.0
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    find_rate: bool = False
    keep: float = 0.99
    output: Path | None = None
    plot: Path | None = None
    api_key: str | None = None
    tls: TlsOptions = SYSTEM_TLS

    @property
    def load(self) -> str:
        """How requests are sent, in words."""
        if self.rate_per_s is None:
            return f"{self.concurrency} at a time"
        return "all at once" if math.isinf(self.rate_per_s) else f"{self.rate_per_s:g} a second (Poisson)"

    @property
    def bounds_s(self) -> tuple[float | None, float | None]:
        """The bounds of goodput in seconds: time to first token, mean inter-token latency."""
        ttft_ms, itl_ms = self.slo_ttft_ms, self.slo_itl_ms
        return None if ttft_ms is None else ttft_ms / 1000, None if itl_ms is None else itl_ms / 1000

    @property
    def lengths(self) -> str:
        """The lengths of prompts and outputs, in words."""
        if self.dataset != "random":
            return f"{self.dataset} prompts, {self.output_len} tokens out"
        shared = f"{self.prefix_len} shared + " if self.prefix_len else ""
        spread = f" (each \u00b1{self.range_ratio:.0%})" if self.range_ratio else ""
        if self.input_sigma or self.output_sigma:
            spread = f" (lognormal, sigma {self.input_sigma:g} and {self.output_sigma:g})"
        return f"{shared}{self.input_len} tokens in, {self.output_len} out{spread}"


_NAMES = frozenset(field.name for field in fields(BenchOptions))


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """All flags. What depends on other flags is checked by `read_bench_options`."""
    default = BenchOptions()

    def count(group: argparse._ActionsContainer, name: str, meaning: str, *, least: int, unset: bool = False) -> None:
        kind, value = whole_number(least), None if unset else getattr(default, name)
        meaning += "" if unset else " (default: %(default)s)"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, metavar="N", help=meaning)

    parser.add_argument("--url", default=default.url, metavar="URL", help="decode server (default: %(default)s)")
    measured = f"requests to measure (default: {default.requests}; {SEARCH_REQUESTS} for each rate of --find-rate)"
    count(parser, "requests", measured, least=1, unset=True)
    count(parser, "warmup", "requests sent before the measurement", least=0)

    load = parser.add_argument_group("load (one of)").add_mutually_exclusive_group()
    in_flight = f"requests in flight (default: {DEFAULT_CONCURRENCY})"
    load.add_argument("--concurrency", type=whole_number(1), metavar="N", help=in_flight)
    arriving = "requests a second, arriving at random (Poisson); inf: all at once"
    load.add_argument("--rate", dest="rate_per_s", type=positive, metavar="R", help=arriving)
    search = parser.add_argument_group("search")
    highest = (
        "find the highest rate at which requests stay inside --slo-ttft-ms and --slo-itl-ms, from --rate on (or 1)"
    )
    search.add_argument("--find-rate", action="store_true", help=highest)
    inside = "share of requests that must stay inside (default: %(default)s)"
    search.add_argument("--keep", type=share, default=default.keep, metavar="X", help=inside)

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", choices=get_args(Dataset), default=default.dataset, help="(default: %(default)s)")
    data.add_argument("--dataset-path", type=Path, metavar="FILE", help="sharegpt: JSON list of conversations")
    count(data, "input_len", "random: prompt tokens after the prefix", least=1)
    count(data, "output_len", "new tokens asked for", least=1)
    spread = "random: lengths are uniform in [(1 - X) * len, (1 + X) * len] (default: 0, all alike)"
    data.add_argument("--range-ratio", type=share, default=default.range_ratio, metavar="X", help=spread)
    for side in ("input", "output"):
        normal = (
            f"random: lengths are lognormal, with --{side}-len as their median and this deviation of their logarithm"
        )
        data.add_argument(f"--{side}-sigma", type=_not_negative, default=0.0, metavar="X", help=normal)
        longest = f"random: lognormal lengths are cut to this (default: {LONGEST} x --{side}-len)"
        count(data, f"max_{side}_len", longest, least=1, unset=True)
    count(data, "prefix_len", "random: tokens that all prompts begin with", least=0)
    count(data, "seed", "seed of prompts, lengths and arrivals", least=0)
    greedy = "default: 0, greedy"
    data.add_argument("--temperature", type=_not_negative, default=default.temperature, metavar="T", help=greedy)
    full = "always generate --output-len tokens, and count a shorter output as failed (default: for random)"
    data.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, help=full)

    judge = parser.add_argument_group("result")
    limit = "time limit of one request (default: 600)"
    judge.add_argument("--timeout-s", type=positive, default=default.timeout_s, metavar="S", help=limit)
    judge.add_argument("--slo-ttft-ms", type=positive, metavar="MS", help="goodput: bound on the time to first token")
    mean = "goodput: bound on a request's mean inter-token latency"
    judge.add_argument("--slo-itl-ms", type=positive, metavar="MS", help=mean)
    judge.add_argument("--output", type=Path, metavar="FILE", help="write everything as JSON")
    picture = "plot the result (.png, .svg or .pdf; needs matplotlib)"
    judge.add_argument("--plot", type=Path, metavar="FILE", help=picture)
    variable = SECRET_VARIABLES["api_key"]
    add_tls_flags(parser)
    parser.epilog = f"For a server with an API key, set {variable}. Exit code 1 when a request failed, 130 on Ctrl-C."


def read_bench_options(given: argparse.Namespace, environ: Mapping[str, str]) -> BenchOptions:
    """The flags as one object; raises StartupError for a combination that makes no sense."""
    if given.dataset == "sharegpt":
        if given.dataset_path is None:
            raise StartupError("--dataset sharegpt needs --dataset-path FILE")
        if given.prefix_len:
            raise StartupError("--prefix-len is for --dataset random: the prompts of sharegpt are text")
    elif given.dataset_path is not None:
        raise StartupError("--dataset-path is for --dataset sharegpt")
    sigmas = given.input_sigma or given.output_sigma
    if sigmas and given.range_ratio:
        raise StartupError("--range-ratio is for uniform lengths: give it or --input-sigma and --output-sigma")
    for side in ("input", "output"):
        longest, median = getattr(given, f"max_{side}_len"), getattr(given, f"{side}_len")
        if longest is not None and not getattr(given, f"{side}_sigma"):
            raise StartupError(f"--max-{side}-len is for lognormal lengths: give --{side}-sigma too")
        if longest is not None and longest < median:
            raise StartupError(f"--max-{side}-len {longest} is below --{side}-len, the median, which is {median}")
    if sigmas and given.dataset != "random":
        raise StartupError("--input-sigma and --output-sigma are for --dataset random")
    if given.find_rate:
        _check_search(given)
    for flag, path in (("--output", given.output), ("--plot", given.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise StartupError(f"{flag} {path}: no such directory: {path.parent}")
    options = BenchOptions(**named_flags(given))
    if given.find_rate:
        options = replace(
            options, rate_per_s=given.rate_per_s or FIRST_RATE_PER_S, requests=given.requests or SEARCH_REQUESTS
        )
    return replace(
        options,
        url=server_url(given.url),
        concurrency=None if options.rate_per_s is not None else given.concurrency or DEFAULT_CONCURRENCY,
        ignore_eos=given.dataset == "random" if given.ignore_eos is None else given.ignore_eos,
        api_key=secrets_in(environ).get("api_key"),
        tls=read_tls_options(given),
    )


def _check_search(given: argparse.Namespace) -> None:
    if given.slo_ttft_ms is None and given.slo_itl_ms is None:
        raise StartupError("--find-rate needs --slo-ttft-ms, --slo-itl-ms or both: the limits to stay inside")
    if given.concurrency is not None:
        raise StartupError("--find-rate sends at rates: --concurrency has no meaning with it")
    if given.rate_per_s is not None and math.isinf(given.rate_per_s):
        raise StartupError("--find-rate begins at --rate, which must be finite")
    if given.dataset != "random":
        raise StartupError("--find-rate needs --dataset random: each rate gets prompts of its own")


def named_flags(given: argparse.Namespace) -> dict[str, Any]:
    """The flags that have the name of an option, and are set."""
    return {name: value for name, value in vars(given).items() if name in _NAMES and value is not None}


def whole_number(least: int) -> Callable[[str], int]:
    """The type of a flag: integers from `least` on."""

    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number, at least {least}, got {text!r}")
        return int(text)

    return parse


def _number(limits: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of a flag: numbers that fit `limits`, which errors show."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not fits(value):
            raise argparse.ArgumentTypeError(f"must be {limits}, got {text!r}")
        return value

    return parse


positive = _number("a number above 0", lambda value: value > 0)
_not_negative = _number("a number, at least 0", lambda value: 0 <= value < math.inf)
share = _number("at least 0 and below 1", lambda value: 0 <= value < 1)
