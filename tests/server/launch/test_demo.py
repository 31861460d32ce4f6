"""The demo's client against a scripted stream: its output, and errors for incomplete responses."""

import http.server
import io
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.configs.schema import DecodeConfig
from pdserve.server.launch.children import Children
from pdserve.server.launch.demo import DemoError, ask, chat_prompt, timeline_table, up_command
from pdserve.server.launch.pair import load_pair_config
from pdserve.server.launch.up import RunningPair
from tests.server.http_harness import write_byte_model

META = {
    "finish_reason": {"type": "stop", "matched": 2},
    "prompt_tokens": 12,
    "completion_tokens": 5,
    "timeline": {"queue": 0.001, "prefill": 0.1, "transfer": 0.003, "decode": 0.2, "a_new_stage": 0.0},
}
PARTIAL = {**META, "finish_reason": None}


class StreamServer(http.server.ThreadingHTTPServer):
    """Responds to every POST with `events` as server-sent events, or with `status` and a JSON error."""

    events: Sequence[object] = ()
    status = 200
    seen: dict[str, object]


class StreamHandler(http.server.BaseHTTPRequestHandler):
    server: StreamServer

    def do_POST(self) -> None:
        self.server.seen = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen["authorization"] = self.headers["Authorization"]
        self.send_response(self.server.status)
        self.end_headers()
        for event in self.server.events:
            self.wfile.write(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server() -> Iterator[StreamServer]:
    with StreamServer(("127.0.0.1", 0), StreamHandler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def pair(server: StreamServer) -> RunningPair:
    config = load_pair_config(None, {"port": str(server.server_address[1])}, {"PDSERVE_API_KEY": "key"})
    console = Console(file=io.StringIO())
    return RunningPair(config, Children(console), console)


def test_cumulative_text_is_printed_once(
    server: StreamServer, pair: RunningPair, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ("Par", "Paris", "Paris", "Paris is [b]it[/b].")
    server.events = [{"text": text, "meta_info": META if text == texts[-1] else PARTIAL} for text in texts] + ["[DONE]"]
    answer = ask(pair, "Q?", 7)
    assert capsys.readouterr().out == "Paris is [b]it[/b]."
    assert server.seen["text"] == "Q?"
    assert server.seen["sampling_params"] == {"max_new_tokens": 7, "temperature": 0}
    assert server.seen["authorization"] == "Bearer key"
    assert answer.meta_info == META
    assert 0 < answer.first_text_s <= answer.total_s

    console = Console(file=io.StringIO(), width=120)
    console.print(timeline_table(answer))
    assert isinstance(console.file, io.StringIO)
    rows = [[cell.strip() for cell in line.split("│")] for line in console.file.getvalue().splitlines() if "│" in line]
    assert {row[1]: row[2] for row in rows} == {
        "queue": "1.0",
        "prefill": "100.0",
        "transfer": "3.0",
        "decode": "200.0",
        "a new stage": "0.0",
    }
    assert "12 prompt tokens, 5 new tokens" in console.file.getvalue()
    assert "20 tokens/s" in console.file.getvalue(), "four tokens in 0.2 s: prefill samples the first one"


@pytest.mark.parametrize(
    ("status", "events", "message"),
    [
        (200, [{"text": "Par", "meta_info": PARTIAL}], "the stream ended before the answer did"),
        (200, [{"error": {"message": "prefill was lost"}}, "[DONE]"], "prefill was lost"),
        (200, [], "the stream ended before the answer did"),
        (503, [], "/generate returned 503"),
    ],
)
def test_incomplete_response_is_an_error(
    server: StreamServer, pair: RunningPair, status: int, events: list[object], message: str
) -> None:
    server.status, server.events = status, events
    with pytest.raises(DemoError, match=message):
        ask(pair, "Q?", 7)


def test_printed_command_starts_the_same_pair(pair: RunningPair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [".venv/bin/pdserve", "demo"])
    port = pair.config.decode.port
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert up_command(pair.config) == f".venv/bin/pdserve up --port={port}"
    monkeypatch.setattr("sys.argv", ["/checkout/.dev/pdserve/server/__main__.py", "demo"])
    assert up_command(pair.config) == f"{sys.executable} -m pdserve.server up --port={port}"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert up_command(load_pair_config(None, {"model": "/a b"}, {})) == "pdserve up '--model=/a b'"
    ports = load_pair_config(None, {"port": "1", "prefill_port": "2", "bootstrap_port": "3"}, {})
    assert up_command(ports) == "pdserve up --port=1 --prefill-port=2 --bootstrap-port=3"


def test_prompt_of_a_model_without_weights(tmp_path: Path) -> None:
    (write_byte_model(tmp_path) / "model.safetensors").unlink()
    config = DecodeConfig(model=str(tmp_path), load_format="dummy")
    assert chat_prompt(config, "Hi") == "user: Hi\nassistant: "
