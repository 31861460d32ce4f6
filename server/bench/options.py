"""The settings of `pdserve bench`, as flags and as one checked object. Light: every command imports it."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from ...configs.errors import StartupError
from ...configs.load import SECRET_VARIABLES, secrets_in
from ..terminal.options import DECODE_URL, SYSTEM_TLS, TlsOptions, add_tls_flags, read_tls_options, server_url

Dataset = Literal["random", "sharegpt"]
DEFAULT_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to send, how fast, and what to do with the result.

    Exactly one of two is set: `concurrency` (requests in flight; the end of one starts the next) or `rate_per_s`
    (Poisson arrivals, independent of the requests in flight; inf sends all at once).
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
    prefix_len: int = 0
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = True
    warmup: int = 2
    timeout_s: float = 600.0
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
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
    def lengths(self) -> str:
        """The lengths of prompts and outputs, in words."""
        if self.dataset != "random":
            return f"{self.dataset} prompts, {self.output_len} tokens out"
        shared = f"{self.prefix_len} shared + " if self.prefix_len else ""
        spread = f" (each \u00b1{self.range_ratio:.0%})" if self.range_ratio else ""
        return f"{shared}{self.input_len} tokens in, {self.output_len} out{spread}"


_NAMES = frozenset(field.name for field in fields(BenchOptions))


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """All flags. What depends on other flags is checked by `read_bench_options`."""
    default = BenchOptions()

    def count(group: argparse._ActionsContainer, name: str, meaning: str, *, least: int) -> None:
        kind, value = whole_number(least), getattr(default, name)
        meaning += " (default: %(default)s)"
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, metavar="N", help=meaning)

    parser.add_argument("--url", default=default.url, metavar="URL", help="decode server (default: %(default)s)")
    count(parser, "requests", "requests to measure", least=1)
    count(parser, "warmup", "requests sent before the measurement", least=0)

    load = parser.add_argument_group("load (one of)").add_mutually_exclusive_group()
    in_flight = f"requests in flight (default: {DEFAULT_CONCURRENCY})"
    load.add_argument("--concurrency", type=whole_number(1), metavar="N", help=in_flight)
    arriving = "requests a second, arriving at random (Poisson); inf: all at once"
    load.add_argument("--rate", dest="rate_per_s", type=positive, metavar="R", help=arriving)

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", choices=get_args(Dataset), default=default.dataset, help="(default: %(default)s)")
    data.add_argument("--dataset-path", type=Path, metavar="FILE", help="sharegpt: JSON list of conversations")
    count(data, "input_len", "random: prompt tokens after the prefix", least=1)
    count(data, "output_len", "new tokens asked for", least=1)
    spread = "random: lengths are uniform in [(1 - X) * len, (1 + X) * len] (default: 0, all alike)"
    data.add_argument("--range-ratio", type=share, default=default.range_ratio, metavar="X", help=spread)
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
    for flag, path in (("--output", given.output), ("--plot", given.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise StartupError(f"{flag} {path}: no such directory: {path.parent}")
    return replace(
        BenchOptions(**named_flags(given)),
        url=server_url(given.url),
        concurrency=None if given.rate_per_s is not None else given.concurrency or DEFAULT_CONCURRENCY,
        ignore_eos=given.dataset == "random" if given.ignore_eos is None else given.ignore_eos,
        api_key=secrets_in(environ).get("api_key"),
        tls=read_tls_options(given),
    )


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
