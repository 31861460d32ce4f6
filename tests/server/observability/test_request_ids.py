"""`X-Request-Id` of a client: in every response and in the log, independent of the `rid`."""

import asyncio
import logging

import httpx
import pytest

from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Failed, Submit, Tokens
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server
from tests.server.scripted_leader import make_finished

NAMED = {"X-Request-Id": "trace-1"}


async def ask(server: RunningServer, body: dict[str, object], end: str = "") -> httpx.Response:
    asking = asyncio.create_task(server.http.post("/generate", json={"text": "a", **body}, headers=NAMED))
    submit = await server.leader.expect(Submit)
    failed = Failed(submit.rid, 503, "unavailable", end)
    await server.leader.send(Tokens(submit.rid, (65,)), failed if end else make_finished(submit.rid, 1))
    return await asking


@pytest.mark.parametrize("body", [{}, {"rid": "mine"}, {"stream": True}])
async def test_response_has_the_request_id(decode: RunningServer, body: dict[str, object]) -> None:
    answer = await ask(decode, body)
    assert answer.status_code == 200
    assert answer.headers.get_list("x-request-id") == ["trace-1"]


async def test_errors_and_other_routes_have_the_request_id(decode: RunningServer) -> None:
    assert (await ask(decode, {}, "no prefill")).headers.get_list("x-request-id") == ["trace-1"]
    for method, path, status in (("POST", "/generate", 400), ("GET", "/nowhere", 404), ("GET", "/health", 200)):
        answer = await decode.http.request(method, path, headers=NAMED)
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["trace-1"])


async def test_concurrent_requests_may_have_the_same_request_id(decode: RunningServer) -> None:
    """A proxy that retries a request sends the same X-Request-Id. Each request has its own `rid`."""
    bodies = [asyncio.create_task(decode.http.post("/generate", json={"text": "a"}, headers=NAMED)) for _ in range(2)]
    submits = [await decode.leader.expect(Submit) for _ in bodies]
    for submit in submits:
        await decode.leader.send(make_finished(submit.rid, 0))
    answers = [await body for body in bodies]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert {answer.json()["meta_info"]["id"] for answer in answers} == {submit.rid for submit in submits}


@pytest.mark.parametrize("value", [b"", b"x" * 257, b"\xe9", b"a\tb"])
async def test_request_id_that_cannot_be_logged_is_ignored(decode: RunningServer, value: bytes) -> None:
    answer = await decode.http.get("/health", headers=[(b"X-Request-Id", value)])
    assert "x-request-id" not in answer.headers


async def test_log_lines_have_the_request_id(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pdserve")
    async with running_server(tokenizer, DecodeConfig(log_requests=True)) as server:
        await ask(server, {"rid": "r1"})
        await ask(server, {"rid": "r2"}, "no prefill")
        await server.http.post("/generate", json={}, headers=NAMED)
    finished, failed, refused = [record.getMessage() for record in caplog.records]
    assert finished.startswith("request r1 (X-Request-Id trace-1): length, ")
    assert failed.startswith("request r2 (X-Request-Id trace-1): 503 unavailable after ")
    assert refused.endswith(' (X-Request-Id trace-1): 400 invalid_request for "text"')
