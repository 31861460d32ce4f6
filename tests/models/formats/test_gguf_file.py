"""GGUF files against the `gguf` library's reader, llama.cpp's q/k permutation, and damaged files."""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from pdserve.common.errors import StartupError
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.formats.gguf_file import GgufFile
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from tests.checkpoints import load_reference, make_checkpoint, read_smollm2, reference_logits
from tests.gguf_checkpoints import convert


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("llama", {"attention_bias": True}), ("llama", {"tie_word_embeddings": True}), ("qwen2", {}), ("qwen3", {})],
    ids=["llama-biases", "llama-tied", "qwen2", "qwen3"],
)
def test_logits_equal_transformers_with_the_same_weights(
    architecture: Any, overrides: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    directory = tmp_path / "hf"
    make_checkpoint(directory, architecture, **overrides)
    reference = convert(directory, tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    source = locate_model(str(tmp_path / "model.gguf"))
    assert source.config.tied_embeddings == overrides.get("tie_word_embeddings", False)
    assert source.config.dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    runner = ModelRunner.load(source, device=torch.device("cpu"), dtype=torch.float32)
    token_ids = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9] * 4
    logits = runner.forward(runner.make_cache(8, 16), [SequenceSlice(token_ids, 0, [3, 1, 0, 7])])
    assert logits is not None
    torch.testing.assert_close(logits[0], reference_logits(reference, token_ids)[-1], rtol=0, atol=5e-5)


def test_rope_scaling_is_read_from_gguf(tmp_path: Path) -> None:
    """llama3 scaling is stored as one factor per frequency; linear as metadata."""
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    token_ids = list(range(200))
    for name, rope in (("llama3", llama3), ("linear", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0})):
        directory, path = tmp_path / name, tmp_path / f"{name}.gguf"
        make_checkpoint(directory, "llama", rope_parameters=rope)
        model = load_reference(directory)
        plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
        factors = (plain / model.model.rotary_emb.inv_freq).tolist()
        options = {"factors": factors} if name == "llama3" else {"linear": 4.0}
        reference = convert(directory, path, gguf.GGMLQuantizationType.F32, **options)
        runner = ModelRunner.load(locate_model(str(path)), device=torch.device("cpu"), dtype=torch.float32)
        logits = runner.forward(runner.make_cache(13, 16), [SequenceSlice(token_ids, 0, range(13))])
        assert logits is not None
        torch.testing.assert_close(logits[0], reference_logits(reference, token_ids)[-1], rtol=0, atol=5e-5)


def test_metadata_and_tensors_equal_those_of_the_gguf_library() -> None:
    path = locate_model("smollm2").path
    file, reader = GgufFile(path), read_smollm2()
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert file.metadata[key] == field.contents(), key
    assert len(file.tensors) == len(reader.tensors) == 272
    for tensor in reader.tensors[:12]:
        ours = file.tensors[tensor.name]
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        rows = np.concatenate([piece for _, piece in file.read_rows(ours, 64)])
        expected = dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(rows.reshape(expected.shape), expected), tensor.name


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "hf", "llama")
    convert(tmp_path / "hf", tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F16)
    shutil.rmtree(tmp_path / "hf")
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "cannot be read"), (2, "not a GGUF file"), (300, "damaged or cut off"), (-100, "is cut off")],
)
def test_truncated_gguf_file_is_refused(size: int, message: str, tiny_file: Path) -> None:
    tiny_file.write_bytes(tiny_file.read_bytes()[:size])
    with pytest.raises(StartupError, match=message):
        locate_model(str(tiny_file))


def test_type_that_cannot_be_expanded_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((2, 4), np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "model.gguf")
    with pytest.raises(StartupError, match=r"tensor 'token_embd.weight' is of type I8, which is not supported"):
        list(file.read_rows(file.tensors["token_embd.weight"]))


def test_unsupported_architecture_is_named(tmp_path: Path) -> None:
    """Some are supported in safetensors files only."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen3moe")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        StartupError, match="architecture qwen3moe is not supported in GGUF files; supported are llama, qw"
    ):
        locate_model(str(tmp_path / "x.gguf"))


def test_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    """Mixtral's files are of the architecture llama, too."""
    writer = gguf.GGUFWriter(tmp_path / "mixtral.gguf", "llama")
    writer.add_expert_count(8)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(StartupError, match=r"a mixture of experts; of GGUF files only models without experts are supp"):
        locate_model(str(tmp_path / "mixtral.gguf"))


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_ranks_read_their_rows_and_columns(kind: str, tmp_path: Path) -> None:
    """Llama's permuted q and k, their biases, and matrices that are split by columns."""
    make_checkpoint(tmp_path / "hf", "llama", attention_bias=True, vocab_size=321)
    reference = convert(tmp_path / "hf", tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    source = locate_model(str(tmp_path / "model.gguf"))
    expected = {name: value.detach() for name, value in reference.named_parameters()}
    for rank in range(4):
        shard = Shard.of(rank, tp_size=2, stages=2)
        parameters = DecoderParameters.allocate(source.config, shard, device=torch.device("cpu"), dtype=torch.float32)
        slots = parameters.slots()
        for slot in slots.values():
            slot.target.fill_(torch.nan)
        load_weights(source, slots, tensor_names(source.config))
        for name, slot in slots.items():
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            assert slot.target.equal(expected[name][part]), name
