"""Damaged model directories: reading one works or raises StartupError. A chat template renders the messages of a
client; if that fails, it is a ClientError.
"""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import strategies as st

from pdserve.common.errors import ClientError, StartupError
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.fingerprint import fingerprints
from pdserve.models.loading.weights import open_checkpoint
from pdserve.server.text.tokenizer import load_tokenizer
from tests.checkpoints import make_checkpoint
from tests.fuzz.harness import altered, as_json, damaged, fuzz, kept

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' and loop.first %}{{ raise_exception('x') }}"
    "{% endif %}{{ message.content | trim | tojson }}{% endfor %}{% if tools %}{{ tools[0]['a'] }}{% endif %}"
    "{{ bos_token }}{% set ns = namespace(n=0) %}{% set ns.n = ns.n + 1 %}"
)
WORDS = ("{%", "%}", "{{", "}}", " for ", " in ", "range(9**9)", ".__class__", "[0]", "|tojson", "|safe", "*", "(", "'")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("fuzz") / "model", "llama", max_position_embeddings=64)


def read_model(directory: Path) -> None:
    """Read what the two processes of a server read at their start."""
    source = locate_model(str(directory))
    load_tokenizer(source)
    fingerprints(source)
    open_checkpoint(source)


@pytest.mark.parametrize("name", FILES)
def test_json_file_is_read_or_refused(name: str, model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        if path.name != name:
            (tmp_path / path.name).hardlink_to(path)
    valid = (model / name).read_bytes()

    def check(data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        with contextlib.suppress(StartupError):
            read_model(tmp_path)

    read_model(model)
    for data in kept("checkpoint"):
        check(data)
    fuzz(altered(json.loads(valid)).map(as_json) | damaged(valid), check)


def test_safetensors_header_is_read_or_refused(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).hardlink_to(path)
    valid = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(valid[:8], "little")
    header, rest = json.loads(valid[8 : 8 + length]), valid[8 + length :]

    def check(data: bytes) -> None:
        (tmp_path / "model.safetensors").write_bytes(data)
        with contextlib.suppress(StartupError):
            read_model(tmp_path)

    def framed(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + rest

    read_model(model)
    for text in kept("checkpoint"):
        check(framed(text))
    headers = altered(header).map(as_json) | damaged(as_json(header))
    fuzz(headers.map(framed) | damaged(valid[: 8 + length]).map(lambda data: data + rest), check)


def test_chat_template_renders_or_is_refused(model: Path, tmp_path: Path) -> None:
    for path in model.iterdir():
        (tmp_path / path.name).hardlink_to(path)
    source = locate_model(str(tmp_path))
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]

    def render(template: str) -> str:
        (tmp_path / "chat_template.jinja").write_text(template, "utf-8", "surrogateescape")
        return load_tokenizer(source).render_chat(messages)

    def check(template: str) -> None:
        with contextlib.suppress(StartupError, ClientError):
            render(template)

    assert render(TEMPLATE).startswith('"a""b"')
    for data in kept("templates"):
        check(data.decode())
    words = st.lists(st.tuples(st.integers(0, len(TEMPLATE)), st.sampled_from(WORDS)), max_size=4)

    def with_words(chosen: list[tuple[int, str]]) -> str:
        text = TEMPLATE
        for at, word in chosen:
            text = text[:at] + word + text[at:]
        return text

    fuzz(words.map(with_words) | damaged(TEMPLATE.encode()).map(lambda data: data.decode(errors="replace")), check)
