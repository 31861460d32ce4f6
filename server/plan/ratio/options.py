"""The options of `pdserve plan` for a load: the ratio of prefill to decode servers. Light: every command imports it."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ....common.errors import StartupError
from ....configs.flags import Flag, add_flags, fields_of, flag_name, from_text, given_flags, read_options
from ....configs.load import secrets_in
from ...bench.options import BenchOptions, Share
from ...launch.pair import PAIR_FIELDS, PairConfig, load_pair_config
from ...terminal.options import DECODE_URL, ServerUrl

DEFAULT_RATIOS = "1:1,2:1,1:2"
MOST_SERVERS = 64
MEASURED_SETTINGS = ("device", "threads", "chunk_size", "max_step_tokens", "load_format")
"""Settings of the measured pair, besides those that the sizes of a decode server depend on."""


@dataclass(frozen=True)
class Ratio:
    """Prefill and decode servers."""

    prefills: int
    decodes: int

    def __str__(self) -> str:
        return f"{self.prefills}P:{self.decodes}D"


def parse_ratios(text: str) -> tuple[Ratio, ...]:
    """`1:1,2:1`; raises StartupError."""
    ratios = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([1-9][0-9]?)[pP]?:([1-9][0-9]?)[dD]?\s*", part)
        if found is None or int(found[1]) + int(found[2]) > MOST_SERVERS:
            raise StartupError(
                f"--ratios {text!r}: give prefill:decode servers, as {DEFAULT_RATIOS}, at most {MOST_SERVERS} in all"
            )
        ratios.append(Ratio(int(found[1]), int(found[2])))
    return tuple(dict.fromkeys(ratios))


@dataclass(frozen=True, slots=True)
class RatioOptions:
    """A load, the ratios to compare, and where the step times come from: `rates`, a running pair, or one to start."""

    trace: Annotated[Path | None, Field(description="requests, as .jsonl (Mooncake) or .csv (Azure)")] = None
    speed: Annotated[float, Field(gt=0, description="play the trace X times as fast")] = 1.0
    input_len: Annotated[int | None, Field(ge=1, description="instead of a trace: prompt tokens")] = None
    output_len: Annotated[int, Field(ge=1, description="new tokens")] = 128
    range_ratio: Annotated[Share, Field(description="lengths vary by this share")] = 0.0
    prefix_len: Annotated[int, Field(ge=0, description="tokens all prompts share")] = 0
    rate_per_s: Annotated[
        float | None, Flag("--rate", metavar="R"), Field(gt=0, description="requests a second (Poisson)")
    ] = None
    requests: Annotated[int, Field(ge=1, description="maximum requests to simulate")] = 200
    seed: Annotated[int, Field(ge=0, description="seed of the load")] = 0
    slo_ttft_ms: Annotated[
        float | None,
        Flag(also=("--slo-ttft",)),
        Field(gt=0, description="bound on the time to first token; also that setting of the servers"),
    ] = None
    slo_itl_ms: Annotated[
        float | None,
        Flag(also=("--slo-itl",)),
        Field(
            gt=0, description="bound on a request's mean inter-token latency; also that setting of the decode servers"
        ),
    ] = None
    ratios: Annotated[
        tuple[Ratio, ...],
        from_text(parse_ratios),
        Flag(metavar="P:D,...", default=DEFAULT_RATIOS),
        Field(description="ratios of prefill to decode servers to compare"),
    ] = parse_ratios(DEFAULT_RATIOS)
    rates: Annotated[Path | None, Field(description="read step times from this file")] = None
    save_rates: Annotated[
        Path | None, Flag(metavar="FILE"), Field(description="write the measured step times to this file")
    ] = None
    url: Annotated[ServerUrl | None, Field(description="measure this running decode server ...")] = None
    prefill_url: Annotated[ServerUrl | None, Field(description="... and this prefill server, both idle")] = None
    cores: Annotated[
        int | None,
        Field(
            ge=0,
            description="all servers share a machine of N cores; 0: each has a device of its own (default: as "
            "measured)",
        ),
    ] = None
    pair: PairConfig | None = None
    as_json: bool = False
    api_key: str | None = None

    @property
    def bench(self) -> BenchOptions:
        """The load, as `pdserve bench` sends it."""
        same = (
            "requests",
            "rate_per_s",
            "output_len",
            "range_ratio",
            "prefix_len",
            "seed",
            "slo_ttft_ms",
            "slo_itl_ms",
        )
        given = {name: getattr(self, name) for name in (*same, "api_key")}
        if self.input_len is not None:
            given["input_len"] = self.input_len
        return BenchOptions(url=self.url or DECODE_URL, concurrency=None, **given)


_LOAD = (
    *("trace", "speed", "input_len", "output_len", "range_ratio", "prefix_len", "rate_per_s", "requests", "seed"),
    *("slo_ttft_ms", "slo_itl_ms", "ratios"),
)
_RATES = ("rates", "save_rates", "url", "prefill_url", "cores")


def add_ratio_flags(parser: argparse.ArgumentParser) -> None:
    fields = fields_of(RatioOptions)
    load = parser.add_argument_group("load: predicts its goodput for each ratio of prefill to decode servers")
    add_flags(load, fields, _LOAD)
    rates = parser.add_argument_group("step times: from a file, of a running pair, or of a pair that is started here")
    add_flags(rates, fields, _RATES)
    add_flags(parser.add_argument_group("settings of the pair that is started"), PAIR_FIELDS, MEASURED_SETTINGS)


def plans_load(given: argparse.Namespace) -> bool:
    """Whether the flags name a load; otherwise sizes are planned. Raises StartupError for flags that would have no
    effect: those of a load without requests, and those of sizes with a load.
    """
    flags = given_flags(given, (*_LOAD, *_RATES))
    if "trace" in flags or "input_len" in flags:
        for name in given_flags(given, ("gpus", "context")):
            raise StartupError(f"--{name} is for sizes: step times of a load are measured, not computed")
        return True
    for name in flags:
        flag = flag_name(name, fields_of(RatioOptions)[name])
        raise StartupError(f"{flag} is for a load: give --input-len N or --trace FILE, too")
    return False


def read_ratio_options(
    given: argparse.Namespace, environ: Mapping[str, str], decode_settings: tuple[str, ...]
) -> RatioOptions:
    """`decode_settings` are further settings that a pair is started with. Raises StartupError for a combination that
    makes no sense.
    """
    flags = given_flags(given, (*_LOAD, *_RATES, "as_json"))
    if "trace" in flags and "input_len" in flags:
        raise StartupError("--trace and --input-len: give one of them")
    if "input_len" in flags and "rate_per_s" not in flags:
        raise StartupError("--input-len needs --rate R, in requests a second")
    if "slo_ttft_ms" not in flags and "slo_itl_ms" not in flags:
        raise StartupError("goodput needs --slo-ttft-ms or --slo-itl-ms, or both")
    if ("url" in flags) != ("prefill_url" in flags):
        raise StartupError("--url and --prefill-url: a pair has both")
    if "rates" in flags and ("url" in flags or "save_rates" in flags):
        raise StartupError("--rates reads step times: --url and --save-rates are for measuring them")
    pair, settings = None, given_flags(given, (*decode_settings, *MEASURED_SETTINGS))
    if "rates" not in flags and "url" not in flags:
        pair = load_pair_config(None, settings, environ)
    elif settings:
        source = "--rates has the step times of a pair" if "rates" in flags else "--url names a pair that runs"
        raise StartupError(f"--{next(iter(settings)).replace('_', '-')} would have no effect: {source}")
    return read_options(RatioOptions, {**flags, "pair": pair, "api_key": secrets_in(environ).get("api_key")})
