"""Damaged GGUF files: the reader raises StartupError, or every tensor is inside the file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdserve.common.errors import StartupError
from pdserve.models.formats.gguf_file import GgufFile

QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
HUGE = (0, 1, 3, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "cd"])
    writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("output.weight", np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def check(data: bytes, directory: Path) -> None:
    path = directory / "damaged.gguf"
    path.write_bytes(data)
    try:
        file = GgufFile(path)
    except StartupError:
        return
    for tensor in file.tensors.values():
        assert 0 <= tensor.offset <= tensor.offset + tensor.size_bytes <= len(data)
        for first, rows in file.read_rows(tensor) if tensor.type_name == "F32" else ():
            assert first >= 0
            assert rows.shape[1] == tensor.shape[-1]


@settings(suppress_health_check=QUIET, max_examples=60)
@given(at=st.integers(0, 400), number=st.sampled_from(HUGE), cut=st.none() | st.integers(0, 600))
def test_header_with_a_wrong_number(valid: bytes, tmp_path: Path, at: int, number: int, cut: int | None) -> None:
    data = bytearray(valid)
    data[at : at + 8] = struct.pack("<Q", number)
    check(bytes(data[:cut]), tmp_path)


@settings(suppress_health_check=QUIET, max_examples=60)
@given(changes=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 255)), min_size=1, max_size=8))
def test_header_with_wrong_bytes(valid: bytes, tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    data = bytearray(valid)
    for at, value in changes:
        data[at % len(data)] = value
    check(bytes(data), tmp_path)


@pytest.mark.parametrize("shape", [(2**62, 4), (2**63, 2), (2**64 - 1, 1), (0, 32), (32, 0)])
def test_tensor_with_an_impossible_shape_is_refused(valid: bytes, tmp_path: Path, shape: tuple[int, int]) -> None:
    """The number of elements of the first shapes does not fit into 64 bits."""
    at = valid.index(b"token_embd.weight") + len(b"token_embd.weight") + 4
    assert struct.unpack_from("<QQ", valid, at) == (32, 2)
    data = bytearray(valid)
    struct.pack_into("<QQ", data, at, *shape)
    path = tmp_path / "shape.gguf"
    path.write_bytes(bytes(data))
    with pytest.raises(StartupError, match="token_embd"):
        GgufFile(path)
