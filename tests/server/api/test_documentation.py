"""/openapi.json and /docs: every route is described, and replies of the server match the description."""

import asyncio
from typing import Any

import jsonschema
import msgspec
import pytest
from pydantic import SecretStr, TypeAdapter

from pdserve.common.sampling import TokenLogprob, pack_logprobs
from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Failed, FinishReason, Prefilled, Submit, Tokens
from pdserve.server.api.common.errors import ErrorReply
from pdserve.server.api.generate.models import GenerateReply, GenerateResult
from pdserve.server.api.info import Health, Load, ModelInfo, ModelList, ServerReport
from pdserve.server.api.openai.models import ChatChunk, ChatCompletion, Completion, StreamError
from pdserve.server.api.tokenize import TokenizeReply
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server, sse_events
from tests.server.scripted_leader import EOS, make_finished

HELLO = [{"role": "user", "content": "Hello"}]


def check(type_: Any, value: object) -> None:
    """Validation drops fields that the type does not declare, so the result must equal the value."""
    validated = TypeAdapter(type_).validate_python(value)
    assert msgspec.json.decode(msgspec.json.encode(validated)) == value


async def fetch_schema(server: RunningServer) -> Any:
    response = await server.http.get("/openapi.json")
    assert response.status_code == 200, response.text
    return response.json()


async def test_openapi_describes_every_route(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer, DecodeConfig(api_key=SecretStr("key"))) as server:
        document = await fetch_schema(server)
        page = await server.http.get("/docs")
    assert (page.status_code, "openapi.json" in page.text) == (200, True)
    bodies = {
        path: item["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
        for path, item in document["paths"].items()
        if "requestBody" in item.get("post", {})
    }
    assert bodies == {
        "/generate": "GenerateBody",
        "/v1/completions": "CompletionBody",
        "/v1/chat/completions": "ChatBody",
        "/v1/responses": "ResponsesBody",
        "/v1/messages": "MessagesBody",
        "/v1/messages/count_tokens": "CountTokensBody",
        "/tokenize": "TokenizeBody",
        "/detokenize": "DetokenizeBody",
        "/abort_request": "AbortBody",
        "/role": "RoleBody",
    }
    for path, item in document["paths"].items():
        for operation in item.values():
            assert operation["summary"], path
            assert operation["responses"]["200"]["content"], path
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert "text/event-stream" in document["paths"][path]["post"]["responses"]["200"]["content"]


async def test_openapi_has_limits_and_descriptions_of_fields(decode: RunningServer) -> None:
    schemas = (await fetch_schema(decode))["components"]["schemas"]
    top_p = schemas["NativeSampling"]["properties"]["top_p"]
    assert top_p["anyOf"][0] == {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    for name in ("GenerateBody", "NativeSampling", "CompletionBody"):
        properties = schemas[name]["properties"]
        assert [field for field, schema in properties.items() if "description" not in schema] in (
            [],
            ["stream_options"],
        )


async def test_openapi_refers_only_to_schemas_that_it_has(decode: RunningServer) -> None:
    document = await fetch_schema(decode)

    def references(value: object) -> set[str]:
        if isinstance(value, list):
            return {name for item in value for name in references(item)}
        if not isinstance(value, dict):
            return set()
        own = {value["$ref"].rsplit("/", 1)[1]} if isinstance(value.get("$ref"), str) else set()
        return own | {name for item in value.values() for name in references(item)}

    assert references(document) <= document["components"]["schemas"].keys()


async def test_errors_of_every_route_validate_against_their_schema(decode: RunningServer) -> None:
    """Those of /v1/messages have Anthropic's shape."""
    document = await fetch_schema(decode)
    schemas = {"components": document["components"]}
    paths = [path for path, item in document["paths"].items() if "post" in item and path != "/flush_cache"]
    for path in paths:
        response = await decode.http.post(path, content=b"not JSON")
        described = document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]
        assert response.is_error, path
        jsonschema.validate(response.json(), {**described, **schemas})
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"detail": "not an error of this server"}, {**described, **schemas})
    assert {"/v1/messages", "/v1/messages/count_tokens", "/generate"} <= set(paths)


@pytest.mark.parametrize(
    ("path", "body", "whole", "event"),
    [
        (
            "/generate",
            {"text": ["a", "b"], "rid": "c", "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 0},
            GenerateReply,
            GenerateResult,
        ),
        ("/v1/completions", {"prompt": ["a", "b"], "rid": "c", "logprobs": 1, "echo": True}, Completion, Completion),
        (
            "/v1/chat/completions",
            {"messages": HELLO, "n": 2, "rid": "c", "logprobs": True, "top_logprobs": 1},
            ChatCompletion,
            ChatChunk,
        ),
    ],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_replies_and_stream_events_validate_against_their_models(
    decode: RunningServer, path: str, body: dict[str, object], whole: Any, event: Any, fails: bool
) -> None:
    rids = ("c", "c_1") if "n" in body else ("c_0", "c_1")
    for stream in (False, True):
        usage = {"stream_options": {"include_usage": True}} if path != "/generate" and stream else {}
        asking = asyncio.create_task(decode.http.post(path, json={**body, "stream": stream, **usage}))
        for _ in range(1 if "n" in body else 2):
            await decode.leader.expect(Submit)
        for rid in rids:
            await decode.leader.send(Prefilled(rid, 0, pack_logprobs([TokenLogprob(97, None)])))
            await decode.leader.send(Tokens(rid, (65,), (TokenLogprob(65, -0.5, ((65, -0.5),)),)))
        await decode.report()
        await decode.leader.send(make_finished(rids[0], 1))
        failed = Failed(rids[1], 503, "unavailable", "prefill lost")
        await decode.leader.send(failed if fails else make_finished(rids[1], 1, FinishReason("stop", matched=EOS)))
        response = await asking
        if not stream:
            check(ErrorReply if fails else whole, response.json())
            continue
        *events, done = sse_events(response.text)
        assert done == "[DONE]"
        for data in events:
            assert isinstance(data, dict)
            check(StreamError if path != "/generate" and "error" in data else event, data)


async def test_information_replies_validate_against_their_models(decode: RunningServer) -> None:
    replies = {"/health": Health, "/model_info": ModelInfo, "/server_info": ServerReport, "/v1/models": ModelList}
    for path, type_ in {**replies, "/get_load": list[Load]}.items():
        check(type_, (await decode.http.get(path)).json())
    check(TokenizeReply, (await decode.http.post("/tokenize", json={"prompt": "a"})).json())


def test_check_fails_for_a_field_that_is_not_declared() -> None:
    with pytest.raises(AssertionError):
        check(TokenizeReply, {"tokens": [1], "count": 1, "max_model_len": 1, "extra": 1})
