"""Loading: sharded files, conversions, and tensors that are missing, extra or misshapen."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.common.errors import StartupError
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.loading.fingerprint import Fingerprints, fingerprints
from pdserve.models.loading.weights import load_weights
from tests.checkpoints import load_reference, make_checkpoint

CPU = torch.device("cpu")


def load(source: ModelSource, dtype: torch.dtype = torch.float32) -> DecoderParameters:
    parameters = DecoderParameters.allocate(source.config, device=CPU, dtype=dtype)
    slots = parameters.slots()
    for slot in slots.values():
        slot.target.fill_(torch.nan)
    load_weights(source, slots)
    return parameters


@pytest.mark.parametrize("shard_size", [None, "60KB"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_every_tensor_is_loaded_into_its_slot(architecture: str, shard_size: str | None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, architecture, shard_size=shard_size)  # type: ignore[arg-type]  # parametrised
    assert (len(list(tmp_path.glob("*.safetensors"))) > 5) == (shard_size is not None)
    parameters = load(locate_model(str(tmp_path)))
    expected = dict(load_reference(tmp_path).named_parameters())
    slots = parameters.slots()
    assert slots.keys() == expected.keys()
    for name, slot in slots.items():
        assert slot.target.equal(expected[name]), name
    covered = sum(slot.target.numel() for slot in slots.values())
    assert covered == sum(parameter.numel() for parameter in expected.values())


def test_16_bit_checkpoint_is_converted(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, dtype=torch.bfloat16)
    source = locate_model(str(tmp_path))
    assert source.config.dtype == "bfloat16"
    stored = load_file(tmp_path / "model.safetensors")
    for name, slot in load(source).slots().items():
        assert slot.target.equal(stored[name].float()), name


def test_tied_head_is_the_embedding_and_a_saved_copy_is_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    parameters = load(locate_model(str(tmp_path)))
    assert parameters.head is parameters.embedding


def test_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    """As after fine-tuning with a separate head. transformers does not tie them, whatever the configuration says."""
    make_checkpoint(tmp_path, tie_word_embeddings=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 1
    save_file({**tensors, "lm_head.weight": head}, path, {"format": "pt"})
    assert load_reference(tmp_path).lm_head.weight.equal(head)
    with pytest.raises(
        StartupError, match=r"'lm_head.weight' is not the same .* tie_word_embeddings: set that to fals"
    ):
        load(locate_model(str(tmp_path)))


def test_tensor_in_several_files_without_an_index_is_refused(tmp_path: Path) -> None:
    """The files may have different formats or be of different models, so none of them can be chosen."""
    path = make_checkpoint(tmp_path) / "model.safetensors"
    shutil.copy(path, tmp_path / "other.safetensors")
    assert load(locate_model(str(tmp_path))).head is not None
    path.rename(tmp_path / "weights.safetensors")
    with pytest.raises(
        StartupError, match=r"several files have the tensor '.*', and no model.safetensors.index.json says"
    ):
        load(locate_model(str(tmp_path)))


NAME = "model.layers.1.mlp.up_proj.weight"


def damage(directory: Path, change: str) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors[NAME]
    elif change == "misshapen":
        tensors[NAME] = tensors[NAME][:-1].contiguous()
    else:
        tensors["model.layers.3.mlp.up_proj.weight"] = tensors[NAME].clone()
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", rf"tensor '{NAME}' is missing; expected shape \[96, 64\]"),
        ("misshapen", rf"tensor '{NAME}' has shape \[95, 64\], the configuration expects \[96, 64\]"),
        ("extra", "tensor 'model.layers.3.mlp.up_proj.weight' is not part of llama"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_named(change: str, message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    damage(tmp_path, change)
    with pytest.raises(StartupError, match=message):
        load(locate_model(str(tmp_path)))


def test_truncated_weight_file_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(StartupError, match=r"model\.safetensors: not a readable safetensors file"):
        load(locate_model(str(tmp_path)))


def test_fingerprint_depends_on_content_and_not_on_paths(tmp_path: Path) -> None:
    def of(name: str, **options: object) -> Fingerprints:
        directory = tmp_path / name
        directory.mkdir()
        make_checkpoint(directory, **options)  # type: ignore[arg-type]  # forwarded as they are
        return fingerprints(locate_model(str(directory)))

    base = of("base")
    assert len(base.model) == len(base.protocol3) == 32
    assert of("elsewhere") == base
    assert of("sharded", shard_size="60KB") == base
    different = [
        of("other-weights", seed=1),
        of("other-dtype", dtype=torch.bfloat16),
        of("other-eps", rms_norm_eps=1e-5),
        of("other-rope", rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    ]
    assert len({prints.model for prints in (base, *different)}) == 5
    assert len({prints.protocol3 for prints in (base, *different)}) == 5


def test_fingerprint_detects_one_changed_tensor_and_ignores_stop_tokens(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    base = fingerprints(locate_model(str(tmp_path)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert fingerprints(locate_model(str(tmp_path))) == base
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors[NAME][48] *= 1.001
    save_file(tensors, path)
    changed = fingerprints(locate_model(str(tmp_path)))
    assert changed.model != base.model
    assert changed.protocol3 != base.protocol3
