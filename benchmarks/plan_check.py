"""Compares what `pdserve plan` predicts with real servers on this machine: goodput of three loads on three ratios.

    python -m benchmarks.plan_check                            # about six minutes on two quiet cores
    python -m benchmarks.plan_check --small --seconds 6        # a smaller model; to see that it works
    python -m benchmarks.plan_check --model smollm2 --loads prefill --ratios 1:1,2:1 --seconds 120

First a pair is measured, and how much up to three servers that compute at once slow each other down. Then each ratio is
started, and gets the same requests at the same times as the simulation. With several decode servers, requests go to
them in turn. Each server computes on one core. By default the model has random weights, and a quarter of the size of
smollm2, so that enough requests for a goodput end within half a minute.

The rate of a load would keep two cores busy for 60 to 70 % of the time, if its work could be divided evenly between
them. One ratio comes close to that and meets the bounds; one that leaves most of the work to a single server falls
behind. The exit status is 0 if every prediction is within 15 % and the planned ratios are the best ones. For each load,
the goodput of the planned ratio is printed, because that is what a plan is used for. That goodput is close to the rate
of the load, so it tests the prediction less than the other ratios do. Those have larger errors: the goodput of
an overloaded server changes by several times the change of its step times.

On a machine with other load, use `--measure-again`: step times are measured again on the servers of each ratio, just
before its runs.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.servers import free_port, running, wait_ready, write_model
from pdserve.common.errors import PdserveError
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.server.bench.client import BenchClient
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.prompts import ModelLimits
from pdserve.server.bench.summary import Goodput, Summary, summarize
from pdserve.server.launch.pair import PairConfig
from pdserve.server.launch.up import base_url
from pdserve.server.plan.ratio.calibration import calibrate
from pdserve.server.plan.ratio.command import measure_own_pair
from pdserve.server.plan.ratio.load import Load, random_load
from pdserve.server.plan.ratio.options import DEFAULT_RATIOS, Ratio, parse_ratios
from pdserve.server.plan.ratio.pair import MeasuredPair, read_pair, write_pair
from pdserve.server.plan.ratio.predict import NEARLY_BEST, Prediction, best_of, predict

START_TIMEOUT_S = 600
ALLOWED_ERROR = 0.15
BATCH = 8
"""Most running requests of a decode server: beyond it, requests wait, so that a server has one capacity."""
LEAST_REQUESTS = 16
WARMUP_TOKENS = (32, 8)
"""Prompt and output tokens of the requests before a measurement."""
BOUNDLESS = BenchOptions(slo_ttft_ms=math.inf, slo_itl_ms=math.inf)
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
SMALL_MODEL = {**MODEL, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
SMALL_MODEL["num_key_value_heads"] = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """Tokens of prompts and outputs; bounds: TTFT in times of a prompt, TPOT in steps of a full batch; and how long the
    load would keep two cores busy, if its work could be divided evenly between them: a share of the time.
    """

    input_len: int
    output_len: int
    ttft_prompts: float
    tpot_steps: float
    busy: float


SHAPES = {
    "prefill": Shape(256, 8, 7, 4, 0.7),
    "balanced": Shape(96, 64, 8, 2.5, 0.6),
    "decode": Shape(24, 96, 8, 2, 0.7),
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One load on one ratio."""

    prediction: Prediction
    summary: Summary

    @property
    def measured(self) -> Goodput:
        assert self.summary.goodput is not None, "there are bounds"
        return self.summary.goodput

    @property
    def error(self) -> float:
        """Error of the prediction relative to the measured goodput; positive if the prediction is too high."""
        real, predicted = self.measured.requests_per_s, self.prediction.goodput.requests_per_s
        return (predicted - real) / real if real else math.inf * predicted if predicted else 0.0

    @property
    def ok(self) -> bool:
        return abs(self.error) <= ALLOWED_ERROR


def main() -> int:
    options, screen = _parse(), Console(stderr=True, highlight=False)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        options.random_weights = options.model is None
        if options.random_weights:
            write_model(Path(folder), SMALL_MODEL if options.small else MODEL)
            options.model = folder
        try:
            pair = _measured_pair(options, screen)
            benches = {name: _bench(name, pair, options, seed) for seed, name in enumerate(options.loads)}
            loads = {name: random_load(bench, _limits(pair)) for name, bench in benches.items()}
            cells: dict[tuple[str, Ratio], Cell] = {}
            for ratio in options.ratios:
                then, found = _run_ratio(ratio, pair, benches, loads, options, screen)
                for name, measured in found.items():
                    cells[name, ratio] = Cell(predict(then, loads[name], benches[name], ratio), measured)
        except PdserveError as error:
            screen.print(f"error: {error}", style="red", markup=False)
            return 1
    ok = _report(benches, options.ratios, cells, Console(highlight=False, width=120))
    screen.print(f"took {time.monotonic() - began:.0f} s")
    if options.output is not None:
        options.output.write_text(json.dumps(_document(pair, cells), indent=2))
    return 0 if ok else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model (default: one with random weights)")
    parser.add_argument("--small", action="store_true", help="use a smaller model with random weights")
    parser.add_argument(
        "--loads", type=lambda text: text.split(","), default=list(SHAPES), help="default: " + ",".join(SHAPES)
    )
    parser.add_argument(
        "--ratios", type=parse_ratios, default=parse_ratios(DEFAULT_RATIOS), help=f"default: {DEFAULT_RATIOS}"
    )
    parser.add_argument("--seconds", type=float, default=22, help="time over which requests arrive (default: 22)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each server (default: 1)")
    parser.add_argument("--kv-tokens", type=int, default=32768, help="KV tokens of each server (default: 32768)")
    parser.add_argument("--local-prefill", choices=["never", "auto"], default="never", help="of the decode servers")
    parser.add_argument("--measure-again", action="store_true", help="measure step times before the runs of each ratio")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="use step times of an earlier run")
    parser.add_argument("--save-rates", type=Path, metavar="FILE", help="write the measured step times")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything as JSON")
    options = parser.parse_args()
    if unknown := set(options.loads) - SHAPES.keys():
        parser.error(f"unknown loads: {', '.join(sorted(unknown))}")
    return options


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    load_format = {"load_format": "dummy"} if options.random_weights else {}
    return {"model": options.model, "threads": options.threads, "kv_tokens": options.kv_tokens, **load_format}


def _prefill(options: argparse.Namespace, **ports: int) -> PrefillConfig:
    return PrefillConfig(**_settings(options), **ports, chunk_size=128 if options.small else None)


def _decode(options: argparse.Namespace, **network: Any) -> DecodeConfig:
    return DecodeConfig(
        **_settings(options), **network, local_prefill=options.local_prefill, max_running_requests=BATCH
    )


def _measured_pair(options: argparse.Namespace, screen: Console) -> MeasuredPair:
    if options.rates is not None:
        return read_pair(options.rates)
    config = PairConfig(_prefill(options), _decode(options))
    pair = measure_own_pair(config, screen, options.ratios)
    if options.save_rates is not None:
        write_pair(options.save_rates, pair)
    return pair


def _limits(pair: MeasuredPair) -> ModelLimits:
    return ModelLimits(pair.vocab_size, frozenset(), pair.context_length)


def _bench(name: str, pair: MeasuredPair, options: argparse.Namespace, seed: int) -> BenchOptions:
    """A load that keeps two cores busy for a part of the time, with bounds that an idle cluster meets easily."""
    shape = SHAPES[name]
    prompt_s = pair.times.prefill_s([(0, shape.input_len)])
    step_s = pair.times.decode_s([shape.input_len + shape.output_len // 2] * BATCH)
    rate_per_s = shape.busy * 2 / (prompt_s + (shape.output_len - 1) * step_s / BATCH)
    return BenchOptions(
        requests=max(LEAST_REQUESTS, round(rate_per_s * options.seconds)),
        concurrency=None,
        rate_per_s=rate_per_s,
        input_len=shape.input_len,
        output_len=shape.output_len,
        range_ratio=0.5,
        seed=seed,
        slo_ttft_ms=1000 * (shape.ttft_prompts * prompt_s + 2 * step_s),
        slo_itl_ms=1000 * shape.tpot_steps * step_s,
    )


def _run_ratio(
    ratio: Ratio,
    pair: MeasuredPair,
    benches: dict[str, BenchOptions],
    loads: dict[str, Load],
    options: argparse.Namespace,
    screen: Console,
) -> tuple[MeasuredPair, dict[str, Summary]]:
    """Start the servers of a ratio and measure all loads. Returns the step times to predict them with, too."""
    ports = [{"port": free_port(), "bootstrap_port": free_port()} for _ in range(ratio.prefills)]
    prefills = [_prefill(options, **own) for own in ports]
    addresses = tuple(f"127.0.0.1:{config.bootstrap_port}" for config in prefills)
    decodes = [_decode(options, port=free_port(), prefill=addresses) for _ in range(ratio.decodes)]
    configs: list[AnyServerConfig] = [*prefills, *decodes]
    servers = {f"{config.role} {config.port}": config for config in configs}
    found = {}
    with running(servers, screen) as children:
        wait_ready(children, configs, START_TIMEOUT_S)
        if options.measure_again:
            first = base_url(decodes[0]), base_url(prefills[0])
            again = asyncio.run(calibrate(*first, screen, machine_cores=pair.machine_cores))
            times = msgspec.structs.replace(again.times, interference=pair.times.interference)
            pair = msgspec.structs.replace(again, times=times)
        urls = [base_url(config) for config in decodes]
        asyncio.run(_measure(urls, BOUNDLESS, _warmup(pair, ratio)))
        for name, load in loads.items():
            screen.print(f"{ratio}, {name}: {load.description}")
            found[name] = asyncio.run(_measure(urls, benches[name], load))
            children.check()
    return pair, found


async def _measure(urls: list[str], bench: BenchOptions, load: Load) -> Summary:
    clients = [BenchClient(url, api_key=None, timeout_s=600) for url in urls]
    sampling = {"temperature": 0, "ignore_eos": True}
    bounds = {"slo_ttft_ms": bench.slo_ttft_ms, "slo_itl_ms": bench.slo_itl_ms} if bench is not BOUNDLESS else {}
    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number, arrival in enumerate(load.arrivals):
                body = msgspec.json.encode(
                    {
                        "input_ids": arrival.prompt,
                        "sampling_params": {**sampling, "max_new_tokens": arrival.output_tokens},
                        "stream": True,
                        **bounds,
                    }
                )
                await asyncio.sleep(max(0.0, started + arrival.at_s - time.perf_counter()))
                client = clients[number % len(clients)]
                tasks.append(group.create_task(client.generate(body, started, expected_tokens=arrival.output_tokens)))
        duration_s = time.perf_counter() - started
    finally:
        for client in clients:
            client.close()
    assert bench.slo_ttft_ms is not None
    assert bench.slo_itl_ms is not None
    return summarize(
        [task.result() for task in tasks],
        duration_s,
        slo_ttft_s=bench.slo_ttft_ms / 1000,
        slo_itl_s=bench.slo_itl_ms / 1000,
    )


def _warmup(pair: MeasuredPair, ratio: Ratio) -> Load:
    """Send requests to every server at once: memory is touched and kernels are compiled before a measurement."""
    input_len, output_len = WARMUP_TOKENS
    bench = BenchOptions(
        requests=4 * ratio.prefills * ratio.decodes,
        concurrency=None,
        rate_per_s=math.inf,
        input_len=input_len,
        output_len=output_len,
        seed=len(SHAPES),
    )
    return random_load(bench, _limits(pair))


def _report(
    benches: dict[str, BenchOptions],
    ratios: tuple[Ratio, ...],
    cells: dict[tuple[str, Ratio], Cell],
    console: Console,
) -> bool:
    """Print the table; returns whether all predictions are close enough, and the named ratios are the best ones."""
    table = Table(title="goodput: requests a second within the bounds, and their share of all requests")
    for column in ("load", "ratio", "predicted", "measured", "error", "limit", "planned", "best"):
        right = column in ("predicted", "measured", "error")
        table.add_column(column, no_wrap=True, justify="right" if right else "left")
    verdicts, ok = [], True
    for name, bench in benches.items():
        of_load = {ratio: cells[name, ratio] for ratio in ratios}
        named = best_of([cell.prediction for cell in of_load.values()]).ratio
        best = max(of_load, key=lambda ratio: of_load[ratio].measured.good)
        of_named = of_load[named]
        is_best = of_named.measured.good >= NEARLY_BEST * of_load[best].measured.good
        ok = ok and is_best and all(cell.ok for cell in of_load.values())
        verdicts.append(
            f"{name}: {named} is planned, error of its goodput {of_named.error:+.0%} "
            f"({'ok' if of_named.ok else f'more than {ALLOWED_ERROR:.0%}'}); "
            f"it is {'the best one, or as good' if is_best else f'worse than {best}'}"
        )
        shape = (
            f"{name}: {bench.input_len} in, {bench.output_len} out",
            f"  {bench.requests} requests, {bench.rate_per_s:.2f} /s",
            f"  TTFT {bench.slo_ttft_ms:.0f} ms, TPOT {bench.slo_itl_ms:.0f} ms",
        )
        rows = [
            (
                str(ratio),
                _goodput(cell.prediction.goodput),
                _goodput(cell.measured),
                f"{cell.error:+.0%}",
                cell.prediction.limit,
                "yes" if ratio == named else "",
                "yes" if ratio == best else "",
            )
            for ratio, cell in of_load.items()
        ]
        for text, row in itertools.zip_longest(shape, rows, fillvalue=()):
            table.add_row(text or "", *row)
        table.add_section()
    console.print(table)
    console.print("\n".join(verdicts))
    close = sum(cell.ok for cell in cells.values())
    console.print(f"of all {len(cells)} predictions, {close} are within {ALLOWED_ERROR:.0%} of what was measured")
    return ok


def _goodput(found: Goodput) -> str:
    return f"{found.requests_per_s:.2f} ({found.share:.0%})"


def _document(pair: MeasuredPair, cells: dict[tuple[str, Ratio], Cell]) -> dict[str, Any]:
    return {
        "pair": msgspec.to_builtins(pair),
        "cells": [
            {"load": name, "ratio": str(ratio), "error": cell.error, **dataclasses.asdict(cell)}
            for (name, ratio), cell in cells.items()
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
