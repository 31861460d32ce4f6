"""CUDA graphs of several ranks, each a process with a simulated GPU, against one rank on the CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import make_checkpoint, make_dsa_checkpoint
from tests.kernels.interpreter import INTERPRETED
from tests.models.ranks import NUM_PAGES, PAGE_SIZE, Pass, RankProcesses

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")

LONG, SHORT = [(11 * at * at + at) % 256 for at in range(30)], [5, 3, 200, 7, 7]
PAGES = ((4, 13, 3, 11, 0, 8, 6, 15, 9, 1, 12, 14), (2, 10, 5))
LAYERS = 2


def passes() -> list[Pass]:
    """Chunks of two prompts, a token beside a chunk, steps of both sequences, the last with tokens of the device."""
    long, short = PAGES
    prompts = [
        Pass((SequenceSlice(LONG[:12], 0, long),)),
        Pass((SequenceSlice(SHORT, 0, short), SequenceSlice(LONG[12:21], 12, long))),
        Pass((SequenceSlice([9], len(SHORT), short), SequenceSlice(LONG[21:], 21, long))),
    ]
    steps = [
        Pass((SequenceSlice([17], len(SHORT) + 1, short), SequenceSlice([3], len(LONG), long))),
        Pass((SequenceSlice([0], len(SHORT) + 2, short), SequenceSlice([0], len(LONG) + 1, long)), token_ids=(8, 21)),
        Pass((SequenceSlice([40], len(LONG) + 2, long),)),
    ]
    return prompts + steps


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    ranks = RankProcesses(2)
    yield ranks
    ranks.stop()


def expected_logits(directory: Path, dtype: torch.dtype, all_passes: list[Pass]) -> list[Any]:
    runner = ModelRunner.load(locate_model(str(directory)), device=torch.device("cpu"), dtype=dtype)
    cache = runner.make_cache(NUM_PAGES, PAGE_SIZE)
    found = []
    for each in all_passes:
        token_ids = None if each.token_ids is None else torch.tensor(each.token_ids)
        logits = runner.forward(cache, each.slices, token_ids)
        assert logits is not None
        found.append(logits.numpy())
    return found


@pytest.mark.parametrize(("family", "tp", "pp"), [("dense", 2, 1), ("dense", 1, 2), ("sparse", 2, 1), ("latent", 1, 2)])
def test_steps_in_graphs_equal_one_rank(
    processes: RankProcesses, tmp_path: Path, family: str, tp: int, pp: int
) -> None:
    """With tensor parallelism nothing waits for the device; a stage waits for the previous one."""
    sizes: dict[str, Any] = {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "vocab_size": 321}
    if family == "dense":
        dtype = torch.float16
        directory = make_checkpoint(tmp_path, "qwen3", num_key_value_heads=2, **sizes)
    else:
        dtype = torch.float32
        sizes |= {"num_key_value_heads": 2, "first_k_dense_replace": LAYERS}
        directory = make_dsa_checkpoint(tmp_path, "glm_moe_dsa" if family == "sparse" else "deepseek_v3", **sizes)
    all_passes = passes()
    expected = expected_logits(directory, dtype, all_passes)
    results = processes.run_in_graphs(tp, pp, directory, dtype, all_passes)
    sampling = results[0 if pp == 1 else tp]
    for rank, result in enumerate(results):
        chunks = 2 if rank >= tp * (pp - 1) else 1  # logits of chunks have their own graph
        assert result.replays == [chunks] * 3 + [1] * 3
        assert (result is sampling) == any(rows is not None for rows in result.logits)
        if tp > 1:  # the embedding, two sums in each layer, and the logits
            per_pass = ["sum"] * (1 + 2 * LAYERS) + ["copy"]
            broadcast = [["copy"] * (each.token_ids is not None) for each in all_passes]
            assert result.collectives == [[*first, *per_pass] for first in broadcast]
        else:
            assert result.collectives == [[] for _ in all_passes]
    for found, wanted in zip(sampling.logits, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=0.02)
