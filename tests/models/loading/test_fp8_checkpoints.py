"""Block-scaled fp8 checkpoints of models without latent attention: expanded, and kept in fp8."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import StartupError
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.format import Format
from tests.checkpoints import is_reference_greedy, load_reference, make_checkpoint, quantise_checkpoint, stored_in

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dense": ("qwen3", SIZES),
    "biased": ("qwen2", {"hidden_size": 128, "intermediate_size": 192}),
    "mixture": ("qwen3_moe", SIZES | {"moe_intermediate_size": 64, "mlp_only_layers": [1]}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[ModelSource, Any]:
    """An fp8 checkpoint, and transformers with the dequantised weights."""
    architecture, overrides = MODELS[request.param]
    directory, expanded = (make_checkpoint(tmp_path / name, architecture, **overrides) for name in ("fp8", "expanded"))
    save_file(quantise_checkpoint(directory, (128, 128)), expanded / "model.safetensors", metadata={"format": "pt"})
    return locate_model(str(directory)), load_reference(expanded)


def runner_with(source: ModelSource, fp8: Format | None) -> ModelRunner:
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32, stored=fp8)
    load_weights(source, parameters.slots())
    return ModelRunner(Decoder(parameters), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_equal_transformers(model: tuple[ModelSource, Any], keep: bool) -> None:
    """Token by token: the products of few rows are exact with weights in fp8."""
    source, reference = model
    fp8 = stored_in(source, "auto") if keep else None
    runner = runner_with(source, fp8)
    assert (runner.held_weight_bytes < 0.6 * ModelRunner.weight_bytes(source, torch.float32, device=CPU)) == keep
    cache, pages = runner.make_cache(4, 16), (2, 0, 3, 1)
    prompt, out = list(range(5, 25)), list[int]()
    for position in range(len(prompt) + 11):
        token = (prompt + out)[position]
        logits = runner.forward(cache, [SequenceSlice((token,), position, pages)])
        assert logits is not None
        if position >= len(prompt) - 1:
            out.append(int(logits[0].argmax()))
    assert is_reference_greedy(reference, prompt, out)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_hold_their_parts_in_fp8(model: tuple[ModelSource, Any], tp_size: int) -> None:
    source, reference = model
    del reference
    fp8 = stored_in(source, "auto")
    whole = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32)
    load_weights(source, whole.slots())
    expected, kept = {name: slot.target for name, slot in whole.slots().items()}, set()
    for rank in range(tp_size):
        shard = Shard(rank, tp_size)
        parameters = DecoderParameters.allocate(source.config, shard, device=CPU, dtype=torch.float32, stored=fp8)
        load_weights(source, parameters.slots(), tensor_names(source.config))
        for name, slot in parameters.slots().items():
            values = slot.target if slot.weight is None else slot.weight.expanded()
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            torch.testing.assert_close(values, expected[name][part], rtol=1e-6, atol=0, msg=name)
            kept |= {name} if slot.weight is not None else set()
    assert "model.layers.0.self_attn.q_proj.weight" in kept
    assert "model.layers.1.mlp.up_proj.weight" in kept


def test_blocks_of_compressed_tensors_load_like_those_of_deepseek(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1, **SIZES)
    expected = quantise_checkpoint(directory, (128, 128))
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    tensors = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    activations = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
    groups = {"group_0": {"weights": weights, "input_activations": activations}}
    scheme = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    source = locate_model(str(directory))
    fp8 = stored_in(source, "auto")
    assert "model.layers.0.mlp.down_proj.weight" in fp8.tensors
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32, stored=fp8)
    load_weights(source, parameters.slots())
    for name, slot in parameters.slots().items():
        values = slot.target if slot.weight is None else slot.weight.expanded()
        assert (slot.weight is not None) == (name in fp8.tensors)
        torch.testing.assert_close(values, expected[name], rtol=1e-6, atol=0, msg=name)


def test_other_quantisation_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "bitsandbytes"},', 1))
    with pytest.raises(
        StartupError, match=r"quantized weights \(bitsandbytes, weight_block_size None\) are not supported"
    ):
        locate_model(str(tmp_path))
