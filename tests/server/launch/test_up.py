"""`pdserve up` with fake servers: readiness, the banner, signals, and servers that exit.

The children are small HTTP servers; tests/cluster uses the real ones. Everything else is product code in its own
process.
"""

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from tests.cluster.forkserver import ForkedProcess
from tests.cluster.servers import fork_server, wait_until
from tests.ports import free_port

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.server.launch.up_program"
ENVIRON = {**os.environ, "PYTHONPATH": str(ROOT / ".dev"), "PYTHONUNBUFFERED": "1"}

# A fake server. The first probes of /health fail, and the first one of /health_generate; GET /die ends it.
SERVER = """
import collections, http.server, os, sys
role, port, unready = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print(f"{role} is starting", flush=True)
if unready < 0:
    print("pdserve: error: no such model", flush=True)
    sys.exit(-unready)
asked = collections.Counter()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        asked[self.path] += 1
        ok = asked["/health"] > unready and (self.path != "/health_generate" or asked[self.path] > 1)
        body = b'{"status": "ok"}' if ok else b'{"status": "starting"}'
        self.send_response(200 if ok else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


class RunningUp:
    """`pdserve up` in a forked process, with its output."""

    def __init__(self, process: ForkedProcess, output: IO[str]) -> None:
        self.process = process
        self.output = output


@pytest.fixture
def ports() -> list[int]:
    return [free_port() for _ in range(3)]


@pytest.fixture
def up(ports: list[int], request: pytest.FixtureRequest) -> Iterator[RunningUp]:
    """`run_up` in its own process. The parameter is the number of probes before prefill is healthy. If it is -N,
    prefill exits at once with status N.
    """
    arguments = [SERVER, *map(str, ports), str(getattr(request, "param", 2))]
    reader, writer = os.pipe()
    with os.fdopen(reader) as output, Path(os.devnull).open("rb") as null:
        try:
            process = fork_server().run(f"{PROGRAM}:main", arguments, ENVIRON, (null, writer, writer))
        finally:
            os.close(writer)
        yield RunningUp(process, output)
        process.terminate()  # not kill: a failed test must not leave the fake servers behind
        process.wait(timeout=20)


def read_until(up: RunningUp, text: str) -> list[str]:
    lines = []
    for line in up.output:
        lines.append(line.rstrip())
        if text in line:
            return lines
    raise AssertionError(f"{text!r} was never printed: {lines}")


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_waits_for_both_servers_and_serves_until_a_signal(
    up: RunningUp, ports: list[int], number: signal.Signals
) -> None:
    lines = read_until(up, "Ctrl-C stops both.")
    assert "[prefill] prefill is starting" in lines
    assert "[decode]  decode is starting" in lines
    assert any(line.startswith("waiting for prefill (") for line in lines)
    ready = next(index for index, line in enumerate(lines) if line.startswith("ready after "))
    token = next(index for index, line in enumerate(lines) if line.startswith("waiting for a first token through both"))
    assert token < ready
    assert any(line.startswith(f'  curl http://127.0.0.1:{ports[0]}/generate -d \'{{"text"') for line in lines)
    assert listening(ports[0])
    assert listening(ports[1])
    begun = time.monotonic()
    up.process.send_signal(number)
    assert up.process.wait(timeout=10) == 0
    assert time.monotonic() - begun < 3.0
    assert not listening(ports[0])
    assert not listening(ports[1])
    interrupted = [line for line in up.output if line.endswith(" KeyboardInterrupt\n")]
    assert len(interrupted) == (2 if number == signal.SIGINT else 0), "the servers get the same signal"


def test_up_starts_a_server_again_that_dies(up: RunningUp, ports: list[int]) -> None:
    read_until(up, "Ctrl-C stops both.")
    with pytest.raises(OSError, match="closed"):
        urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/die", timeout=5)
    line = read_until(up, "prefill ended with exit code 7 after")[-1]
    assert line.endswith("its last line: prefill is starting; starting it again")
    read_until(up, "[prefill] prefill is starting")
    assert listening(ports[0]), "the other server goes on"
    wait_until(lambda: listening(ports[1]), 10, "prefill is there again")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=10) == 0
    assert not listening(ports[0])
    assert not listening(ports[1])


@pytest.mark.parametrize(("up", "code"), [(-1, 1), (-2, 2), (-7, 1)], indirect=["up"])
def test_up_exits_with_the_reason_when_a_server_cannot_start(up: RunningUp, code: int, ports: list[int]) -> None:
    """The exit code is 2 when the settings are wrong."""
    lines = read_until(up, "prefill ended with exit code ")
    assert lines[-1].endswith("its last line: pdserve: error: no such model")
    assert up.process.wait(timeout=10) == code
    assert not listening(ports[0])


@pytest.mark.parametrize("up", [1_000_000], indirect=True)
def test_signal_stops_up_while_it_waits(up: RunningUp, ports: list[int]) -> None:
    read_until(up, "waiting for prefill (starting)")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=10) == 0
    assert not listening(ports[0])
