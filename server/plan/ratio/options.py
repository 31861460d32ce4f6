"""The flags of `pdserve plan` for a load: which ratio of prefill to decode servers. Light: every command imports it."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ....common.errors import StartupError
from ....configs.flags import add_flags, given_flags
from ....configs.load import secrets_in
from ...bench.options import BenchOptions, named_flags, positive, share, whole_number
from ...launch.pair import PAIR_FIELDS, PairConfig, load_pair_config
from ...terminal.options import server_url

DEFAULT_RATIOS = "1:1,2:1,1:2"
LOAD_DEFAULTS: Mapping[str, object] = {
    "speed": 1.0,
    "output_len": 128,
    "range_ratio": 0.0,
    "prefix_len": 0,
    "requests": 200,
    "seed": 0,
    "ratios": DEFAULT_RATIOS,
}
"""Flags of a load that have a default. The others are None unless given."""
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


@dataclass(frozen=True)
class RatioOptions:
    """A load, the ratios to compare, and where the step times come from: `rates`, a running pair, or one to start."""

    bench: BenchOptions
    trace: Path | None
    speed: float
    ratios: tuple[Ratio, ...]
    rates: Path | None
    save_rates: Path | None
    prefill_url: str | None
    cores: int | None
    pair: PairConfig | None
    as_json: bool


def add_ratio_flags(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load: predicts its goodput for each ratio of prefill to decode servers")
    load.add_argument("--trace", type=Path, metavar="FILE", help="requests, as .jsonl (Mooncake) or .csv (Azure)")
    load.add_argument("--speed", type=positive, metavar="X", help="play the trace X times as fast")
    load.add_argument("--input-len", type=whole_number(1), metavar="N", help="instead of a trace: prompt tokens")
    load.add_argument("--output-len", type=whole_number(1), metavar="N", help="new tokens (default: %(default)s)")
    load.add_argument("--range-ratio", type=share, metavar="X", help="lengths vary by this share")
    load.add_argument("--prefix-len", type=whole_number(0), metavar="N", help="tokens all prompts share")
    load.add_argument("--rate", dest="rate_per_s", type=positive, metavar="R", help="requests a second (Poisson)")
    load.add_argument(
        "--requests", type=whole_number(1), metavar="N", help="maximum requests to simulate (default: %(default)s)"
    )
    load.add_argument("--seed", type=whole_number(0), metavar="N", help="seed of the load (default: %(default)s)")
    bound = "bound on the time to first token; also that setting of the servers"
    load.add_argument("--slo-ttft-ms", "--slo-ttft", type=positive, metavar="MS", help=bound)
    bound = "bound on a request's mean inter-token latency; also that setting of the decode servers"
    load.add_argument("--slo-itl-ms", "--slo-itl", type=positive, metavar="MS", help=bound)
    load.add_argument(
        "--ratios",
        metavar="P:D,...",
        help="ratios of prefill to decode servers to compare (default: %(default)s)",
    )
    parser.set_defaults(**LOAD_DEFAULTS)

    rates = parser.add_argument_group("step times: from a file, of a running pair, or of a pair that is started here")
    rates.add_argument("--rates", type=Path, metavar="FILE", help="read step times from this file")
    rates.add_argument("--save-rates", type=Path, metavar="FILE", help="write the measured step times to this file")
    rates.add_argument("--url", metavar="URL", help="measure this running decode server ...")
    rates.add_argument("--prefill-url", metavar="URL", help="... and this prefill server, both idle")
    cores = "all servers share a machine of N cores; 0: each has a device of its own (default: as measured)"
    rates.add_argument("--cores", type=whole_number(0), metavar="N", help=cores)
    add_flags(parser.add_argument_group("settings of the pair that is started"), PAIR_FIELDS, MEASURED_SETTINGS)


def plans_load(given: argparse.Namespace) -> bool:
    """Whether the flags name a load; otherwise sizes are planned. Raises StartupError for flags that would have no
    effect: those of a load without requests, and those of sizes with a load.
    """
    if given.trace is not None or given.input_len is not None:
        for name in ("gpus", "context"):
            if getattr(given, name) is not None:
                raise StartupError(f"--{name} is for sizes: step times of a load are measured, not computed")
        return True
    without_default = ("rate_per_s", "slo_ttft_ms", "slo_itl_ms", "rates", "save_rates", "url", "prefill_url", "cores")
    for name in (*without_default, *LOAD_DEFAULTS):
        if getattr(given, name) != LOAD_DEFAULTS.get(name):
            flag = name.removesuffix("_per_s").replace("_", "-")
            raise StartupError(f"--{flag} is for a load: give --input-len N or --trace FILE, too")
    return False


def read_ratio_options(
    given: argparse.Namespace, environ: Mapping[str, str], decode_settings: tuple[str, ...]
) -> RatioOptions:
    """`decode_settings` are further settings that a pair is started with. Raises StartupError for a combination that
    makes no sense.
    """
    if given.trace is not None and given.input_len is not None:
        raise StartupError("--trace and --input-len: give one of them")
    if given.input_len is not None and given.rate_per_s is None:
        raise StartupError("--input-len needs --rate R, in requests a second")
    if given.slo_ttft_ms is given.slo_itl_ms is None:
        raise StartupError("goodput needs --slo-ttft-ms or --slo-itl-ms, or both")
    if (given.url is None) != (given.prefill_url is None):
        raise StartupError("--url and --prefill-url: a pair has both")
    if given.rates is not None and (given.url is not None or given.save_rates is not None):
        raise StartupError("--rates reads step times: --url and --save-rates are for measuring them")
    pair, settings = None, given_flags(given, (*decode_settings, *MEASURED_SETTINGS))
    if given.rates is None and given.url is None:
        pair = load_pair_config(None, settings, environ)
    elif settings:
        source = "--url names a pair that runs" if given.rates is None else "--rates has the step times of a pair"
        raise StartupError(f"--{next(iter(settings)).replace('_', '-')} would have no effect: {source}")
    bench = BenchOptions(**named_flags(given), concurrency=None, api_key=secrets_in(environ).get("api_key"))
    return RatioOptions(
        bench=replace(bench, url=server_url(bench.url)),
        trace=given.trace,
        speed=given.speed,
        ratios=parse_ratios(given.ratios),
        rates=given.rates,
        save_rates=given.save_rates,
        prefill_url=None if given.prefill_url is None else server_url(given.prefill_url, "--prefill-url"),
        cores=given.cores,
        pair=pair,
        as_json=given.json,
    )


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
