"""Sharded models with latent attention in real processes against transformers."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.models.layers.batch import SequenceSlice
from tests.checkpoints import load_reference, make_dsa_checkpoint, reference_greedy, reference_logits
from tests.models.ranks import NUM_PAGES, Pass, RankProcesses

TOLERANCE = 3e-5  # as in test_dsa_decoder.py

# The last one has an odd vocabulary, and layers that share a selection: stages of equal size would separate them.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek": ("deepseek_v32", {}),
    "glm": ("glm_moe_dsa", {"index_topk_pattern": "FSSF", "vocab_size": 321}),
}
INDEXERS = {"deepseek-v3": 0, "deepseek": 4, "glm": 2}
PROMPT, NEW = 40, 8


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Pass], torch.Tensor]]:
    """Per model: a prompt far longer than the selection, in two chunks and steps, and transformers' logits of each."""
    found = {}
    for name, (architecture, overrides) in MODELS.items():
        directory = make_dsa_checkpoint(tmp_path_factory.mktemp(name), architecture, **overrides)
        reference = load_reference(directory)
        text = random.Random(1).choices(range(256), k=PROMPT)
        text += reference_greedy(reference, text, NEW)
        pages = tuple(random.Random(2).sample(range(NUM_PAGES), NUM_PAGES))
        ends = [23, *range(PROMPT, PROMPT + NEW)]
        starts = [0, *ends[:-1]]
        passes = [
            Pass((SequenceSlice(text[start:end], start, pages),)) for start, end in zip(starts, ends, strict=True)
        ]
        logits = reference_logits(reference, text)
        found[name] = (directory, passes, logits[[end - 1 for end in ends]])
        assert logits[PROMPT - 1 : -1].argmax(-1).tolist() == text[PROMPT:]
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.stop()


@pytest.mark.parametrize(
    ("tp_size", "stages", "whole_experts"),
    [(2, 1, False), (1, 2, False), (2, 2, False), (4, 1, False), (2, 1, True), (2, 2, True), (4, 1, True)],
)
def test_logits_and_greedy_tokens_equal_transformers(
    ranks: RankProcesses,
    cases: dict[str, tuple[Path, list[Pass], torch.Tensor]],
    tp_size: int,
    stages: int,
    whole_experts: bool,
) -> None:
    with ranks.connected(tp_size, stages, whole_experts=whole_experts) as shards:
        for name, (directory, passes, expected) in cases.items():
            where = f"{name}, tp {tp_size}, pp {stages}, whole experts: {whole_experts}"
            results = ranks.run(shards, directory, passes)
            (sampling,) = (result for shard, result in zip(shards, results, strict=True) if shard.samples)
            logits = torch.cat([torch.from_numpy(rows) for rows in sampling.logits])
            torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE, msg=where)
            assert logits.argmax(-1).equal(expected.argmax(-1)), where
            # all pools are whole on every rank of a stage
            rows = 4 * 64 + INDEXERS[name] * 32
            assert sum(result.kv_token_bytes for result in results) == tp_size * rows * 4
