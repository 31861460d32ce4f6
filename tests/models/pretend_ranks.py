"""A rank on a simulated GPU: loads its part of a model, captures its steps and runs them."""

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import tests.kernels.interpreter  # noqa: F401 (rank processes run no conftest.py; its lookups are a third of the time)
from pdserve.kernels.backends.streams import use_own_stream
from pdserve.models.config.sharding import Shard
from pdserve.models.layers.parallel import Parallel
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.models.pretend_gpu import CPU, DEVICE, CapturedGraph, PretendGpu
from tests.models.pretend_ipc import patch_collectives
from tests.models.ranks import NUM_PAGES, PAGE_SIZE, Pass

MAX_CONTEXT, MAX_BATCH, MAX_TOKENS = 64, 2, 16


@dataclass(frozen=True)
class GraphedResult:
    """The logits of each pass (numpy) on the sampling rank, and the graphs that were replayed and the collectives that
    were launched in each pass.
    """

    logits: list[Any]
    replays: list[int]
    collectives: list[list[str]]


def run_in_graphs(
    shard: Shard, port: int, timeout_s: float, directory: Path, dtype: torch.dtype, passes: Sequence[Pass]
) -> GraphedResult:
    patches = pytest.MonkeyPatch()
    replayed: list[str] = []
    replay = CapturedGraph.replay

    def count_and_replay(graph: CapturedGraph) -> None:
        replayed.append("graph")
        replay(graph)

    try:
        with PretendGpu() as gpu, warnings.catch_warnings():
            # as in test_pretend_gpu.py: padded rows are computed from arbitrary memory, and Triton's interpreter
            # converts arrays of one element
            warnings.filterwarnings("ignore", ".* encountered in", RuntimeWarning)
            warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
            patches.setattr("pdserve.models.graphs.chunks.COPIED_TOKENS", 512)  # every 128 are a program to interpret
            patches.setattr(CapturedGraph, "replay", count_and_replay)
            launched = patch_collectives(patches, gpu)
            use_own_stream(DEVICE)
            parallel = Parallel.connect(
                shard, store_host="127.0.0.1", store_port=port, backend="gloo", device=DEVICE, timeout_s=timeout_s
            )
            try:
                source = locate_model(str(directory))
                runner = ModelRunner.load(source, device=DEVICE, dtype=dtype, parallel=parallel)
                return _run(runner, gpu, launched, replayed, passes)
            finally:
                parallel.close()
    finally:
        patches.undo()


def _run(
    runner: ModelRunner, gpu: PretendGpu, launched: list[str], replayed: list[str], passes: Sequence[Pass]
) -> GraphedResult:
    parallel, cache = runner.parallel, runner.make_cache(NUM_PAGES, PAGE_SIZE)
    assert runner.capture_graphs(cache, max_batch=MAX_BATCH, max_context=MAX_CONTEXT) is not None
    runner.capture_chunk_graphs(cache, max_tokens=MAX_TOKENS, max_slices=2, max_context=MAX_CONTEXT)
    parallel.start_serving()
    result = GraphedResult([], [], [])
    for each in passes:
        launched.clear()
        replayed.clear()
        token_ids = None
        if each.token_ids is not None:
            known = each.token_ids if parallel.shard.tp_rank == 0 else [0] * len(each.slices)
            token_ids = parallel.broadcast_tokens(torch.tensor(known, device=DEVICE))
        with gpu.no_waits() if parallel.on_device else contextlib.nullcontext():
            logits = runner.forward(cache, each.slices, token_ids)
        parallel.check()
        result.logits.append(None if logits is None else logits.to(CPU).numpy())
        result.replays.append(len(replayed))
        result.collectives.append(list(launched))
    return result
