"""Clients of a cell: one that sends the request under test, and one that sends other requests at the same time."""

import http.client
import io
import json
import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx

from tests.cluster.servers import HTTP, Server, body

ANSWER_S = 60.0
PAUSE_S = 0.05
"""Between two requests of the background client."""


class _Received:
    """A socket for http.client that returns the bytes that were received."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def parse_stream(data: bytes) -> tuple[str, list[int]]:
    """The outcome and the output ids of a streamed /generate response. Outcomes: 200, the status of an error, `closed`
    for a response that is cut short. Raises AssertionError if there is not exactly one terminal event.
    """
    response = http.client.HTTPResponse(_Received(data))  # type: ignore[arg-type]
    try:
        response.begin()
        text = response.read().decode()
    except (http.client.HTTPException, ConnectionError) as error:
        text = error.partial.decode() if isinstance(error, http.client.IncompleteRead) else ""
        response.status = response.status if isinstance(response.status, int) else 0
    if response.status not in (0, 200):
        return str(response.status), []
    events = re.findall(r"^data: (.*)\n$", text, re.MULTILINE)
    parts = [json.loads(event) for event in events if event != "[DONE]"]
    terminal = [part for part in parts if "error" in part or part["meta_info"]["finish_reason"] is not None]
    tokens: list[int] = next((part["output_ids"] for part in reversed(parts) if "output_ids" in part), [])
    assert len(terminal) <= 1, f"{len(terminal)} terminal events"
    if not terminal:
        return "closed", tokens
    assert events[-1] == "[DONE]"
    assert terminal[0] is parts[-1], "an event after the terminal one"
    if "error" in terminal[0]:
        return str(terminal[0]["error"].get("status", STATUS_OF[terminal[0]["error"]["code"]])), tokens
    return "200", tokens


STATUS_OF = {"unavailable": 503, "deadline": 504, "aborted": 499, "internal": 500, "queue_full": 429}


class StreamClient(threading.Thread):
    """Streams one request over a socket of its own."""

    def __init__(self, server: Server, prompt: Sequence[int], new_tokens: int, **extra: Any) -> None:
        super().__init__(daemon=True)
        payload = json.dumps(body(prompt, new_tokens, stream=True, **extra)).encode()
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._socket = socket.create_connection(("127.0.0.1", server.port), 10)
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(head.encode() + payload)
        self._data = b""
        self.pause_s = 0.0
        """Sleep before each read of 256 bytes."""
        self.left = False
        self.problem: str | None = None
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            while part := self._socket.recv(256 if self.pause_s else 65536):
                self._data += part
                time.sleep(self.pause_s)
        except TimeoutError:
            self.problem = f"no answer within {ANSWER_S:g} s"
        except OSError as error:
            if not self.left and not isinstance(error, ConnectionResetError):
                self.problem = repr(error)
        self.ended_at = time.monotonic()
        self._socket.close()

    def leave(self) -> None:
        """Close the connection."""
        self.left = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def text(self) -> str:
        """The response so far."""
        return self._data.decode(errors="replace")

    def outcome(self) -> tuple[str, list[int]]:
        """Wait for the end of the response; returns its outcome and output ids."""
        self.join(ANSWER_S + 10)
        assert not self.is_alive(), "no end of the response"
        assert self.problem is None, self.problem
        outcome, tokens = parse_stream(self._data)
        return ("left" if self.left and outcome == "closed" else outcome), tokens


class BackgroundClient(threading.Thread):
    """Sends one request after the other until `stop()`; records the outcomes and what is wrong with them."""

    def __init__(self, server: Server, prompt: Sequence[int], expected: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._server, self._body, self._expected = server, body(prompt, len(expected), priority=1), expected
        self._stopping = threading.Event()
        self.outcomes: list[str] = []
        self.wrong: list[str] = []
        self.start()

    def run(self) -> None:
        while not self._stopping.is_set():
            try:
                response = HTTP.post(f"{self._server.url}/generate", json=self._body, timeout=ANSWER_S)
            except httpx.TransportError as error:
                if isinstance(error, httpx.TimeoutException):
                    self.wrong.append(f"a background request has no response within {ANSWER_S:g} s")
                self.outcomes.append("closed")
            else:
                self.outcomes.append(str(response.status_code))
                if response.status_code == 200 and response.json()["output_ids"] != self._expected:
                    self.wrong.append(f"a background request has wrong tokens: {response.json()['output_ids']}")
            self._stopping.wait(PAUSE_S)

    def stop(self) -> None:
        self._stopping.set()
        self.join(ANSWER_S + 10)
        if self.is_alive():
            self.wrong.append("a background request has no response")
