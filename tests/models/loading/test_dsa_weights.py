"""Loading sparse models: every tensor in its slot, block-scaled fp8, parts of ranks, unused tensors."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import StartupError
from pdserve.models.config.sharding import WHOLE, Shard
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from tests.checkpoints import load_reference, make_dsa_checkpoint, quantise_checkpoint, reference_greedy

CPU = torch.device("cpu")
BLOCK = (24, 20)  # divides neither the matrices nor the parts of ranks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dsa_checkpoint(tmp_path_factory.mktemp("glm"), "glm_moe_dsa", index_topk_pattern="FSFS")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def load(directory: Path, shard: Shard = WHOLE) -> LatentParameters:
    source = locate_model(str(directory))
    parameters = LatentParameters.allocate(source.config, shard, device=CPU, dtype=torch.float32)
    slots = parameters.slots()
    for slot in slots.values():
        slot.target.fill_(torch.nan)
    load_weights(source, slots, tensor_names(source.config))
    return parameters


def check_shares(
    directory: Path,
    expected: dict[str, torch.Tensor],
    tp_size: int,
    stages: int,
    *,
    whole_experts: bool = False,
    dp_attention: bool = False,
) -> None:
    """Every rank has exactly its parts, and together they have everything: replicas once per rank of a stage."""
    seen = {name: torch.zeros_like(value) for name, value in expected.items()}
    for rank in range(tp_size * stages):
        shard = Shard.of(rank, tp_size=tp_size, stages=stages, whole_experts=whole_experts, dp_attention=dp_attention)
        for name, slot in load(directory, shard).slots().items():
            assert slot.fills_whole or not (whole_experts and ".experts." in name), name
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            assert slot.target.equal(expected[name][part]), name
            seen[name][part] += 1
    replicated = ("norm.weight", "norm.bias", "_a_proj.weight", "_mqa.weight", "mlp.gate.weight", "_correction_bias")
    for name, count in seen.items():
        whole = name.endswith(replicated) or ".indexer." in name or (dp_attention and "_proj" not in name)
        whole |= dp_attention and ".self_attn." in name
        assert (count == (tp_size if whole else 1)).all(), name


@pytest.mark.parametrize(("tp_size", "stages"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_ranks_have_their_parts_and_together_everything(checkpoint: Path, tp_size: int, stages: int) -> None:
    check_shares(checkpoint, load_file(checkpoint / "model.safetensors"), tp_size, stages)


@pytest.mark.parametrize(("tp_size", "stages"), [(2, 1), (4, 2)])
def test_ranks_can_have_whole_experts(checkpoint: Path, tp_size: int, stages: int) -> None:
    expected = load_file(checkpoint / "model.safetensors")
    check_shares(checkpoint, expected, tp_size, stages, whole_experts=True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("tp_size", "stages"), [(2, 1), (4, 2)])
def test_ranks_can_have_whole_attention_and_vocabulary(copy: Path, tp_size: int, stages: int, fp8: bool) -> None:
    expected = quantise_checkpoint(copy, BLOCK) if fp8 else load_file(copy / "model.safetensors")
    check_shares(copy, expected, tp_size, stages, whole_experts=True, dp_attention=True)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_block_scaled_fp8_is_dequantised(copy: Path, tp_size: int) -> None:
    exact = load_file(copy / "model.safetensors")
    values = quantise_checkpoint(copy, BLOCK)
    rounding = max(float((values[name] - exact[name]).abs().max()) for name in exact)
    assert 0.001 < rounding < 0.1
    check_shares(copy, values, tp_size, 1)


def test_quantised_model_equals_its_dequantised_values(copy: Path, tmp_path: Path) -> None:
    values = quantise_checkpoint(copy, (128, 128))
    runner = ModelRunner.load(locate_model(str(copy)), device=CPU, dtype=torch.float32)
    plain = make_dsa_checkpoint(tmp_path / "plain", "glm_moe_dsa", index_topk_pattern="FSFS")
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    text = list(range(40))
    text += reference_greedy(load_reference(plain), text, 8)
    cache = runner.make_cache(12, 4)
    hidden = runner.forward_hidden(cache, [SequenceSlice(text, 0, range(12))])
    assert hidden is not None
    logits = runner.logits(hidden[39:-1])
    assert logits is not None
    assert logits.argmax(-1).tolist() == text[40:]


def test_unused_tensors_are_left_out(copy: Path) -> None:
    path = copy / "model.safetensors"
    unused = {"model.layers.4.shared_head.head.weight", "model.layers.1.self_attn.indexer.wk.weight"}
    save_file(load_file(path) | {name: torch.zeros(3, 3) for name in unused}, path)
    assert unused.isdisjoint(load(copy).slots())
    save_file(load_file(path) | {"model.layers.2.self_attn.wk.weight": torch.zeros(3, 3)}, path)
    with pytest.raises(StartupError, match=r"tensor 'model\.layers\.2\.self_attn\.wk\.weight' is not part of glm"):
        load(copy)


def test_scales_of_wrong_shape_are_named(copy: Path) -> None:
    quantise_checkpoint(copy, BLOCK)
    path, name = copy / "model.safetensors", "model.layers.0.self_attn.o_proj.weight_scale_inv"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][:-1].contiguous()}, path)
    with pytest.raises(StartupError, match=rf"tensor '{name}' has shape \[2, 4\]; \[64, 80\] in blocks of \[24, 20\]"):
        load(copy)


def test_model_that_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    source = locate_model(
        str(make_dsa_checkpoint(tmp_path, moe_intermediate_size=24, num_attention_heads=16, num_key_value_heads=16))
    )
    for tp_size, message in (
        (16, "tp = 16 does not divide moe_intermediate_size = 24"),
        (3, "tp = 3 does not divide num_attention_heads = 16"),
        (2, "a rank's share of moe_intermediate_size = 12 must be a multiple of 8"),
    ):
        with pytest.raises(StartupError, match=message):
            LatentParameters.allocate(source.config, Shard(tp_size=tp_size), device=CPU, dtype=torch.float32)
