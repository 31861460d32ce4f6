"""Log-probabilities in the formats of SGLang and OpenAI, in whole responses and in streams."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from pdserve.common.sampling import LogprobParams, TokenLogprob, pack_logprobs
from pdserve.scheduler.messages.frontend import FinishReason, Prefilled, Submit, Tokens
from pdserve.server.api.openai.replies import CompletionRendering
from tests.server.http_harness import RunningServer, sse_events
from tests.server.scripted_leader import EOS, make_finished

CRAB = "🦀".encode()


def post(server: RunningServer, path: str, **body: object) -> "asyncio.Task[httpx.Response]":
    return asyncio.create_task(server.http.post(path, json=body))


def scored(rid: str, data: bytes | list[int], top: int = 0) -> Tokens:
    """Tokens with the log-probability -id / 100. The alternatives are the ids 65, 66, ..."""
    alternatives = tuple((65 + rank, -1.0 - rank) for rank in range(top))
    return Tokens(rid, tuple(data), tuple(TokenLogprob(token, -token / 100, alternatives) for token in data))


async def test_generate_returns_logprobs_of_the_output(decode: RunningServer) -> None:
    asking = post(decode, "/generate", text="ab", rid="r", return_logprob=True)
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams()
    await decode.leader.send(scored("r", b"A"), scored("r", b"B"), make_finished("r", 2))
    meta = (await asking).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.65, 65, None], [-0.66, 66, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta


async def test_generate_returns_logprobs_of_prompt_and_alternatives_with_text(decode: RunningServer) -> None:
    wanted = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    asking = post(decode, "/generate", text="a ", rid="r", **wanted)
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams(top=2, start=0)
    prompt = (TokenLogprob(97, None), TokenLogprob(32, -0.5, ((32, -0.5), (240, -2.0))))
    await decode.leader.send(Prefilled("r", 0, pack_logprobs(prompt)), scored("r", [EOS], top=2))
    await decode.leader.send(make_finished("r", 1, FinishReason("stop", matched=EOS)))
    meta = (await asking).json()["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.5, 32, " "]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 32, " "], [-2.0, 240, "\N{REPLACEMENT CHARACTER}"]]]
    assert meta["output_token_logprobs"] == [[-2.56, EOS, "<eos>"]]
    assert meta["output_top_logprobs"] == [[[-1.0, 65, "A"], [-2.0, 66, "B"]]]


async def test_streamed_logprobs_are_cumulative_and_end_at_a_stop_string(decode: RunningServer) -> None:
    params = {"stop": "!", "n": 2}
    asking = post(
        decode,
        "/generate",
        text="a",
        rid="r",
        stream=True,
        return_logprob=True,
        logprob_start_len=0,
        sampling_params=params,
    )
    await decode.leader.expect(Submit)
    for rid in ("r", "r_1"):
        await decode.leader.send(Prefilled(rid, 0, pack_logprobs([TokenLogprob(97, None)])), scored(rid, b"A"))
    await decode.report()
    for rid in ("r", "r_1"):
        await decode.leader.send(scored(rid, b"B!C"), make_finished(rid, 4))
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    for index in (0, 1):
        metas = [event["meta_info"] for event in events if event["index"] == index]
        lengths = [len(meta["output_token_logprobs"]) for meta in metas]
        assert (lengths[0], lengths[-1], lengths) == (1, 3, sorted(lengths))
        assert lengths == [meta["completion_tokens"] for meta in metas]
        assert all(meta["input_token_logprobs"] == [[None, 97, None]] for meta in metas)
        assert [entry[1] for entry in metas[-1]["output_token_logprobs"]] == list(b"AB!")


async def test_completion_has_columns_of_logprobs(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", prompt="a", rid="c", logprobs=2)
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams(top=2)
    await decode.leader.send(
        scored("c", [*b"A", *CRAB[:2]], top=2), scored("c", CRAB[2:], top=2), make_finished("c", 5)
    )
    choice = (await asking).json()["choices"][0]
    assert choice["text"] == "A🦀"
    assert choice["logprobs"]["tokens"] == ["A", *(f"bytes:\\x{byte:02x}" for byte in CRAB)]
    assert choice["logprobs"]["token_logprobs"] == [-0.65, *(-byte / 100 for byte in CRAB)]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1]
    assert choice["logprobs"]["top_logprobs"][0] == {"A": -1.0, "B": -2.0}
    assert choice["logprobs"]["top_logprobs"][1] == {"A": -1.0, "B": -2.0, "bytes:\\xf0": -2.4}


async def test_completion_stream_concatenates_to_the_whole(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", prompt="a", rid="c", logprobs=0, stream=True)
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams()
    for data in (b"A", CRAB[:3], CRAB[3:], b"B"):
        await decode.leader.send(scored("c", data))
        await decode.report()
    await decode.leader.send(scored("c", [EOS]), make_finished("c", 7, FinishReason("stop", matched=EOS)))
    events: list[Any] = sse_events((await asking).text)
    assert events.pop() == "[DONE]"
    logprobs = [event["choices"][0]["logprobs"] for event in events]
    assert [token for part in logprobs for token in part["tokens"]][-2:] == ["B", "<eos>"]
    assert [offset for part in logprobs for offset in part["text_offset"]] == [0, 1, 1, 1, 1, 2, 3]
    assert all(part["top_logprobs"] is None for part in logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_has_an_entry_per_token(decode: RunningServer, stream: bool) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    asking = post(
        decode, "/v1/chat/completions", messages=messages, rid="c", logprobs=True, top_logprobs=1, stream=stream
    )
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams(top=1)
    await decode.leader.send(scored("c", CRAB[:2], top=1))
    await decode.report()
    await decode.leader.send(scored("c", CRAB[2:], top=1))
    await decode.report()
    await decode.leader.send(scored("c", [EOS], top=1), make_finished("c", 5, FinishReason("stop", matched=EOS)))
    response = await asking
    if stream:
        events: list[Any] = sse_events(response.text)
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "🦀"
        parts = [choice["logprobs"] for choice in choices]
        assert parts[0] is None, "the role comes before the first token"
        assert parts[-1] is None, "the end comes after the last token"
        content = [entry for part in parts if part is not None for entry in part["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "bytes:\\xf0",
        "logprob": -2.4,
        "bytes": [0xF0],
        "top_logprobs": [{"token": "A", "logprob": -1.0, "bytes": [65]}],
    }
    assert [entry["token"] for entry in content[-2:]] == ["bytes:\\x80", "<eos>"]
    assert len(content) == 5


async def test_logprobs_are_null_unless_requested(decode: RunningServer) -> None:
    asking = post(decode, "/v1/completions", prompt="a", rid="c", logprobs=False)
    assert (await decode.leader.expect(Submit)).logprobs is None
    await decode.leader.send(Tokens("c", (65,)), make_finished("c", 1))
    assert (await asking).json()["choices"][0]["logprobs"] is None


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that write completions."""
    names: list[str] = []

    def noted(write: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            names.append(threading.current_thread().name)
            return write(*arguments, **named)

        return call

    for name in ("events", "result"):
        monkeypatch.setattr(CompletionRendering, name, noted(getattr(CompletionRendering, name)))
    return names


@pytest.mark.parametrize("stream", [False, True])
async def test_many_logprobs_are_written_in_a_thread(decode: RunningServer, writers: list[str], stream: bool) -> None:
    """3,150 of them take about 15 ms of the event loop. In a stream, those of the prompt are in the first event."""
    asking = post(decode, "/v1/completions", prompt=[97] * 150, rid="r", echo=True, logprobs=20, stream=stream)
    assert (await decode.leader.expect(Submit)).logprobs == LogprobParams(top=20, start=0)
    alternatives = tuple((65 + rank, -1.0) for rank in range(20))
    prompt = (TokenLogprob(97, None), *(TokenLogprob(97, -0.5, alternatives) for _ in range(149)))
    await decode.leader.send(Prefilled("r", 0, pack_logprobs(prompt)), scored("r", b"A", top=20))
    await decode.report()
    await decode.leader.send(scored("r", b"B", top=20), make_finished("r", 2))
    answer = await asking
    if stream:
        first, *_ = [event["choices"][0] for event in sse_events(answer.text) if isinstance(event, dict)]
    else:
        first = answer.json()["choices"][0]
    assert len(first["logprobs"]["top_logprobs"][149]) == 21
    assert writers[0].startswith("writing")
    assert all(name == threading.current_thread().name for name in writers[1:])


async def test_log_probabilities_of_prompts_are_limited(decode: RunningServer) -> None:
    problem = "asks for 262500 log-probabilities of the prompt, with the alternatives of each token; at most 262144"
    for field, path, asked in (
        ("echo", "/v1/completions", {"prompt": [[97] * 250] * 50, "echo": True, "logprobs": 20}),
        ("prompt_logprobs", "/v1/completions", {"prompt": [[97] * 250] * 50, "prompt_logprobs": 20}),
        ("prompt_logprobs", "/v1/completions", {"prompt": [[97] * 250] * 10, "n": 5, "prompt_logprobs": 20}),
        (
            "logprob_start_len",
            "/generate",
            {"input_ids": [[97] * 250] * 50, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20},
        ),
    ):
        answer = await decode.http.post(path, json=asked)
        assert answer.json()["error"]["message"].startswith(f"{field} {problem}"), answer.text


@pytest.mark.parametrize(("field", "unit"), [("echo", "characters"), ("return_token_ids", "token ids")])
async def test_prompts_repeated_in_an_answer_are_limited(
    decode: RunningServer, monkeypatch: pytest.MonkeyPatch, field: str, unit: str
) -> None:
    monkeypatch.setattr("pdserve.server.api.openai.requests.MOST_ECHOED", 15)
    monkeypatch.setattr("pdserve.server.api.openai.requests.MOST_RETURNED_IDS", 15)
    asked = {"prompt": ["abcd", "efgh"], "n": 2, field: True}
    answer = await decode.http.post("/v1/completions", json=asked)
    problem = f"{field} asks for 8 {unit} of prompts in each of 2 samples = 16; at most 15 are allowed"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, problem)
