"""Time to the first token by prompt length, one request at a time; Qwen3-8B's geometry with random weights on one GPU.

    python -m benchmarks.ttft [--only loop|pair] [--hops] [--json results.json]

loop   the model loop of a prefill server: its executor, in chunks of `--chunk-size`, from token ids on the host to the
       sampled token on the host; and the same without CUDA graphs
pair   a prefill and a decode server on the GPU with default settings: from the client's first byte sent to the first
       token received, and the stages that the servers report

The floor is the weights read once at the copy rate, or the matrix products and causal attention at 790 TFLOP/s,
whichever is longer. Prompts
differ, so nothing is cached. `--hops` records when a request passes each thread of the servers
(hop_trace/sitecustomize.py) and prints the median time from one to the next; this costs about 0.1 ms itself.
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
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.server.launch.pair import PairConfig
from pdserve.server.launch.up import running_pair

from .pair import QWEN3_8B as QWEN3_8B_JSON
from .servers import free_port, write_model

PRODUCT_RATE = 790e12
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


def measure_loop(lengths: list[int], chunk: int) -> dict[str, Any]:
    from pdserve.configs.sampling import SamplingParams
    from pdserve.models.runner import ModelRunner
    from pdserve.scheduler.messages.step import Draw, StepRow
    from pdserve.scheduler.ranks.builder import GRAPH_PROMPTS, GRAPH_TOKENS
    from pdserve.scheduler.ranks.executor import Executor

    from .engine import QWEN3_8B, Engine
    from .gpu_timing import copy_rate

    rate = copy_rate()
    engine = Engine(QWEN3_8B, kv_tokens=160_000, page_size=16)
    products = 2 * sum(
        slot.target.numel()
        for name, slot in engine.parameters.slots().items()
        if slot.target.ndim == 2 and "embed" not in name and "lm_head" not in name
    )
    begun = time.perf_counter()
    graphs = engine.runner.capture_chunk_graphs(
        engine.cache, max_tokens=GRAPH_TOKENS, max_slices=GRAPH_PROMPTS, max_context=131072
    )
    assert graphs is not None
    capture_s = time.perf_counter() - begun
    print(f"captured graphs of chunks in {capture_s:.1f} s; copies at {rate / 1e12:.2f} TB/s")
    eager_runner = ModelRunner(engine.decoder, device=engine.runner.device, dtype=engine.runner.dtype)
    executors = [Executor(runner, engine.cache, ()) for runner in (engine.runner, eager_runner)]
    greedy = (Draw(SamplingParams(temperature=0.0), 0),)

    def milliseconds(executor: Executor, tokens: int, cached: int = 0, pause_s: float = PAUSE_S) -> float:
        (pages,) = engine.pages([cached + tokens])
        prompt = engine.tokens(cached + tokens)
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

    results: dict[str, Any] = {"copy_rate": rate, "capture_s": capture_s, "chunk_size": chunk, "prompts": []}
    print("tokens   loop ms  sustained     eager     floor  vLLM")
    for tokens in lengths:
        graphed = milliseconds(executors[0], tokens)
        sustained = milliseconds(executors[0], tokens, pause_s=0.0)
        eager = milliseconds(executors[1], tokens) if tokens <= SHORT else graphed  # chunks of long prompts are eager
        attention = 2 * tokens**2 * QWEN3_8B.num_heads * QWEN3_8B.head_dim * QWEN3_8B.num_layers  # causal: half of it
        floor = max(engine.weight_bytes / rate, (tokens * products + attention) / PRODUCT_RATE) * 1e3
        row = {"loop_ms": graphed, "sustained_ms": sustained, "eager_ms": eager, "floor_ms": floor}
        results["prompts"].append({"tokens": tokens, **row})
        print(
            f"{tokens:6}  " + "  ".join(f"{value:8.2f}" for value in row.values()), VLLM_MS.get(tokens, ""), flush=True
        )
    results["cached"] = []
    print("\nnew tokens after cached ones: loop ms, eager ms")
    for tokens, cached in CACHED:
        graphed, eager = (milliseconds(executor, tokens, cached) for executor in executors)
        results["cached"].append({"tokens": tokens, "cached": cached, "loop_ms": graphed, "eager_ms": eager})
        print(f"{tokens:6} after {cached:6}: {graphed:8.2f}  {eager:8.2f}", flush=True)
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
    """Median milliseconds from the start of a request to each labelled event, in order; the n-th one of a label counts
    as its own.
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
    parser.add_argument("--only", choices=("loop", "pair"))
    parser.add_argument("--hops", action="store_true", help="where the time between threads and processes goes")
    parser.add_argument("--chunk-size", type=int, default=2048, help="tokens per step of the model loop")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(VLLM_MS))
    parser.add_argument("--layers", type=int, help="of the pair's model; fewer for a quick look")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the servers that have it"
    )
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.only != "pair":
        results["loop"] = measure_loop(options.lengths, options.chunk_size)
        gc.collect()
        torch.cuda.empty_cache()  # the memory is for the servers now
    if options.only != "loop":
        given = dict(setting.split("=", 1) for setting in options.set)
        results["pair"] = measure_pair(options.lengths, hops=options.hops, given=given, layers=options.layers)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
