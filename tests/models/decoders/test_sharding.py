"""Sharded models in real processes against the same model on one rank and against transformers."""

import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pdserve.common.errors import StartupError
from pdserve.models.config.sharding import Shard
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.layers.parallel import ALONE, Parallel
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.weights import allocate_parameters, load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from tests.checkpoints import load_reference, make_checkpoint, reference_greedy, reference_logits
from tests.models.ranks import NUM_PAGES, Pass, RankProcesses, run_passes
from tests.ports import free_port

CPU = torch.device("cpu")
TOLERANCE = 3e-5  # as in test_decoder.py

# 321 and 322 tokens cannot be divided evenly. At tp = 4 there are more ranks than KV heads in all but the last.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama-tied": ("llama", {"tie_word_embeddings": True, "vocab_size": 321}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "qwen2": ("qwen2", {"vocab_size": 322}),
    "gpt-oss": ("gpt_oss", {"sliding_window": 6, "intermediate_size": 64}),
    "olmo2": ("olmo2", {}),
    "gemma3": ("gemma3_text", {"tie_word_embeddings": True, "sliding_window": 6, "final_logit_softcapping": 5.0}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3-moe": ("qwen3_moe", {"moe_intermediate_size": 64, "mlp_only_layers": [1]}),
}
TOPOLOGIES = [(2, 1), (1, 2), (2, 2), (4, 1)]


@dataclass(frozen=True)
class Case:
    """A model, two sequences in passes of every kind, and transformers' logits for each pass."""

    source: ModelSource
    passes: list[Pass]
    expected: list[torch.Tensor]


def make_case(directory: Path, architecture: Any, overrides: dict[str, Any]) -> Case:
    """A prompt in chunks beside a decoding sequence, a pass with logits of selected rows, and steps of both. The tokens
    of the last steps are only on the device.
    """
    make_checkpoint(directory, architecture, **overrides)
    reference = load_reference(directory)
    prompts = [random.Random(seed).choices(range(256), k=length) for seed, length in ((1, 20), (2, 9))]
    texts = [prompt + reference_greedy(reference, prompt, 8) for prompt in prompts]
    logits = [reference_logits(reference, text) for text in texts]
    free = random.Random(3).sample(range(NUM_PAGES), NUM_PAGES)
    pages = [tuple(free[:8]), tuple(free[8:])]
    passes: list[Pass] = []
    expected: list[torch.Tensor] = []

    def add(first: range, second: range, *, scored: bool = False, on_device: bool = False) -> None:
        """Positions of both sequences in one pass."""
        rows = [logits[number][where] for number, where in enumerate((first, second))]
        ids = [tuple(texts[number][at] for at in where) for number, where in enumerate((first, second))]
        shown = [(0,), (0,)] if on_device else ids
        passes.append(
            Pass(
                tuple(
                    SequenceSlice(shown[number], where.start, pages[number])
                    for number, where in enumerate((first, second))
                ),
                token_ids=ids[0] + ids[1] if on_device else None,
                scored=tuple(range(len(first) + len(second))) if scored else None,
            )
        )
        expected.append(torch.cat(rows) if scored else torch.stack([part[-1] for part in rows]))

    add(range(13), range(9))
    add(range(13, 20), range(9, 10))
    add(range(20, 21), range(10, 12), scored=True)
    for step in range(5):
        add(range(21 + step, 22 + step), range(12 + step, 13 + step), on_device=step >= 3)
    return Case(locate_model(str(directory)), passes, expected)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {name: make_case(tmp_path_factory.mktemp(name), *model) for name, model in MODELS.items()}


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(4)
    yield processes
    processes.stop()


@pytest.mark.parametrize(("tp_size", "stages"), TOPOLOGIES)
def test_logits_and_greedy_tokens_equal_one_rank_and_transformers(
    ranks: RankProcesses, cases: dict[str, Case], tp_size: int, stages: int
) -> None:
    with ranks.connected(tp_size, stages) as shards:
        assert ranks.minimum(shards, [9 - shard.rank for shard in shards]) == [9 - shards[-1].rank] * len(shards)
        for name, case in cases.items():
            alone = run_passes(ModelRunner.load(case.source, device=CPU, dtype=torch.float32), case.passes)
            results = ranks.run(shards, case.source.path, case.passes)
            for shard, result in zip(shards, results, strict=True):
                assert [logits is not None for logits in result.logits] == [shard.samples] * len(case.passes)
            (sampling,) = (result for shard, result in zip(shards, results, strict=True) if shard.samples)
            for found, single, expected in zip(sampling.logits, alone.logits, case.expected, strict=True):
                where = f"{name}, tp {tp_size}, pp {stages}"
                assert found.shape == expected.shape, where
                found = torch.from_numpy(found)
                torch.testing.assert_close(found, torch.from_numpy(single), rtol=0, atol=TOLERANCE, msg=where)
                torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE, msg=where)
                assert found.argmax(-1).equal(expected.argmax(-1)), where
            copies = max(1, tp_size // case.source.config.num_kv_heads)
            assert sum(result.kv_token_bytes for result in results) == copies * alone.kv_token_bytes
            assert sum(result.cache_bytes for result in results) == copies * alone.cache_bytes


def test_stage_does_not_wait_for_the_next(ranks: RankProcesses, cases: dict[str, Case]) -> None:
    case = cases["qwen2"]
    with ranks.connected(1, 2) as (first, last):
        ranks.send(first, "run", case.source.path, case.passes[:3])
        assert ranks.receive(first).logits == [None] * 3
        ranks.send(last, "run", case.source.path, case.passes[:3])
        for found, expected in zip(ranks.receive(last).logits, case.expected, strict=False):
            torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=TOLERANCE)


def shards_of(tp_size: int, stages: int) -> list[Shard]:
    return [Shard.of(rank, tp_size=tp_size, stages=stages) for rank in range(tp_size * stages)]


def copies(name: str, source: ModelSource, tp_size: int, stages: int) -> int:
    """Number of ranks that hold each element of a tensor."""
    if name.endswith(("o_proj.bias", "down_proj.bias")):
        return 1
    of_heads = source.config.architecture == "olmo2" and name.endswith(("q_norm.weight", "k_norm.weight"))
    if (name.endswith(("norm.weight", "mlp.gate.weight")) or ".router." in name) and not of_heads:
        return tp_size
    if any(each in name for each in (".k_proj.", ".v_proj.", ".k_norm.")):
        return max(1, tp_size // source.config.num_kv_heads)
    if name == "model.embed_tokens.weight" and source.config.tied_embeddings:
        return min(2, stages)
    return 1


@pytest.mark.parametrize(("tp_size", "stages"), [*TOPOLOGIES, (1, 3)])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_read_their_parts_and_together_everything(
    cases: dict[str, Case], model: str, tp_size: int, stages: int
) -> None:
    source = cases[model].source
    expected = load_file(source.path / "model.safetensors")
    seen = {name: torch.zeros_like(value) for name, value in expected.items()}
    for shard in shards_of(tp_size, stages):
        parameters = allocate_parameters(source.config, shard, device=CPU, dtype=torch.float32)
        slots = parameters.slots()
        for slot in slots.values():
            slot.target.fill_(torch.nan)
        load_weights(source, slots, tensor_names(source.config))
        for name, slot in slots.items():
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            assert slot.target.equal(expected[name][part] + slot.offset), name
            seen[name][part] += 1
        read = sum(
            slot.target.nbytes for name, slot in slots.items() if not name.startswith(("model.embed", "lm_head"))
        )
        padded = {id(each): each.nbytes for each in (parameters.embedding, parameters.head) if each is not None}
        assert ModelRunner.weight_bytes(source, torch.float32, shard, device=CPU) == read + sum(padded.values())
    for name, count in seen.items():
        assert (count == copies(name, source, tp_size, stages)).all(), name


TWELVE_HEADS = {"num_attention_heads": 12, "hidden_size": 96}


@pytest.mark.parametrize(
    ("overrides", "tp_size", "stages", "message"),
    [
        ({}, 3, 1, "tp = 3 does not divide num_attention_heads = 4"),
        ({"intermediate_size": 98}, 4, 1, "tp = 4 does not divide intermediate_size = 98"),
        (TWELVE_HEADS | {"num_key_value_heads": 6}, 4, 1, "tp = 4 does not divide num_key_value_heads = 6"),
        (TWELVE_HEADS | {"num_key_value_heads": 3}, 4, 1, "tp = 4 is not a multiple of num_key_value_heads = 3"),
        ({}, 1, 4, "pp = 4 stages for a model of 3 layers: give at most 3"),
    ],
)
def test_model_that_cannot_be_divided_is_refused(
    overrides: dict[str, Any], tp_size: int, stages: int, message: str, tmp_path: Path
) -> None:
    source = locate_model(str(make_checkpoint(tmp_path, **overrides)))
    for shard in shards_of(tp_size, stages):
        with pytest.raises(StartupError, match=message):
            ModelRunner.load(source, device=CPU, dtype=torch.float32, parallel=Parallel(shard))


@pytest.mark.parametrize("fast", [(True, False), (False, True), (True, True)])
def test_ranks_multiply_16_bits_in_the_same_dtype(
    ranks: RankProcesses, cases: dict[str, Case], fast: tuple[bool, bool]
) -> None:
    """Otherwise the router's logits could differ between ranks, and ranks would add up different experts of a token."""
    with ranks.connected(2, 1) as shards:
        found = ranks.products(shards, cases["qwen3-moe"].source.path, fast)
    assert found == [torch.bfloat16 if all(fast) else torch.float32] * 2


def test_rendezvous_store_refuses_connections_after_all_ranks_have_joined(ranks: RankProcesses) -> None:
    """torch's TCPStore has no authentication, and stores what anybody sends."""
    with ranks.connected(2, 1) as shards:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", ranks.store_port))
        assert ranks.minimum(shards, [3, 5]) == [3, 3]


def test_missing_rank_is_a_startup_error() -> None:
    with pytest.raises(
        StartupError, match=r"rank 0 of 2 could not join the process group at 127\.0\.0\.1:\d+ within 1 s"
    ):
        Parallel.connect(
            Shard(tp_size=2),
            store_host="127.0.0.1",
            store_port=free_port(),
            backend="gloo",
            device=CPU,
            timeout_s=1,
        )


def test_ranks_without_collectives_on_the_device_have_no_graphs(cases: dict[str, Case]) -> None:
    shard = Shard(tp_size=2)
    runner = ModelRunner.load(cases["qwen2"].source, device=CPU, dtype=torch.float32, parallel=Parallel(shard))
    assert not runner.capture_graphs(runner.make_cache(4, 4), max_batch=2, max_context=16)


def test_single_rank_needs_no_communication() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert ALONE.all_reduce(tensor) is tensor
    assert ALONE.gather_last_dim(tensor, 3) is tensor
    assert ALONE.broadcast_tokens(tensor) is tensor
    assert ALONE.agree_minimum(5) == 5
    ALONE.close()
    assert not torch.distributed.is_initialized()
