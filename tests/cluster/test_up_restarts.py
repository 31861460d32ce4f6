"""`pdserve up` with real servers: they are killed, and clients go on."""

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx

from tests.cluster.forkserver import CLI
from tests.cluster.servers import HTTP, START_TIMEOUT_S, body, fork_server, python_path, wait_until
from tests.ports import free_port


def started_by(up: int, role: str) -> int | None:
    """The server of this role that `up` has started, if it runs."""
    for pid in Path(f"/proc/{up}/task/{up}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if role.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return int(pid)
    return None


def test_requests_are_answered_after_a_server_of_up_was_killed(llama: Path, tmp_path: Path) -> None:
    port, prefill_port, control_port = (free_port() for _ in range(3))
    ports = (f"--port={port}", f"--prefill-port={prefill_port}", f"--bootstrap-port={control_port}")
    # only prefill computes prompts: an answer shows that both servers work together
    flags = ("--kv-tokens=2048", "--local-prefill=never", "--prefill-wait-s=0.1")
    log = tmp_path / "up.log"
    with Path(os.devnull).open("rb") as null, log.open("wb") as output:
        arguments = ("up", f"--model={llama}", "--device=cpu", *ports, *flags)
        environment = {**os.environ, "PYTHONPATH": python_path()}
        up = fork_server().run(CLI, arguments, environment, (null, output, output))

    def answers() -> bool:
        try:
            return HTTP.post(f"http://127.0.0.1:{port}/generate", json=body([1, 2, 3], 4), timeout=60).is_success
        except httpx.TransportError:
            return False

    def restarted(role: str, former: int) -> bool:
        return started_by(up.pid, role) not in (former, None)

    try:
        wait_until(lambda: "Ctrl-C stops both." in log.read_text(), START_TIMEOUT_S, "ready")
        for role in ("prefill", "decode"):
            former = started_by(up.pid, role)
            assert former is not None
            os.kill(former, signal.SIGKILL)
            wait_until(partial(restarted, role, former), 10, f"{role} is started again")
            wait_until(answers, START_TIMEOUT_S, "the pair answers again")
        up.send_signal(signal.SIGINT)
        code = up.wait(60)
    finally:
        up.terminate()
        up.wait(60)
    lines = log.read_text()
    assert code == 0, lines
    assert [lines.count(f"{role} was killed by SIGKILL after") for role in ("prefill", "decode")] == [1, 1]
    assert lines.count("starting it again") == 2
