"""Rotary embeddings of GGUF files: what llama.cpp computes from their metadata, or a refusal that names the field."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from pdserve.common.errors import StartupError
from pdserve.models.config.rope import RopeConfig, read_gguf_rope
from pdserve.models.formats.gguf_file import GgufFile

HEAD_DIM = 16


def read(tmp_path: Path, fields: dict[str, float | str], *, frequencies: bool = False) -> RopeConfig:
    """The configuration of a file with these fields below `llama.rope`."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in fields.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.{name}", value)
    name = "rope_freqs.weight" if frequencies else "token_embd.weight"
    writer.add_tensor(name, np.full(HEAD_DIM // 2, 2.0, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf_rope(GgufFile(tmp_path / "x.gguf"), "llama", HEAD_DIM)


def test_factor_without_a_type_is_linear(tmp_path: Path) -> None:
    assert read(tmp_path, {"scaling.factor": 4.0}) == RopeConfig(kind="linear", factor=4.0)
    assert read(tmp_path, {"scaling.factor": 1.0}) == RopeConfig()
    assert read(tmp_path, {"scaling.factor": 4.0, "scaling.type": "none"}) == RopeConfig()


@pytest.mark.parametrize(
    ("name", "default", "other"),
    [
        ("scale_linear", 1.0, 4.0),
        ("scaling.attn_factor", 1.0, 1.5),
        ("scaling.yarn_attn_factor", 1.0, 1.5),
        ("scaling.yarn_beta_fast", 32.0, 16.0),
        ("scaling.yarn_log_multiplier", 0.0, 0.5),
    ],
)
def test_other_scalings_are_refused(name: str, default: float, other: float, tmp_path: Path) -> None:
    assert read(tmp_path, {name: default}) == RopeConfig()
    with pytest.raises(StartupError, match=rf"llama\.rope\.{name} {other} is not supported"):
        read(tmp_path, {name: other})


def test_table_of_frequencies_is_not_scaled(tmp_path: Path) -> None:
    assert read(tmp_path, {}, frequencies=True).factors == (2.0,) * (HEAD_DIM // 2)
    with pytest.raises(StartupError, match=r"rope\.scaling\.factor is not supported beside the tensor 'rope_freqs"):
        read(tmp_path, {"scaling.type": "linear", "scaling.factor": 4.0}, frequencies=True)
