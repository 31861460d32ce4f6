"""Checkpoints in NVFP4: tokens equal those of transformers with the dequantised weights."""

import json
import logging
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import StartupError
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.layers.moe import MoeParameters
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.loading.weights import allocate_parameters, load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.nvfp4 import Nvfp4Weight
from tests.checkpoints import is_reference_greedy, load_reference, make_checkpoint, make_dsa_checkpoint, stored_in
from tests.nvfp4_checkpoints import Nvfp4Method, pack_nvfp4, quantization_config

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
CASES: dict[str, tuple[Any, Nvfp4Method, dict[str, Any]]] = {
    "dense": ("qwen3", "compressed-tensors", {}),
    "dense of ModelOpt": ("llama", "modelopt", {}),
    "experts": ("qwen3_moe", "compressed-tensors", {"moe_intermediate_size": 96, "mlp_only_layers": [1]}),
    "experts of Mixtral": ("mixtral", "modelopt", {"num_hidden_layers": 1}),
}


class Model(NamedTuple):
    source: ModelSource
    expanded: dict[str, torch.Tensor]
    reference: Any


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    architecture, method, sizes = CASES[request.param]
    root = tmp_path_factory.mktemp("nvfp4")
    directory, plain = (make_checkpoint(root / name, architecture, **(SIZES | sizes)) for name in ("packed", "plain"))
    expanded = pack_nvfp4(directory, method)
    save_file(expanded, plain / "model.safetensors", {"format": "pt"})
    return Model(locate_model(str(directory)), expanded, load_reference(plain))


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_equal_those_of_the_dequantised_model(model: Model, keep: bool) -> None:
    """Expanded, as on a CPU, and packed, as on a GPU."""
    source = model.source
    kept = stored_in(source, "auto") if keep else None
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32, stored=kept)
    load_weights(source, parameters.slots())
    assert isinstance(parameters.layers[-1].qkv, Nvfp4Weight) == keep
    experts = [layer.mlp for layer in parameters.layers if isinstance(layer.mlp, MoeParameters)]
    assert all(isinstance(part, Nvfp4Weight) == keep for each in experts for part in (each.gate_up, each.down))
    runner = ModelRunner(Decoder(parameters), device=CPU, dtype=torch.float32)
    cache, pages = runner.make_cache(4, 16), (2, 0, 3, 1)
    prompt, out = list(range(5, 25)), list[int]()
    slices = [SequenceSlice(tuple(prompt), 0, pages)]
    for _ in range(11):
        logits = runner.forward(cache, slices)
        assert logits is not None
        out.append(int(logits[0].argmax()))
        slices = [SequenceSlice((out[-1],), len(prompt) + len(out) - 1, pages)]
    assert is_reference_greedy(model.reference, prompt, out)


@pytest.mark.parametrize("keep", [False, True])
def test_ranks_hold_their_parts(model: Model, keep: bool) -> None:
    """Parts of 48 and 96 columns end inside a block of the kernels."""
    source, packed = model.source, set()
    kept = stored_in(source, "auto")
    for rank in range(2):
        parameters = allocate_parameters(
            source.config, Shard(rank, 2), device=CPU, dtype=torch.float32, stored=kept if keep else None
        )
        load_weights(source, parameters.slots(), tensor_names(source.config))
        for name, slot in parameters.slots().items():
            values = slot.target if slot.weight is None else slot.weight.expanded()
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.size, strict=True))
            torch.testing.assert_close(values, model.expanded[name][part], rtol=1e-6, atol=0, msg=name)
            packed |= {name} if slot.weight is not None else set()
    assert packed == (set(kept.tensors) if keep else set())


def test_latent_attention_is_expanded(tmp_path: Path) -> None:
    """Its experts and MLPs stay in NVFP4, and layers that nothing uses are not read."""
    directory = make_dsa_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=2)
    expanded = pack_nvfp4(directory, "modelopt")
    source = locate_model(str(directory))
    kept = stored_in(source, "auto")
    parameters = allocate_parameters(source.config, Shard(), device=CPU, dtype=torch.float32, stored=kept)
    load_weights(source, parameters.slots(), tensor_names(source.config))
    for name, slot in parameters.slots().items():
        values = slot.target if slot.weight is None else slot.weight.expanded()
        torch.testing.assert_close(values, expanded[name], rtol=1e-6, atol=0, msg=name)
        assert (slot.weight is not None) == (name in kept.tensors and ".self_attn." not in name), name


def test_cost_of_expanding_is_logged(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.models.weights.format"):
        ModelRunner.load(model.source, device=CPU, dtype=torch.float32)
    (line,) = (record.getMessage() for record in caplog.records if "NVFP4" in record.getMessage())
    count = len(stored_in(model.source, "auto").tensors)
    assert line.startswith(f"NVFP4 weights: {count} of {count} tensors are dequantized to float32 and take 0.0")
    assert line.endswith("GiB more (cpu has no NVFP4 kernels)")


def test_packed_matrices_take_less_than_a_third_of_bfloat16(model: Model) -> None:
    parameters = allocate_parameters(
        model.source.config, Shard(), device=CPU, dtype=torch.bfloat16, stored=stored_in(model.source, "auto")
    )
    held = [slot for slot in parameters.slots().values() if slot.weight is not None]
    elements = sum(slot.size.numel() for slot in held if slot.size[1] % 128 == 0)
    assert sum(slot.nbytes for slot in held if slot.size[1] % 128 == 0) <= 0.32 * 2 * elements


def test_dummy_weights_do_not_depend_on_what_is_expanded(model: Model) -> None:
    source, stored = model.source, stored_in(model.source, "dummy")
    assert stored.tensors == stored_in(source, "auto").tensors
    found = []
    for kept in (stored, None):
        slots = allocate_parameters(source.config, Shard(1, 2), device=CPU, dtype=torch.float32, stored=kept).slots()
        fill_with_noise(slots, stored)
        found.append({n: slot.target if slot.weight is None else slot.weight.expanded() for n, slot in slots.items()})
    for name, values in found[0].items():
        torch.testing.assert_close(values, found[1][name], rtol=1e-6, atol=0, msg=name)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, r"\(modelopt, quant_algo NVFP4_AWQ\)"),
        ("modelopt", {"config_groups": {}}, r"\(modelopt, config_groups missing\)"),
        ("modelopt", {"config_groups": {"a": {"weights": {"num_bits": 8}}}}, r"\(modelopt, a, num_bits 8\)"),
        ("compressed-tensors", {"format": "mxfp4-pack-quantized"}, "format mxfp4-pack-quantized"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}}},
            r"\(compressed-tensors, a, group_size 32\)",
        ),
        (
            "compressed-tensors",
            {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "float", "group_size": 16, "actorder": "g"}}}},
            r"\(compressed-tensors, a, actorder g\)",
        ),
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, method: Nvfp4Method, changes: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization_config(method) | changes}
    path.write_text(json.dumps(config))
    with pytest.raises(StartupError, match=message):
        locate_model(str(tmp_path))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("weight_scale", r"weight_scale' has shape \[64, 1\]; \[64, 128\] in groups of 16 columns takes \[64, 8\]"),
        ("weight_global_scale", r"o_proj.weight_global_scale' has shape \[64, 1\]; a matrix has one factor"),
        ("weight_packed", r"o_proj.weight_packed' has shape None; NVFP4 values are matrices"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, part: str, message: str) -> None:
    directory = make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    pack_nvfp4(directory, "compressed-tensors")
    path, module = directory / "model.safetensors", "model.layers.0.self_attn.o_proj"
    stored = load_file(path)
    wrong = stored[f"{module}.weight_scale"][:, :1].contiguous()
    stored.pop(f"{module}.{part}")
    if part != "weight_packed":
        stored[f"{module}.{part}"] = wrong
    save_file(stored, path, {"format": "pt"})
    source = locate_model(str(directory))
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32)
    with pytest.raises(StartupError, match=message):
        load_weights(source, parameters.slots())
