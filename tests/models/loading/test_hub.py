"""Models of the Hugging Face Hub: which files are downloaded, and errors. A local server replaces the Hub."""

import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from pdserve.common.errors import StartupError
from pdserve.models.loading import hub as hub_module
from pdserve.models.loading.catalog import locate_model
from pdserve.models.loading.hub import find_on_hub
from tests.cluster.servers import wait_until
from tests.hub_server import COMMIT, FakeHub, hub_of_this_process, use_endpoint
from tests.ports import free_port
from tests.server.http_harness import write_byte_model

TINY = "acme/tiny"
WEIGHTS = "model-00001-of-00001.safetensors"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Repositories: `acme/tiny` with an index, other formats beside it, and `acme/quants` with GGUF files."""
    root = tmp_path_factory.mktemp("hub")
    tiny = write_byte_model(root / TINY)
    (tiny / "model.safetensors").rename(tiny / WEIGHTS)
    (tiny / WEIGHTS).write_bytes(bytes(range(256)) * 16)
    index = {"weight_map": {"lm_head.weight": WEIGHTS}}
    (tiny / "model.safetensors.index.json").write_text(json.dumps(index))
    for other in ("consolidated.safetensors", "pytorch_model.bin", "README.md", "onnx/model.onnx"):
        (tiny / other).parent.mkdir(exist_ok=True)
        (tiny / other).write_bytes(b"not for us")
    for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "config.json"):
        (root / "acme/quants").mkdir(exist_ok=True)
        (root / "acme/quants" / name).write_text(name)
    return root


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_of_this_process(repository, tmp_path / "cache", monkeypatch) as server:
        yield server


def download(spec: str, revision: str | None = None) -> Path:
    found = find_on_hub(spec, revision)
    assert found is not None
    return found.download()


def test_only_needed_files_are_fetched_and_weights_last(hub: FakeHub) -> None:
    path = download(TINY)
    assert path.name == COMMIT
    source = locate_model(str(path))
    assert source.config.architecture == "llama"
    files = sorted(file.name for file in path.iterdir())
    assert hub.downloaded[-1] == WEIGHTS
    assert sorted(hub.downloaded) == files
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= set(files)
    assert not {"consolidated.safetensors", "pytorch_model.bin", "README.md", "onnx"} & set(files)


def test_weights_in_one_file_are_fetched_alone(hub: FakeHub, repository: Path) -> None:
    single = Path(shutil.copytree(repository / TINY, repository / "acme/single"))
    (single / WEIGHTS).rename(single / "model.safetensors")
    path = download("acme/single")
    assert locate_model(str(path)).config.architecture == "llama"
    assert [name for name in hub.downloaded if name.endswith(".safetensors")] == ["model.safetensors"]


def test_second_start_fetches_no_file(hub: FakeHub) -> None:
    path = download(TINY)
    hub.requests.clear()
    assert download(TINY) == path
    assert hub.downloaded == []


def test_dummy_weights_need_no_weight_files(hub: FakeHub) -> None:
    found = find_on_hub(TINY, None)
    assert found is not None
    path = found.download("dummy")
    assert locate_model(str(path), "dummy").config.num_layers == 1
    assert not [name for name in hub.downloaded if name.endswith(".safetensors")]


def test_download_continues_after_a_lost_connection(hub: FakeHub, repository: Path) -> None:
    hub.cut = {WEIGHTS}
    path = download(TINY)
    assert (path / WEIGHTS).read_bytes() == (repository / TINY / WEIGHTS).read_bytes()
    assert hub.downloaded.count(WEIGHTS) == 2


@pytest.mark.usefixtures("hub")
def test_revision_is_a_branch_tag_or_commit() -> None:
    assert download(TINY, "v1") == download(TINY, COMMIT)
    with pytest.raises(StartupError, match=r"model 'acme/tiny': its repository has no revision 'v7'"):
        find_on_hub(TINY, "v7")


def test_unsupported_architecture_is_refused_before_weights(hub: FakeHub, repository: Path) -> None:
    other = Path(shutil.copytree(repository / TINY, repository / "acme/other"))
    config = json.loads((other / "config.json").read_text()) | {"architectures": ["FalconForCausalLM"]}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match="architecture FalconForCausalLM is not supported"):
        download("acme/other")
    assert "config.json" in hub.downloaded
    assert not [name for name in hub.downloaded if name.endswith(".safetensors")]
    hub.gguf["acme/quants"] = "falcon"
    with pytest.raises(StartupError, match="model acme/quants: architecture falcon is not supported"):
        download("acme/quants:Q8_0")


def test_gguf_is_chosen_by_name_or_unique_part_of_it(hub: FakeHub) -> None:
    assert download("acme/quants:tiny-Q8_0.gguf").name == "tiny-Q8_0.gguf"
    assert download("acme/quants:q4_k_m").name == "tiny-Q4_K_M.gguf"
    assert hub.downloaded == ["tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf"]
    with pytest.raises(StartupError, match=r"2 GGUF files match; .* one of tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"):
        download("acme/quants")
    with pytest.raises(StartupError, match=r"no GGUF file 'Q2' in its repository; it has tiny-Q4_K_M"):
        download("acme/quants:Q2")
    with pytest.raises(StartupError, match=r"no GGUF file 'x' in its repository; it has none"):
        download(f"{TINY}:x")


def test_split_gguf_is_refused_before_it_is_fetched(hub: FakeHub, repository: Path) -> None:
    (repository / "acme/split").mkdir()
    for name in ("big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf", "big-Q2_K.gguf"):
        (repository / "acme/split" / name).write_bytes(b"GGUF")
    for spec in ("acme/split:Q8_0", "acme/split:big-Q8_0-00001-of-00002.gguf"):
        with pytest.raises(StartupError, match=r"big-Q8_0-00001-of-00002.gguf is one of several .*llama-gguf-split"):
            download(spec)
    assert hub.downloaded == []
    assert download("acme/split:Q2").name == "big-Q2_K.gguf"


@pytest.mark.usefixtures("hub")
def test_single_gguf_needs_no_name(repository: Path) -> None:
    (repository / "acme/one").mkdir()
    (repository / "acme/one/model.gguf").write_bytes(b"GGUF")
    assert download("acme/one").name == "model.gguf"


@pytest.mark.parametrize(
    ("missing", "named"), [("tokenizer.json", "tokenizer.json"), (WEIGHTS, r"\*\.safetensors file")]
)
@pytest.mark.usefixtures("hub")
def test_incomplete_repository_is_refused(repository: Path, missing: str, named: str) -> None:
    name = f"acme/without-{missing.partition('.')[0]}"
    other = Path(shutil.copytree(repository / TINY, repository / name))
    (other / missing).unlink()
    (other / "model.safetensors.index.json").unlink()
    (other / "consolidated.safetensors").unlink()
    with pytest.raises(StartupError, match=f"model {name}: its repository has no {named}"):
        download(name)


@pytest.mark.usefixtures("hub")
def test_unknown_repository_is_refused() -> None:
    with pytest.raises(StartupError, match=r"'acme/none': no such directory here, and no such repository at http"):
        find_on_hub("acme/none", None)


def test_gated_repository_needs_a_token(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(TINY)
    with pytest.raises(StartupError, match=r"access is restricted; accept its conditions at http.*/acme/tiny and set"):
        download(TINY)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    download(TINY)
    assert "Bearer hf_secret" in hub.tokens


def test_offline_mode_uses_the_cache(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = download(TINY)
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    with caplog.at_level(logging.WARNING):
        assert download(TINY) == path
    assert "model acme/tiny: HF_HUB_OFFLINE is set; using the files in" in caplog.text
    with pytest.raises(
        StartupError, match=r"'acme/quants': no such directory here, HF_HUB_OFFLINE is set, and it is not"
    ):
        download("acme/quants")
    (path / WEIGHTS).unlink()
    with pytest.raises(StartupError, match=r"model-00001-of-00001.safetensors is not in the cache"):
        download(TINY)
    assert hub.requests == []


@pytest.mark.usefixtures("hub")
def test_unreachable_hub_uses_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    path = download(TINY)
    use_endpoint(f"http://127.0.0.1:{free_port()}", monkeypatch)
    assert download(TINY) == path
    with pytest.raises(
        StartupError, match=r"http://127.0.0.1:\d+ cannot be reached \(.*\), and it is not in the cache"
    ):
        download("acme/quants")


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("proxy", ["socks4://127.0.0.1:1", "socks5://127.0.0.1:1"])
def test_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, proxy: str) -> None:
    path = download(TINY)
    for name in ("all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    huggingface_hub.close_session()  # huggingface_hub keeps a client, which read the environment before
    assert download(TINY) == path
    with pytest.raises(StartupError, match=r"cannot be reached \(.*\), and it is not in the cache"):
        download("acme/quants")


def test_hub_that_is_down_is_not_needed_for_a_cached_model(hub: FakeHub) -> None:
    path = download(TINY)
    hub.down = True
    assert download(TINY) == path
    with pytest.raises(StartupError, match=r"cannot be reached \(.*503.*\), and it is not in the cache"):
        download("acme/quants")


def test_progress_is_logged_where_there_is_no_terminal(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "INTERVAL_S", 0.01)
    line = "model acme/tiny: downloaded 0.0 of 0.0 GB"
    hub.before_file = lambda: wait_until(lambda: line in caplog.text, 30, "progress")
    with caplog.at_level(logging.INFO):
        download(TINY)
    assert line in caplog.text


def test_names_on_this_machine_are_not_looked_up(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/llama").mkdir(parents=True)
    for spec in ("smollm2", "models/llama", "models/missing.gguf", "./acme/tiny", "/acme/tiny", os.curdir):
        assert find_on_hub(spec, None) is None
        with pytest.raises(StartupError, match=r"revision = 'v1' is for models of the Hugging Face Hub"):
            find_on_hub(spec, "v1")
    assert hub.requests == []
