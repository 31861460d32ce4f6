"""The frontend as a process: start-up, its leader's death, signals and exit codes. The leader is a scripted program."""

import argparse
import dataclasses
import io
import json
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import trustme

from pdserve.common.errors import StartupError
from pdserve.common.words import OUT_OF_MEMORY
from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.shutdown import exit_s
from pdserve.server.bench.command import run_bench
from pdserve.server.bench.options import BenchOptions, add_bench_flags, read_bench_options
from pdserve.server.connections.tls import own_server_context
from pdserve.server.launch.ports import check_port
from pdserve.server.launch.signals import COPY_S
from pdserve.server.terminal.chat import run_chat
from pdserve.server.terminal.options import (
    ChatOptions,
    TlsOptions,
    add_chat_flags,
    add_top_flags,
    read_chat_options,
    read_top_options,
)
from pdserve.server.terminal.top import run_top
from tests.cluster.forkserver import ForkedProcess
from tests.cluster.servers import fork_server, is_grammar_compiler, wait_until
from tests.ports import free_port
from tests.processes import gone
from tests.server.http_harness import write_byte_model
from tests.server.scripted_leader import SUBMITTED
from tests.server.scripted_leader import __file__ as LEADER_PROGRAM  # noqa: N812

ROOT = Path(__file__).parents[3]
DIRECT: Any = {"trust_env": False, "verify": False}  # Any: httpx's keyword arguments differ in type
AUTHORIZED = {"Authorization": "Bearer frontend-secret"}
START_TIMEOUT_S = 60.0
"""For two Python processes on a machine that is busy with other tests."""
PROGRAM = "tests.server.launch.frontend_program"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("bytes"))


class RunningFrontend:
    def __init__(
        self,
        process: ForkedProcess | subprocess.Popen[bytes],
        port: int,
        temp: Path,
        stderr: IO[str],
        scheme: str = "http",
    ) -> None:
        self.process = process
        self.port = port
        self.temp = temp
        self.url = f"{scheme}://127.0.0.1:{port}"
        self._stderr = stderr

    def wait_healthy(self) -> None:
        self.wait_state("ready")

    def wait_submitted(self) -> None:
        """Wait until the leader has a request."""
        info = {"url": f"{self.url}/server_info", "headers": AUTHORIZED, **DIRECT}
        wait_until(lambda: httpx.get(**info).json()["states"]["RUNNING"] == SUBMITTED, 10, "submitted")

    def wait_state(self, state: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", **DIRECT).json()["state"] == state:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"never {state}: {self.end()}")

    def wait_logged(self, text: str) -> None:
        """Uses pread, which does not move the file offset: the server shares it."""
        number = self._stderr.fileno()
        wait_until(lambda: text.encode() in os.pread(number, os.fstat(number).st_size, 0), 10, f"logged {text!r}")

    def end(self, within_s: float = 8.0) -> tuple[int, str]:
        """Exit code and stderr; also checks that the temporary folder is empty."""
        code = self.process.wait(timeout=within_s)
        assert list(self.temp.iterdir()) == []
        self._stderr.seek(0)
        return code, self._stderr.read()

    def children(self) -> list[str]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [pid for path in children for pid in path.read_text().split()]

    def leader_pid(self) -> int:
        (pid,) = [int(pid) for pid in self.children() if not is_grammar_compiler(pid)]
        return pid


@contextmanager
def frontend(
    model: Path, temp: Path, behaviour: str, *, forked: bool = True, **config: object
) -> Iterator[RunningFrontend]:
    """Run a frontend. A forked one starts sooner; one that is not forked also checks that it does not import torch."""
    port = free_port()
    settings = {"role": "decode", "model": str(model), "port": port, "api_key": "frontend-secret"} | config
    arguments = [json.dumps(settings), LEADER_PROGRAM, behaviour]
    env = os.environ | {"PYTHONPATH": f"{ROOT / '.dev'}{os.pathsep}{ROOT}", "TMPDIR": str(temp)}
    process: ForkedProcess | subprocess.Popen[bytes]
    with tempfile.TemporaryFile("w+") as stderr:
        if forked:
            with Path(os.devnull).open("r+") as null:
                process = fork_server().run(f"{PROGRAM}:main", arguments, env, (null, null, stderr))
        else:
            command = [sys.executable, "-P", "-m", PROGRAM, *arguments]
            process = subprocess.Popen(command, env=env, stderr=stderr)
        try:
            yield RunningFrontend(process, port, temp, stderr, "https" if "ssl_certfile" in config else "http")
        finally:
            process.kill()
            process.wait()


def generate(running: RunningFrontend) -> httpx.Response:
    return httpx.post(f"{running.url}/generate", json={"text": "a"}, headers=AUTHORIZED, timeout=10, **DIRECT)


def check_gone(pid: int) -> None:
    wait_until(lambda: gone(pid), 5, "the leader has gone")


def test_serves_and_drains_on_sigterm(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "slow", forked=False) as running:
        running.wait_healthy()
        leader = running.leader_pid()
        wait_until(lambda: any(map(is_grammar_compiler, running.children())), 10, "the compiler starts with the server")
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(generate, running)
            running.wait_submitted()
            running.process.send_signal(signal.SIGTERM)
            response = answer.result()
        assert (response.status_code, response.json()["text"]) == (200, "hi")
        assert "server" not in response.headers
        code, stderr = running.end()
        assert code == 0, stderr
        check_gone(leader)
        lines = [line for line in stderr.splitlines() if line]
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} [IW] decode: ", line) for line in lines), stderr
        for words in (f"ready: bytes at http://127.0.0.1:{running.port}", "SIGTERM: draining"):
            assert words in stderr
        assert "frontend-secret" not in stderr


def test_serves_tls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    files, temp = tmp_path_factory.mktemp("certificate"), tmp_path_factory.mktemp("temporary")
    certificate = trustme.CA().issue_cert("server.example.com", "127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(files / "cert.pem")
    certificate.private_key_pem.write_to_path(files / "key.pem")
    settings: Any = {"ssl_certfile": str(files / "cert.pem"), "ssl_keyfile": str(files / "key.pem")}
    with frontend(model, temp, "serve", **settings) as running:
        running.wait_healthy()
        trusted = own_server_context(DecodeConfig(**settings))
        assert trusted is not None
        with httpx.Client(base_url=running.url, verify=trusted, trust_env=False) as client:
            answer = client.post("/generate", json={"text": "a", "stream": True}, headers=AUTHORIZED)
            assert (answer.status_code, answer.text.endswith("data: [DONE]\n\n")) == (200, True)
            assert client.get("/health", headers={"X-Long": "x" * (80 << 10)}).status_code == 431
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{running.url}/health", verify=ssl.create_default_context(), trust_env=False)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{running.port}/health", **DIRECT)
        check_terminal_clients(running.url, files / "cert.pem")
        running.process.send_signal(signal.SIGTERM)
        code, stderr = running.end()
    assert code == 0, stderr
    assert f"ready: bytes at https://127.0.0.1:{running.port}" in stderr
    assert " E " not in stderr
    assert "Traceback" not in stderr


def check_terminal_clients(url: str, certificate: Path) -> None:
    """Chat, top and bench connect with --cacert or --insecure, and refuse the certificate otherwise."""
    key = {"PDSERVE_API_KEY": "frontend-secret"}
    for trust in (["--cacert", str(certificate)], ["--insecure"], ["-k"]):
        flags = argparse.ArgumentParser()
        add_chat_flags(flags)
        out = io.StringIO()
        options = read_chat_options(flags.parse_args(["--url", url, "--max-tokens", "2", *trust]), key)
        assert (run_chat(options, io.StringIO("Hello\n"), out), out.getvalue()) == (0, "hi\n")
        flags = argparse.ArgumentParser()
        add_top_flags(flags)
        assert run_top(read_top_options(flags.parse_args(["--once", "--interval=0.1", "--url", url, *trust]), key)) == 0
        flags = argparse.ArgumentParser()
        add_bench_flags(flags)
        load = ["--requests=1", "--warmup=0", "--input-len=4", "--output-len=2"]
        assert run_bench(read_bench_options(flags.parse_args(["--url", url, *load, *trust]), key), load) == 0
    with pytest.raises(StartupError, match=r"needs an API key: set PDSERVE_API_KEY"):
        run_bench(BenchOptions(url, tls=TlsOptions(insecure=True)), [])
    with pytest.raises(StartupError, match=r"needs an API key: set PDSERVE_API_KEY"):
        run_chat(ChatOptions(url, None, None, None, None, TlsOptions(insecure=True)), io.StringIO())
    with pytest.raises(StartupError, match=r"refuses the API key in PDSERVE_API_KEY"):
        run_bench(BenchOptions(url, api_key="wrong", tls=TlsOptions(insecure=True)), [])
    with pytest.raises(StartupError, match=r"refuses the API key in PDSERVE_API_KEY"):
        run_chat(ChatOptions(url, None, None, None, "wrong", TlsOptions(insecure=True)), io.StringIO())
    nothing_given = ChatOptions(url, None, None, None, None)
    with pytest.raises(StartupError, match=r"CERTIFICATE_VERIFY_FAILED.*--cacert FILE .* --insecure"):
        run_chat(nothing_given, io.StringIO())
    with pytest.raises(StartupError, match=r"CERTIFICATE_VERIFY_FAILED.*--cacert FILE .* --insecure"):
        run_bench(BenchOptions(url), [])
    for absent in (certificate.with_name("absent.pem"), certificate.with_name("key.pem")):
        with pytest.raises(StartupError, match=f"--cacert .*{absent.name}: cannot be read as certificates"):
            run_chat(dataclasses.replace(nothing_given, tls=TlsOptions(str(absent))), io.StringIO())


def test_request_fails_when_the_leader_is_killed(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "crash-on-submit") as running:
        running.wait_healthy()
        started = time.monotonic()
        response = generate(running)
        assert response.status_code == 503
        assert "SIGKILL" in response.json()["error"]["message"]
        assert response.headers["retry-after"]
        code, stderr = running.end()
        assert time.monotonic() - started < 5
        assert (code, f"ended by SIGKILL{OUT_OF_MEMORY}" in stderr) == (1, True)


@pytest.mark.parametrize(
    ("behaviour", "expected_code", "message"),
    [
        ("startup-failed", 2, "pdserve: error: model /nowhere: no such directory\n"),
        ("crash-at-start", 1, "while it was starting; its log is above"),
    ],
)
def test_exit_code_when_the_leader_cannot_start(
    model: Path, tmp_path: Path, behaviour: str, expected_code: int, message: str
) -> None:
    """2 means that the settings must be changed; after 1 a restart may help."""
    with frontend(model, tmp_path, behaviour) as running:
        code, stderr = running.end(within_s=START_TIMEOUT_S)
        assert code == expected_code, stderr
        assert message in stderr
        assert "Traceback" not in stderr


def test_busy_port_is_refused(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with frontend(model, tmp_path, "serve", port=port) as running:
            code, stderr = running.end(within_s=START_TIMEOUT_S)
    assert code == 2
    assert stderr == f"pdserve: error: port {port} on 127.0.0.1 is in use; choose another with --port\n"


def test_settings_that_do_not_fit_the_model_are_refused_before_the_leader_starts(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "serve", tp=4) as running:
        code, stderr = running.end(within_s=START_TIMEOUT_S)
    assert code == 2
    assert stderr == "pdserve: error: tp = 4 does not divide num_attention_heads = 2: --tp may be 1 or 2\n"


def test_busy_control_port_is_refused_before_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with frontend(model, tmp_path, "serve", role="prefill", bootstrap_port=port) as running:
            code, stderr = running.end(within_s=START_TIMEOUT_S)
    assert code == 2
    assert stderr == f"pdserve: error: port {port} on 127.0.0.1 is in use; choose another with --bootstrap-port\n"


def test_frontend_waits_for_a_control_port_to_become_free() -> None:
    """After a restart, the leader of the previous server may still be stopping."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        threading.Timer(0.3, taken.close).start()
        check_port("127.0.0.1", port, "--bootstrap-port", patience_s=START_TIMEOUT_S)


def test_second_signal_kills_a_leader_that_does_not_respond(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "deaf", shutdown_timeout_s=60) as running:
        running.wait_healthy()
        leader = running.leader_pid()
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(generate, running)
            running.wait_submitted()
            running.process.send_signal(signal.SIGINT)
            running.wait_state("stopping")
            assert httpx.get(f"{running.url}/health", **DIRECT).status_code == 503
            time.sleep(2 * COPY_S)
            running.process.send_signal(signal.SIGINT)
            assert answer.result().status_code == 503
        code, stderr = running.end(within_s=30)
        assert code == 130, stderr
        assert "SIGINT again: stopping now, 1 request cut off" in stderr
        check_gone(leader)


def test_drain_is_bounded(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "deaf", shutdown_timeout_s=0) as running:
        running.wait_healthy()
        leader = running.leader_pid()
        started = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        code, stderr = running.end(within_s=20)
        assert time.monotonic() - started < exit_s("cpu")
        assert code == 1
        assert re.search(r"leader process \d+ has not exited in 6 s; sending SIGKILL", stderr)
        assert "stopped: leader" in stderr, "the event loop has ended the server"
        check_gone(leader)


def test_frontend_waits_for_a_leader_that_ends_slowly(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "lingers", role="prefill", shutdown_timeout_s=0) as running:
        running.wait_healthy()
        running.process.send_signal(signal.SIGTERM)
        code, stderr = running.end(within_s=20)
        assert code == 0, stderr
        assert "SIGTERM: draining 1 transfer for" in stderr


def test_signal_ends_the_server_while_the_model_loads(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "loading", shutdown_timeout_s=60) as running:
        running.wait_state("starting")
        leader = running.leader_pid()
        running.process.send_signal(signal.SIGTERM)
        code, stderr = running.end(within_s=30)
        assert code == 0, stderr
        check_gone(leader)


def test_leader_ends_when_the_frontend_is_killed(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "serve") as running:
        running.wait_healthy()
        leader = running.leader_pid()
        running.process.kill()
        check_gone(leader)
    assert list(tmp_path.iterdir()) == []


def test_invalid_requests_do_not_fill_the_log(model: Path, tmp_path: Path) -> None:
    with frontend(model, tmp_path, "serve") as running:
        running.wait_healthy()
        started = time.monotonic()
        for _ in range(100):
            with socket.create_connection(("127.0.0.1", running.port)) as stranger:
                stranger.sendall(b"\x16\x03\x01 hello?\r\n\r\n")
                assert b"400 Bad Request" in stranger.recv(1000)
        seconds = time.monotonic() - started
        running.process.send_signal(signal.SIGTERM)
        _, stderr = running.end()
    assert 1 <= stderr.count("Invalid HTTP request received") <= 1 + seconds, stderr


def test_open_files_limit_is_raised(model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 128, hard))
    try:
        with frontend(model, tmp_path, "serve", forked=False) as running:  # it inherits the limit
            running.wait_healthy()
            assert resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE) == (min(hard, 1 << 16), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
