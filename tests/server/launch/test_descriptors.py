"""Servers whose stdin, stdout or stderr is closed, and whose log nobody reads."""

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.cluster.servers import START_TIMEOUT_S, program_path, python_path, wait_until
from tests.ports import free_port
from tests.server.http_harness import write_byte_model
from tests.server.scripted_leader import __file__ as LEADER_PROGRAM  # noqa: N812

DIRECT = httpx.Client(trust_env=False, timeout=10)
SHOW_DESCRIPTORS = """
import json, os, socket, sys
from pdserve.server.__main__ import main
sys.argv = ["pdserve", "version"]
main()
print("to nobody")
print("to nobody", file=sys.stderr)
targets = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
with open(os.environ["SHOWN"], "w") as shown, socket.socket() as first:
    json.dump([targets, first.fileno() > 2], shown)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_descriptors_are_those_of_dev_null(tmp_path: Path, closed: str) -> None:
    """Otherwise the next sockets get their numbers, and log lines are sent to clients."""
    shown = tmp_path / "shown"
    command = f"exec {shlex.join([sys.executable, '-P', '-c', SHOW_DESCRIPTORS])} {closed}"
    environ = os.environ | {"PYTHONPATH": python_path(), "SHOWN": str(shown)}
    with (tmp_path / "other").open("w") as other:
        subprocess.run(["bash", "-c", command], env=environ, stdin=other, stdout=other, stderr=other, check=True)
    targets, above = json.loads(shown.read_text())
    files = ["<&-" in closed, " >&-" in f" {closed}", "2>&-" in closed]
    assert targets == [os.devnull if is_closed else str(tmp_path / "other") for is_closed in files]
    assert above


def test_log_that_nobody_reads_does_not_stop_the_server(tmp_path: Path) -> None:
    port = free_port()
    model = str(write_byte_model(tmp_path / "model"))
    settings = {"role": "decode", "model": model, "port": port, "log_requests": True}
    arguments = [json.dumps(settings), LEADER_PROGRAM, "serve"]
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tests.server.launch.frontend_program", *arguments],
        env=os.environ | {"PYTHONPATH": program_path()},
        stderr=writing,
    )
    try:

        def health() -> bool:
            assert process.poll() is None, "the server has ended"
            try:
                return DIRECT.get(f"http://127.0.0.1:{port}/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(health, START_TIMEOUT_S, "ready")
        for _ in range(60):
            assert DIRECT.post(f"http://127.0.0.1:{port}/generate", json={"text": "a"}).status_code == 200
        assert health()
        os.set_blocking(reading, False)
        read = os.read(reading, 1 << 16)
        assert DIRECT.post(f"http://127.0.0.1:{port}/generate", json={"text": "a"}).status_code == 200
        wait_until(lambda: b"log lines were dropped: nobody has read the log" in os.read(reading, 1 << 16), 5, "a line")
        assert read.endswith(b"\n"), "the lines before are whole"
        metrics = DIRECT.get(f"http://127.0.0.1:{port}/metrics").text
        (dropped,) = re.findall(r"^pdserve_frontend_log_lines_dropped_total (\S+)$", metrics, re.MULTILINE)
        assert float(dropped) > 10
    finally:
        process.kill()
        process.wait()
        os.close(reading)
        os.close(writing)
