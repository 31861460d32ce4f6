"""Signals of the frontend: a copy of a signal is ignored, and one ends a server whose event loop is blocked."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest

from pdserve.scheduler.shutdown import exit_s
from pdserve.server.launch.frontend import Frontend
from pdserve.server.launch.signals import COPY_S
from tests.cluster.servers import START_TIMEOUT_S, is_grammar_compiler, program_path, wait_until
from tests.ports import free_port
from tests.processes import gone
from tests.server.http_harness import write_byte_model
from tests.server.scripted_leader import __file__ as LEADER_PROGRAM  # noqa: N812

WAITING = """
import asyncio, os, signal
from pdserve.server.launch.signals import SignalWatch

async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: print("received", flush=True))
    SignalWatch(lambda: 1.5, lambda: os._exit(7))
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_copy_of_a_signal_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM twice. A second signal would end the drain at once."""
    now = Mock(return_value=100.0)
    monkeypatch.setattr(time, "monotonic", now)
    frontend = Frontend(Mock(), Mock(), (), None)

    def received(number: signal.Signals) -> int:
        frontend._on_signal(number)
        return frontend._signals.qsize()

    assert received(signal.SIGTERM) == 1
    assert received(signal.SIGTERM) == 1
    assert received(signal.SIGINT) == 2, "a different signal is not a copy"
    now.return_value += 2 * COPY_S
    assert received(signal.SIGTERM) == 3


@pytest.mark.parametrize("signals", [1, 2])
def test_server_with_a_blocked_event_loop_ends_in_time(tmp_path: Path, signals: int) -> None:
    """At the second signal it ends at once."""
    port, model = free_port(), str(write_byte_model(tmp_path / "model"))
    settings = {"role": "decode", "model": model, "port": port, "shutdown_timeout_s": 2.0}
    command = [sys.executable, "-P", "-m", "tests.server.launch.blocked_program", json.dumps(settings)]
    environ = os.environ | {"PYTHONPATH": program_path()}
    process = subprocess.Popen([*command, LEADER_PROGRAM, "serve"], env=environ, stderr=subprocess.PIPE, text=True)
    url, client = f"http://127.0.0.1:{port}", httpx.Client(trust_env=False)
    try:

        def is_healthy() -> bool:
            assert process.poll() is None, "the server has ended"
            try:
                return client.get(f"{url}/health").status_code == 200
            except httpx.TransportError:
                return False

        wait_until(is_healthy, START_TIMEOUT_S, "ready")
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        (leader,) = [int(pid) for pid in children if not is_grammar_compiler(pid)]
        with pytest.raises(httpx.ReadTimeout):
            client.get(f"{url}/get_load", timeout=0.5)
        began = time.monotonic()
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(2 * COPY_S)
        _, log = process.communicate(timeout=30)
        took_s = time.monotonic() - began
        if signals == 1:
            assert 2.0 < took_s < 2.0 + exit_s("cpu")
        else:
            assert took_s < 4
        assert process.returncode == 1
        assert "the server has not ended in time after a signal, and is ended now" in log
        wait_until(lambda: gone(leader), 5, "the leader has ended")
    finally:
        process.kill()
        process.wait()


def test_event_loop_that_waits_for_too_long_is_ended_too() -> None:
    environ = os.environ | {"PYTHONPATH": program_path()}
    with subprocess.Popen([sys.executable, "-P", "-c", WAITING], env=environ, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == "ready\n"
        began = time.monotonic()
        one.send_signal(signal.SIGTERM)
        assert one.wait(60) == 7
        assert 1.0 < time.monotonic() - began < 5
        assert one.stdout.read() == "received\n"
