"""/generate end to end over a real socket: responses, streams, lists of prompts, failures and disconnects."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Prefilled, Submit, Tokens
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server, sse_events
from tests.server.scripted_leader import EOS, VOCAB_SIZE, make_finished


def post(server: RunningServer, body: dict[str, object]) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(server.http.post("/generate", json=body))


async def wait_until_closed(server: RunningServer) -> None:
    async with asyncio.timeout(10):
        while server.client.open_rids:
            await asyncio.sleep(0.01)


async def test_single_prompt_returns_one_result(decode: RunningServer) -> None:
    asking = post(decode, {"text": "hello", "rid": "r1"})
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r1", (104,)), Tokens("r1", tuple("é!".encode())), make_finished("r1", 4))
    response = await asking
    assert (submit.rid, response.status_code) == ("r1", 200)
    body = response.json()
    meta = body.pop("meta_info")
    assert body == {"text": "hé!", "output_ids": [104, 195, 169, 33]}
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "r1",
        "finish_reason": {"type": "length", "length": 4},
        "prompt_tokens": 5,
        "completion_tokens": 4,
        "cached_tokens": 3,
        "cached_tokens_details": {"device": 3, "host": 0, "storage": 0},
        "timeline": {"queued": 0.001, "prefilling": 0.02},
    }


async def test_every_stream_event_has_cached_tokens(decode: RunningServer) -> None:
    asking = post(decode, {"text": "a", "rid": "r1", "stream": True})
    await decode.leader.expect(Submit)
    prefilled = Prefilled("r1", cached_tokens=15, stored_tokens=4, host_tokens=8)
    await decode.leader.send(prefilled, Tokens("r1", (104,)))
    await asyncio.sleep(0.05)
    end = msgspec.structs.replace(make_finished("r1", 2), cached_tokens=15, stored_tokens=4, host_tokens=8)
    await decode.leader.send(Tokens("r1", (105,)), end)
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    assert len(events) == 2
    assert [event["meta_info"]["cached_tokens"] for event in events] == [15, 15]
    details = {"device": 3, "host": 8, "storage": 4}
    assert [event["meta_info"]["cached_tokens_details"] for event in events] == [details, details]


async def test_stop_token_is_in_the_ids_but_not_in_the_text(decode: RunningServer) -> None:
    asking = post(decode, {"text": "a", "rid": "r1", "sampling_params": {"stop_token_ids": [33]}})
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r1", (104, 33)), make_finished("r1", 2, FinishReason("stop", matched=33)))
    body = (await asking).json()
    assert (body["text"], body["output_ids"]) == ("h", [104, 33])
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 33}


async def test_stop_string_cuts_the_text_and_cancels(decode: RunningServer) -> None:
    asking = post(decode, {"text": "a", "rid": "r1", "sampling_params": {"stop": ["END", "zz"]}})
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r1", tuple(b"one EN")))
    await decode.leader.send(Tokens("r1", tuple(b"D two")))
    assert await decode.leader.expect(Cancel) == Cancel("r1", stopped=True)
    await decode.leader.send(Tokens("r1", tuple(b" three")), make_finished("r1", 17, FinishReason("stop")))
    body = (await asking).json()
    assert (body["text"], bytes(body["output_ids"])) == ("one ", b"one END")
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}
    assert (body["meta_info"]["completion_tokens"], body["meta_info"]["cached_tokens"]) == (7, 3)
    assert body["meta_info"]["timeline"] == {"queued": 0.001, "prefilling": 0.02}
    await decode.leader.expect_nothing(for_s=0.05)
    metrics = (await decode.http.get("/metrics")).text
    assert 'pdserve_requests_total{outcome="stop"} 1.0' in metrics
    assert 'outcome="aborted"' not in metrics


async def test_no_stop_trim_keeps_stop_strings_and_stop_tokens(decode: RunningServer) -> None:
    params = {"stop": "END", "stop_token_ids": [33], "no_stop_trim": True}
    asking = post(decode, {"text": ["a", "b"], "rid": ["r1", "r2"], "sampling_params": params})
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r1", tuple(b"one END two")), make_finished("r1", 11))
    await decode.leader.send(Tokens("r2", tuple(b"h!")), make_finished("r2", 2, FinishReason("stop", matched=33)))
    assert [result["text"] for result in (await asking).json()] == ["one END", "h!"]


async def test_stop_string_split_over_tokens_is_not_streamed(decode: RunningServer) -> None:
    asking = post(decode, {"text": "a", "rid": "r1", "stream": True, "sampling_params": {"stop": ["\n\n", "é!"]}})
    await decode.leader.expect(Submit)
    for token in "one\ntwo é!".encode():
        await decode.leader.send(Tokens("r1", (token,)))
        await decode.report()
    assert await decode.leader.expect(Cancel) == Cancel("r1", stopped=True)
    await decode.leader.send(Tokens("r1", (65,)), Failed("r1", 504, "deadline", "a moment too late"))
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    assert [event["text"] for event in events][-1] == "one\ntwo "
    assert all("one\ntwo ".startswith(event["text"]) for event in events)
    assert {event["text"] for event in events if event["meta_info"]["completion_tokens"] == 4} <= {"one"}
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "é!"}
    assert "error" not in events[-1], "the output was already complete when the request failed"


async def test_stream_is_cumulative_and_ends_with_done(decode: RunningServer) -> None:
    body = {"text": "hello", "rid": "r1", "stream": True}
    async with asyncio.timeout(5):
        asking = post(decode, body)
        await decode.leader.expect(Submit)
        await decode.leader.send(Tokens("r1", (104,)))
        await decode.report()
        await decode.leader.send(Tokens("r1", (195,)))  # half of é: the ids grow, the text does not
        await decode.report()
        await decode.leader.send(Tokens("r1", (169, EOS)), make_finished("r1", 4, FinishReason("stop", matched=EOS)))
        response = await asking
    assert response.headers["content-type"].startswith("text/event-stream")
    events: list[Any] = sse_events(response.text)
    assert events.pop() == "[DONE]"
    assert [event["text"] for event in events][:2] == ["h", "h"]
    assert events[-1]["text"] == "hé"
    assert [event["output_ids"] for event in events][:2] == [[104], [104, 195]]
    assert events[-1]["output_ids"] == [104, 195, 169, EOS]
    assert [event["meta_info"]["completion_tokens"] for event in events][:2] == [1, 2]
    assert all(event["meta_info"]["finish_reason"] is None for event in events[:-1])
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert events[-1]["meta_info"]["id"] == "r1"
    assert "index" not in events[0]


async def test_list_of_prompts_returns_results_in_order(decode: RunningServer) -> None:
    body = {"text": ["a", "b"], "rid": "call", "bootstrap_room": 40, "bootstrap_host": ["p1", None]}
    asking = post(decode, body | {"bootstrap_port": 9000, "sampling_params": [{"seed": 1}, {"seed": 2}]})
    first, second = await decode.leader.expect(Submit), await decode.leader.expect(Submit)
    assert [(s.rid, s.room, s.endpoint, s.sampling.seed) for s in (first, second)] == [
        ("call_0", 40, "p1:9000", 1),
        ("call_1", 41, None, 2),
    ]
    await decode.leader.send(Tokens("call_1", (66,)), make_finished("call_1", 1))
    await decode.leader.send(Tokens("call_0", (65,)), make_finished("call_0", 1))
    results = (await asking).json()
    assert [(result["text"], result["meta_info"]["id"]) for result in results] == [("A", "call_0"), ("B", "call_1")]


async def test_list_of_one_prompt_returns_a_list(decode: RunningServer) -> None:
    asking = post(decode, {"input_ids": [[1]]})
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(make_finished(submit.rid, 0))
    assert isinstance((await asking).json(), list)


async def test_stream_events_of_a_list_have_an_index(decode: RunningServer) -> None:
    asking = post(decode, {"text": ["a", "b"], "rid": ["x", "y"], "stream": True})
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("y", (66,)))
    await decode.report()
    await decode.leader.send(Tokens("x", (65,)), make_finished("x", 1))
    await decode.report()
    await decode.leader.send(Failed("y", 503, "unavailable", "prefill lost"))
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    assert next((event["index"], event["text"]) for event in events if event["text"]) == (1, "B")
    ended = {event["index"]: event for event in events if event["meta_info"]["finish_reason"]}
    assert ended[0]["meta_info"]["finish_reason"]["type"] == "length"
    assert ended[1]["meta_info"]["finish_reason"] == {
        "type": "abort",
        "message": "prefill lost",
        "status_code": 503,
        "err_type": "unavailable",
    }
    assert ended[1]["error"]["code"] == "unavailable"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failed", "retry_after"),
    [
        (Failed("r1", 429, "overloaded", "queue holds 256 requests", retry_after_s=2.5), "3"),
        (Failed("r1", 503, "unavailable", "no prefill server"), "1"),
        (Failed("r1", 504, "deadline", "queue_timeout_s of 60 passed"), None),
    ],
)
async def test_failure_before_the_first_byte_is_an_http_status(
    decode: RunningServer, stream: bool, failed: Failed, retry_after: str | None
) -> None:
    asking = post(decode, {"text": "a", "rid": "r1", "stream": stream})
    await decode.leader.expect(Submit)
    await decode.leader.send(failed)
    response = await asking
    assert response.status_code == failed.status
    assert response.headers.get("retry-after") == retry_after
    error = response.json()["error"]
    assert (error["code"], error["message"]) == (failed.code, failed.message)


async def test_failure_mid_stream_is_the_last_event(decode: RunningServer) -> None:
    asking = post(decode, {"text": "a", "rid": "r1", "stream": True})
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r1", (65,)))
    await decode.report()
    await decode.leader.send(Failed("r1", 504, "deadline", "request_timeout_s of 600 passed"))
    response = await asking
    assert response.status_code == 200
    events: list[Any] = sse_events(response.text)
    assert events[-1] == "[DONE]"
    assert events[-2]["error"]["message"] == "request_timeout_s of 600 passed"
    assert events[-2]["meta_info"]["finish_reason"]["type"] == "abort"
    assert events[-2]["text"] == "A"


async def test_one_failed_prompt_fails_a_call_that_is_not_streamed(decode: RunningServer) -> None:
    asking = post(decode, {"text": ["a", "b"], "rid": ["x", "y"]})
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    await decode.leader.send(Failed("x", 429, "overloaded", "full"))
    assert (await asking).status_code == 429
    assert (await decode.leader.expect(Cancel)).rid == "y"


async def test_duplicate_rids_are_refused(decode: RunningServer) -> None:
    twice = await decode.http.post("/generate", json={"text": ["a", "b"], "rid": ["x", "x"]})
    assert (twice.status_code, twice.json()["error"]["code"]) == (409, "duplicate_rid")
    await decode.leader.expect_nothing(for_s=0.05)
    asking = post(decode, {"text": "a", "rid": "x"})
    await decode.leader.expect(Submit)
    again = await decode.http.post("/generate", json={"text": "a", "rid": "x"})
    assert again.status_code == 409
    assert "'x'" in again.json()["error"]["message"]
    await decode.leader.send(make_finished("x", 0))
    assert (await asking).status_code == 200
    after = post(decode, {"text": "a", "rid": "x"})
    await decode.leader.expect(Submit)
    await decode.leader.send(make_finished("x", 0))
    assert (await after).status_code == 200


@pytest.mark.parametrize("tokens_first", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_cancels_within_a_second(decode: RunningServer, stream: bool, tokens_first: bool) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    body = json.dumps({"text": "hello", "rid": "gone", "stream": stream}).encode()
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await decode.leader.expect(Submit)
    if tokens_first:
        await decode.leader.send(Tokens("gone", (65,)))
        if stream:
            assert b"200 OK" in await reader.read(200)
    writer.close()
    assert (await decode.leader.expect(Cancel, within_s=1.0)).rid == "gone"
    assert decode.client.open_rids == ("gone",), "the id stays in use until the leader confirms"
    busy = await decode.http.post("/generate", json={"text": "a", "rid": "gone"})
    assert busy.status_code == 409
    await decode.leader.send(Failed("gone", 499, "aborted", "client has gone"))
    await wait_until_closed(decode)


async def test_disconnect_before_the_body_is_complete_is_harmless(decode: RunningServer) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    writer.write(b'POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"text"')
    await writer.drain()
    writer.close()
    await decode.leader.expect_nothing(for_s=0.2)
    assert (await decode.http.get("/health")).status_code == 200


async def test_abort_request_cancels_all_prompts_of_a_call(decode: RunningServer) -> None:
    asking = post(decode, {"text": ["a", "b"], "rid": "call"})
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    missing = await decode.http.post("/abort_request", json={"rid": "nobody"})
    assert missing.json() == {"aborted": []}
    assert (await decode.http.post("/abort_request", json={})).json()["error"]["param"] == "rid"
    aborted = await decode.http.post("/abort_request", json={"rid": "call"})
    assert aborted.json() == {"aborted": ["call_0", "call_1"]}
    assert {(await decode.leader.expect(Cancel)).rid for _ in range(2)} == {"call_0", "call_1"}
    await decode.leader.send(Failed("call_0", 499, "aborted", "aborted"), Failed("call_1", 499, "aborted", "aborted"))
    results = (await asking).json()
    assert [result["meta_info"]["finish_reason"] for result in results] == [{"type": "abort", "message": "aborted"}] * 2


async def test_leader_death_fails_open_requests_and_refuses_new_ones(decode: RunningServer) -> None:
    whole = post(decode, {"text": "a"})
    streamed = post(decode, {"text": "a", "stream": True, "rid": "s"})
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("s", (65,)))
    await decode.report()
    decode.client.fail_all("process 7 was ended by SIGKILL")
    response = await asyncio.wait_for(whole, 1)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert "SIGKILL" in response.json()["error"]["message"]
    events: list[Any] = sse_events((await asyncio.wait_for(streamed, 1)).text)
    assert events[-2]["error"]["code"] == "unavailable"
    refused = await decode.http.post("/generate", json={"text": "a"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    await decode.leader.send(make_finished("s", 1))  # a late message of the dead leader changes nothing
    assert (await decode.http.get("/health")).status_code == 503


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_over_the_limit_is_refused(tokenizer: Tokenizer, chunked: bool) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 1000

    async with running_server(tokenizer, DecodeConfig(max_body_bytes=10_000)) as server:
        content = pieces() if chunked else b"x" * 40_000
        response = await server.http.post("/generate", content=content)
        assert response.status_code == 413
        error = response.json()["error"]
        assert (error["code"], "10000" in error["message"]) == ("too_large", True)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/generate", "text"),
        ("/v1/completions", "prompt"),
        ("/v1/chat/completions", "messages"),
        ("/tokenize", "prompt"),
        ("/tokenize", "messages"),
    ],
)
async def test_text_that_is_too_long_is_not_tokenized(
    decode: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    def encode(_tokenizer: Tokenizer, text: str, **_options: bool) -> list[int]:
        raise AssertionError(f"{len(text)} characters are tokenized")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "word " * 400_000
    body = {"messages": [{"role": "user", "content": text}]} if field == "messages" else {field: text}
    error = (await decode.http.post(path, json=body)).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "has at least 400000 tokens" in error["message"] or "has at least 400004 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "field"), [("/generate", "text"), ("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")]
)
async def test_text_with_a_token_outside_the_vocabulary_is_refused(
    decode: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Tokenizers of fine-tuned models may have more tokens than the model, such as [PAD]. Such a token would fail all
    requests of a step.
    """
    monkeypatch.setattr(Tokenizer, "encode", lambda *_arguments, **_options: [65, VOCAB_SIZE, 66])
    body = {"messages": [{"role": "user", "content": "[PAD]"}]} if field == "messages" else {field: "[PAD]"}
    response = await decode.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert f"has token id {VOCAB_SIZE} of the tokenizer, but the model has only 0 to 257" in error["message"]


async def test_long_body_does_not_block_the_event_loop(decode: RunningServer) -> None:
    """A body near the limit is tokenized in a thread while the event loop continues."""
    longest_gap = 0.0

    async def watch() -> None:
        nonlocal longest_gap
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(0.002)
            longest_gap = max(longest_gap, loop.time() - last)
            last = loop.time()

    watching = asyncio.create_task(watch())
    started = asyncio.get_running_loop().time()
    response = await decode.http.post("/tokenize", json={"prompt": "word " * 200_000})
    took = asyncio.get_running_loop().time() - started
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching
    assert response.json()["count"] == 1_000_000
    assert longest_gap < took / 2
