"""A prefill and a decode server that share one GPU, at Qwen3-8B's geometry with random weights, KV over CUDA IPC.

    python -m benchmarks.pair [--json results.json]

Real servers, loaded over HTTP by the code of `pdserve bench`:

    ttft     one prompt of 8,192 tokens at a time: time to first token, and what the transfer adds to it
    burst    64 clients, each with one prompt of 1,024 tokens and 256 new ones
    steady   the same clients, four requests each: tokens a second, and time to first token after the first burst
    tokens   inter-token latency of 8 streams, alone and while prefill computes prompts of 8,192 tokens

Other settings are the defaults.

Two processes take turns on a GPU: while both have work, each gets about half of it, and kernels of one do not fill the
gaps of the other. The gain of a pair on two GPUs does not show here.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.servers import cpu_seconds, free_port, write_model
from pdserve.common.errors import PdserveError
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.report import BenchResult
from pdserve.server.bench.summary import Distribution
from pdserve.server.launch.pair import PairConfig
from pdserve.server.launch.up import RunningPair, base_url, running_pair

QWEN3_8B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}

LONG_PROMPT, PROMPT, OUTPUT, CLIENTS, STREAMS = 8192, 1024, 256, 64, 8
TARGET_TRANSFER_SHARE = 0.03
TARGET_TOKENS_PER_S = 4000
TARGET_TTFT_S = 0.15
VLLM_TOKENS_PER_S = 4596
"""vLLM 0.22.1 on the same GPU and geometry, both phases in one process, in one burst of 64."""

BEFORE_FIRST_TOKEN = ("queue", "prefill_queue", "prefill", "transfer", "control", "admit")


def pair_config(model: Path, options: argparse.Namespace) -> PairConfig:
    names = ("kv_dtype", "transport", "device", "kv_memory_gib", "chunk_size", "max_running_requests")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    shared: dict[str, Any] = {"model": str(model), "load_format": "dummy"}
    roles: dict[str, dict[str, Any]] = {
        role: {**shared, "port": free_port(), **{name: value for name, value in given.items() if name in fields}}
        for role, fields in (("prefill", PrefillConfig.model_fields), ("decode", DecodeConfig.model_fields))
    }
    prefill = PrefillConfig(**roles["prefill"], bootstrap_port=free_port())
    return PairConfig(
        prefill,
        DecodeConfig(
            **roles["decode"],
            local_prefill=options.local_prefill,
            prefill=(f"127.0.0.1:{prefill.bootstrap_port}",),
        ),
    )


class Load:
    """Runs loads against a pair, each with uncached prompts."""

    def __init__(self, pair: RunningPair, screen: Console) -> None:
        self._pair = pair
        self._screen = screen
        self._seed = 0

    async def run(
        self, *, requests: int, concurrency: int, input_len: int, output_len: int, warmup: int = 0
    ) -> BenchResult:
        self._seed += 1
        options = BenchOptions(
            url=self._pair.url,
            requests=requests,
            concurrency=concurrency,
            input_len=input_len,
            output_len=output_len,
            warmup=warmup,
            seed=self._seed,
        )
        return await measure(options, self._screen)

    def usage(self) -> dict[str, dict[str, float]]:
        """Counters of each server so far, and the CPU time of its processes."""
        found: dict[str, dict[str, float]] = {}
        for config in self._pair.config:
            time.sleep(0.6)  # counters are published a few times a second
            info = httpx.get(f"{base_url(config)}/server_info", timeout=5).json()
            busy = {name: value for name, value in info["gauges"].items() if name.endswith("busy_seconds")}
            found[config.role] = {**info["counters"], **busy, **cpu_seconds(config.port)}
        return found


def difference(before: dict[str, dict[str, float]], after: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        role: {name: value - before[role].get(name, 0.0) for name, value in values.items()}
        for role, values in after.items()
    }


async def between_tokens(load: Load) -> tuple[BenchResult, BenchResult]:
    """8 streams alone, and 8 streams while prefill always computes a long prompt."""
    streams = {"requests": STREAMS, "concurrency": STREAMS, "input_len": 256, "output_len": 384}
    alone = await load.run(**streams)
    prompts = asyncio.create_task(load.run(requests=1000, concurrency=2, input_len=LONG_PROMPT, output_len=1))
    await asyncio.sleep(2.0)
    busy = await load.run(**streams)
    prompts.cancel()  # ends the load, which then summarises its results
    await prompts
    return alone, busy


def main() -> int:
    options = _parse()
    screen = Console(stderr=True, highlight=False, width=160)
    out = Console(highlight=False, width=120)
    results: dict[str, Any] = {"command": sys.argv}
    config = {**QWEN3_8B, "num_hidden_layers": options.layers}
    try:
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), config)
            began = time.perf_counter()
            with (
                running_pair(pair_config(Path(directory), options), screen) as pair,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                pair.wait_ready(timeout_s=120)
                results["start_s"] = time.perf_counter() - began
                load = Load(pair, screen)
                for name, requests, concurrency, input_len, output_len, warmup in (
                    ("ttft", 6, 1, LONG_PROMPT, 2, 2),
                    ("burst", CLIENTS, CLIENTS, PROMPT, OUTPUT, 2),
                    ("steady", 4 * CLIENTS, CLIENTS, PROMPT, OUTPUT, 0),
                ):
                    before = load.usage()
                    result = runner.run(
                        load.run(
                            requests=requests,
                            concurrency=concurrency,
                            input_len=input_len,
                            output_len=output_len,
                            warmup=warmup,
                        )
                    )
                    results[name] = _figures(result) | {"usage": difference(before, load.usage())}
                    shown = {key: value for key, value in results[name].items() if key != "usage"}
                    screen.print(f"{name}: {json.dumps(shown)}", soft_wrap=True)
                    if options.json is not None:
                        options.json.write_text(json.dumps(results, indent=2) + "\n")
                for name, result in zip(("alone", "busy"), runner.run(between_tokens(load)), strict=True):
                    results[name] = _figures(result)
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    out.print(_table(results))
    failed = sum(results[name]["failed"] for name in ("ttft", "burst", "steady", "alone", "busy"))
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--chunk-size", type=int, help="chunk size of the prefill server")
    parser.add_argument("--max-running-requests", type=int, help="batch slots of the decode server")
    parser.add_argument("--kv-memory-gib", type=float, help="size of each server's KV pool")
    parser.add_argument("--kv-dtype", help="auto or fp8_e4m3")
    parser.add_argument("--transport", help="default: auto, which is CUDA IPC here")
    parser.add_argument("--local-prefill", default="never", help="with auto, decode computes some prompts")
    parser.add_argument("--device", help="device of both servers (default: auto)")
    parser.add_argument("--layers", type=int, default=QWEN3_8B["num_hidden_layers"], help="fewer for a quick look")
    return parser.parse_args()


def _figures(result: BenchResult) -> dict[str, Any]:
    summary = result.summary

    def seconds(found: Distribution | None) -> dict[str, float]:
        return {} if found is None else {"p50": found.p50, "p90": found.p90, "p99": found.p99, "max": found.max}

    return {
        "ok": summary.ok,
        "failed": summary.failed,
        "failures": summary.failures,
        "duration_s": summary.duration_s,
        "tokens_per_s": summary.output_tokens_per_s,
        "ttft_s": seconds(summary.ttft_s),
        "later_ttft_s": seconds(_later_ttft(result)),
        "itl_s": seconds(summary.itl_s),
        "stages_s": {name: found.p50 for name, found in summary.stages_s.items()},
        "client_cpu_s": result.client_cpu_s,
    }


def _later_ttft(result: BenchResult) -> Distribution | None:
    """Time to first token of requests sent after the first burst of all clients."""
    in_order = sorted(result.records, key=lambda record: record.started_s)
    return Distribution.of(record.ttft_s for record in in_order[CLIENTS:] if record.ttft_s is not None)


def _table(results: dict[str, Any]) -> Table:
    ttft, burst, steady, alone, busy = (results[name] for name in ("ttft", "burst", "steady", "alone", "busy"))
    stages = ttft["stages_s"]
    added = stages.get("transfer", 0.0) + stages.get("control", 0.0)
    table = Table(title="prefill and decode on one GPU, random weights at Qwen3-8B's geometry")
    for column in ("figure", "found", "target", "anchor"):
        table.add_column(column, no_wrap=True)
    table.add_row(f"TTFT of {LONG_PROMPT} tokens, p50", f"{ttft['ttft_s']['p50'] * 1e3:.1f} ms", "", "")
    for name in BEFORE_FIRST_TOKEN:
        if name in stages:
            table.add_row(f"  {name}", f"{stages[name] * 1e3:.2f} ms", "", "")
    table.add_row("  transfer + control", f"{added / ttft['ttft_s']['p50']:.2%}", f"< {TARGET_TRANSFER_SHARE:.0%}", "")
    for name, figures in (("one burst", burst), ("steady", steady)):
        table.add_row(
            f"{CLIENTS} x ({PROMPT} in, {OUTPUT} out), {name}",
            f"{figures['tokens_per_s']:.0f} tokens/s",
            f">= {TARGET_TOKENS_PER_S}",
            f"vLLM, one process: {VLLM_TOKENS_PER_S}" if name == "one burst" else "",
        )
    later = steady["later_ttft_s"]
    table.add_row(
        "  TTFT after the first burst",
        f"{later['p50'] * 1e3:.1f} ms (p90 {later['p90'] * 1e3:.1f}, p99 {later['p99'] * 1e3:.1f})",
        f"p50 < {TARGET_TTFT_S * 1e3:.0f} ms",
        "",
    )
    for name, figures in (("prefill idle", alone), ("prefill busy", busy)):
        itl = figures["itl_s"]
        table.add_row(
            f"inter-token latency, {STREAMS} streams, {name}",
            f"{itl['p50'] * 1e3:.2f} ms (p99 {itl['p99'] * 1e3:.2f})",
            "",
            "",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
