"""`pdserve plan` for a load: measures a pair or reads its step times, simulates each ratio, names the best."""

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Console

from ....common.errors import StartupError
from ...bench.prompts import ModelLimits
from ...bench.summary import Distribution
from ...launch.children import ChildEndedError
from ...launch.pair import PairConfig
from ...launch.ports import free_ports
from ...launch.up import NotReadyError, base_url, running_pair
from .calibration import calibrate
from .interference import measure_interference
from .load import Load, random_load, read_trace
from .options import Ratio, RatioOptions
from .pair import MeasuredPair, read_pair, write_pair
from .predict import Prediction, best_of, predict


def run_ratio_plan(options: RatioOptions) -> int:
    screen = Console(stderr=True, highlight=False)
    pair = _pair(options, screen)
    if options.cores is not None:
        pair = msgspec.structs.replace(pair, machine_cores=options.cores or None)
    load = make_load(options, pair)
    predictions = [predict(pair, load, options.bench, ratio) for ratio in options.ratios]
    print(_as_json(pair, load, predictions) if options.as_json else _as_text(pair, load, options, predictions))
    return 0


def make_load(options: RatioOptions, pair: MeasuredPair) -> Load:
    if options.trace is not None:
        return read_trace(
            options.trace, most=options.bench.requests, speed=options.speed, max_total_tokens=pair.context_length
        )
    limits = ModelLimits(pair.vocab_size, frozenset(), pair.context_length)
    return random_load(options.bench, limits)


def _pair(options: RatioOptions, screen: Console) -> MeasuredPair:
    if options.rates is not None:
        return read_pair(options.rates)
    _check_files(options)
    if options.prefill_url is not None:
        measured = asyncio.run(calibrate(options.bench.url, options.prefill_url, screen, api_key=options.bench.api_key))
    else:
        assert options.pair is not None, "checked with the flags"
        measured = measure_own_pair(options.pair, screen, options.ratios)
    if options.save_rates is not None:
        write_pair(options.save_rates, measured)
    return measured


def _check_files(options: RatioOptions) -> None:
    """Raises StartupError for files that cannot be used, before a minute of measurements."""
    if options.trace is not None:
        read_trace(options.trace, most=options.bench.requests, speed=options.speed, max_total_tokens=sys.maxsize)
    path = options.save_rates
    if path is not None and not path.absolute().parent.is_dir():
        raise StartupError(f"--save-rates {path}: no such directory: {path.parent}")


def measure_own_pair(config: PairConfig, screen: Console, ratios: Sequence[Ratio]) -> MeasuredPair:
    """Start a pair on free ports, measure it, and end it. During the measurement, prefill computes all prompts. On a
    CPU, the servers of the `ratios` share the machine, so it is also measured how they slow each other down. If a ratio
    has more than two servers, a second pair is started for that.
    """
    key = config.decode.api_key.get_secret_value() if config.decode.api_key is not None else None
    screen.print("starting a prefill and a decode server to measure them")
    try:
        with running_pair(_on_free_ports(config), screen) as pair:
            pair.wait_ready()
            cores = len(os.sched_getaffinity(0))
            prefill_url = base_url(pair.config.prefill)
            measured = asyncio.run(calibrate(pair.url, prefill_url, screen, api_key=key, machine_cores=cores))
            if measured.device != "cpu":
                measured = msgspec.structs.replace(measured, machine_cores=None)
            elif max(ratio.prefills + ratio.decodes for ratio in ratios) > 2:
                screen.print("starting two more servers: all share this machine")
                with running_pair(_on_free_ports(config), screen) as other:
                    other.wait_ready()
                    urls = (pair.url, other.url)
                    measured = asyncio.run(measure_interference(measured, urls, screen, api_key=key))
            else:
                measured = asyncio.run(measure_interference(measured, (pair.url,), screen, api_key=key))
    except (ChildEndedError, NotReadyError) as error:
        raise StartupError(str(error)) from None
    settings = {**measured.decode.settings, "local_prefill": config.decode.local_prefill}
    return msgspec.structs.replace(measured, decode=msgspec.structs.replace(measured.decode, settings=settings))


def _on_free_ports(config: PairConfig) -> PairConfig:
    prefill_port, control_port, decode_port = free_ports(3)
    prefill = config.prefill.model_copy(update={"port": prefill_port, "bootstrap_port": control_port})
    update = {"port": decode_port, "prefill": (f"127.0.0.1:{control_port}",), "local_prefill": "never"}
    return PairConfig(prefill, config.decode.model_copy(update=update))


def _as_json(pair: MeasuredPair, load: Load, predictions: list[Prediction]) -> str:
    document: dict[str, Any] = {
        "load": load.description,
        "best": str(best_of(predictions).ratio),
        "ratios": [{**dataclasses.asdict(found), "ratio": str(found.ratio)} for found in predictions],
        "pair": msgspec.to_builtins(pair),
    }
    return json.dumps(document, indent=2)


def _as_text(pair: MeasuredPair, load: Load, options: RatioOptions, predictions: list[Prediction]) -> str:
    shared = f", all on {pair.machine_cores} cores" if pair.machine_cores is not None else ""
    bounds = {"first token": options.bench.slo_ttft_ms, "between tokens": options.bench.slo_itl_ms}
    within = " and ".join(f"{what} within {ms:g} ms" for what, ms in bounds.items() if ms is not None)
    lines = [f"{pair.model} on {pair.device}{shared}; {load.description}", f"goodput: {within}", ""]
    rows = [("", "goodput", "of all", "TTFT p50", "p95", "TPOT p50", "p95", "prefill", "decode", "limit")]
    rows += [
        (
            str(found.ratio),
            f"{found.goodput.requests_per_s:.2f} /s",
            f"{found.goodput.share:.0%}",
            *_milliseconds(found.summary.ttft_s),
            *_milliseconds(found.summary.tpot_s),
            f"{found.prefill_busy:.0%} busy",
            f"{found.decode_busy:.0%} busy",
            found.limit,
        )
        for found in predictions
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    best = best_of(predictions)
    lines += ["", f"best: {best.ratio}, {best.goodput.requests_per_s:.2f} requests a second within the bounds"]
    if failed := {reason for found in predictions for reason in found.summary.failures}:
        lines.append(f"some requests failed: {', '.join(sorted(failed))}")
    return "\n".join(lines)


def _milliseconds(found: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{1000 * found.p50:.0f} ms", f"{1000 * found.p95:.0f} ms")
