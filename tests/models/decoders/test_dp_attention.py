"""Data-parallel attention with expert parallelism in real processes, against transformers: each rank computes its own
requests, and its experts for the tokens of all ranks.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import StartupError
from pdserve.models.config.sharding import RankTokens, Shard
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from tests.checkpoints import load_reference, make_checkpoint, make_dsa_checkpoint, reference_logits
from tests.family_checkpoints import write_checkpoint
from tests.models.ranks import NUM_PAGES, Pass, RankProcesses

CPU = torch.device("cpu")
TOLERANCE = 3e-5  # as in test_dsa_decoder.py
LENGTHS = (32, 25, 31, 18)
"""Tokens of each sequence; sequence i is on rank i % ranks."""
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek": ("deepseek_v32", {}),
    "glm": ("glm_moe_dsa", {"index_topk_pattern": "FSSF", "vocab_size": 321}),
    "mixtral": ("mixtral", {"sliding_window": 6}),
    "qwen3-moe": ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True, "vocab_size": 321}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 6, "tie_word_embeddings": True}),
}
QUANTISED = (
    ("qwen3-moe", "fp8-blocks"),
    ("qwen3-moe", "nvfp4"),
    ("qwen3-moe", "gptq"),
    ("mixtral", "fp8-matrices"),
    ("mixtral", "awq"),
    ("deepseek-v32", "fp8-rows"),
    ("glm-dsa", "int4-experts"),
    ("kimi-k2", "int4-experts"),
    ("gpt-oss", "mxfp4"),
)
"""Families with experts, and formats of their weights."""

# Steps of the sequences, as {sequence: tokens}. A rank without a sequence in a step has no tokens.
STEPS: list[dict[int, int]] = [
    {0: 23},  # one rank only
    {1: 9, 2: 20},
    {0: 1, 1: 16, 3: 18},  # single tokens beside chunks
    {2: 1},
    {0: 1, 2: 1},
    {0: 7, 2: 9},
]
SCORED = 4
"""In this step, ranks call forward_hidden, which computes the hidden states of all tokens."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[list[int]], list[torch.Tensor]]]:
    """Per model: the checkpoint, the sequences, and transformers' logits of each."""
    found = {}
    texts = [random.Random(seed).choices(range(256), k=length) for seed, length in enumerate(LENGTHS)]

    def add(name: str, directory: Path, reference: Any) -> None:
        found[name] = (directory, texts, [reference_logits(reference, text) for text in texts])

    for name, (architecture, overrides) in MODELS.items():
        make = make_checkpoint if name in ("mixtral", "qwen3-moe", "gpt-oss") else make_dsa_checkpoint
        directory = make(tmp_path_factory.mktemp(name), architecture, **overrides)
        add(name, directory, load_reference(directory))
    for family, format_name in QUANTISED:
        checkpoint = write_checkpoint(tmp_path_factory.mktemp(format_name), family, format_name, "float32")
        add(f"{family} in {format_name}", checkpoint.directory, checkpoint.load_reference())
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.stop()


def passes_of(size: int, texts: Sequence[list[int]]) -> tuple[list[list[Pass]], list[list[tuple[int, int]]]]:
    """The passes of each rank, and the sequence and position of each row of their logits."""
    passes: list[list[Pass]] = [[] for _ in range(size)]
    rows: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    done = [0] * len(texts)
    numbers = random.Random(5).sample(range(NUM_PAGES), NUM_PAGES)
    share = NUM_PAGES // 2  # two sequences of a rank share its pages
    for number, step in enumerate(STEPS):
        slices: list[list[SequenceSlice]] = [[] for _ in range(size)]
        for sequence, tokens in step.items():
            start, rank = done[sequence], sequence % size
            done[sequence] = end = start + tokens
            pages = numbers[share * (sequence // size) :] if size > 1 else numbers[4 * sequence :]
            slices[rank].append(SequenceSlice(texts[sequence][start:end], start, tuple(pages)))
            rows[rank].append((sequence, end - 1))
        counts = [sum(len(piece.token_ids) for piece in of_rank) for of_rank in slices]
        scored = number == SCORED
        tokens_of = [
            RankTokens(count, count if scored else len(of_rank)) for count, of_rank in zip(counts, slices, strict=True)
        ]
        for rank in range(size):
            last = tuple(range(len(slices[rank]))) if scored else None
            passes[rank].append(Pass(tuple(slices[rank]), scored=last, ranks=tuple(tokens_of)))
    return passes, rows


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 1), (2, 2)])
def test_logits_of_every_rank_equal_transformers(
    ranks: RankProcesses,
    cases: dict[str, tuple[Path, list[list[int]], list[torch.Tensor]]],
    size: int,
    stages: int,
) -> None:
    for name, (directory, texts, expected) in cases.items():
        passes, rows = passes_of(size, texts)
        assert any(not each.slices for of_rank in passes for each in of_rank), "no rank is ever without tokens"
        with ranks.connected(size, stages, whole_experts=True, dp_attention=True) as shards:
            results = ranks.run_each(shards, directory, passes * stages)
        for shard, result in zip(shards, results, strict=True):
            logits = [torch.from_numpy(part) for part in result.logits if part is not None]
            assert bool(logits) == shard.last, "every rank of the last stage samples"
            if shard.last:
                wanted = torch.stack([expected[sequence][at] for sequence, at in rows[shard.tp_rank]])
                torch.testing.assert_close(torch.cat(logits), wanted, rtol=0, atol=TOLERANCE, msg=f"{name}, {shard}")


def test_rank_has_whole_attention_and_its_share_of_experts(tmp_path: Path) -> None:
    source = locate_model(str(make_dsa_checkpoint(tmp_path, "deepseek_v32")))
    whole = ModelRunner.weight_bytes(source, torch.float32, device=CPU)
    tensor_parallel, own = (
        ModelRunner.weight_bytes(
            source,
            torch.float32,
            Shard.of(1, tp_size=4, stages=1, whole_experts=True, dp_attention=dp_attention),
            device=CPU,
        )
        for dp_attention in (False, True)
    )
    assert tensor_parallel < own < whole
    config = source.config
    assert config.moe is not None
    mixtures = sum(config.mixed)
    experts = mixtures * config.moe.num_experts * 3 * config.hidden_size * config.moe.expert_size * 4
    shared = mixtures * 3 * config.hidden_size * config.moe.shared_size * 4
    dense = (len(config.mixed) - mixtures) * 3 * config.hidden_size * config.intermediate_size * 4
    assert whole - own == (experts + shared + dense) * 3 // 4


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_rank_has_all_heads_and_its_share_of_mlps(tmp_path: Path, architecture: Any) -> None:
    """The second of three layers of qwen3_moe has no experts: ranks divide the width of its MLP."""
    overrides: dict[str, Any] = {"mlp_only_layers": [1]} if architecture == "qwen3_moe" else {}
    source = locate_model(str(make_checkpoint(tmp_path, architecture, **overrides)))
    config = source.config
    shards = [Shard.of(rank, tp_size=4, stages=1, whole_experts=True, dp_attention=True) for rank in range(4)]
    runners = [ModelRunner.outline(config, shard, dtype=torch.float32) for shard in shards]
    whole = ModelRunner.outline(config, dtype=torch.float32)
    for runner in runners:
        assert runner.kv_token_bytes == whole.kv_token_bytes
        (pool,) = runner.make_cache(1, 4).pools
        assert pool.heads == range(config.num_kv_heads)
    assert config.moe is not None
    mixtures, hidden = sum(config.mixed), config.hidden_size
    per_expert = 3 * hidden * config.moe.expert_size + (2 * config.moe.expert_size + hidden) * config.moe.biases
    divided = mixtures * config.moe.num_experts * per_expert
    divided += (config.num_layers - mixtures) * 3 * hidden * config.intermediate_size
    assert {whole.held_weight_bytes - runner.held_weight_bytes for runner in runners} == {4 * divided * 3 // 4}


def test_models_without_experts_are_refused_by_name(tmp_path: Path) -> None:
    source = locate_model(str(make_checkpoint(tmp_path, "qwen3")))
    with pytest.raises(StartupError, match="dp_attention needs a model with experts, and qwen3 has none"):
        ModelRunner.weight_bytes(source, torch.float32, Shard.of(0, tp_size=2, stages=1, dp_attention=True), device=CPU)
