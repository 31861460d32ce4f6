"""Sums over ranks that share one GPU, and decode steps with tensor parallelism.

    python -m benchmarks.all_reduce [--mps] [--ranks 2 4] [--json results.json]

Each rank is a process on cuda:0. Without NVIDIA MPS the GPU runs the processes in turns of a few milliseconds, and that
is most of a sum's time. With `--mps` they run side by side, as on separate GPUs except for the links between GPUs.

    sum      µs of a sum of bf16 rows: over CUDA IPC memory, in a CUDA graph, and over gloo through host memory
    step     ms of a decode step of two ranks at Qwen3-8B's geometry with few layers, in a CUDA graph and without
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engine import QWEN3_8B
from benchmarks.gpu_timing import DEVICE
from pdserve.kernels.backends.streams import use_own_stream
from pdserve.memory.pages import pages_for
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.layers.parallel import Parallel, listen
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.runner import ModelRunner

ROWS, WIDTHS = (1, 8, 32, 64), (4096, 7168)
SUMS = 10
"""Sums in a graph."""
REPEATS = 10
LAYERS, CONTEXT, PAGE_SIZE, BATCHES = 4, 1024, 16, (1, 8, 32)
TIMEOUT_S = 240.0


def wall_us(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median wall time of a call and of what it enqueues."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        dist.barrier()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def time_sums(parallel: Parallel) -> dict[str, float]:
    """µs of each sum, by size and method."""
    found = {}
    for width in WIDTHS:
        for rows in ROWS:
            tensor = torch.zeros(rows, width, dtype=torch.bfloat16, device=DEVICE)
            parallel.all_reduce(tensor)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(SUMS):
                    parallel.all_reduce(tensor)
            graph.replay()
            found[f"{rows} x {width} ipc"] = wall_us(graph.replay) / SUMS
            found[f"{rows} x {width} gloo"] = wall_us(functools.partial(dist.all_reduce, tensor))
    return found


def time_steps(parallel: Parallel) -> dict[str, float]:
    """ms of decode steps by batch size, in graphs and without."""
    config = dataclasses.replace(QWEN3_8B, num_layers=LAYERS)
    parameters = DecoderParameters.allocate(config, parallel.shard, device=DEVICE, dtype=torch.bfloat16)
    fill_with_noise(parameters.slots())
    decoder = Decoder(parameters, parallel)
    pages = pages_for(CONTEXT, PAGE_SIZE)
    cache = decoder.make_cache(max(BATCHES) * pages, PAGE_SIZE)
    eager = ModelRunner(decoder, device=DEVICE, dtype=torch.bfloat16, parallel=parallel)
    graphed = ModelRunner(decoder, device=DEVICE, dtype=torch.bfloat16, parallel=parallel)
    if graphed.capture_graphs(cache, max_batch=max(BATCHES), max_context=CONTEXT) is None:
        raise SystemExit("the ranks have no collectives that a graph can capture")
    found = {}
    for batch in BATCHES:
        slices = [
            SequenceSlice([7], CONTEXT - 1, list(range(at * pages, (at + 1) * pages)))  # pages of their own
            for at in range(batch)
        ]
        for name, runner in (("graph", graphed), ("eager", eager)):
            runner.forward(cache, slices)
            found[f"batch {batch} {name}"] = wall_us(functools.partial(runner.forward, cache, slices)) / 1e3
    return found


def serve(pipe: Connection, rank: int, ranks: int, port: int) -> None:
    torch.cuda.set_device(DEVICE)
    use_own_stream(DEVICE)
    parallel = Parallel.connect(
        Shard.of(rank, tp_size=ranks, stages=1),
        store_host="127.0.0.1",
        store_port=port,
        backend="gloo",
        device=DEVICE,
        timeout_s=60.0,
    )
    pipe.send((time_sums(parallel), time_steps(parallel) if ranks == 2 else {}))
    parallel.close()


def run(ranks: int) -> tuple[dict[str, float], dict[str, float]]:
    """Run all ranks; returns the times of rank 0."""
    context = multiprocessing.get_context("spawn")
    with listen("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    started: list[tuple[Any, Connection]] = []
    for rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(theirs, rank, ranks, port), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        results = []
        for rank, (_, pipe) in enumerate(started):
            if not pipe.poll(TIMEOUT_S):
                raise SystemExit(f"rank {rank} does not answer")
            results.append(pipe.recv())
        for process, _ in started:
            process.join(20)
    finally:
        for process, _ in started:
            process.kill()
    times: tuple[dict[str, float], dict[str, float]] = results[0]
    return times


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """A context in which new processes use NVIDIA MPS."""
    with tempfile.TemporaryDirectory() as directory:
        os.environ["CUDA_MPS_PIPE_DIRECTORY"] = os.environ["CUDA_MPS_LOG_DIRECTORY"] = directory
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit\n", check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mps", action="store_true", help="run the ranks side by side, with NVIDIA MPS")
    parser.add_argument("--json", type=Path, help="write the times to this file")
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with mps() if options.mps else contextlib.nullcontext():
        for ranks in options.ranks:
            sums, steps = run(ranks)
            results[f"{ranks} ranks"] = {"sum_us": sums, "step_ms": steps}
            print(f"{ranks} ranks, {'side by side (MPS)' if options.mps else 'in turns'}")
            for name, value in sums.items():
                print(f"  sum of {name:<16} {value:9.1f} us")
            for name, value in steps.items():
                print(f"  step of {LAYERS} layers, {name:<16} {value:9.3f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
