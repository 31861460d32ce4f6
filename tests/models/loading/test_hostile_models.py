"""Model directories and GGUF files that are made to harm: each is refused with one line, soon and in little memory."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.configs.load import read_config_file
from pdserve.models.formats.bounds import MOST, MOST_INTEGER
from pdserve.models.loading.catalog import WEIGHT_FILE, WEIGHT_INDEX
from tests.cluster.servers import ForkedCommand
from tests.models.loading.refusals import read_model, refused
from tests.ports import free_port
from tests.server.http_harness import write_byte_model

Spoil = Callable[[Path], object]
ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
MOE = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 2, "moe_intermediate_size": 8}
GIB = 1 << 30


def safetensors(header: dict[str, Any] | bytes, data: bytes = bytes(8), length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def with_config(**fields: Any) -> Spoil:
    def spoil(model: Path) -> None:
        path = model / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return spoil


def with_file(name: str, content: bytes | str) -> Spoil:
    return lambda model: (model / name).write_bytes(content.encode() if isinstance(content, str) else content)


def with_weights(header: dict[str, Any] | bytes, data: bytes = bytes(8), length: int | None = None) -> Spoil:
    return with_file(WEIGHT_FILE, safetensors(header, data, length))


def with_sparse(name: str, size: int) -> Spoil:
    def spoil(model: Path) -> None:
        with (model / name).open("wb") as file:
            file.truncate(size)

    return spoil


def with_index(weight_map: Any, *files: str) -> Spoil:
    def spoil(model: Path) -> None:
        (model / WEIGHT_FILE).unlink()
        (model / WEIGHT_INDEX).write_text(json.dumps({"weight_map": weight_map}))
        for name in files:
            (model / name).write_bytes(safetensors({"a": ENTRY}))

    return spoil


def instead_of(name: str, make: Callable[[Path], object]) -> Spoil:
    def spoil(model: Path) -> None:
        (model / name).unlink()
        make(model / name)

    return spoil


def with_tokenizer(**fields: Any) -> Spoil:
    def spoil(model: Path) -> None:
        path = model / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return spoil


SECRET = "/etc/passwd"
MANY_TENSORS = (
    b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % n for n in range(300_000)) + b"}"
)

DIRECTORIES: dict[str, tuple[Spoil, str]] = {
    "many layers": (with_config(num_hidden_layers=10**9), r"num_hidden_layers must be at most 1024, got 1000000000$"),
    "layers as float": (
        with_config(num_hidden_layers=1e9),
        "num_hidden_layers must be a positive integer, got 1000000",
    ),
    "negative layers": (with_config(num_hidden_layers=-1), "num_hidden_layers must be a positive integer, got -1"),
    "layers not a number": (with_config(num_hidden_layers=float("nan")), "num_hidden_layers must be .* got nan"),
    "layers as text": (with_config(num_hidden_layers="9" * 4000), r"num_hidden_layers .* got '9.*\(4002 characters\)"),
    "layers as truth": (with_config(num_hidden_layers=True), "num_hidden_layers must be a positive integer, got True"),
    "layers with 4,000 digits": (
        with_config(num_hidden_layers=10**4000),
        r"num_hidden_layers must be at most 1024, got 1",
    ),
    "layers with 5,000 digits": (
        with_file("config.json", '{"num_hidden_layers": ' + "1" * 5000 + "}"),
        r"config.json: cannot be read: Exceeds the limit \(4300 digits\)",
    ),
    "wide": (with_config(hidden_size=1 << 40), "hidden_size must be at most 1048576, got 1099511627776"),
    "large vocabulary": (with_config(vocab_size=1 << 31), "vocab_size must be at most 16777216, got 2147483648"),
    "no KV heads": (with_config(num_key_value_heads=0), "num_key_value_heads must be a positive integer, got 0"),
    "long context": (with_config(max_position_embeddings=1 << 62), "max_position_embeddings must be at most 134217728"),
    "large rope factor": (
        with_config(rope_scaling={"rope_type": "linear", "factor": 1e300}),
        "factor must be at most 1e[+]12, got 1e[+]300",
    ),
    "long stretched context": (
        with_config(rope_scaling={"rope_type": "yarn", "factor": 1e12, "original_max_position_embeddings": 1 << 20}),
        "the context length must be at most 134217728, got",
    ),
    "original length as text": (
        with_config(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": "x"}),
        "original_max_position_embeddings must be a positive integer, got 'x'",
    ),
    "many experts in all layers": (
        with_config(**MOE, num_hidden_layers=1024, num_experts=1 << 20),
        "the layers must have at most 262144 experts together, got 1073741824",
    ),
    "many weights": (
        with_config(num_hidden_layers=1024, hidden_size=1 << 20, intermediate_size=1 << 20),
        "the model must have at most 140737488355328 weights, got",
    ),
    "large end token": (with_config(eos_token_id=[1 << 70]), "eos_token_id must be a token id or a list of them, got"),
    "many layer types": (
        with_config(layer_types=["x"] * 100_000),
        r"layer_types must have one .* \(500000 characters\)",
    ),
    "architecture of several lines": (
        with_config(architectures=["a\nb\x1b[2J"]),
        r"architecture 'a\\nb\\x1b\[2J' is not",
    ),
    "architectures a number": (with_config(architectures=7), "architectures must be a list of names, got 7"),
    "configuration a list": (with_file("config.json", "[1]"), "config.json: expected a JSON object"),
    "deep configuration": (
        with_file("config.json", '{"a":' * 100_000),
        "config.json: cannot be read: maximum recursion",
    ),
    "configuration not text": (with_file("config.json", b"\xff\xfe"), "config.json: cannot be read: 'utf-8' codec"),
    "huge configuration": (
        with_sparse("config.json", 8 * GIB),
        "config.json: must have at most 16777216 bytes, and has",
    ),
    "configuration of many values": (
        with_file("config.json", '{"a":[' + "1," * 2_000_000 + "1]}"),
        "config.json: must have at most 1048576 JSON values, and may have 2000002",
    ),
    "index with an absolute path": (with_index({"a": SECRET}), r"index.json names '/etc/passwd', which is not inside"),
    "index that leads out": (
        with_index({"a": "../../a.safetensors"}),
        r"index.json names '../../a.safetensors', which",
    ),
    "index with a null character": (with_index({"a": "a\0b"}), r"index.json names 'a\\x00b', which is not inside"),
    "index without its file": (with_index({"a": "b.safetensors"}), "b.safetensors is missing, model.safetensors.index"),
    "index of numbers": (with_index({"a": 7}), r"index.json cannot be read: .*Expected `str`, got `int`"),
    "index a list": (with_index([1]), r"index.json cannot be read: .*Expected `object`, got `array`"),
    "deep index": (
        lambda model: [with_index({})(model), (model / WEIGHT_INDEX).write_text('{"weight_map":' * 50_000)],
        "index.json cannot be read:",
    ),
    "huge index": (
        lambda model: [with_index({})(model), with_sparse(WEIGHT_INDEX, 8 * GIB)(model)],
        "index.json: must have at most 67108864 bytes, and has 8589934592",
    ),
    "tensor in two files": (
        with_index({"b": "1.safetensors", "c": "2.safetensors"}, "1.safetensors", "2.safetensors"),
        "several files have the tensor 'a', and no model.safetensors.index.json says which counts",
    ),
    "weights linked to another folder": (
        instead_of(WEIGHT_FILE, lambda path: path.symlink_to(SECRET)),
        f"model.safetensors must be a file inside the directory, and is a link to {SECRET}",
    ),
    "weights linked to a device": (
        instead_of(WEIGHT_FILE, lambda path: path.symlink_to("/dev/zero")),
        "model.safetensors must be a file inside the directory, and is a link to /dev/zero",
    ),
    "weights linked to themselves": (
        instead_of(WEIGHT_FILE, lambda path: path.symlink_to(path.name)),
        "model.safetensors: cannot be read: Too many levels of symbolic links",
    ),
    "weights a FIFO": (instead_of(WEIGHT_FILE, os.mkfifo), "model.safetensors: must be a regular file, and is a FIFO"),
    "weights a directory": (instead_of(WEIGHT_FILE, os.mkdir), "must be a regular file, and is a directory"),
    "tokenizer a FIFO": (instead_of("tokenizer.json", os.mkfifo), "tokenizer.json is missing"),
    "header of 2^63 bytes": (
        with_weights(b"{}", length=1 << 63),
        r"not a safetensors file \(a header of 92233720368547",
    ),
    "header past the end": (with_weights(b"{}", length=90 << 20), "the safetensors header is damaged"),
    "header of many tensors": (with_weights(MANY_TENSORS), "must have at most 1048576 JSON values, and may have"),
    "deep header": (with_weights(b"[" * 100_000), "the safetensors header is damaged"),
    "tensor outside the file": (
        with_weights({"a": ENTRY | {"data_offsets": [0, 1 << 40]}}),
        "the safetensors header is damaged: a is at 0 to 1099511627776 of 8 bytes",
    ),
    "tensor before the file": (with_weights({"a": ENTRY | {"data_offsets": [-8, 0]}}), "header is damaged: .*>= 0"),
    "overlapping tensors": (
        with_weights({"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)),
        "not a readable safetensors file: .*invalid offset for tensor `b`",
    ),
    "tensor of 2^80 elements": (
        with_weights({"a": ENTRY | {"shape": [1 << 40, 1 << 40]}}),
        "not a readable safetensors",
    ),
    "broken tokenizer": (with_file("tokenizer.json", "{"), "tokenizer.json: cannot be read: .*EOF"),
    "deep tokenizer": (with_file("tokenizer.json", '{"model":' + "[" * 100_000), "tokenizer.json: cannot be read:"),
    "huge tokenizer": (with_sparse("tokenizer.json", 8 * GIB), "tokenizer.json: must have at most 67108864 bytes"),
    "tokenizer of many values": (
        with_file("tokenizer.json", "[" + "1," * 4_000_000),
        "tokenizer.json: must have at most 3145728 JSON values, and may have 4000001",
    ),
    "tokenizer that makes its library panic": (
        with_tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        "tokenizer.json: cannot be read: .*Cannot parse precompiled_charsmap",
    ),
    "huge template": (
        with_sparse("chat_template.jinja", 8 * GIB),
        "chat_template.jinja: must have at most 1048576 bytes",
    ),
    "broken template": (with_file("chat_template.jinja", "{% for"), "chat template cannot be compiled"),
    "huge special tokens": (
        with_sparse("special_tokens_map.json", 8 * GIB),
        "special_tokens_map.json: must have at most",
    ),
}


@pytest.mark.parametrize("kind", DIRECTORIES)
def test_hostile_directory_is_refused(kind: str, tmp_path: Path) -> None:
    spoil, named = DIRECTORIES[kind]
    model = write_byte_model(tmp_path / "model")
    (model / WEIGHT_FILE).write_bytes(safetensors({"a": ENTRY}))
    read_model(model)
    spoil(model)
    with refused(named):
        read_model(model)


@pytest.mark.parametrize("kind", ["many layers", "weights a FIFO"])
def test_command_ends_with_one_line(kind: str, tmp_path: Path) -> None:
    spoil, named = DIRECTORIES[kind]
    model = write_byte_model(tmp_path / "model")
    (model / WEIGHT_FILE).write_bytes(safetensors({"a": ENTRY}))
    spoil(model)
    command = ForkedCommand("serve", "--model", str(model), "--port", str(free_port()))
    try:
        code, _, errors = command.finish(300)
    finally:
        command.close()
    (line,) = [line for line in errors.splitlines() if line.startswith("pdserve: error:")]
    assert re.search(named, line), line
    assert code == 2
    assert "Traceback" not in errors


def test_every_bound_of_the_configuration_is_named(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "model")
    for name in ("num_hidden_layers", "num_attention_heads", "intermediate_size", "head_dim"):
        before = (model / "config.json").read_text()
        most = MOST.get(name, MOST_INTEGER)
        with_config(**{name: most + 1})(model)
        with refused(f"{name} must be at most {most}, got {most + 1}$"):
            read_model(model)
        (model / "config.json").write_text(before)


@pytest.mark.parametrize("closed", ["file", "directory"])
def test_what_another_user_has_closed_is_refused(closed: str, tmp_path: Path) -> None:
    """Root reads every file, so it becomes another user for this."""
    model = write_byte_model(tmp_path / "model")
    for folder in (model, *model.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o055)
    (model / WEIGHT_FILE if closed == "file" else model).chmod(0)
    user = os.geteuid()
    with refused("model.* cannot be read: Permission denied"):
        if user == 0:
            os.seteuid(65534)
        try:
            read_model(model)
        finally:
            os.seteuid(user)
    model.chmod(0o755)


def gguf(tensors: int = 0, fields: int = 0, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def field(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


GGUF: dict[str, tuple[bytes, str]] = {
    "many tensors": (gguf(1 << 62), "the GGUF header must have at most 65536 tensors, and has 4611686018427387904"),
    "many fields": (gguf(0, 1 << 63), "the GGUF header must have at most 4194304 metadata fields, and has 92233720368"),
    "fields that are not there": (gguf(0, 1 << 20), "the GGUF header is damaged or cut off"),
    "long array": (
        gguf(0, 1, field(b"a", 9, struct.pack("<IQ", 0, 1 << 40))),
        "the GGUF header must have at most 4194304 values of arrays, and has 1099511627776",
    ),
    "array of bytes as long as the file": (
        gguf(0, 1, field(b"a", 9, struct.pack("<IQ", 0, 5 << 20) + bytes(5 << 20))),
        "the GGUF header must have at most 4194304 values of arrays, and has 5242880",
    ),
    "several long arrays": (
        gguf(0, 2, b"".join(field(b"%d" % n, 9, struct.pack("<IQ", 0, 3 << 20) + bytes(3 << 20)) for n in range(2))),
        "the GGUF header must have at most 1048576 values of arrays, and has 3145728",
    ),
    "array of arrays": (
        gguf(0, 1, field(b"a", 9, struct.pack("<IQ", 9, 1))),
        "GGUF arrays of type 9 are not supported",
    ),
    "long string": (
        gguf(0, 1, struct.pack("<Q", 1 << 63)),
        "damaged or cut off .a string of 9223372036854775808 bytes",
    ),
    "many dimensions": (
        gguf(1, 0, text(b"a\nb") + struct.pack("<I", 1 << 31)),
        r"tensor 'a\\nb' must have at most 4 dimensions, and has 2147483648",
    ),
    "tensor outside the file": (
        gguf(1, 0, text(b"../a") + struct.pack("<IQIQ", 1, 1 << 40, 0, 0)),
        "the file is cut off: tensor '../a' ends at byte",
    ),
    "alignment": (
        gguf(0, 1, field(b"general.alignment", 10, struct.pack("<Q", 1 << 62))),
        "general.alignment is 4611686018427387904, expected a positive integer of at most 1048576",
    ),
    "layers": (
        gguf(
            1,
            7,
            field(b"general.architecture", 8, text(b"llama"))
            + b"".join(
                field(b"llama." + key, 4, struct.pack("<I", value))
                for key, value in {
                    b"embedding_length": 32,
                    b"attention.head_count": 2,
                    b"feed_forward_length": 32,
                    b"block_count": 1 << 31,
                    b"context_length": 64,
                    b"rope.dimension_count": 16,
                }.items()
            )
            + text(b"token_embd.weight")
            + struct.pack("<IQQIQ", 2, 32, 4, 0, 0)
            + bytes(1024),
        ),
        "llama.block_count must be at most 1024, got 2147483648",
    ),
}


@pytest.mark.parametrize("kind", GGUF)
def test_hostile_gguf_file_is_refused(kind: str, tmp_path: Path) -> None:
    content, named = GGUF[kind]
    (tmp_path / "model.gguf").write_bytes(content)
    with refused(named):
        read_model(tmp_path / "model.gguf")


CONFIGURATIONS = {
    "5,000 digits": (f"port: {'1' * 5000}", r"not valid YAML: Exceeds the limit \(4300 digits\)"),
    "no date": ("port: 2001-99-99", "not valid YAML: month must be in 1..12"),
    "deep": ("[" * 2_000, "not valid YAML: maximum recursion depth"),
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_hostile_configuration_file_is_refused(kind: str, tmp_path: Path) -> None:
    content, named = CONFIGURATIONS[kind]
    (tmp_path / "config.yaml").write_text(content)
    with refused(named):
        read_config_file(tmp_path / "config.yaml")
