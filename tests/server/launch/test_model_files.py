"""`--model org/name`: the server downloads a model from the Hub and checks its settings before the weights arrive."""

import tempfile
from pathlib import Path

import httpx
import pytest

from pdserve.common.errors import StartupError
from pdserve.configs.schema import DecodeConfig
from pdserve.server.launch.model_files import with_local_model
from tests.hub_server import COMMIT, hub_of_this_process
from tests.server.http_harness import write_byte_model
from tests.server.launch.test_frontend_process import AUTHORIZED, DIRECT, frontend

TINY = "acme/tiny"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_byte_model(tmp_path / TINY)
    return tmp_path


def test_model_of_the_hub_becomes_a_local_path_and_keeps_its_name(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_of_this_process(root, root / "cache", monkeypatch):
        config = with_local_model(DecodeConfig(model=TINY, revision="v1"))
        named = with_local_model(DecodeConfig(model=TINY, served_model_name="mine"))
    assert (Path(config.model).name, config.revision, config.served_model_name) == (COMMIT, None, TINY)
    assert named.served_model_name == "mine"
    local = DecodeConfig(model=config.model)
    assert with_local_model(local) is local


def test_settings_are_checked_before_weights_are_downloaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_of_this_process(root, root / "cache", monkeypatch) as hub:
        with pytest.raises(StartupError, match=r"tp = 3 does not divide"):
            with_local_model(DecodeConfig(model=TINY, tp=3))
        assert "config.json" in hub.downloaded
        assert "model.safetensors" not in hub.downloaded


def test_server_starts_with_a_model_of_the_hub(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as temp, hub_of_this_process(root, root / "unused", monkeypatch) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(root / "cache"))
        with frontend(Path(TINY), Path(temp), "idle", forked=False) as running:
            running.wait_healthy()
            models = httpx.get(f"{running.url}/v1/models", headers=AUTHORIZED, **DIRECT).json()
            running.process.terminate()
            code, log = running.end()
    assert models["data"][0]["id"] == TINY
    assert code == 0
    assert f"model {TINY}: revision {COMMIT}, in {root}" in log
    assert "HTTP Request" not in log, "httpx logs every request"
