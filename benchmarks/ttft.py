"""Time to the first token by prompt length, one request at a time; Qwen3-8B's geometry with random weights on one GPU.

    python -m benchmarks.ttft [--only loop|pair] [--hops] [--json results.json]
    python -m benchmarks.ttft --only loop --geometry deepseek-v3.2-4-layers

loop   the model loop of a prefill server: its executor, in chunks of `--chunk-size`, from token ids on the host to the
       sampled token on the host; and the same without CUDA graphs
pair   a prefill and a decode server on the GPU with default settings: from the client's first byte sent to the first
       token received, and the stages that the servers report

The floor is the weights read once at the copy rate, or the matrix products and attention at 790 TFLOP/s, whichever is
longer. The sparse geometry has 4 layers of DeepSeek-V3.2's attention with the dense MLP of its first layers, and a
small vocabulary. Its floor also counts index scores. Prompts differ, so nothing is cached. `--hops` records when a
request passes each thread of the servers (hop_trace/sitecustomize.py) and prints the median time from one to the next;
this costs about 0.1 ms itself.
"""

import argparse
import collections
import gc
import http.client
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pdserve.common.sampling import SamplingParams
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.models.runner import ModelRunner
from pdserve.scheduler.messages.step import Draw, StepRow
from pdserve.scheduler.ranks.builder import GRAPH_PROMPTS, GRAPH_TOKENS
from pdserve.scheduler.ranks.executor import Executor
from pdserve.server.launch.pair import PairConfig
from pdserve.server.launch.up import running_pair

from . import dsa_engine, engine
from .gpu_timing import copy_rate
from .pair import QWEN3_8B as QWEN3_8B_JSON
from .results import renew
from .servers import free_port, write_model

# vLLM 0.22.1 on the same GPU with the same geometry and random weights, one request, one token generated (ms)
VLLM_MS = {16: 6.8, 64: 7.1, 128: 7.5, 256: 9.1, 512: 13.9, 1024: 25.7, 2048: 51.7, 4096: 102.0, 8192: 216.0}
PAUSE_S = 0.05
"""Between two prompts of the model loop. `sustained` is without pauses: the GPU then reaches its power limit and lowers
its clock.
"""
SHORT = 16_384
"""Longer prompts of the model loop are measured once, after one to warm up."""
CACHED = ((16, 1024), (64, 8192), (256, 8192), (64, 30720), (64, 100_000))
"""New tokens after cached ones, for the model loop."""
STAGES = ("queue", "prefill_queue", "prefill", "transfer", "control", "admit")


def loop_engine(geometry: str) -> engine.Engine | dsa_engine.Engine:
    """A model on the GPU with a pool for the longest prompt of `CACHED`."""
    if geometry == "qwen3-8b":
        return engine.Engine(engine.QWEN3_8B, kv_tokens=160_000, page_size=16)
    config = dsa_engine.deepseek_v32(4, 0, mlp=18432, max_context=131072)
    return dsa_engine.Engine(config, sequences=1, page_size=64, hot_rows=None)


def measure_loop(
    bench: engine.Engine | dsa_engine.Engine, lengths: list[int], chunk: int, rate: float, anchors: Mapping[int, float]
) -> dict[str, Any]:
    """`rate` is the GPU's copy rate, for the floor; `anchors` are printed beside the figures."""
    results: dict[str, Any] = {"copy_rate": rate, "chunk_size": chunk, "prompts": [], "cached": []}
    runners = {"loop_ms": bench.runner}
    begun = time.perf_counter()
    if bench.runner.device.type == "cuda" and bench.runner.capture_chunk_graphs(
        bench.cache, max_tokens=GRAPH_TOKENS, max_slices=GRAPH_PROMPTS, max_context=131072
    ):
        results["capture_s"] = time.perf_counter() - begun
        print(f"captured graphs of chunks in {results['capture_s']:.1f} s; copies at {rate / 1e12:.2f} TB/s")
        runners["eager_ms"] = ModelRunner(bench.decoder, device=bench.runner.device, dtype=bench.runner.dtype)
    executors = {name: Executor(runner, bench.cache, ()) for name, runner in runners.items()}
    greedy = (Draw(SamplingParams(temperature=0.0), 0),)

    def milliseconds(executor: Executor, tokens: int, cached: int = 0, pause_s: float = PAUSE_S) -> float:
        (pages,) = bench.pages([cached + tokens])
        prompt = bench.tokens(cached + tokens)
        walls = []
        for _ in range(max(2 if tokens > SHORT else 5, min(15, 20_000 // tokens))):
            time.sleep(pause_s)
            begun = time.perf_counter()
            for first in range(cached, len(prompt), chunk):
                part = prompt[first : first + chunk]
                last = first + len(part) == len(prompt)
                pending = executor.start([StepRow(part, first, pages, greedy if last else ())])
            pending.finish()
            walls.append((time.perf_counter() - begun) * 1e3)
        return statistics.median(walls[1:])

    def measure(tokens: int, cached: int) -> dict[str, float]:
        # all chunks of a long prompt run without graphs
        used = executors if tokens <= SHORT else {"loop_ms": executors["loop_ms"]}
        found = {name: milliseconds(executor, tokens, cached) for name, executor in used.items()}
        if not cached:
            found["sustained_ms"] = milliseconds(executors["loop_ms"], tokens, pause_s=0.0)
        found["floor_ms"] = bench.prompt_floor_ms(tokens, cached, rate)
        return found

    for tokens in lengths:
        row = measure(tokens, 0)
        if not results["prompts"]:
            print("tokens  " + "  ".join(f"{name:>12}" for name in row), "vLLM" if anchors else "")
        results["prompts"].append({"tokens": tokens, **row})
        values = "  ".join(f"{value:12.2f}" for value in row.values())
        print(f"{tokens:6}  {values}", anchors.get(tokens, ""), flush=True)
    print("\nnew tokens after cached ones")
    for tokens, cached in CACHED:
        row = measure(tokens, cached)
        results["cached"].append({"tokens": tokens, "cached": cached, **row})
        values = ", ".join(f"{name} {value:.2f}" for name, value in row.items())
        print(f"{tokens:6} after {cached:6}: {values}", flush=True)
    return results


class Client:
    """One kept-alive connection to the decode server."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._random = random.Random(5)

    def first_token(self, tokens: int) -> tuple[float, float, dict[str, float]]:
        """Monotonic times in seconds of a request and its first token, and the stages in milliseconds."""
        ids = self._random.choices(range(1000, 40_000), k=tokens)
        body = json.dumps(
            {
                "input_ids": ids,
                "stream": True,
                "sampling_params": {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True},
            }
        )
        begun = time.monotonic()
        self._connection.request("POST", "/generate", body, {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        lines = [response.readline()]
        arrived = time.monotonic()
        lines += response.read().splitlines()
        if response.status != 200 or not lines[0].startswith(b"data: "):
            raise RuntimeError(f"{response.status}: {lines[0]!r}")
        events = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
        timeline = json.loads(events[-1])["meta_info"]["timeline"]
        return begun, arrived, {stage: timeline.get(stage, 0.0) * 1e3 for stage in STAGES}


def measure_pair(lengths: list[int], *, hops: bool, given: dict[str, Any], layers: int | None) -> dict[str, Any]:
    screen = Console(stderr=True, highlight=False, width=160)
    results: dict[str, Any] = {"prompts": []}
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "hops.txt")
        path = str(Path(__file__).parent / "hop_trace")
        os.environ["PYTHONPATH"] = os.pathsep.join([path, os.environ.get("PYTHONPATH", "")])
        if hops:
            os.environ["HOP_TRACE"] = str(trace)
        model = {**QWEN3_8B_JSON, **({"num_hidden_layers": layers} if layers is not None else {})}
        write_model(Path(directory), model)
        shared: dict[str, Any] = {"model": directory, "load_format": "dummy", **given}

        def of(role: type[PrefillConfig | DecodeConfig]) -> dict[str, Any]:
            return {name: value for name, value in shared.items() if name in role.model_fields}

        prefill = PrefillConfig(**of(PrefillConfig), port=free_port(), bootstrap_port=free_port())
        endpoints = (f"127.0.0.1:{prefill.bootstrap_port}",)
        decode = DecodeConfig(**of(DecodeConfig), port=free_port(), prefill=endpoints)
        with running_pair(PairConfig(prefill, decode), screen) as pair:
            pair.wait_ready(timeout_s=180)
            client = Client(decode.port)
            print("tokens  client ms  p90  vLLM ms  " + "  ".join(STAGES))
            first = client.first_token(64)
            print(f"the first request after pairing: {(first[1] - first[0]) * 1e3:.1f} ms, {_stages(first[2])}")
            for tokens in lengths:
                for _ in range(3):
                    client.first_token(tokens)
                spans = []
                for _ in range(max(7, min(25, 20_000 // tokens))):
                    spans.append(client.first_token(tokens))
                    time.sleep(0.02)
                walls = sorted((end - begun) * 1e3 for begun, end, _ in spans)
                stages = {name: statistics.median(span[2][name] for span in spans) for name in STAGES}
                row = {"tokens": tokens, "client_ms": statistics.median(walls), "p90_ms": walls[len(walls) * 9 // 10]}
                results["prompts"].append({**row, **stages})
                print(
                    f"{tokens:6}  {row['client_ms']:8.2f}  {row['p90_ms']:8.2f}  {VLLM_MS.get(tokens, ''):>7}  "
                    f"{_stages(stages)}",
                    flush=True,
                )
                if hops:
                    table = hop_table(trace, [span[:2] for span in spans])
                    results["prompts"][-1]["hops"] = table
                    for name, millis in table:
                        print(f"        {millis:8.3f}  {name}")
    return results


def _stages(stages: dict[str, float]) -> str:
    return "  ".join(f"{stages[name]:.2f}" for name in STAGES)


def hop_table(trace: Path, spans: list[tuple[float, float]]) -> list[tuple[str, float]]:
    """Median milliseconds from the start of a request to each labelled event, in order. If a label occurs several times
    in a request, each occurrence is a row of its own.
    """
    events = sorted(
        (int(at) / 1e9, label) for at, label in re.findall(r"^(\d+) (.*)$", trace.read_text(), re.MULTILINE)
    )
    found: dict[str, list[float]] = collections.defaultdict(list)
    for begun, end in spans:
        seen: collections.Counter[str] = collections.Counter()
        for at, label in events:
            if begun <= at <= end:
                seen[label] += 1
                found[f"{label} #{seen[label]}"].append((at - begun) * 1e3)
        found["client: first token"].append((end - begun) * 1e3)
    medians = [(name, statistics.median(times)) for name, times in found.items() if len(times) > len(spans) / 2]
    return sorted(medians, key=lambda pair: pair[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--record", type=Path, help="renew the rows of this file of results (results/first_token.json)")
    parser.add_argument("--only", choices=("loop", "pair"))
    parser.add_argument(
        "--geometry", choices=("qwen3-8b", "deepseek-v3.2-4-layers"), default="qwen3-8b", help="model of the model loop"
    )
    parser.add_argument("--hops", action="store_true", help="print the time from thread to thread")
    parser.add_argument("--chunk-size", type=int, default=2048, help="tokens per step of the model loop")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(VLLM_MS))
    parser.add_argument("--layers", type=int, help="layers of the pair's model; fewer for a quick look")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="set NAME on each server that has it"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.only != "pair":
        anchors = VLLM_MS if options.geometry == "qwen3-8b" else {}
        bench = loop_engine(options.geometry)
        results["loop"] = measure_loop(bench, options.lengths, options.chunk_size, copy_rate(), anchors)
        results["loop"]["geometry"] = options.geometry
        del bench
        gc.collect()
        torch.cuda.empty_cache()  # the memory is for the servers now
    given = dict(setting.split("=", 1) for setting in options.set)
    if options.only != "loop":
        results["pair"] = measure_pair(options.lengths, hops=options.hops, given=given, layers=options.layers)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.record is not None:
        renew(options.record, figures_of(results, given))


def figures_of(results: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, float]:
    """The figures of rows in the results. Decode computes the short prompts, unless it may not."""
    figures: dict[str, float] = {}
    if "loop" in results and results["loop"]["geometry"] == "qwen3-8b":
        figures |= {f"model loop, {row['tokens']:,} tokens": row["loop_ms"] for row in results["loop"]["prompts"]}
    for row in results.get("pair", {"prompts": []})["prompts"]:
        where = "computed by prefill" if given else "pair with defaults"
        if not given and row["tokens"] >= 1024:
            where += f" ({'prefill' if row['transfer'] > 0 else 'decode'} computes)"
        figures[f"{row['tokens']:,} tokens, {where}"] = row["client_ms"]
    return figures


if __name__ == "__main__":
    main()
