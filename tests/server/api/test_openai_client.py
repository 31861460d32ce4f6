"""OpenAI's client against the real application: responses, streams, errors, retries and disconnects."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import openai
import pytest
from pydantic import SecretStr

from pdserve.common.sampling import LogprobParams, TokenLogprob, pack_logprobs
from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Cancel, Failed, FinishReason, Prefilled, Submit, Tokens
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server
from tests.server.scripted_leader import EOS, make_finished


@pytest.fixture
async def decode(tokenizer: Tokenizer) -> AsyncIterator[RunningServer]:
    async with running_server(tokenizer, DecodeConfig(api_key=SecretStr("right"))) as server:
        yield server


@pytest.fixture
async def client(decode: RunningServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(decode) as made:
        yield made


@asynccontextmanager
async def client_of(
    server: RunningServer, *, path: str = "/v1", api_key: str = "right", max_retries: int = 0
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{server.port}{path}",
        api_key=api_key,
        max_retries=max_retries,
        timeout=10,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    ) as made:
        yield made


def scored(tokens: Iterable[int]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of -id / 100; the only alternative is the token itself."""
    return tuple(TokenLogprob(token, -token / 100, ((token, -token / 100),)) for token in tokens)


async def test_chat(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    asking = asyncio.create_task(
        client.chat.completions.create(
            model="any",
            messages=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            max_completion_tokens=5,
            seed=7,
            store=False,
            user="somebody",
            metadata={"a": "b"},
        )
    )
    submit = await decode.leader.expect(Submit)
    assert bytes(submit.prompt_ids).decode() == "system: Be brief.\nuser: Hello\nassistant: "
    assert (submit.sampling.max_new_tokens, submit.sampling.seed) == (5, 7)
    finished = make_finished(submit.rid, 3, FinishReason("stop", matched=EOS))
    await decode.leader.send(Tokens(submit.rid, (*b"Hi", EOS)), finished)
    completion = await asking
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("Hi", "stop")
    assert (completion.model, completion.id, completion._request_id) == ("bytes", f"chatcmpl-{submit.rid}", submit.rid)
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens, completion.usage.total_tokens) == (
        5,
        3,
        8,
    )


async def test_stream_helper_assembles_chunks(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    """The helper checks that chunks are consistent: roles, indices, log-probabilities, finish reasons, usage."""

    async def ask() -> openai.types.chat.ParsedChatCompletion[None]:
        async with client.chat.completions.stream(
            model="any",
            messages=[{"role": "user", "content": "Hello"}],
            n=2,
            logprobs=True,
            top_logprobs=1,
            stream_options={"include_usage": True},
        ) as stream:
            return await stream.get_final_completion()

    asking = asyncio.create_task(ask())
    submit = await decode.leader.expect(Submit)
    rids = (submit.rid, *submit.more_rids)
    for token in "Aé".encode():
        for rid in rids:
            await decode.leader.send(Tokens(rid, (token,), scored([token])))
        await decode.report()
    for rid in rids:
        await decode.leader.send(make_finished(rid, 3, FinishReason("stop", matched=EOS)))
    completion = await asking
    for choice in completion.choices:
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Aé", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert [bytes(entry.bytes or ()) for entry in choice.logprobs.content] == [b"A", b"\xc3", b"\xa9"]
    assert [choice.index for choice in completion.choices] == [0, 1]
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 6


async def test_echo_returns_logprobs_of_the_prompt(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    """A request of lm-evaluation-harness: it needs the log-probabilities of the prompt and generates one token."""
    asking = asyncio.create_task(
        client.completions.create(model="any", prompt="ab", max_tokens=1, temperature=0, logprobs=1, echo=True)
    )
    submit = await decode.leader.expect(Submit)
    assert submit.logprobs == LogprobParams(top=1, start=0)
    await decode.leader.send(Prefilled(submit.rid, 0, pack_logprobs([TokenLogprob(97, None), *scored(b"b")])))
    await decode.leader.send(Tokens(submit.rid, (33,), scored(b"!")), make_finished(submit.rid, 1))
    choice = (await asking).choices[0]
    assert choice.text == "ab!"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [None, -0.98, -0.33]
    assert choice.logprobs.top_logprobs == [None, {"b": -0.98}, {"!": -0.33}]


async def test_closing_a_stream_aborts_its_request(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    stream_options: openai.types.chat.ChatCompletionStreamOptionsParam = {"include_usage": True}
    asking = asyncio.create_task(
        client.completions.create(model="any", prompt="a", stream=True, stream_options=stream_options)
    )
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Tokens(submit.rid, (65,)))
    stream = await asking
    assert (await anext(aiter(stream))).choices[0].text == "A"
    await stream.close()
    assert await decode.leader.expect(Cancel) == Cancel(submit.rid)


async def test_client_timeout_aborts_its_request(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(model="any", prompt="a", timeout=openai.Timeout(10, read=0.2))
    submit = await decode.leader.expect(Submit)
    assert await decode.leader.expect(Cancel) == Cancel(submit.rid)


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["bytes"]
    assert (await client.models.retrieve("bytes")).owned_by == "sglang"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_unknown_routes_raise_not_found_with_a_hint(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.embeddings.create(model="bytes", input="a")
    assert caught.value.code == "not_found"
    async with client_of(decode, path="") as without_v1:
        with pytest.raises(openai.NotFoundError, match=r"did you mean /v1/chat/completions\?"):
            await without_v1.chat.completions.create(model="any", messages=[])
    for path in ("/generate/", "/v1/completions//"):
        response = await decode.http.post(path, json={"text": "a"})
        assert response.status_code == 404, (
            "not a redirect: clients do not follow it with POST, and curl does not show it"
        )
        assert response.json()["error"]["message"].endswith(f"did you mean {path.rstrip('/')}?")


async def test_bad_request_error_names_the_field(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature must be at least 0") as caught:
        await client.completions.create(model="any", prompt="a", temperature=-1)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        "temperature",
        "invalid_request",
        "invalid_request_error",
    )


async def test_too_long_prompt_raises_context_length_exceeded(client: openai.AsyncOpenAI) -> None:
    """Clients that then shorten their history look for this code or for OpenAI's wording."""
    with pytest.raises(openai.BadRequestError, match="this model's maximum context length is 400 tokens") as caught:
        await client.completions.create(model="any", prompt="a" * 401)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


async def test_wrong_key_raises_authentication_error(decode: RunningServer) -> None:
    async with client_of(decode, api_key="wrong") as stranger:
        with pytest.raises(openai.AuthenticationError) as caught:
            await stranger.models.list()
    assert caught.value.code == "unauthorized"


async def test_overload_raises_rate_limit_error(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    asking = asyncio.create_task(client.completions.create(model="any", prompt="a"))
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Failed(submit.rid, 429, "overloaded", "prompts are queued already", retry_after_s=2.0))
    with pytest.raises(openai.RateLimitError) as caught:
        await asking
    assert (caught.value.code, caught.value.request_id) == ("overloaded", submit.rid)
    assert caught.value.response.headers["retry-after"] == "2"


async def test_client_does_not_retry_after_a_deadline(decode: RunningServer) -> None:
    """By default the client retries after every 5xx. A request that took too long would take too long again."""
    async with client_of(decode, max_retries=2) as patient:
        asking = asyncio.create_task(patient.completions.create(model="any", prompt="a"))
        submit = await decode.leader.expect(Submit)
        await decode.leader.send(Failed(submit.rid, 504, "deadline", "not finished after 1.0 s"))
        with pytest.raises(openai.InternalServerError, match=r"not finished after 1\.0 s") as caught:
            await asking
        assert (caught.value.code, caught.value.request_id) == ("deadline", submit.rid)
        await decode.leader.expect_nothing()


async def test_failure_in_a_stream_is_raised(decode: RunningServer, client: openai.AsyncOpenAI) -> None:
    asking = asyncio.create_task(client.completions.create(model="any", prompt="a", stream=True))
    submit = await decode.leader.expect(Submit)
    await decode.leader.send(Tokens(submit.rid, (65,)))
    stream = aiter(await asking)
    await anext(stream)
    await decode.leader.send(Failed(submit.rid, 503, "unavailable", "prefill was lost"))
    with pytest.raises(openai.APIError, match="prefill was lost") as caught:
        await anext(stream)
    assert caught.value.code == "unavailable"
