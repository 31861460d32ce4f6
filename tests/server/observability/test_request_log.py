"""`--log-requests`: a line for every request, however it ended, without its text."""

import asyncio
import logging

import pytest

from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.scheduler.messages.frontend import Failed, Submit, Tokens
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server
from tests.server.scripted_leader import make_finished

BODY = {"text": "a secret", "rid": "r1", "sampling_params": {"temperature": 0}}


async def run_requests(server: RunningServer) -> None:
    """One request that finishes, one that fails, and three that are refused before the engine."""
    for end in (make_finished("r1", 2), Failed("r1", 503, "unavailable", "no prefill server is paired")):
        posting = asyncio.create_task(server.http.post("/generate", json=BODY))
        await server.leader.expect(Submit)
        await server.leader.send(Tokens("r1", (65, 66)), end)
        await posting
    assert (await server.http.post("/generate", json={"text": 5, "input_ids": "a secret"})).status_code == 400
    assert (await server.http.post("/generate", json={**BODY, "rid": ["a secret"]})).status_code == 400
    assert (await server.http.get("/generate")).status_code == 405


async def test_every_request_has_a_log_line(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    async with running_server(tokenizer, DecodeConfig(log_requests=True)) as server:
        await run_requests(server)
    finished, failed, *refused = [record.getMessage() for record in caplog.records]
    assert finished.startswith("request r1: length, 5 prompt tokens (3 cached), 2 new in 0.")
    assert finished.endswith(" s (queued 0.001, prefilling 0.020)")
    assert failed.startswith("request r1: 503 unavailable after 0.")
    assert failed.endswith(" s: no prefill server is paired")
    assert [line.partition(" from 127.0.0.1:")[0] for line in refused] == ["POST /generate"] * 2 + ["GET /generate"]
    ends = [line.partition(": ")[2] for line in refused]
    assert ends == ['400 invalid_request for "text"', '400 invalid_request for "rid"', "405 method_not_allowed"]
    assert "secret" not in caplog.text


async def test_routed_request_has_a_log_line_on_prefill(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    async with running_server(tokenizer, PrefillConfig(log_requests=True)) as server:
        await server.http.post("/generate", json=BODY | {"bootstrap_room": 7})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "request r1: 8 prompt tokens in room 7, for a decode server"


async def test_client_cannot_inject_log_lines(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    async with running_server(tokenizer, DecodeConfig(log_requests=True)) as server:
        await server.http.get("/a%0Ab%1B" + "c" * 1000)
        await server.http.post("/generate", json={"text": "a", "sampling_params": {"a\nb": 1}})
    path, field = [record.getMessage() for record in caplog.records]
    assert path.startswith("GET /a%0Ab%1Bccc")
    assert "... (1009 characters) from 127.0.0.1:" in path
    assert field.endswith(r'400 invalid_request for "sampling_params.a\nb"')


async def test_requests_are_not_logged_by_default(decode: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    await run_requests(decode)
    assert caplog.records == []


async def test_failure_is_logged_once(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    async with running_server(tokenizer, DecodeConfig(log_requests=True)) as server:
        posting = asyncio.create_task(server.http.post("/generate", json=BODY))
        await server.leader.expect(Submit)
        await server.leader.send(Failed("r1", 504, "deadline", "not finished within its deadline"))
        await posting
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        "request r1 failed with 504: not finished within its deadline",
    )
