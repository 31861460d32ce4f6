"""The options of `pdserve bench`. Light: every command imports it."""

import argparse
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ...common.errors import StartupError
from ...configs.flags import Flag, add_flags, fields_of, given_flags, read_options
from ...configs.load import SECRET_VARIABLES
from ..terminal.options import DECODE_URL, SYSTEM_TLS, ServerUrl, TlsOptions, add_tls_flags, client_options

Dataset = Literal["random", "sharegpt"]
Share = Annotated[float, Field(ge=0, lt=1)]
Sigma = Annotated[float, Field(ge=0, allow_inf_nan=False)]
DEFAULT_CONCURRENCY = 8
SEARCH_REQUESTS = 300
FIRST_RATE_PER_S = 1.0
LONGEST = 16
"""Lognormal lengths are cut to this multiple of their median: with a sigma of 1, one in 360 is."""
_LOGNORMAL = "random: lengths are lognormal, with --{}-len as their median and this deviation of their logarithm"
_CUT = f"random: lognormal lengths are cut to this; default: {LONGEST} x --{{}}-len"


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to send, how fast, and what to do with the result.

    Exactly one of two is set: `concurrency` (requests in flight; the end of one starts the next) or `rate_per_s`
    (Poisson arrivals, independent of the requests in flight; inf sends all at once). With `find_rate` it is the first
    rate of a search (search.py).
    """

    url: Annotated[ServerUrl, Field(description="decode server")] = DECODE_URL
    requests: Annotated[
        int, Field(ge=1, description=f"requests to measure; {SEARCH_REQUESTS} for each rate of --find-rate")
    ] = 64
    concurrency: Annotated[int | None, Field(ge=1, description="requests in flight")] = DEFAULT_CONCURRENCY
    rate_per_s: Annotated[
        float | None,
        Flag("--rate", metavar="R"),
        Field(gt=0, description="requests a second, arriving at random (Poisson); inf: all at once"),
    ] = None
    dataset: Annotated[Dataset, Field(description="prompts to send")] = "random"
    dataset_path: Annotated[Path | None, Field(description="sharegpt: JSON list of conversations")] = None
    input_len: Annotated[int, Field(ge=1, description="random: prompt tokens after the prefix")] = 256
    output_len: Annotated[int, Field(ge=1, description="new tokens asked for")] = 64
    range_ratio: Annotated[
        Share, Field(description="random: lengths are uniform in [(1 - X) * len, (1 + X) * len]")
    ] = 0.0
    input_sigma: Annotated[Sigma, Field(description=_LOGNORMAL.format("input"))] = 0.0
    output_sigma: Annotated[Sigma, Field(description=_LOGNORMAL.format("output"))] = 0.0
    max_input_len: Annotated[int | None, Field(ge=1, description=_CUT.format("input"))] = None
    max_output_len: Annotated[int | None, Field(ge=1, description=_CUT.format("output"))] = None
    prefix_len: Annotated[int, Field(ge=0, description="random: tokens that all prompts begin with")] = 0
    seed: Annotated[int, Field(ge=0, description="seed of prompts, lengths and arrivals")] = 0
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False, description="of sampling; 0 is greedy")] = 0.0
    ignore_eos: Annotated[
        bool,
        Flag(default="for random"),
        Field(description="always generate --output-len tokens, and count a shorter output as failed"),
    ] = True
    warmup: Annotated[int, Field(ge=0, description="requests sent before the measurement")] = 2
    timeout_s: Annotated[float, Field(gt=0, description="time limit of one request")] = 600.0
    slo_ttft_ms: Annotated[float | None, Field(gt=0, description="goodput: bound on the time to first token")] = None
    slo_itl_ms: Annotated[
        float | None, Field(gt=0, description="goodput: bound on a request's mean inter-token latency")
    ] = None
    find_rate: Annotated[
        bool,
        Flag(switch=True),
        Field(
            description="find the highest rate at which requests stay inside --slo-ttft-ms and --slo-itl-ms, from "
            "--rate on (or 1)"
        ),
    ] = False
    keep: Annotated[Share, Field(description="share of requests that must stay inside")] = 0.99
    output: Annotated[Path | None, Field(description="write everything as JSON")] = None
    plot: Annotated[Path | None, Field(description="plot the result (.png, .svg or .pdf; needs matplotlib)")] = None
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


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """All flags. What depends on other flags is checked by `read_bench_options`."""
    fields = fields_of(BenchOptions)
    add_flags(parser, fields, ("url", "requests", "warmup"))
    load = parser.add_argument_group("load (one of)").add_mutually_exclusive_group()
    add_flags(load, fields, ("concurrency", "rate_per_s"))
    add_flags(parser.add_argument_group("search"), fields, ("find_rate", "keep"))
    lengths = ("input_len", "output_len", "range_ratio", "input_sigma", "max_input_len", "output_sigma")
    data = ("dataset", "dataset_path", *lengths, "max_output_len", "prefix_len", "seed", "temperature", "ignore_eos")
    add_flags(parser.add_argument_group("data"), fields, data)
    result = ("timeout_s", "slo_ttft_ms", "slo_itl_ms", "output", "plot")
    add_flags(parser.add_argument_group("result"), fields, result)
    variable = SECRET_VARIABLES["api_key"]
    add_tls_flags(parser)
    parser.epilog = f"For a server with an API key, set {variable}. Exit code 1 when a request failed, 130 on Ctrl-C."


def read_bench_options(given: argparse.Namespace, environ: Mapping[str, str]) -> BenchOptions:
    """The flags as one object; raises StartupError for a combination that makes no sense."""
    flags = given_flags(given, fields_of(BenchOptions))
    options = read_options(BenchOptions, flags | client_options(given, environ))
    if options.dataset == "sharegpt":
        if options.dataset_path is None:
            raise StartupError("--dataset sharegpt needs --dataset-path FILE")
        if options.prefix_len:
            raise StartupError("--prefix-len is for --dataset random: the prompts of sharegpt are text")
    elif options.dataset_path is not None:
        raise StartupError("--dataset-path is for --dataset sharegpt")
    sigmas = options.input_sigma or options.output_sigma
    if sigmas and options.range_ratio:
        raise StartupError("--range-ratio is for uniform lengths: give it or --input-sigma and --output-sigma")
    for side in ("input", "output"):
        longest, median = getattr(options, f"max_{side}_len"), getattr(options, f"{side}_len")
        if longest is not None and not getattr(options, f"{side}_sigma"):
            raise StartupError(f"--max-{side}-len is for lognormal lengths: give --{side}-sigma too")
        if longest is not None and longest < median:
            raise StartupError(f"--max-{side}-len {longest} is below --{side}-len, the median, which is {median}")
    if sigmas and options.dataset != "random":
        raise StartupError("--input-sigma and --output-sigma are for --dataset random")
    for flag, path in (("--output", options.output), ("--plot", options.plot)):
        if path is not None and not path.absolute().parent.is_dir():
            raise StartupError(f"{flag} {path}: no such directory: {path.parent}")
    if options.find_rate:
        _check_search(options, flags)
        requests = options.requests if "requests" in flags else SEARCH_REQUESTS
        options = replace(options, rate_per_s=options.rate_per_s or FIRST_RATE_PER_S, requests=requests)
    return replace(
        options,
        concurrency=None if options.rate_per_s is not None else options.concurrency,
        ignore_eos=options.ignore_eos if "ignore_eos" in flags else options.dataset == "random",
    )


def _check_search(options: BenchOptions, flags: Collection[str]) -> None:
    if options.slo_ttft_ms is None and options.slo_itl_ms is None:
        raise StartupError("--find-rate needs --slo-ttft-ms, --slo-itl-ms or both: the limits to stay inside")
    if "concurrency" in flags:
        raise StartupError("--find-rate sends at rates: --concurrency has no meaning with it")
    if options.rate_per_s is not None and math.isinf(options.rate_per_s):
        raise StartupError("--find-rate begins at --rate, which must be finite")
    if options.dataset != "random":
        raise StartupError("--find-rate needs --dataset random: each rate gets prompts of its own")
