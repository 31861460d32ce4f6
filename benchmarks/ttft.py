"""Time to the first token by prompt length, on one GPU with random weights at Qwen3-8B's geometry.

    python -m benchmarks.ttft [--json results.json]

`loop` is the model loop of a prefill server for one prompt: the same executor, in chunks of `--chunk-size`, from token
ids on the host to the sampled token on the host. `eager` is the same without CUDA graphs. The floor is the weights read
once at the copy rate, or the matrix products at 790 TFLOP/s, whichever is longer. `benchmarks.pair` measures whole
servers.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.engine import QWEN3_8B, Engine
from benchmarks.gpu_timing import copy_rate
from pdserve.configs.sampling import SamplingParams
from pdserve.models.runner import ModelRunner
from pdserve.scheduler.messages.step import Draw, StepRow
from pdserve.scheduler.ranks.builder import GRAPH_PROMPTS, GRAPH_TOKENS
from pdserve.scheduler.ranks.executor import Executor

PRODUCT_RATE = 790e12
# vLLM 0.22.1 on the same GPU with the same geometry and random weights, one request, one token generated (ms)
VLLM_MS = {16: 6.8, 64: 7.1, 128: 7.5, 256: 9.1, 512: 13.9, 1024: 25.7, 2048: 51.7, 4096: 102.0, 8192: 216.0}


def time_prompt(engine: Engine, executor: Executor, tokens: int, chunk: int, *, cached: int = 0) -> float:
    """Milliseconds for the uncached `tokens` of one prompt: median of several."""
    (pages,) = engine.pages([cached + tokens])
    prompt = engine.tokens(cached + tokens)
    greedy = (Draw(SamplingParams(temperature=0.0), 0),)
    walls = []
    for _ in range(max(4, min(15, 20_000 // tokens))):
        begun = time.perf_counter()
        for first in range(cached, len(prompt), chunk):
            part = prompt[first : first + chunk]
            last = first + len(part) == len(prompt)
            pending = executor.start([StepRow(part, first, pages, greedy if last else (), prompt_ids=prompt)])
        pending.finish()
        walls.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(walls[1:])


def floor_ms(engine: Engine, tokens: int, rate: float) -> float:
    products = (
        2
        * tokens
        * sum(
            slot.target.numel()
            for name, slot in engine.parameters.slots().items()
            if name.endswith("weight") and slot.target.ndim == 2 and "embed" not in name and "lm_head" not in name
        )
    )
    return max(engine.weight_bytes / rate, products / PRODUCT_RATE) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--chunk-size", type=int, default=2048, help="tokens per step (the server's default here)")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(VLLM_MS))
    options = parser.parse_args()
    rate = copy_rate()
    engine = Engine(QWEN3_8B, kv_tokens=160_000, page_size=16)
    begun = time.perf_counter()
    graphs = engine.runner.capture_chunk_graphs(
        engine.cache, max_tokens=GRAPH_TOKENS, max_slices=GRAPH_PROMPTS, max_context=131072
    )
    assert graphs is not None
    capture_s = time.perf_counter() - begun
    print(f"captured graphs of chunks in {capture_s:.1f} s")
    loop = Executor(engine.runner, engine.cache, ())
    eager = Executor(
        ModelRunner(engine.decoder, device=engine.runner.device, dtype=engine.runner.dtype), engine.cache, ()
    )
    results: dict[str, Any] = {"copy_rate": rate, "capture_s": capture_s, "prompts": [], "cached": []}
    print("tokens   loop ms  eager ms  floor ms   vLLM ms")
    for tokens in options.lengths:
        row = {
            "tokens": tokens,
            "loop_ms": time_prompt(engine, loop, tokens, options.chunk_size),
            "eager_ms": time_prompt(engine, eager, tokens, options.chunk_size),
            "floor_ms": floor_ms(engine, tokens, rate),
        }
        results["prompts"].append(row)
        print(
            f"{tokens:6}  {row['loop_ms']:8.2f}  {row['eager_ms']:8.2f}  {row['floor_ms']:8.2f}  "
            f"{VLLM_MS.get(tokens, ''):>8}",
            flush=True,
        )
    print("\nnew tokens after cached ones: loop ms, eager ms")
    for tokens, cached in ((16, 1024), (64, 8192), (256, 8192), (64, 30720), (64, 100_000)):
        found = [time_prompt(engine, executor, tokens, options.chunk_size, cached=cached) for executor in (loop, eager)]
        results["cached"].append({"tokens": tokens, "cached": cached, "loop_ms": found[0], "eager_ms": found[1]})
        print(f"{tokens:6} after {cached:6}: {found[0]:8.2f}  {found[1]:8.2f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
