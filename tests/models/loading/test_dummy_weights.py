"""Random weights: the same model however it is divided, with activations of order 1."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from pdserve.models.config.sharding import WHOLE, Shard
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.loading.fingerprint import fingerprints
from pdserve.models.loading.weights import allocate_parameters
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.slots import Slot
from tests.checkpoints import make_checkpoint, make_dsa_checkpoint, stored_in

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen2", "qwen3", "deepseek_v32"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    directory = tmp_path_factory.mktemp(request.param)
    make = make_dsa_checkpoint if request.param == "deepseek_v32" else make_checkpoint
    return locate_model(str(make(directory, request.param)))


def filled(source: ModelSource, shard: Shard) -> dict[str, Slot]:
    slots = allocate_parameters(source.config, shard, device=CPU, dtype=torch.float32).slots()
    for slot in slots.values():
        slot.target.fill_(torch.nan)
    fill_with_noise(slots)
    return slots


@pytest.mark.parametrize(("tp_size", "stages"), [(2, 1), (1, 2), (2, 2)])
def test_part_of_a_rank_equals_that_part_of_the_whole_model(source: ModelSource, tp_size: int, stages: int) -> None:
    whole = filled(source, WHOLE)
    seen = set()
    for rank in range(tp_size * stages):
        for name, slot in filled(source, Shard.of(rank, tp_size=tp_size, stages=stages)).items():
            part = whole[name].target[
                tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            ]
            assert slot.target.equal(part), f"{name} on rank {rank}"
            seen.add(name)
    assert seen == whole.keys()


def test_rows_of_a_large_matrix_differ_and_a_part_can_start_anywhere() -> None:
    whole, part = torch.empty(3000, 7), torch.empty(1100, 3)
    fill_with_noise({"lm_head.weight": Slot(whole, (3000, 7), (0, 0))})
    fill_with_noise({"lm_head.weight": Slot(part, (3000, 7), (1000, 2))})
    assert part.equal(whole[1000:2100, 2:5])
    assert len(set(map(tuple, whole.tolist()))) == 3000
    assert whole.std().item() == pytest.approx(7**-0.5, rel=0.02)


def test_tensors_of_one_shape_differ(source: ModelSource) -> None:
    slots = filled(source, WHOLE)
    first, second = (slots[f"model.layers.{index}.input_layernorm.weight"].target for index in (0, 1))
    assert not first.equal(second)
    assert first.mean().item() == pytest.approx(1.0, abs=0.05)


def test_logits_are_of_order_one(source: ModelSource) -> None:
    runner = ModelRunner.load(source, device=CPU, dtype=torch.float32, load_format="dummy")
    read = ModelRunner.load(source, device=CPU, dtype=torch.float32)
    pieces = [SequenceSlice(list(range(40)), 0, range(10))]
    logits, of_files = (each.forward(each.make_cache(10, 4), pieces) for each in (runner, read))
    assert logits is not None
    assert of_files is not None
    assert 0.5 < logits.std().item() < 2.0
    assert not logits.equal(of_files)


def test_fingerprint_of_dummy_weights_needs_no_weights_and_differs(source: ModelSource, tmp_path: Path) -> None:
    dummy = fingerprints(source, "dummy")
    shutil.copy(source.path / "config.json", tmp_path)
    bare = ModelSource(source.name, tmp_path, "huggingface", source.config)
    assert fingerprints(bare, "dummy") == dummy
    assert fingerprints(source).model != dummy.model


def quantised(source: ModelSource, directory: Path) -> ModelSource:
    """The same geometry with block-scaled weights."""
    config = json.loads((source.path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (directory / name).hardlink_to(source.path / name)
    return locate_model(str(directory))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_dummy_fp8_weights_equal_expanded_ones(tmp_path: Path, tp_size: int) -> None:
    plain = make_dsa_checkpoint(tmp_path / "plain", hidden_size=192, moe_intermediate_size=160)
    (tmp_path / "fp8").mkdir()
    source = quantised(locate_model(str(plain)), tmp_path / "fp8")
    fp8 = stored_in(source, "dummy")
    whole = allocate_parameters(source.config, WHOLE, device=CPU, dtype=torch.float32).slots()
    fill_with_noise(whole, fp8)
    assert whole["model.layers.0.mlp.gate_proj.weight"].target.std().item() == pytest.approx(192**-0.5, rel=0.05)
    kept = 0
    for rank in range(tp_size):
        shard = Shard(rank, tp_size)
        slots = allocate_parameters(source.config, shard, device=CPU, dtype=torch.float32, stored=fp8).slots()
        fill_with_noise(slots, fp8)
        for name, slot in slots.items():
            kept += slot.weight is not None
            values = slot.target if slot.weight is None else slot.weight.expanded()
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            assert values.equal(whole[name].target[part]), name
    assert kept > 60
