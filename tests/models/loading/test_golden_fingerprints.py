"""Fingerprints that released servers have computed: servers of two versions pair only if they compute the same one.

A test that fails here means that old and new servers stop pairing. Do not change a fingerprint in
golden_fingerprints.json; only add new ones. The configurations are those of small checkpoints (family_checkpoints.py).
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.fingerprint import Fingerprints, fingerprints
from pdserve.models.registry import FAMILIES, read_config_file

GOLDEN: list[dict[str, Any]] = json.loads(Path(__file__).with_name("golden_fingerprints.json").read_text())


def source_of(entry: dict[str, Any], directory: Path) -> ModelSource:
    (directory / "config.json").write_text(json.dumps(entry["config"]))
    return ModelSource(entry["name"], directory, "huggingface", read_config_file(directory / "config.json"))


@pytest.mark.parametrize("entry", GOLDEN, ids=[entry["name"] for entry in GOLDEN])
def test_configuration_has_the_fingerprint_of_released_servers(entry: dict[str, Any], tmp_path: Path) -> None:
    found = fingerprints(source_of(entry, tmp_path), "dummy")
    assert (found.model, found.protocol3) == (entry["model"], entry["protocol3"])


def test_every_family_has_a_golden_fingerprint() -> None:
    golden = {name for entry in GOLDEN for name in entry["config"]["architectures"]}
    assert golden == {family.architecture for family in FAMILIES}


def test_tensors_have_the_fingerprint_of_released_servers(tmp_path: Path) -> None:
    """Tensors below and above the size of a sample, in two types."""
    tensors = {
        "model.norm.weight": torch.arange(64, dtype=torch.float32),
        "model.embed_tokens.weight": torch.arange(320 * 64, dtype=torch.float32).reshape(320, 64),
        "lm_head.weight": torch.arange(320 * 64, dtype=torch.int16).view(torch.bfloat16).reshape(320, 64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = fingerprints(source_of(GOLDEN[0], tmp_path))
    assert found == Fingerprints(model="4cb9e1b826dd07a76a271e9c2c382159", protocol3="e4ae10e31cd6b2b7d156b97bf4a28420")


def test_gguf_file_has_the_fingerprint_of_released_servers() -> None:
    found = fingerprints(locate_model("smollm2"))
    assert found == Fingerprints(model="bd82e90399ebb6b74020806f64f67f20", protocol3="d5305d11c336960d203943f0b90e696f")


def test_notes_and_other_spellings_of_a_number_do_not_count(tmp_path: Path) -> None:
    """Such as those of a file that another version of transformers has saved."""
    entry = GOLDEN[0]
    rope = entry["config"]["rope_parameters"] | {"rope_theta": 10000}
    notes = {"transformers_version": "9.9", "eos_token_id": [1, 2], "attention_dropout": 0.1, "rope_scaling": None}
    same = entry | {"config": entry["config"] | notes | {"rope_parameters": rope}}
    assert fingerprints(source_of(same, tmp_path), "dummy").model == entry["model"]


@pytest.mark.parametrize("change", [{"num_hidden_layers": 4}, {"a_field_that_nobody_knows": 1}, {"sub": {"depth": 1}}])
def test_any_other_field_counts(change: dict[str, Any], tmp_path: Path) -> None:
    changed = GOLDEN[0] | {"config": GOLDEN[0]["config"] | change}
    assert fingerprints(source_of(changed, tmp_path), "dummy").model != GOLDEN[0]["model"]
