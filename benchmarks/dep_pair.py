"""Four prefill ranks (TP4) and four decode ranks with data-parallel attention (DEP4) that share one GPU, at
Qwen3-30B-A3B's geometry with 32 layers and random weights: KV staged, and not.

    python -m benchmarks.dep_pair [--arms tcp-dep-staged tcp-dep-off ...] [--limit-s 90] [--no-mps] [--json FILE]

Each arm starts a pair of real servers, 83 GiB of weights in all:

    tcp-dep-staged, tcp-dep-off         TP4 -> DEP4 over TCP in pages of 16 tokens, with staging and with --staging off
    nvlink-dep-staged, nvlink-dep-off   the same over CUDA IPC
    tcp-tp, nvlink-tp                   TP4 -> TP4: both sides divide heads alike, so that nothing needs staging

alone    prompts of 4,096 tokens in one chunk, one at a time: KV starts when the chunk is computed. KV GB/s is the KV of
         a prompt over the time that it is on its way; `to first step` runs from the last chunk to the first step
load     128 clients, 1,024 tokens in and 64 out: tokens a second

Ranks run side by side under NVIDIA MPS, which this program starts; if it cannot, they take turns of a few milliseconds,
each exchange waits for the turns of all, and only `alone` runs, whose figures tell staging from its absence. A load
that takes longer than `--limit-s` is ended there, and its figures are those of the requests until then. `--tiny` runs
the arms over TCP with two ranks on a CPU, to test this program.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import httpx
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.pair import Load, difference
from benchmarks.servers import free_port, write_model
from pdserve.common.errors import PdserveError, StartupError
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.models.loading.catalog import GEOMETRIES
from pdserve.server.bench.report import BenchResult
from pdserve.server.launch.pair import PairConfig
from pdserve.server.launch.up import running_pair

LAYERS = 32
READY_TIMEOUT_S = 120
TARGET_TOKENS = {"tcp": 2.0, "nvlink": 1.0}
"""Tokens a second with staging over those without, at least."""
TARGET_KV = {"nvlink": 20.0}
"""KV GB/s with staging over those without, at least."""
AFTER_LAST_CHUNK = ("transfer", "control", "admit")
TINY: Mapping[str, Any] = {
    "vocab_size": 640,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 16,
}


@dataclasses.dataclass(frozen=True)
class Arm:
    """A pair of layouts, the transport between them, and whether decode allows staging."""

    transport: Literal["tcp", "nvlink"]
    decode: Literal["dep", "tp"]
    staging: Literal["auto", "off"] = "auto"

    @property
    def name(self) -> str:
        mode = {"auto": "-staged", "off": "-off"}[self.staging] if self.decode == "dep" else ""
        return f"{self.transport}-{self.decode}{mode}"


ARMS = {
    arm.name: arm
    for transport in ("tcp", "nvlink")
    for arm in (Arm(transport, "dep"), Arm(transport, "dep", "off"), Arm(transport, "tp"))
}


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of servers and loads. `decode_tokens` is the pool of each decode rank that has requests of its own."""

    device: str
    tp: int
    prefill_tokens: int
    decode_tokens: int
    clients: int
    requests: int
    prompt: int
    output: int
    alone_prompts: int
    alone_prompt: int


FULL = Scale("cuda:0", 4, 65536, 65536, 128, 128, 1024, 64, 4, 4096)
SMALL = Scale("cpu", 2, 2048, 1024, 4, 8, 48, 8, 2, 96)


def pair_config(model: Path, arm: Arm, scale: Scale) -> PairConfig:
    shared: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "device": scale.device,
        "tp": scale.tp,
        "page_size": 16,
        "transport": arm.transport,
    }
    prefill = PrefillConfig(
        **shared,
        port=free_port(),
        bootstrap_port=free_port(),
        kv_tokens=scale.prefill_tokens,
        chunk_size=scale.alone_prompt,
    )
    ranks = scale.tp if arm.decode == "tp" else 1
    decode = DecodeConfig(
        **shared,
        port=free_port(),
        prefill=(f"127.0.0.1:{prefill.bootstrap_port}",),
        local_prefill="never",
        dp_attention=arm.decode == "dep",
        staging=arm.staging,
        kv_tokens=ranks * scale.decode_tokens,
        max_running_requests=scale.clients,
    )
    return PairConfig(prefill, decode)


async def for_at_most(limit_s: float, load: Coroutine[Any, Any, BenchResult]) -> BenchResult:
    """The load, ended after `limit_s`: a cancelled load returns its figures until then, if it has begun."""
    task = asyncio.ensure_future(load)
    await asyncio.wait([task], timeout=limit_s)
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        raise StartupError(f"the load had not begun after {limit_s:g} s") from None


def run_arm(
    model: Path, arm: Arm, scale: Scale, screen: Console, *, loaded: bool = True, limit_s: float
) -> dict[str, Any]:
    """The figures of an arm, or of a pair that does not serve its `error`."""
    began = time.monotonic()
    arm_figures: dict[str, Any] = {}

    def note(part: str, figures: Any) -> None:
        arm_figures[part] = figures
        shown = json.dumps(figures)
        screen.print(f"{arm.name}, {time.monotonic() - began:.0f} s: {part}: {shown}", soft_wrap=True)

    try:
        with (
            running_pair(pair_config(model, arm, scale), screen) as pair,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            pair.wait_ready(timeout_s=READY_TIMEOUT_S)
            note("start_s", round(time.monotonic() - began, 1))
            load = Load(pair, screen)

            def run(requests: int, clients: int, prompt: int, output: int, warmup: int) -> dict[str, Any]:
                before = load.usage()["prefill"]
                sizes = {"input_len": prompt, "output_len": output, "warmup": warmup}
                result = runner.run(for_at_most(limit_s, load.run(requests=requests, concurrency=clients, **sizes)))
                found = difference({"prefill": before}, {"prefill": load.usage()["prefill"]})["prefill"]
                return figures_of(result, found, warmup)

            note("alone", run(scale.alone_prompts, 1, scale.alone_prompt, 2, 1))
            if loaded:
                note("load", run(scale.requests, scale.clients, scale.prompt, scale.output, 0))
    except (PdserveError, httpx.HTTPError) as error:
        note("error", str(error) or type(error).__name__)
    return arm_figures


def figures_of(result: BenchResult, counted: Mapping[str, float], warmup: int) -> dict[str, Any]:
    """Of a load after so many warm-up prompts, for all of which the prefill server has counted `counted`."""
    summary = result.summary
    stages = {name: found.p50 for name, found in summary.stages_s.items()}
    prompt_bytes = counted.get("transfer_bytes", 0.0) / (summary.ok + warmup) if summary.ok else 0.0
    return {
        "ok": summary.ok,
        "failed": summary.failed,
        "missed": result.options.requests - summary.ok,
        "failures": summary.failures,
        "duration_s": summary.duration_s,
        "tokens_per_s": summary.output_tokens_per_s,
        "ttft_p50_s": summary.ttft_s.p50 if summary.ttft_s is not None else None,
        "itl_p50_s": summary.itl_s.p50 if summary.itl_s is not None else None,
        "stages_s": stages,
        "to_first_step_s": sum(stages.get(name, 0.0) for name in AFTER_LAST_CHUNK),
        "prompt_bytes": prompt_bytes,
        "kv_gb_per_s": prompt_bytes / stages["transfer"] / 1e9 if stages.get("transfer") else None,
        "writes": counted.get("transfer_writes", 0.0),
        "staged_parts": counted.get("staged_parts", 0.0),
    }


@contextmanager
def mps(screen: Console, clients: int = 2 * FULL.tp) -> Iterator[bool]:
    """NVIDIA MPS for this process and its children; False if it does not start. Each of the `clients` gets its share of
    the multiprocessors: a rank that waits for another in a kernel must leave room for that one's kernels, or both wait
    forever.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None:
        screen.print("no MPS: nvidia-cuda-mps-control is not installed")
        yield False
        return
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "CUDA_MPS_PIPE_DIRECTORY": directory,
            "CUDA_MPS_LOG_DIRECTORY": directory,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // clients),
        }
        os.environ |= settings
        problem = _start_mps(control)
        if problem:
            screen.print(f"no MPS: {problem}", markup=False)
            for name in settings:
                del os.environ[name]
        try:
            yield not problem
        finally:
            os.environ |= settings
            subprocess.run([control], input="quit\n", text=True, capture_output=True, timeout=60, check=False)
            for name in settings:
                del os.environ[name]


def _start_mps(control: str) -> str:
    """Start the daemon, and a client to see that it serves; returns what went wrong."""
    client = "import torch; torch.zeros(1, device='cuda')"
    for command in ([control, "-d"], [sys.executable, "-c", client]):
        with tempfile.TemporaryFile("w+") as output:  # a daemon that keeps a pipe open would never let us read its end
            try:
                subprocess.run(command, stdout=output, stderr=output, timeout=60, check=True)
            except subprocess.CalledProcessError:
                output.seek(0)
                return f"{command[-1]}: {output.read().strip()[-200:]}"
            except (OSError, subprocess.TimeoutExpired) as error:
                return str(error)
    servers = subprocess.run([control], input="get_server_list\n", text=True, capture_output=True, check=False)
    return "" if servers.stdout.strip() else "no client has reached its server"


def table_of(results: Mapping[str, Any]) -> Table:
    table = Table(title=f"ranks that share a GPU, {'under' if results['mps'] else 'without'} MPS")
    for column in ("arm", "KV GB/s alone", "to first step, ms", "tokens/s", "to first step, ms", "writes", "missed"):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for name, found in results["arms"].items():
        cells = [""] * 6
        if alone := found.get("alone"):
            cells[:2] = f"{alone['kv_gb_per_s'] or 0:.2f}", f"{alone['to_first_step_s'] * 1e3:.1f}"
        if load := found.get("load"):
            cells[2:5] = f"{load['tokens_per_s']:.0f}", f"{load['to_first_step_s'] * 1e3:.0f}", f"{load['writes']:,.0f}"
        cells[5] = found.get("error") or str(missed(found))
        table.add_row(name, *cells)
    return table


def missed(found: Mapping[str, Any]) -> int:
    """The requests of an arm that failed or were not done in time."""
    return sum(found[part]["missed"] for part in ("alone", "load") if part in found)


def gains_of(arms: Mapping[str, Any]) -> list[str]:
    """What staging gains, over each transport of which both arms have run."""
    lines = []
    for transport, wanted in TARGET_TOKENS.items():
        both = [arms.get(f"{transport}-dep-{mode}", {}) for mode in ("staged", "off")]
        tokens = [found["load"]["tokens_per_s"] for found in both if "load" in found]
        if len(tokens) == 2 and all(tokens):
            gain = tokens[0] / tokens[1]
            lines.append(f"{transport}: staging gives {gain:.2f} x the tokens/s (at least {wanted:g})")
        rates = [found["alone"]["kv_gb_per_s"] for found in both if "alone" in found]
        if len(rates) == 2 and all(rates):
            least = f" (at least {TARGET_KV[transport]:g})" if transport in TARGET_KV else ""
            lines.append(f"{transport}: staging gives {rates[0] / rates[1]:.2f} x the KV GB/s{least}")
    return lines


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all")
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--requests", type=int, help=f"of the load (default: {FULL.requests})")
    parser.add_argument("--limit-s", type=float, default=90.0, help="of each load (default: %(default)g)")
    parser.add_argument("--no-mps", action="store_true", help="do not start MPS")
    parser.add_argument("--tiny", action="store_true", help="two ranks of a tiny model, to test this program on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures to this file, after each arm")
    options = parser.parse_args(arguments)
    if options.arms is None:
        options.arms = [name for name, arm in ARMS.items() if arm.transport == "tcp" or not options.tiny]
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    screen = Console(stderr=True, highlight=False, width=160)
    scale = SMALL if options.tiny else FULL
    scale = dataclasses.replace(scale, requests=options.requests or scale.requests)
    config = json.loads((GEOMETRIES / "qwen3-30b-a3b.json").read_text())
    config |= TINY if options.tiny else {"num_hidden_layers": options.layers}
    results: dict[str, Any] = {"command": sys.argv, "arms": {}}
    started = nullcontext(False) if options.no_mps or options.tiny else mps(screen)
    with tempfile.TemporaryDirectory() as directory, started as side_by_side:
        results["mps"] = side_by_side
        write_model(Path(directory), config)
        for name in options.arms:
            results["arms"][name] = run_arm(
                Path(directory),
                ARMS[name],
                scale,
                screen,
                loaded=side_by_side or options.tiny,
                limit_s=options.limit_s,
            )
            if options.json is not None:
                options.json.write_text(json.dumps(results, indent=2) + "\n")
    out = Console(highlight=False, width=160)
    out.print(table_of(results), *gains_of(results["arms"]), sep="\n")
    failed = [name for name, found in results["arms"].items() if "error" in found or missed(found)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
