"""The response of a prefill server to a routed request: a router sends the same body to prefill and decode."""

from typing import Any

import pytest

from pdserve.common.sampling import NEUTRAL_SAMPLING
from pdserve.configs.schema import PrefillConfig
from pdserve.server.api.service.service import Service
from pdserve.server.engine.grammar_checker import GrammarChecker
from pdserve.server.text.tokenizer import Tokenizer
from tests.server import http_harness
from tests.server.http_harness import RunningServer, running_server, sse_events
from tests.server.scripted_leader import CONTEXT_LENGTH

ROOM = {"bootstrap_host": "p1", "bootstrap_port": 9000, "bootstrap_room": 7}
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"text": "abc"},
    "/v1/completions": {"prompt": "abc"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {}),
    ("/generate", {"text": ""}),
    ("/generate", {"text": "abc", "sampling_params": {"top_p": 2.0}}),
    ("/generate", {"text": "abc", "sampling_params": {"temprature": 1}}),
    ("/generate", {"text": "abc", "sampling_params": {"max_new_tokens": CONTEXT_LENGTH + 1}}),
    ("/generate", {"text": "abc", "lora_path": "x"}),
    ("/generate", {"input_ids": [1, 999]}),
    ("/generate", {"text": "a" * (CONTEXT_LENGTH + 1)}),
    ("/generate", {"text": ["a", "b"], "bootstrap_room": [7]}),
    ("/generate", {"text": "abc", "bootstrap_room": -1}),
    ("/generate", {"text": "abc", "rid": ""}),
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": "abc", "suffix": "x"}),
    ("/v1/completions", {"prompt": "abc", "max_new_tokens": 4}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 4}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}),
]


@pytest.mark.parametrize(("path", "body"), WRONG)
async def test_prefill_and_decode_refuse_a_body_with_the_same_error(
    decode: RunningServer, prefill: RunningServer, path: str, body: dict[str, Any]
) -> None:
    decoded, prefilled = [await server.http.post(path, json=ROOM | body) for server in (decode, prefill)]
    assert decoded.status_code == prefilled.status_code == 400
    # messages differ when the pool is the limit: on decode it holds prompt and output, on prefill only prompts
    assert decoded.json()["error"] | {"message": ""} == prefilled.json()["error"] | {"message": ""}


@pytest.mark.parametrize("path", GOOD)
async def test_prefill_responds_at_once_without_the_engine(prefill: RunningServer, path: str) -> None:
    """It does not wait for a decode server to request the room: the decode server answers the client."""
    response = await prefill.http.post(path, json=ROOM | GOOD[path])
    assert response.status_code == 200
    answer = response.json()
    tokens = answer["meta_info"] if path == "/generate" else answer["usage"]
    assert (tokens["completion_tokens"], tokens["prompt_tokens"] >= 3) == (0, True)
    await prefill.leader.expect_nothing(for_s=0.05)


@pytest.mark.parametrize("path", GOOD)
async def test_prefill_responds_to_a_streamed_body_with_a_stream(prefill: RunningServer, path: str) -> None:
    response = await prefill.http.post(path, json=ROOM | GOOD[path] | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = sse_events(response.text)
    assert events
    assert done == "[DONE]"


async def test_list_of_prompts_takes_a_list_of_rooms(prefill: RunningServer) -> None:
    body = {"text": ["a", "b"], "bootstrap_room": [7, 9], "stream": True}
    events: list[Any] = sse_events((await prefill.http.post("/generate", json=body)).text)
    assert events.pop() == "[DONE]"
    assert sorted(event["index"] for event in events) == [0, 1]


@pytest.mark.parametrize("path", GOOD)
async def test_prefill_needs_a_room(prefill: RunningServer, path: str) -> None:
    response = await prefill.http.post(path, json=GOOD[path])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bootstrap_room")


async def test_prefill_response_has_the_fields_that_routers_merge(prefill: RunningServer) -> None:
    body = ROOM | {"text": "abc", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0}
    answer = (await prefill.http.post("/generate", json=body)).json()
    assert (answer["meta_info"]["input_token_logprobs"], answer["meta_info"]["input_top_logprobs"]) == ([], [])


async def test_echo_with_logprobs_is_accepted_on_prefill(prefill: RunningServer) -> None:
    body = ROOM | {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1}
    assert (await prefill.http.post("/v1/completions", json=body)).status_code == 200


async def test_output_length_is_not_limited_by_the_pool_of_prefill(
    decode: RunningServer, prefill: RunningServer
) -> None:
    """Both pools hold 400 tokens, less than the context of 512. On prefill this limits only prompts."""
    body = ROOM | {"text": "a" * 300, "sampling_params": {"max_new_tokens": 200}}
    assert (await decode.http.post("/generate", json=body)).status_code == 400
    assert (await prefill.http.post("/generate", json=body)).status_code == 200
    await decode.leader.expect_nothing(for_s=0.05)


@pytest.mark.parametrize("room", [ROOM, {}], ids=["of a router", "of a client"])
async def test_request_for_decode_is_refused_if_the_role_changes_while_its_grammar_is_compiled(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, room: dict[str, Any]
) -> None:
    """A prefill server would answer that of a router with an empty text, and that of a client with 400."""
    services: list[Service] = []

    def made(*arguments: Any) -> Service:
        services.append(Service(*arguments))
        return services[0]

    async def switch(*_: object) -> None:
        (service,) = services
        service.serve(PrefillConfig(), service.leader, NEUTRAL_SAMPLING)

    monkeypatch.setattr(http_harness, "Service", made)
    monkeypatch.setattr(GrammarChecker, "check", switch)
    async with running_server(tokenizer) as server:
        response = await server.http.post("/generate", json=room | {"text": "abc", "sampling_params": {"regex": "a"}})
    assert services[0].config.role == "prefill"
    assert (response.status_code, "has switched from decode to prefill" in response.text) == (503, True)
