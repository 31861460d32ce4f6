"""Models with block-scaled fp8 checkpoints against transformers with the dequantised weights.

On a CPU weights are expanded, and tokens are equal. Weights that stay fp8 give equal tokens too in steps of few rows,
which do not quantise activations. In longer steps activations are quantised: kernels are compared with the reference
that quantises them in the same way, and logits of the model with a tolerance.
"""

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file

from pdserve.kernels.linear.fp8_linear import FEW_ROWS
from pdserve.models.config.sharding import WHOLE, Shard
from pdserve.models.decoders.dsa import DsaDecoder
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.decoders.mla import MlaDecoder
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.weights import load_weights, tensor_names
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.fp8 import Fp8Weight
from tests.checkpoints import (
    load_reference,
    make_dsa_checkpoint,
    quantise_checkpoint,
    reference_greedy,
    reference_logits,
    stored_in,
)
from tests.models.ranks import NUM_PAGES, PAGE_SIZE, Pass, RankProcesses, run_passes

CPU = torch.device("cpu")
TOLERANCE = 3e-5  # as in test_dsa_decoder.py
PROMPT, NEW = 40, 8
# Several blocks in every direction, the last ones partial; fused parts begin inside blocks.
GEOMETRY: dict[str, Any] = {
    "hidden_size": 192,
    "moe_intermediate_size": 160,
    "intermediate_size": 320,
    "q_lora_rank": 72,
}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "deepseek-v3": ("deepseek_v3", {}),
    "deepseek": ("deepseek_v32", {}),
    "glm": ("glm_moe_dsa", {"index_topk_pattern": "FSSF"}),
}


class Case(NamedTuple):
    """A checkpoint in fp8, a prompt in two chunks and steps, and transformers' logits of each."""

    model: Path
    text: list[int]
    passes: list[Pass]
    expected: torch.Tensor


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    found = {}
    for name, (architecture, overrides) in MODELS.items():
        model = make_dsa_checkpoint(tmp_path_factory.mktemp(name), architecture, **GEOMETRY, **overrides)
        plain = make_dsa_checkpoint(tmp_path_factory.mktemp(name), architecture, **GEOMETRY, **overrides)
        save_file(quantise_checkpoint(model, (128, 128)), plain / "model.safetensors", metadata={"format": "pt"})
        reference = load_reference(plain)
        text = random.Random(1).choices(range(256), k=PROMPT)
        text += reference_greedy(reference, text, NEW)
        pages = tuple(random.Random(2).sample(range(NUM_PAGES), NUM_PAGES))
        ends = [23, *range(PROMPT, PROMPT + NEW)]
        passes = [
            Pass((SequenceSlice(text[start:end], start, pages),))
            for start, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
        found[name] = Case(model, text, passes, reference_logits(reference, text)[[end - 1 for end in ends]])
    return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    processes = RankProcesses(2)
    yield processes
    processes.stop()


def kept(model: Path, shard: Shard = WHOLE, device: torch.device = CPU) -> LatentParameters:
    """Weights that stay fp8, also on a CPU."""
    source = locate_model(str(model))
    parameters = LatentParameters.allocate(
        source.config, shard, device=device, dtype=torch.float32, stored=stored_in(source, "auto")
    )
    load_weights(source, parameters.slots(), tensor_names(source.config))
    return parameters


def decoder(parameters: LatentParameters) -> DsaDecoder | MlaDecoder:
    return MlaDecoder(parameters) if parameters.config.dsa is None else DsaDecoder(parameters)


@pytest.mark.parametrize(("tp_size", "stages", "whole_experts"), [(2, 1, False), (1, 2, False), (2, 1, True)])
def test_expanded_weights_give_transformers_logits(
    ranks: RankProcesses, cases: dict[str, Case], tp_size: int, stages: int, whole_experts: bool
) -> None:
    with ranks.connected(tp_size, stages, whole_experts=whole_experts) as shards:
        for name, case in cases.items():
            results = ranks.run(shards, case.model, case.passes)
            (sampling,) = (result for shard, result in zip(shards, results, strict=True) if shard.samples)
            logits = torch.cat([torch.from_numpy(rows) for rows in sampling.logits])
            torch.testing.assert_close(logits, case.expected, rtol=0, atol=TOLERANCE, msg=name)
            assert logits.argmax(-1).equal(case.expected.argmax(-1)), name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)], ids=str)
def test_fp8_weights_give_transformers_logits_in_short_steps(
    cases: dict[str, Case], device: torch.device, name: str
) -> None:
    case = cases[name]
    parameters = kept(case.model, device=device)
    assert isinstance(parameters.layers[0].attention.compress, Fp8Weight)
    runner = ModelRunner(decoder(parameters), device=device, dtype=torch.float32)
    logits = torch.cat([torch.from_numpy(rows) for rows in run_passes(runner, case.passes).logits])
    torch.testing.assert_close(logits, case.expected, rtol=0, atol=TOLERANCE)
    assert logits.argmax(-1).equal(case.expected.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_long_steps_quantise_activations(cases: dict[str, Case], name: str) -> None:
    """The error of the logits is that of four layers of activations with 4 significant bits."""
    text = (cases[name].text * 2)[: FEW_ROWS + 30]
    pages = range(-(-len(text) // PAGE_SIZE))
    logits = []
    for parameters in (kept(cases[name].model), None):
        if parameters is None:
            runner = ModelRunner.load(locate_model(str(cases[name].model)), device=CPU, dtype=torch.float32)
        else:
            runner = ModelRunner(decoder(parameters), device=CPU, dtype=torch.float32)
        hidden = runner.forward_hidden(runner.make_cache(len(pages), PAGE_SIZE), [SequenceSlice(text, 0, pages)])
        assert hidden is not None
        rows = runner.logits(hidden[:16])  # these tokens select all that they see, so no selection differs
        assert rows is not None
        logits.append(rows)
    errors = (logits[0] - logits[1]).std(dim=1) / logits[1].std(dim=1)
    assert 0.01 < float(errors.median()) < 0.15  # the median: a few tokens get other experts


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("whole_experts", [False, True])
def test_ranks_have_their_parts_of_values_and_scales(cases: dict[str, Case], name: str, whole_experts: bool) -> None:
    """Shares of 160 and 80 columns begin inside blocks: those are expanded."""
    whole = kept(cases[name].model).slots()
    for rank in range(2):
        slots = kept(cases[name].model, Shard(rank, 2, whole_experts=whole_experts)).slots()
        for key, slot in slots.items():
            values, expected = (
                each.target if each.weight is None else each.weight.expanded() for each in (slot, whole[key])
            )
            part = tuple(slice(at, at + size) for at, size in zip(slot.start, slot.target.shape, strict=True))
            assert values.equal(expected[part]), key
        expanded = {key for key, slot in slots.items() if slot.weight is None and whole[key].weight is not None}
        inside = ".mlp.down_proj." if whole_experts else "down_proj."
        assert all(inside in key or ".shared_experts.down_proj." in key for key in expanded)
        assert bool(expanded) == (rank == 1)


def test_cost_of_expanding_is_logged(cases: dict[str, Case], caplog: pytest.LogCaptureFixture) -> None:
    source = locate_model(str(cases["deepseek"].model))
    with caplog.at_level(logging.INFO, "pdserve.models.weights.format"):
        ModelRunner.load(source, device=CPU, dtype=torch.float32)
    (line,) = (record.getMessage() for record in caplog.records if "fp8" in record.getMessage())
    assert line.startswith("fp8 weights: 112 of 112 tensors are dequantized to float32 and take 0.0")
    assert line.endswith("GiB more (cpu has no fp8 kernels)")


def test_weight_bytes_are_those_of_the_device(cases: dict[str, Case], monkeypatch: pytest.MonkeyPatch) -> None:
    source = locate_model(str(cases["deepseek"].model))
    expanded = ModelRunner.weight_bytes(source, torch.bfloat16, device=CPU)
    monkeypatch.setattr("pdserve.models.weights.fp8.supports_fp8", lambda _: True)
    found = ModelRunner.weight_bytes(source, torch.bfloat16, device=CPU)
    parameters = LatentParameters.allocate(
        source.config, device=CPU, dtype=torch.bfloat16, stored=stored_in(source, "auto")
    )
    assert found == sum(slot.nbytes for slot in parameters.slots().values())
    assert 0.5 * expanded < found < 0.6 * expanded  # embedding, head, kv_b and the router have more than 8 bits
