"""fp8 checkpoints with a scale per row or matrix: tokens equal those of transformers with the dequantised weights."""

import json
import logging
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import StartupError
from pdserve.models.config.sharding import Shard
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.loading.weights import allocate_parameters, load_weights, open_checkpoint, tensor_names
from pdserve.models.runner import ModelRunner
from pdserve.server.plan.models import weight_bytes
from tests.checkpoints import is_reference_greedy, load_reference, make_checkpoint, make_dsa_checkpoint, stored_in

CPU = torch.device("cpu")
Fp8Method = Literal["channel", "tensor", "fbgemm", "plain", "transformers"]
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
CASES: dict[str, tuple[Any, Fp8Method, dict[str, Any]]] = {
    "compressed-tensors by row": ("qwen3", "channel", {}),
    "compressed-tensors by matrix": ("qwen2", "tensor", {}),
    "fbgemm": ("llama", "fbgemm", {}),
    "fp8 of transformers": ("mistral", "transformers", {}),
    "experts by row": ("qwen3_moe", "channel", {"moe_intermediate_size": 80, "mlp_only_layers": [1]}),
    "experts by matrix": ("mixtral", "plain", {"intermediate_size": 80}),
}
IGNORED = ("embed_tokens.weight", "lm_head.weight", "gate.weight")
KEPT_IN_16_BITS = "model.layers.1.self_attn.o_proj.weight"
"""A matrix that the configuration ignores."""


def quantization_config(method: Fp8Method) -> dict[str, Any]:
    """`quantization_config` as the tools write it."""
    ignored = ["lm_head", "re:.*mlp.gate$", KEPT_IN_16_BITS.removesuffix(".weight")]
    if method == "fbgemm":
        return {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ignored}
    if method == "plain":
        return {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ignored}
    if method == "transformers":
        return {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": method, "dynamic": False}
    activations = {"num_bits": 8, "type": "float", "symmetric": True}
    activations |= {"strategy": "token", "dynamic": True} if method == "channel" else {"strategy": "tensor"}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def quantise_by_row(directory: Path, method: Fp8Method) -> dict[str, torch.Tensor]:
    """Turn the matrices of layers into fp8; returns the values of all tensors of the model now."""
    path = directory / "model.safetensors"
    stored, values = {}, {}
    for name, tensor in load_file(path).items():
        stored[name] = values[name] = tensor
        if tensor.ndim != 2 or name.endswith(IGNORED) or name == KEPT_IN_16_BITS:
            continue
        by_row = method in ("channel", "fbgemm")
        scale = (tensor.abs().amax(1, keepdim=True) if by_row else tensor.abs().max()) / 448
        stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
        values[name] = stored[name].float() * scale
        module = name.removesuffix(".weight")
        suffix = "_scale_inv" if method == "transformers" else "_scale"
        stored[name + suffix] = scale.reshape(1) if method == "tensor" else scale
        match method:
            case "tensor" | "plain":
                stored[f"{module}.input_scale"] = torch.tensor(0.02)
            case "fbgemm":
                stored[f"{module}.input_scale_ub"] = torch.tensor([1200.0])
            case "transformers":
                stored[f"{module}.activation_scale"] = torch.tensor(0.02)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path, {"format": "pt"})
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["quantization_config"] = quantization_config(method)
    (directory / "config.json").write_text(json.dumps(config), "utf-8")
    return values


class Model(NamedTuple):
    source: ModelSource
    values: dict[str, torch.Tensor]
    reference: Any


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    architecture, method, sizes = CASES[request.param]
    root = tmp_path_factory.mktemp("fp8")
    directory, plain = (make_checkpoint(root / name, architecture, **(SIZES | sizes)) for name in ("fp8", "plain"))
    values = quantise_by_row(directory, method)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    return Model(locate_model(str(directory)), values, load_reference(plain))


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_equal_those_of_the_dequantised_model(model: Model, keep: bool) -> None:
    """Expanded, as on a CPU, and in fp8, as on a GPU: products of few rows are exact."""
    source = model.source
    stored = stored_in(source, "auto")
    parameters = DecoderParameters.allocate(
        source.config, device=CPU, dtype=torch.float32, stored=stored if keep else None
    )
    load_weights(source, parameters.slots())
    kept = {name for name, slot in parameters.slots().items() if slot.weight is not None}
    assert kept == (set(stored.tensors) if keep else set())
    assert KEPT_IN_16_BITS not in stored.tensors
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
@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_hold_their_parts(model: Model, keep: bool, whole_experts: bool) -> None:
    """Any range of columns stays in fp8. With scales per block, a rank's 40 columns of an expert would be expanded."""
    source = model.source
    if whole_experts and source.config.moe is None:
        return
    stored = stored_in(source, "auto") if keep else None
    for rank in range(2):
        shard = Shard(rank, 2, whole_experts=whole_experts)
        parameters = allocate_parameters(source.config, shard, device=CPU, dtype=torch.float32, stored=stored)
        load_weights(source, parameters.slots(), tensor_names(source.config))
        for name, slot in parameters.slots().items():
            values = slot.target if slot.weight is None else slot.weight.expanded()
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            torch.testing.assert_close(values, model.values[name][part], rtol=1e-6, atol=0, msg=name)
            assert (slot.weight is not None) == (stored is not None and name in stored.tensors)


def test_latent_attention_stays_in_fp8(tmp_path: Path) -> None:
    directory = make_dsa_checkpoint(tmp_path, "deepseek_v3", num_hidden_layers=2)
    values = quantise_by_row(directory, "channel")
    source = locate_model(str(directory))
    stored = stored_in(source, "auto")
    parameters = allocate_parameters(source.config, Shard(1, 2), device=CPU, dtype=torch.float32, stored=stored)
    load_weights(source, parameters.slots(), tensor_names(source.config))
    for name, slot in parameters.slots().items():
        found = slot.target if slot.weight is None else slot.weight.expanded()
        part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
        torch.testing.assert_close(found, values[name][part], rtol=1e-6, atol=0, msg=name)
        assert (slot.weight is not None) == (name in stored.tensors and "kv_b_proj" not in name), name


def test_cost_of_expanding_is_logged(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.models.weights.format"):
        ModelRunner.load(model.source, device=CPU, dtype=torch.float32)
    (line,) = (record.getMessage() for record in caplog.records if "fp8" in record.getMessage())
    count = len(stored_in(model.source, "auto").tensors)
    assert line.startswith(f"fp8 weights: {count} of {count} tensors are dequantized to float32 and take 0.0")
    assert line.endswith("GiB more (cpu has no fp8 kernels)")


def test_weight_bytes_count_fp8(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    source = model.source
    expanded = ModelRunner.weight_bytes(source, torch.bfloat16, device=CPU)
    monkeypatch.setattr("pdserve.models.weights.fp8.supports_fp8", lambda _: True)
    assert ModelRunner.weight_bytes(source, torch.bfloat16, device=CPU) < 0.85 * expanded
    config = source.config
    assert weight_bytes(config) == config.layer_parameters + 2 * (config.parameters - config.layer_parameters)


def test_dummy_weights_do_not_depend_on_what_is_expanded(model: Model) -> None:
    config, stored = model.source.config, stored_in(model.source, "dummy")
    whole = allocate_parameters(config, Shard(), device=CPU, dtype=torch.float32).slots()
    fill_with_noise(whole, stored)
    slots = allocate_parameters(config, Shard(1, 2), device=CPU, dtype=torch.float32, stored=stored).slots()
    fill_with_noise(slots, stored)
    for name, slot in slots.items():
        values = slot.target if slot.weight is None else slot.weight.expanded()
        part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
        assert values.equal(whole[name].target[part]), name


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=1)


FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def groups(weights: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": FLOAT8 | weights, **others}}}


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("plain", {"activation_scheme": "other"}, r"\(fp8, activation_scheme other\)"),
        ("plain", {"fmt": "e5m2"}, r"\(fp8, fmt e5m2\)"),
        ("plain", {"kv_cache_scheme": "static"}, r"\(fp8, kv_cache_scheme static\)"),
        ("plain", {"weight_block_size": [128, 128], "fmt": "e5m2"}, r"\(fp8, fmt e5m2\)"),
        ("plain", {"weight_block_size": [128, 128], "kv_cache_scheme": "static"}, r"\(fp8, kv_cache_scheme static\)"),
        ("plain", {"weight_block_size": [128]}, r"\(fp8, weight_block_size \[128\]\)"),
        ("plain", {"quant_method": "modelopt", "quant_algo": "FP8"}, r"\(modelopt, quant_algo FP8\)"),
        ("channel", {"format": "int-quantized"}, r"\(compressed-tensors, format int-quantized\)"),
        ("channel", {"format": "mxfp4-pack-quantized"}, r"\(compressed-tensors, format mxfp4-pack-quantized\)"),
        ("channel", {"format": "mixed-precision"}, r"\(compressed-tensors, format mixed-precision\)"),
        ("channel", {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme {'num_bits': 8"),
        ("channel", {"config_groups": {}}, "config_groups with 0 kinds of scales"),
        (
            "channel",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            r"\(compressed-tensors, sparsity_config, format sparse-24-bitmask\)",
        ),
        ("channel", groups({"type": "int"}), r"\(compressed-tensors, group_0, weights, type int\)"),
        ("channel", groups({"num_bits": 4}), r"\(compressed-tensors, group_0, weights, num_bits 4\)"),
        ("channel", groups({"strategy": "group"}), r"\(compressed-tensors, group_0, weights, strategy group\)"),
        ("channel", groups({"strategy": "block"}), r"\(compressed-tensors, group_0, weights, block_structure None\)"),
        (
            "channel",
            groups({}, input_activations={"num_bits": 8, "type": "int"}),
            r"\(compressed-tensors, group_0, input_activations, type int\)",
        ),
        ("channel", groups({}, output_activations=FLOAT8), r"\(compressed-tensors, group_0, output_activations"),
    ],
)
def test_other_schemes_are_refused_before_weights_are_read(
    plain: Path, tmp_path: Path, method: Fp8Method, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((plain / "config.json").read_text())
    config |= {"quantization_config": quantization_config(method) | changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").symlink_to(plain / "tokenizer.json")
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    with pytest.raises(StartupError, match=message) as refused:
        locate_model(str(tmp_path))
    assert "supported are fp8 with a weight_block_size of rows and columns, or with a scale per" in str(refused.value)


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    quantise_by_row(directory, "channel")
    path, name = directory / "model.safetensors", "model.layers.0.mlp.up_proj.weight_scale"
    stored = load_file(path)
    save_file(stored | {name: stored[name][:7].contiguous()}, path, {"format": "pt"})
    with pytest.raises(StartupError, match=r"shape \[7, 1\]; a matrix of 96 rows takes 1 or 96 scales"):
        open_checkpoint(locate_model(str(directory)))


def test_scale_of_a_norm_is_refused(plain: Path, tmp_path: Path) -> None:
    config = json.loads((plain / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config("plain")}))
    (tmp_path / "tokenizer.json").symlink_to(plain / "tokenizer.json")
    values = load_file(plain / "model.safetensors")
    save_file(values | {"model.norm.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    source = locate_model(str(tmp_path))
    with pytest.raises(StartupError, match=r"tensor 'model\.norm\.weight_scale' is not part of llama"):
        load_weights(source, allocate_parameters(source.config, device=CPU, dtype=torch.float32).slots())
