"""Checkpoints of 4-bit weights: tokens equal those of transformers with the dequantised weights."""

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
from pdserve.models.loading.weights import allocate_parameters, load_weights, open_checkpoint, tensor_names
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.packed4 import Packed4Weight
from tests.checkpoints import is_reference_greedy, load_reference, make_checkpoint, make_dsa_checkpoint, stored_in
from tests.int4_checkpoints import Int4Method, pack_checkpoint, quantization_config

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
CASES: dict[str, tuple[Any, Int4Method, int]] = {
    "awq": ("qwen2", "awq", 64),
    "gptq": ("llama", "gptq", 32),
    "gptq per row": ("llama", "gptq_v2", -1),
    "compressed-tensors": ("qwen3", "compressed-tensors", 32),
    "asymmetric": ("qwen3_moe", "compressed-tensors-asymmetric", 32),
    "experts of Mixtral": ("mixtral", "awq", 32),
}


class Model(NamedTuple):
    source: ModelSource
    expanded: dict[str, torch.Tensor]
    reference: Any


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    architecture, method, group = CASES[request.param]
    sizes = SIZES | ({"moe_intermediate_size": 64, "mlp_only_layers": [1]} if architecture == "qwen3_moe" else {})
    sizes |= {"num_hidden_layers": 1} if architecture == "mixtral" else {}
    root = tmp_path_factory.mktemp("int4")
    directory, plain = (make_checkpoint(root / name, architecture, **sizes) for name in ("packed", "plain"))
    expanded = pack_checkpoint(directory, method, group)
    save_file(expanded, plain / "model.safetensors", {"format": "pt"})
    return Model(locate_model(str(directory)), expanded, load_reference(plain))


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_equal_those_of_the_dequantised_model(model: Model, keep: bool) -> None:
    """Expanded, as on a CPU, and in 4 bits, as on a GPU."""
    source = model.source
    kept = stored_in(source, "auto") if keep else None
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32, stored=kept)
    load_weights(source, parameters.slots())
    runner = ModelRunner(Decoder(parameters), device=CPU, dtype=torch.float32)
    assert isinstance(parameters.layers[-1].qkv, Packed4Weight) == keep
    experts = [layer.mlp for layer in parameters.layers if isinstance(layer.mlp, MoeParameters)]
    assert all(isinstance(part, Packed4Weight) == keep for each in experts for part in (each.gate_up, each.down))
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
    """Parts of o_proj and down_proj are 64 and 96 columns; scales of a whole row, or of 64 columns, are repeated."""
    source = model.source
    kept = stored_in(source, "auto")
    packed = set()
    for rank in range(2):
        shard = Shard(rank, 2)
        parameters = allocate_parameters(
            source.config, shard, device=CPU, dtype=torch.float32, stored=kept if keep else None
        )
        load_weights(source, parameters.slots(), tensor_names(source.config))
        for name, slot in parameters.slots().items():
            values = slot.target if slot.weight is None else slot.weight.expanded()
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.size, strict=True))
            torch.testing.assert_close(values, model.expanded[name][part], rtol=1e-6, atol=0, msg=name)
            packed |= {name} if slot.weight is not None else set()
    assert packed == (set(kept.tensors) if keep else set())


def test_experts_are_expanded_if_one_matrix_has_no_groups(tmp_path: Path) -> None:
    """A rank has 48 columns of `down`."""
    directory = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1, moe_intermediate_size=96)
    pack_checkpoint(directory, "gptq", 32)
    source = locate_model(str(directory))
    kept = stored_in(source, "auto")
    for tp_size, packed in ((1, True), (2, False)):
        slots = allocate_parameters(
            source.config, Shard(0, tp_size), device=CPU, dtype=torch.float32, stored=kept
        ).slots()
        assert all((slot.weight is not None) == packed for name, slot in slots.items() if ".experts." in name)


def test_latent_attention_is_expanded(tmp_path: Path) -> None:
    """Its experts and MLPs stay in 4 bits."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "intermediate_size": 128}
    directory = make_dsa_checkpoint(tmp_path, "deepseek_v3", **sizes)
    expanded = pack_checkpoint(directory, "compressed-tensors", -1)
    source = locate_model(str(directory))
    kept = stored_in(source, "auto")
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in kept.tensors
    parameters = allocate_parameters(source.config, Shard(1, 2), device=CPU, dtype=torch.float32, stored=kept)
    load_weights(source, parameters.slots(), tensor_names(source.config))
    for name, slot in parameters.slots().items():
        values = slot.target if slot.weight is None else slot.weight.expanded()
        part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.size, strict=True))
        torch.testing.assert_close(values, expanded[name][part], rtol=1e-6, atol=0, msg=name)
        assert (slot.weight is not None) == (name in kept.tensors and ".self_attn." not in name), name


def test_cost_of_expanding_is_logged(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.models.weights.format"):
        ModelRunner.load(model.source, device=CPU, dtype=torch.float32)
    (line,) = (record.getMessage() for record in caplog.records if "4-bit" in record.getMessage())
    count = len(stored_in(model.source, "auto").tensors)
    assert line.startswith(f"4-bit weights: {count} of {count} tensors are dequantized to float32 and take 0.0")
    assert line.endswith("GiB more (cpu has no 4-bit kernels)")


def test_weight_bytes_are_those_of_the_device(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = ModelRunner.weight_bytes(model.source, torch.bfloat16, device=CPU)
    monkeypatch.setattr("pdserve.models.weights.packed4.supports_int4", lambda _: True)
    found = ModelRunner.weight_bytes(model.source, torch.bfloat16, device=CPU)
    kept = stored_in(model.source, "auto")
    parameters = allocate_parameters(model.source.config, Shard(), device=CPU, dtype=torch.bfloat16, stored=kept)
    assert found == sum(slot.nbytes for slot in parameters.slots().values())
    assert found < 0.85 * expanded


def test_dummy_weights_do_not_depend_on_what_is_expanded(model: Model) -> None:
    source = model.source
    stored = stored_in(source, "dummy")
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
        ("awq", {"bits": 8}, r"\(awq, bits 8\)"),
        ("awq", {"version": "gemv"}, r"\(awq, version gemv\)"),
        ("awq", {"group_size": 16}, r"group_size 16, which must be -1 or a multiple of 32"),
        ("gptq", {"bits": 3}, r"\(gptq, bits 3\)"),
        ("gptq", {"desc_act": True}, r"\(gptq, desc_act True\)"),
        ("gptq", {"checkpoint_format": "marlin"}, r"\(gptq, checkpoint_format marlin\)"),
        ("compressed-tensors", {"format": "int-quantized"}, r"\(compressed-tensors, format int-quantized\)"),
        ("compressed-tensors", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            "compressed-tensors",
            {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}},
            r"\(compressed-tensors, group_0, num_bits 8\)",
        ),
        (
            "compressed-tensors",
            {
                "config_groups": {
                    name: {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}}
                    for name, size in (("group_0", 32), ("group_1", 64))
                }
            },
            "2 group sizes",
        ),
        ("awq", {"quant_method": "bitsandbytes"}, r"\(bitsandbytes, weight_block_size None\) are not supported"),
    ],
)
def test_other_schemes_are_refused(tmp_path: Path, method: Int4Method, changes: dict[str, Any], message: str) -> None:
    make_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization_config(method, 32) | changes}
    path.write_text(json.dumps(config))
    with pytest.raises(StartupError, match=message) as refused:
        locate_model(str(tmp_path))
    assert "supported are fp8 with a weight_block_size" in str(refused.value)
    assert "4-bit awq (gemm), gptq and compressed-tensors" in str(refused.value)


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    pack_checkpoint(directory, "gptq", 32)
    path, name = directory / "model.safetensors", "model.layers.0.mlp.up_proj"
    stored = load_file(path)
    for part, value, message in (
        ("g_idx", stored[f"{name}.g_idx"].flip(0), "orders columns by activation"),
        ("bias", torch.ones(96), "is not part of llama"),
    ):
        save_file(stored | {f"{name}.{part}": value.contiguous()}, path, {"format": "pt"})
        source = locate_model(str(directory))
        parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32)
        with pytest.raises(StartupError, match=message):
            load_weights(source, parameters.slots())


def test_shapes_that_do_not_fit_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    pack_checkpoint(directory, "gptq", 32)
    path, name = directory / "model.safetensors", "model.layers.0.mlp.up_proj"
    stored = load_file(path)
    for part, value, message in (
        ("scales", stored[f"{name}.scales"][:1], r"has shape \[1, 96\]; \[96, 64\] in groups of 32 columns takes"),
        ("qweight", stored[f"{name}.qweight"].unsqueeze(0), r"has shape \[1, 8, 96\]; 4-bit values are matrices"),
    ):
        save_file(stored | {f"{name}.{part}": value.contiguous()}, path, {"format": "pt"})
        with pytest.raises(StartupError, match=message):
            open_checkpoint(locate_model(str(directory)))
