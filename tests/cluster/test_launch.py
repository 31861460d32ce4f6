"""Invalid settings end a command with exit code 2 and one line that names the setting."""

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.cluster.servers import fork_server, python_path
from tests.ports import free_port


def launch(*arguments: str) -> tuple[int, str]:
    """Run a command in a forked process until it exits. Returns exit code and output."""
    with tempfile.TemporaryFile() as output:
        environment = {**os.environ, "PYTHONPATH": python_path()}
        code = fork_server().start(arguments, output, environment, ranks=0).wait(60)
        output.seek(0)
        return code, output.read().decode()


def decode(model: Path | str) -> list[str]:
    """The default port may be in use."""
    return ["decode", "--model", str(model), "--port", str(free_port())]


def check_refused(arguments: list[str], *words: str) -> None:
    check_refusal(*launch(*arguments), *words)


def check_refusal(code: int, output: str, *words: str) -> None:
    assert code == 2, output
    assert "Traceback" not in output
    (line,) = [line for line in output.splitlines() if line.startswith("pdserve: error: ")]
    for word in words:
        assert word in line


def test_missing_model_is_refused() -> None:
    """As a user runs it: not forked, and the error is on stderr."""
    command = [sys.executable, "-P", "-m", "pdserve.server", *decode("/no/such/model")]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    check_refusal(result.returncode, result.stderr, "/no/such/model", "--model")


def test_unsupported_architecture_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(
        config.replace("LlamaForCausalLM", "MambaForCausalLM").replace('"llama"', '"mamba"')
    )
    check_refused(decode(model), "MambaForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")


def test_busy_http_port_is_refused(llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        check_refused(["decode", "--model", str(llama), "--port", port], port, "--port")


def test_busy_bootstrap_port_is_refused(llama: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        arguments = ["prefill", "--model", str(llama), "--port", str(free_port()), "--bootstrap-port", port]
        check_refused(arguments, port, "--bootstrap-port")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-memory-gib", "4000"], ["kv_memory_gib", "4000", "GiB are free"]),
        (["--kv-memory-gib", "0.000001"], ["kv_memory_gib", "less than one page"]),
        (["--device", "cuda:7"], ["cuda:7"]),
    ],
)
def test_unavailable_resources_are_refused(llama: Path, flags: list[str], words: list[str]) -> None:
    check_refused([*decode(llama), *flags], *words)


def test_control_port_on_all_addresses_needs_a_cluster_key() -> None:
    check_refused(["prefill", "--host", "0.0.0.0"], "0.0.0.0", "cluster_key")
