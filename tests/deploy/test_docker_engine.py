"""The parts of `make test-image` that need no engine."""

import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.docker_engine import MissingPartError, run
from tests.deploy.image import CANNOT_RUN, main, pip_conf, served_folders


def test_machine_without_engine_and_root_ends_the_test_with_77_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main([]) == CANNOT_RUN == 77
    printed = capsys.readouterr()
    line = "test-image: not run: no Docker engine answers, and only root can start one\n"
    assert (printed.out, printed.err) == (line, "")


def test_failing_command_is_named_with_its_last_line() -> None:
    with pytest.raises(MissingPartError) as caught:
        run("sh", "-c", "echo first >&2; echo no space left >&2; exit 1")
    assert str(caught.value).endswith("exit 1: no space left")


def test_containers_install_from_the_folders_that_pip_uses_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index" / "simple"
    index.mkdir(parents=True)
    (tmp_path / "index" / "a.whl").write_text("wheel", encoding="utf-8")
    (tmp_path / "other").write_text("private", encoding="utf-8")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"file://{index} https://index.example/simple")
    with served_folders("127.0.0.1") as served:
        lines = pip_conf("127.0.0.1", served).splitlines()
        (found,) = (line for line in lines if line.startswith("extra-index-url = "))
        local, remote = found.removeprefix("extra-index-url = ").split()
        assert remote == "https://index.example/simple"
        assert local.endswith("/index/simple/")
        # an index links to files beside it
        with urllib.request.urlopen(local.replace("simple/", "a.whl")) as answer:
            assert answer.read() == b"wheel"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(local.replace("index/simple/", "other"))
