"""The health check of the image, against a real HTTP server."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.ports import free_port

SCRIPT = Path(__file__).parents[2] / "deploy" / "health.py"


def check(port: int) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HEALTH_PORT": str(port)}
    return subprocess.run([sys.executable, "-I", SCRIPT], env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_health_check_exits_with_the_state_of_the_server_and_prints_one_line(status: int, code: int) -> None:
    class Server(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b'{"status": "the model is being loaded"}')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        result = check(server.server_port)
    assert result.returncode == code
    line = f'port {server.server_port}: 503 {{"status": "the model is being loaded"}}\n'
    assert (result.stdout, result.stderr) == ("", "" if code == 0 else line)


def test_health_check_prints_one_line_while_nothing_listens() -> None:
    """Docker keeps the output of failing checks: twenty lines of a traceback each."""
    port = free_port()
    result = check(port)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"port {port}: [Errno 111] Connection refused\n"
