"""Matrices of GGUF files that stay in their blocks: results, memory, parts of ranks, and when they are expanded."""

import logging
from pathlib import Path
from typing import Any, Literal

import gguf
import pytest
import torch

from pdserve.kernels.backends import dispatch
from pdserve.kernels.gguf.blocks import GgufBlocks
from pdserve.kernels.gguf.interleaved import interleaves
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.formats.gguf_file import GgufFile
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.gguf import GgufWeight, keeps_blocks
from pdserve.models.weights.plain import PlainWeight
from pdserve.models.weights.slots import Share, Slot
from tests.checkpoints import make_checkpoint, reference_logits, stored_in
from tests.gguf_checkpoints import convert
from tests.kernels.numba_kernels import needs_numba
from tests.models.ranks import Pass, RankProcesses

CPU = torch.device("cpu")
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] * 4
KINDS = gguf.GGMLQuantizationType


def write(
    folder: Path, kind: str, architecture: Any = "llama", others: dict[str, str] | None = None, **fields: Any
) -> Any:
    """A tiny model; returns its source and transformers' model with the same weights."""
    make_checkpoint(folder / "hf", architecture, **fields)
    reference = convert(
        folder / "hf",
        folder / "model.gguf",
        KINDS[kind],
        others={module: KINDS[name] for module, name in (others or {}).items()},
    )
    return locate_model(str(folder / "model.gguf")), reference


def assert_logits(logits: torch.Tensor, expected: torch.Tensor, kind: str) -> None:
    """With interleaved blocks, x is rounded to 16 bits. With others, only the order of sums differs."""
    tolerance = 8e-5 * expected.abs().max().item() if interleaves(kind, rows=16) else 5e-5
    torch.testing.assert_close(logits, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("llama", {"attention_bias": True}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {})],
    ids=["llama-biases", "llama-tied", "qwen2", "qwen3"],
)
def test_logits_equal_transformers(architecture: str, fields: dict[str, Any], kind: str, tmp_path: Path) -> None:
    """A prompt, computed with unpacked weights, and the step after it, computed from blocks; for interleaved ones in
    one call for all layers.
    """
    source, reference = write(tmp_path, kind, architecture, **fields)
    runner = ModelRunner.load(source, device=CPU, dtype=torch.float32, keep_blocks=True)
    cache, pages = runner.make_cache(8, 16), [3, 1, 0, 7]
    expected = reference_logits(reference, TOKENS)
    for tokens, start in ((TOKENS[:-1], 0), (TOKENS[-1:], len(TOKENS) - 1)):
        logits = runner.forward(cache, [SequenceSlice(tokens, start, pages)])
        assert logits is not None
        assert_logits(logits[0], expected[start + len(tokens) - 1], kind)


def test_fused_matrices_may_have_several_types(tmp_path: Path) -> None:
    """As in the mixed formats of llama.cpp, where v and down have more bits. A type without kernels is expanded."""
    source, reference = write(tmp_path, "Q4_0", others={"v_proj": "Q8_0", "up_proj": "Q5_1", "o_proj": "F16"})
    runner = ModelRunner.load(source, device=CPU, dtype=torch.float32, keep_blocks=True)
    parameters = runner._decoder.parameters
    assert isinstance(parameters, DecoderParameters)
    layer = parameters.layers[0]
    assert isinstance(layer.qkv, GgufWeight)
    assert [part.type_name for part in layer.qkv.operand.parts] == ["Q4_0", "Q8_0"]
    assert isinstance(layer.o, PlainWeight)
    logits = runner.forward(runner.make_cache(8, 16), [SequenceSlice(TOKENS, 0, range(4))])
    assert logits is not None
    assert_logits(logits[0], reference_logits(reference, TOKENS)[-1], "Q4_0")


def test_weights_take_the_memory_that_they_take_in_the_file() -> None:
    source = locate_model("smollm2")
    stored = sum(tensor.size_bytes for tensor in GgufFile(source.path).tensors.values())
    runner = ModelRunner.load(source, device=CPU, dtype=torch.float32, keep_blocks=True)
    assert runner.held_weight_bytes == stored < source.path.stat().st_size
    assert ModelRunner.weight_bytes(source, torch.float32, device=CPU, keep_blocks=True) == stored
    assert ModelRunner.weight_bytes(source, torch.float32, device=CPU) > 5 * stored


def test_ranks_read_blocks_of_their_rows_and_columns(tmp_path: Path) -> None:
    """Llama's permuted q and k, and matrices that are split by columns: those of o are whole blocks, those of down are
    not and are expanded.
    """
    source, reference = write(tmp_path, "Q8_0", attention_bias=True, vocab_size=321)
    expected = {name: value.detach() for name, value in reference.named_parameters()}
    for rank in range(4):
        shard = Shard.of(rank, tp_size=2, stages=2)
        types = stored_in(source, "auto")
        parameters = DecoderParameters.allocate(source.config, shard, device=CPU, dtype=torch.float32, stored=types)
        slots = parameters.slots()
        for slot in slots.values():
            slot.target.fill_(255)
        load_weights(source, slots, tensor_names(source.config))
        for name, slot in slots.items():
            values = slot.target if slot.weight is None else slot.weight.expanded()
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, values.shape, strict=True))
            assert values.equal(expected[name][part]), name
            assert (slot.weight is None) == (values.ndim == 1 or "down_proj" in name), name
        held = ModelRunner.weight_bytes(source, torch.float32, shard, device=CPU, keep_blocks=True)
        padding = 68 * (shard.vocabulary_rows(321) - len(shard.vocabulary(321)))  # a row of 64 elements in Q8_0
        assert held == sum(slot.nbytes for slot in slots.values()) + padding


def test_two_ranks_compute_with_their_blocks(tmp_path: Path) -> None:
    source, reference = write(tmp_path, "Q4_1", others={"v_proj": "Q8_0"}, attention_bias=True)
    passes = [
        Pass((SequenceSlice(TOKENS[:-1], 0, range(15)),)),
        Pass((SequenceSlice(TOKENS[-1:], len(TOKENS) - 1, range(15)),)),
    ]
    processes = RankProcesses(2)
    try:
        with processes.connected(2, 1) as shards:
            first, _ = processes.run(shards, source.path, passes)
    finally:
        processes.stop()
    expected = reference_logits(reference, TOKENS)[-2:]
    for found, row in zip(first.logits, expected, strict=True):
        assert found is not None
        torch.testing.assert_close(torch.as_tensor(found[0]), row, rtol=0, atol=5e-5)


@needs_numba
@pytest.mark.parametrize(
    ("dtype", "cpu_kernels", "device", "kept"),
    [
        ("auto", "auto", "cpu", True),
        ("auto", "numba", "cpu", True),
        ("auto", "torch", "cpu", False),
        ("float32", "auto", "cpu", False),
        ("bfloat16", "auto", "cpu", False),
        ("auto", "auto", "cuda", False),
    ],
)
def test_blocks_are_kept_by_default_where_numba_computes(
    dtype: Any, cpu_kernels: Literal["auto", "numba", "torch"], device: str, kept: bool
) -> None:
    assert keeps_blocks(dtype, cpu_kernels, torch.device(device)) == kept


def test_blocks_are_not_kept_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_numba_problem", lambda: "No module named 'numba'")
    assert not keeps_blocks("auto", "auto", CPU)


def test_random_weights_have_no_blocks(tmp_path: Path) -> None:
    source, _ = write(tmp_path, "Q8_0")
    runner = ModelRunner.load(source, device=CPU, dtype=torch.float32, load_format="dummy", keep_blocks=True)
    assert runner.held_weight_bytes == ModelRunner.weight_bytes(source, torch.float32, device=CPU)


@pytest.mark.parametrize("keep", [True, False])
def test_memory_of_the_weights_is_logged(keep: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, _ = write(tmp_path, "Q8_0", others={"v_proj": "Q4_1"})
    with caplog.at_level(logging.INFO, "pdserve.models.weights"):
        ModelRunner.load(source, device=CPU, dtype=torch.float32, keep_blocks=keep)
    (line,) = (record.getMessage() for record in caplog.records if "GGUF" in record.getMessage())
    expected = (
        "stay quantized (20 of Q8_0, 3 of Q4_1)" if keep else "23 of 23 tensors are dequantized to float32 and take"
    )
    assert expected in line


def test_a_slot_has_the_size_of_its_tensor() -> None:
    stored = GgufWeight(GgufBlocks.allocate([(4, "Q8_0")], 64, device=torch.device("cpu")))
    slot = Slot.of(stored, Share.all(4), Share.all(64))
    assert (slot.size, slot.shape, slot.nbytes) == ((4, 64), (4, 64), 4 * 2 * 34)
    none = Slot.of(stored[:0], Share(4, 0, 4), Share.all(64))  # a rank without rows
    assert (none.size, none.shape, none.nbytes) == ((0, 64), (4, 64), 0)
