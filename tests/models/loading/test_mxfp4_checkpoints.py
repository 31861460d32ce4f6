"""Experts in MXFP4: tensors and tokens equal those of transformers with the expanded weights."""

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
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.loading.weights import allocate_parameters, load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.slots import Slot
from tests.checkpoints import is_reference_greedy, load_reference, make_checkpoint, pack_experts, stored_in

CPU = torch.device("cpu")
SHARDS = (Shard(), Shard(1, 2), Shard(1, 2, whole_experts=True))


class Model(NamedTuple):
    source: ModelSource
    expanded: dict[str, torch.Tensor]  # the experts, by transformers
    reference: Any


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    root = tmp_path_factory.mktemp("mxfp4")
    directory, plain = (
        make_checkpoint(root / name, "gpt_oss", intermediate_size=64, num_hidden_layers=2)
        for name in ("packed", "plain")
    )
    expanded = pack_experts(directory)
    save_file(load_file(plain / "model.safetensors") | expanded, plain / "model.safetensors", {"format": "pt"})
    return Model(locate_model(str(directory)), expanded, load_reference(plain))


def held(slot: Slot) -> torch.Tensor:
    return slot.target if slot.weight is None else slot.weight.expanded().transpose(1, 2)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("shard", SHARDS)
def test_tensors_are_those_that_transformers_expands(model: Model, shard: Shard, keep: bool) -> None:
    source = model.source
    stored = stored_in(source, "auto")
    assert stored.tensors == model.expanded.keys()
    parameters = DecoderParameters.allocate(
        source.config, shard, device=CPU, dtype=torch.float32, stored=stored if keep else None
    )
    slots = parameters.slots()
    load_weights(source, slots, tensor_names(source.config))
    for name, tensor in model.expanded.items():
        slot = slots[name]
        assert (slot.weight is not None) == keep
        part = tuple(slice(start, start + size) for start, size in zip(slot.start, slot.size, strict=True))
        assert held(slot).equal(tensor[part]), name


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("scales", r"down_proj_scales' has shape \[8, 64, 1\]; the blocks need \[8, 64, 2\]"),
        ("blocks", r"down_proj_blocks' has shape \[8, 64, 1\]; MXFP4 blocks are \[experts, rows, groups, 16\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, part: str, message: str) -> None:
    directory = make_checkpoint(tmp_path, "gpt_oss", intermediate_size=64, num_hidden_layers=1)
    pack_experts(directory)
    path, name = directory / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    stored = load_file(path)
    wrong = stored[f"{name}_scales"][:, :, :1].contiguous()
    save_file(stored | {f"{name}_{part}": wrong}, path, {"format": "pt"})
    source = locate_model(str(directory))
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32)
    with pytest.raises(StartupError, match=message):
        load_weights(source, parameters.slots())


def test_parts_inside_a_block_are_expanded(model: Model) -> None:
    """A quarter of the width is 16 columns of `down`, half a block."""
    slots = allocate_parameters(
        model.source.config,
        Shard(1, 4),
        device=torch.device("meta"),
        dtype=torch.float32,
        stored=stored_in(model.source, "auto"),
    ).slots()
    assert all(slot.weight is None for slot in slots.values())


@pytest.mark.parametrize("keep", [False, True])
def test_tokens_equal_transformers(model: Model, keep: bool) -> None:
    source = model.source
    kept = stored_in(source, "auto") if keep else None
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=torch.float32, stored=kept)
    load_weights(source, parameters.slots())
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


def test_cost_of_expanding_is_logged(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pdserve.models.weights.format"):
        ModelRunner.load(model.source, device=CPU, dtype=torch.float32)
    (line,) = (record.getMessage() for record in caplog.records if "4-bit" in record.getMessage())
    assert line.startswith("4-bit weights: 4 of 4 tensors are dequantized to float32 and take 0.00 GiB more")


def test_weight_bytes_are_those_of_the_device(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = ModelRunner.weight_bytes(model.source, torch.bfloat16, device=CPU)
    monkeypatch.setattr("pdserve.models.weights.mxfp4.supports_int4", lambda _: True)
    elements = sum(tensor.numel() for tensor in model.expanded.values())
    saved = 2 * elements - elements // 2 - elements // 32
    assert ModelRunner.weight_bytes(model.source, torch.bfloat16, device=CPU) == expanded - saved


@pytest.mark.parametrize("shard", SHARDS[1:])
def test_dummy_weights_do_not_depend_on_what_is_expanded(model: Model, shard: Shard) -> None:
    config, stored = model.source.config, stored_in(model.source, "dummy")
    assert stored.tensors == stored_in(model.source, "auto").tensors
    whole = allocate_parameters(config, Shard(), device=CPU, dtype=torch.float32).slots()
    fill_with_noise(whole, stored)
    slots = allocate_parameters(config, shard, device=CPU, dtype=torch.float32, stored=stored).slots()
    fill_with_noise(slots, stored)
    for name in stored.tensors:
        part = tuple(slice(at, at + size) for at, size in zip(slots[name].start, slots[name].size, strict=True))
        assert held(slots[name]).equal(whole[name].target[part]), name
        assert float(whole[name].target.std()) == pytest.approx(whole[name].shape[-1] ** -0.5, rel=0.1)
