"""Prompts computed by a prefill server, by decode itself, or where `auto` chooses: first tokens, throughput and gaps.

    python -m benchmarks.local_prefill [--json results.json]                       SmolLM2 on a CPU
    python -m benchmarks.local_prefill --geometry qwen3-8b --lengths 64,512,4096,32768 --streams 32      on a GPU

One prefill server and three decode servers: `never` and `auto` are paired with it, `always` is alone.

    lengths     time to first token by prompt length, while streams run on the same decode server; beside it the place
                that `auto` chose
    mixes       the same requests to each decode server, in turns: short prompts, long ones, a shared prefix
    burst       many prompts at once: tokens a second and inter-token latency
    poisson     requests at a rate, lognormal lengths: first tokens, gaps, and requests within --slo-ttft-ms and 1.5
                idle steps a token; with --pin, prefill and decode have a core each (--record: into benchmarks/results)
    gap         inter-token latency of streams, alone and while a prompt of the largest length is computed
"""

import argparse
import asyncio
import collections
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.pair import QWEN3_8B
from benchmarks.results import RESULTS, figure_of_this_run, record
from benchmarks.servers import free_port, running, wait_ready, write_model
from pdserve.common.errors import PdserveError
from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.configs.setting_types import LocalPrefillSetting
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.report import BenchResult
from pdserve.server.bench.summary import Distribution
from pdserve.server.launch.children import Children
from pdserve.server.launch.up import base_url

MODES: tuple[LocalPrefillSetting, ...] = ("never", "always", "auto")
TARGET_SLOWER = 0.05
TARGET_GAP = 2.5
ENDLESS = 100_000
GAPS = "gap p99 of auto / never, pair on cores of its own, 0.5 requests a second"
FIRST = "first token p99 of auto / never, pair on cores of its own, 0.5 requests a second"
MOST = {GAPS: 1.2, FIRST: 1.05}
"""Targets."""
PARTS = ("lengths", "mixes", "burst", "poisson", "gap")


class Servers:
    """Runs loads against the servers, each with new prompts."""

    def __init__(self, configs: Mapping[str, AnyServerConfig], screen: Console) -> None:
        self._configs = configs
        self.screen = screen
        self.seed = 0

    async def load(self, name: str, **options: Any) -> BenchResult:
        self.seed += 1
        url = base_url(self._configs[name])
        return await measure(BenchOptions(url=url, seed=self.seed, **{"warmup": 0, **options}), self.screen)

    async def ttft_s(self, name: str, tokens: int, repeats: int) -> float:
        """Median time to first token of prompts, one at a time."""
        result = await self.load(name, requests=repeats, concurrency=1, input_len=tokens, output_len=1)
        assert result.summary.ttft_s is not None, result.summary.failures
        return result.summary.ttft_s.p50

    @asynccontextmanager
    async def streams(self, name: str, count: int, context: int) -> AsyncIterator[None]:
        """Keep streams running in this context."""
        if not count:
            yield
            return
        output = min(ENDLESS, context - 64)
        task = asyncio.create_task(
            self.load(name, requests=64 * count, concurrency=count, input_len=16, output_len=output)
        )
        await asyncio.sleep(2.0)
        try:
            yield
        finally:
            task.cancel()  # ends the load, which then summarizes its results
            await task

    async def info(self, name: str) -> dict[str, Any]:
        """/server_info; counters in it are published a few times a second."""
        await asyncio.sleep(0.6)
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            found: dict[str, Any] = (await client.get(f"{base_url(self._configs[name])}/server_info")).json()
        return found

    async def local_prompts(self, name: str) -> int:
        return sum((await self.placements(name, "local_prefill_")).values())

    async def placements(self, name: str, prefix: str = "") -> collections.Counter[str]:
        """Prompts so far, by the place and the reason."""
        found = (await self.info(name))["counters"].items()
        return collections.Counter({key: int(count) for key, count in found if "_prefill_" in key and prefix in key})

    async def flush(self, name: str) -> None:
        async with httpx.AsyncClient(timeout=10, trust_env=False) as client:
            (await client.post(f"{base_url(self._configs[name])}/flush_cache")).raise_for_status()


async def by_length(servers: Servers, options: argparse.Namespace, context: int) -> list[dict[str, Any]]:
    """A row for each length."""
    rows: list[dict[str, Any]] = [{"tokens": tokens} for tokens in options.lengths]
    for mode in MODES:
        async with servers.streams(mode, options.streams, context):
            await servers.ttft_s(mode, options.lengths[-1], 2)  # the rates of both places are measured
            for row in rows:
                before = await servers.local_prompts(mode)
                row[mode] = await servers.ttft_s(mode, row["tokens"], options.repeats)
                if mode == "auto":
                    row["local"] = await servers.local_prompts(mode) - before
    return rows


async def mixes(servers: Servers, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round, by mix and mode. The modes take turns, so that all see the same machine."""
    middle, longest = options.mix_lengths
    kinds = {
        "short": {"input_len": 32},
        "long": {"input_len": longest},
        "shared prefix": {"prefix_len": longest, "input_len": middle},
    }
    found: dict[str, dict[str, list[float]]] = {kind: {mode: [] for mode in MODES} for kind in kinds}
    for number in range(options.rounds + 1):
        for kind, lengths in kinds.items():
            for mode in MODES if number % 2 else reversed(MODES):
                result = await servers.load(
                    mode, requests=options.requests, concurrency=options.concurrency, output_len=32, **lengths
                )
                assert not result.summary.failed, result.summary.failures
                servers.screen.print(f"mix {kind}, round {number}, {mode}: {result.summary.duration_s:.2f} s")
                if number:  # the first round warms up
                    found[kind][mode].append(result.summary.duration_s)
    return found


async def burst(servers: Servers, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Many prompts at once, on the server that computes all of them and on the pair."""
    found: dict[str, dict[str, float]] = {}
    prompts, tokens, new = options.burst
    for mode in ("always",) if options.alone else ("always", "never"):
        result = await servers.load(
            mode, requests=prompts, concurrency=prompts, input_len=tokens, output_len=new, warmup=2
        )
        found[mode] = {"tokens_per_s": result.summary.output_tokens_per_s, **_times(result.summary.itl_s)}
    return found


async def poisson(servers: Servers, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Figures of each mode, with the same requests: the seed counts loads, so it is set back. Prefill forgets them."""
    rate, tokens, new = options.poisson[0], *map(int, options.poisson[1:])
    step = (await servers.load("never", requests=1, concurrency=1, input_len=16, output_len=64)).summary.itl_s
    assert step is not None, "it has 64 tokens"
    bounds = {"slo_ttft_ms": options.slo_ttft_ms, "slo_itl_ms": 1000 * 1.5 * step.p50}
    lengths = {"input_len": tokens, "output_len": new, "input_sigma": 1.0, "output_sigma": 0.7}
    found: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        servers.seed = 1000
        await servers.flush("prefill")
        before = await servers.placements(mode)
        load = {"requests": options.requests, "concurrency": None, "rate_per_s": rate, **lengths, **bounds}
        summary = (await servers.load(mode, warmup=2, **load)).summary
        assert summary.goodput is not None, "there are bounds"
        assert summary.ttft_s is not None, summary.failures
        found[mode] = {
            "ttft_p50_s": summary.ttft_s.p50,
            "ttft_p99_s": summary.ttft_s.p99,
            **{f"gap_{name}": seconds for name, seconds in _times(summary.itl_s).items()},
            "good": summary.goodput.share,
            "places": dict(await servers.placements(mode) - before),
        }
    if options.record:
        never, auto = found["never"], found["auto"]
        ratios = {GAPS: auto["gap_p99_s"] / never["gap_p99_s"], FIRST: auto["ttft_p99_s"] / never["ttft_p99_s"]}
        figures = [figure_of_this_run(name, ratio, "x", target=MOST[name]) for name, ratio in ratios.items()]
        record(RESULTS / "scheduling.json", "", figures)
    return found


async def gap(servers: Servers, options: argparse.Namespace, context: int) -> dict[str, dict[str, float]]:
    """Time between tokens of streams on the server that computes prompts itself."""
    output = min(400, context - 64)
    load = {"requests": options.streams, "concurrency": options.streams, "input_len": 16, "output_len": output}
    alone = await servers.load("always", **load)
    streams = asyncio.create_task(servers.load("always", **load))
    await asyncio.sleep(1.0)
    await servers.ttft_s("always", options.lengths[-1], 1)
    beside = await streams
    return {"alone": _times(alone.summary.itl_s), "beside": _times(beside.summary.itl_s)}


def _times(found: Distribution | None) -> dict[str, float]:
    if found is None:
        return {}
    return {"p50_s": found.p50, "p90_s": found.p90, "p99_s": found.p99, "max_s": found.max}


def main() -> int:
    options = _parse()
    screen, out = Console(stderr=True, highlight=False, width=160), Console(highlight=False, width=140)
    results: dict[str, Any] = {"command": sys.argv}
    try:
        with tempfile.TemporaryDirectory() as directory:
            configs = _configs(options, Path(directory))
            with (
                _running(options, configs, screen) as children,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                wait_ready(children, list(configs.values()), timeout_s=300)
                servers = Servers(configs, screen)
                context = int(runner.run(servers.info("always"))["max_total_num_tokens"]) // max(1, options.streams)
                context = min(context, options.context)
                if "lengths" in options.parts:
                    results["lengths"] = runner.run(by_length(servers, options, context))
                    out.print(_lengths_table(results["lengths"]))
                if "mixes" in options.parts:
                    results["mixes"] = runner.run(mixes(servers, options))
                    out.print(_mixes_table(results["mixes"]))
                if "burst" in options.parts:
                    results["burst"] = runner.run(burst(servers, options))
                    out.print("burst of {} x ({} in, {} out):".format(*options.burst), json.dumps(results["burst"]))
                if "poisson" in options.parts:
                    results["poisson"] = runner.run(poisson(servers, options))
                    out.print("poisson {:g}, {:g} in, {:g} out:".format(*options.poisson), results["poisson"])
                if "gap" in options.parts:
                    results["gap"] = figures = runner.run(gap(servers, options, context))
                    ratio = figures["beside"]["p99_s"] / figures["alone"]["p50_s"]
                    out.print(
                        f"inter-token latency of {options.streams} streams, p99 while {options.lengths[-1]} tokens are "
                        f"computed: {figures['beside']['p99_s'] * 1e3:.1f} ms, {ratio:.2f} x the idle step "
                        f"({figures['alone']['p50_s'] * 1e3:.1f} ms); target {TARGET_GAP} x"
                    )
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


@contextmanager
def _running(
    options: argparse.Namespace, configs: Mapping[str, AnyServerConfig], screen: Console
) -> Iterator[Children]:
    """With --pin, prefill has the first core and the decode servers the second: processes inherit it."""
    cores = sorted(os.sched_getaffinity(0))
    if not options.pin:
        with running(configs, screen) as children:
            yield children
        return
    os.sched_setaffinity(0, cores[:1])
    with running({"prefill": configs["prefill"]}, screen):
        os.sched_setaffinity(0, cores[1:2])
        with running({name: configs[name] for name in configs if name != "prefill"}, screen) as children:
            os.sched_setaffinity(0, cores)
            yield children


def _configs(options: argparse.Namespace, directory: Path) -> dict[str, AnyServerConfig]:
    given = {name: value for name in ("device", "threads", "kv_memory_gib") if (value := getattr(options, name))}
    shared: dict[str, Any] = {"model": options.model, "slo_ttft_ms": options.slo_ttft_ms, **given}
    if options.geometry is not None:
        write_model(directory, {**QWEN3_8B, "num_hidden_layers": options.layers})
        shared |= {"model": str(directory), "load_format": "dummy"}
    prefill = PrefillConfig(**shared, port=free_port(), bootstrap_port=free_port())
    decode: dict[str, AnyServerConfig] = {
        mode: DecodeConfig(
            **shared,
            port=free_port(),
            local_prefill=mode,
            prefill=(f"127.0.0.1:{prefill.bootstrap_port}",) if mode != "always" else (),
            **dict(setting.split("=", 1) for setting in options.set),
        )
        for mode in MODES
    }
    return {"always": decode["always"]} if options.alone else {"prefill": prefill, **decode}


def _lengths_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="time to first token, ms")
    for column in ("prompt", *MODES, "computed here"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(str(row["tokens"]), *(f"{row[mode] * 1e3:.1f}" for mode in MODES), str(row["local"]))
    return table


def _mixes_table(found: dict[str, dict[str, list[float]]]) -> Table:
    table = Table(title="seconds per round, median")
    for column in ("mix", *MODES, "auto / better of the others"):
        table.add_column(column, justify="right")
    for kind, by_mode in found.items():
        medians = {mode: statistics.median(seconds) for mode, seconds in by_mode.items()}
        ratio = medians["auto"] / min(medians["never"], medians["always"])
        times = (f"{medians[mode]:.2f}" for mode in MODES)
        table.add_row(kind, *times, f"{ratio:.3f} (target <= {1 + TARGET_SLOWER})")
    return table


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", type=lambda text: text.split(","), default=list(PARTS), help="what to measure (default: all)"
    )
    parser.add_argument("--alone", action="store_true", help="measure one `pdserve serve`, not a pair: burst and gap")
    parser.add_argument("--lengths", type=_numbers, default=[16, 64, 256, 1024], help="prompt lengths")
    parser.add_argument("--repeats", type=int, default=5, help="prompts per length")
    parser.add_argument("--streams", type=int, default=4, help="requests that decode runs during a measurement")
    parser.add_argument("--context", type=int, default=8000, help="maximum tokens of a stream")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each mix")
    parser.add_argument("--requests", type=int, default=24, help="requests of each mix")
    parser.add_argument("--concurrency", type=int, default=6, help="requests of a mix at a time")
    parser.add_argument("--mix-lengths", type=_numbers, default=[64, 512], help="middle and long prompts of the mixes")
    parser.add_argument("--burst", type=_numbers, default=[16, 256, 64], help="prompts,tokens in,tokens out")
    parser.add_argument(
        "--poisson", type=_floats, default=[0.5, 64, 48], help="requests a second,median tokens in,median tokens out"
    )
    parser.add_argument("--slo-ttft-ms", type=float, default=500, help="of all servers, and of `poisson`")
    parser.add_argument("--pin", action="store_true", help="prefill on the first CPU core, decode on the second")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--geometry", choices=["qwen3-8b"], help="random weights instead of a model")
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"], help="fewer for a quick look")
    parser.add_argument("--device", help="device of all servers (default: auto)")
    parser.add_argument("--threads", type=int, help="CPU threads of each server")
    parser.add_argument("--kv-memory-gib", type=float, help="size of each server's KV pool")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the decode servers"
    )
    parser.add_argument("--record", action="store_true", help="the figures of `poisson`")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args()


def _floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
