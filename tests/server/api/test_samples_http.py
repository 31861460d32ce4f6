"""Several samples of a prompt (`n`): one Submit, a list in the response, and one failed sample fails the whole call."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Submit, Tokens
from tests.server.http_harness import RunningServer, sse_events
from tests.server.scripted_leader import make_finished


def post(server: RunningServer, path: str, **body: object) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(server.http.post(path, json=body))


async def answer(server: RunningServer, **texts: str) -> None:
    """Send tokens and Finished of each request, in this order."""
    for rid, text in texts.items():
        await server.leader.send(Tokens(rid, tuple(text.encode())), make_finished(rid, len(text)))


async def test_samples_of_one_prompt_return_a_list(decode: RunningServer) -> None:
    asking = post(decode, "/generate", text="a", rid="r", sampling_params={"n": 3, "seed": 5})
    submit = await decode.leader.expect(Submit)
    assert (submit.rid, submit.more_rids, submit.sampling.seed) == ("r", ("r_1", "r_2"), 5)
    await answer(decode, r_2="C", r="A", r_1="B")
    results = (await asking).json()
    assert [(result["text"], result["meta_info"]["id"]) for result in results] == [
        ("A", "r"),
        ("B", "r_1"),
        ("C", "r_2"),
    ]
    metrics = (await decode.http.get("/metrics")).text
    assert 'pdserve_requests_total{outcome="length"} 3.0' in metrics
    assert "pdserve_prompt_tokens_total 5.0" in metrics, "the samples share their prompt"


async def test_samples_of_several_prompts_are_ordered_by_prompt(decode: RunningServer) -> None:
    asking = post(decode, "/generate", text=["a", "b"], rid="c", sampling_params={"n": 2}, bootstrap_room=40)
    first, second = await decode.leader.expect(Submit), await decode.leader.expect(Submit)
    assert [(s.rid, s.more_rids, s.room) for s in (first, second)] == [("c_0", ("c_0_1",), 40), ("c_1", ("c_1_1",), 41)]
    assert first.sampling.seed != second.sampling.seed
    await answer(decode, c_1_1="D", c_0_1="B", c_1="C", c_0="A")
    assert [result["text"] for result in (await asking).json()] == ["A", "B", "C", "D"]


async def test_stream_events_have_the_index_of_their_sample(decode: RunningServer) -> None:
    asking = post(decode, "/generate", text="a", rid="r", stream=True, sampling_params={"n": 2, "stop": "!"})
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("r_1", tuple(b"one!")))
    assert await decode.leader.expect(Cancel) == Cancel("r_1", stopped=True)
    await decode.leader.send(make_finished("r_1", 4, FinishReason("stop")))
    await answer(decode, r="two")
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    ended = [event for event in events if event["meta_info"]["finish_reason"] is not None]
    assert sorted((event["index"], event["text"], event["meta_info"]["finish_reason"]["type"]) for event in ended) == [
        (0, "two", "length"),
        (1, "one", "stop"),
    ]
    assert not any("!" in event["text"] for event in events)


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_fails_the_whole_call(decode: RunningServer, stream: bool) -> None:
    asking = post(decode, "/generate", text=["a", "b"], rid="c", stream=stream, sampling_params={"n": 2})
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    full = "queue holds 256 requests"
    await decode.leader.send(*(Failed(rid, 429, "overloaded", full, retry_after_s=2.5) for rid in ("c_0", "c_0_1")))
    response = await asking
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["code"] == "overloaded"
    assert {(await decode.leader.expect(Cancel)).rid for _ in range(2)} == {"c_1", "c_1_1"}


@pytest.mark.parametrize("rid", [["x", "x_1"], ["x", "x"]])
async def test_duplicate_sample_ids_are_refused(decode: RunningServer, rid: list[str]) -> None:
    refused = await decode.http.post("/generate", json={"text": ["a", "b"], "rid": rid, "sampling_params": {"n": 2}})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "duplicate_rid")
    await decode.leader.expect_nothing(for_s=0.05)
    assert decode.client.open_rids == ()


async def test_abort_by_rid_ends_all_samples(decode: RunningServer) -> None:
    asking = post(decode, "/generate", text=["a", "b"], rid=["x", "y"], sampling_params={"n": 2})
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    aborted = await decode.http.post("/abort_request", json={"rid": "x"})
    assert aborted.json() == {"aborted": ["x", "x_1"]}
    assert [await decode.leader.expect(Cancel) for _ in range(2)] == [Cancel("x"), Cancel("x_1")]
    everything = await decode.http.post("/abort_request", json={"abort_all": True})
    assert everything.json() == {"aborted": ["x", "x_1", "y", "y_1"]}
    for rid in ("x", "x_1", "y", "y_1"):
        assert await decode.leader.expect(Cancel) == Cancel(rid)
        await decode.leader.send(Failed(rid, 499, "aborted", "aborted"))
    results = (await asking).json()
    assert [result["meta_info"]["finish_reason"]["type"] for result in results] == ["abort"] * 4


async def test_disconnect_cancels_all_samples(decode: RunningServer) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", decode.port)
    body = json.dumps({"text": "hello", "rid": "gone", "sampling_params": {"n": 3, "stop": "!"}}).encode()
    writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await decode.leader.expect(Submit)
    await decode.leader.send(Tokens("gone_1", tuple(b"!")))
    assert await decode.leader.expect(Cancel) == Cancel("gone_1", stopped=True)
    writer.close()
    cancelled = {(await decode.leader.expect(Cancel, within_s=1.0)).rid for _ in range(2)}
    assert cancelled == {"gone", "gone_2"}, "the sample that was stopped is not cancelled again"
    assert sorted(decode.client.open_rids) == ["gone", "gone_1", "gone_2"]


async def test_openai_choices_and_usage_count_samples(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", prompt=["ab", "cd"], rid="c", n=2)
    await decode.leader.expect(Submit)
    await decode.leader.expect(Submit)
    await answer(decode, c_0="A", c_0_1="B", c_1="C", c_1_1="D")
    body = (await asking).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "A"), (1, "B"), (2, "C"), (3, "D")]
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (10, 4)
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}


async def test_openai_chat_stream_sends_the_role_of_every_choice(decode: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    asking = post(decode, "/v1/chat/completions", messages=messages, rid="c", stream=True, n=2)
    assert (await decode.leader.expect(Submit)).more_rids == ("c_1",)
    await answer(decode, c_1="B", c="A")
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    for index, text in ((0, "A"), (1, "B")):
        choices = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in choices) == text
        assert choices[-1]["finish_reason"] == "length"


async def test_request_may_have_a_room_for_every_sample(decode: RunningServer, prefill: RunningServer) -> None:
    """Prefill and decode use the first room of a routed chat with n = 2: there is one transfer."""
    routed: dict[str, object] = {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "rid": "c"}
    routed |= {"bootstrap_host": ["p1", "p1"], "bootstrap_port": [9000, 9000], "bootstrap_room": [7, 8]}
    asking = post(decode, "/v1/chat/completions", **routed)
    submit = await decode.leader.expect(Submit)
    assert (submit.room, submit.endpoint, submit.more_rids) == (7, "p1:9000", ("c_1",))
    await answer(decode, c="A", c_1="B")
    assert (await asking).status_code == 200
    assert (await post(prefill, "/v1/chat/completions", **routed)).status_code == 200


async def test_wrong_number_of_rooms_is_refused(decode: RunningServer) -> None:
    body = {"text": "a", "sampling_params": {"n": 2}, "bootstrap_room": [1, 2, 3]}
    refused = await decode.http.post("/generate", json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "bootstrap_room")
