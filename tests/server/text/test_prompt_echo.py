"""`echo` of /v1/completions: the prompt before the output, whole and in a stream, as text and as ids."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from pdserve.common.sampling import LogprobParams, TokenLogprob, pack_logprobs
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.frontend import Prefilled, Submit, Tokens
from pdserve.server.text.prompt_echo import Echo, make_echo
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.http_harness import RunningServer, running_server, sse_events, write_byte_model
from tests.server.scripted_leader import make_finished

CRAB = "🦀".encode()


def scored(tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, -token / 100, ((token, -token / 100),)) for token in tokens)


async def answer(server: RunningServer, data: bytes) -> None:
    """Send log-probabilities of the next prompt, then `data` token by token."""
    submit = await server.leader.expect(Submit)
    assert submit.logprobs == LogprobParams(top=1, start=0)
    first, *rest = submit.prompt_ids
    for rid in (submit.rid, *submit.more_rids):
        await server.leader.send(Prefilled(rid, 0, pack_logprobs([TokenLogprob(first, None), *scored(rest)])))
        for token in data:
            await server.leader.send(Tokens(rid, (token,), scored([token])))
            await server.report()
        await server.leader.send(make_finished(rid, len(data)))


def joined(choices: Sequence[dict[str, Any]]) -> tuple[str, dict[str, list[object]]]:
    """Text and log-probability columns of one choice, joined over its chunks."""
    columns = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    parts = {column: [entry for choice in choices for entry in choice["logprobs"][column]] for column in columns}
    return "".join(choice["text"] for choice in choices), parts


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_precedes_every_sample_of_every_prompt(tokenizer: Tokenizer, stream: bool) -> None:
    async with running_server(tokenizer) as server:
        body = {"prompt": ["a🦀", "b"], "n": 2, "logprobs": 1, "echo": True, "stream": stream}
        asking = asyncio.create_task(server.http.post("/v1/completions", json=body))
        await answer(server, CRAB)
        await answer(server, b"!")
        response = await asking
        if stream:
            events: list[Any] = sse_events(response.text)[:-1]
            choices = [choice for event in events for choice in event["choices"]]
        else:
            choices = response.json()["choices"]
        crabs = [f"bytes:\\x{byte:02x}" for byte in CRAB]
        for index in (0, 1):
            text, logprobs = joined([choice for choice in choices if choice["index"] == index])
            assert text == "a🦀🦀"
            assert logprobs["tokens"] == ["a", *crabs, *crabs]
            assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2, 2, 2, 2]
            assert logprobs["token_logprobs"] == [None, *(-byte / 100 for byte in CRAB * 2)]
            assert logprobs["top_logprobs"][:2] == [None, {crabs[0]: -2.4}]
        for index in (2, 3):
            text, logprobs = joined([choice for choice in choices if choice["index"] == index])
            assert (text, logprobs["text_offset"]) == ("b!", [0, 1])


async def test_echo_without_logprobs_returns_only_text(tokenizer: Tokenizer) -> None:
    async with running_server(tokenizer) as server:
        body = {"prompt": [257, 98], "echo": True, "stop": "b", "max_tokens": 3}
        asking = asyncio.create_task(server.http.post("/v1/completions", json=body))
        submit = await server.leader.expect(Submit)
        assert submit.logprobs is None
        await server.leader.send(Tokens(submit.rid, tuple(b"xyz")), make_finished(submit.rid, 3))
        choice = (await asking).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]) == ("<bos>bxyz", None), "stop strings do not apply to the prompt"


def test_token_added_by_the_tokenizer_is_not_in_the_text(tmp_path: Path) -> None:
    file = str(write_byte_model(tmp_path) / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 257)])
    backend.save(file)
    adding = load_tokenizer(locate_model(str(tmp_path)))
    ids = adding.encode("ab<eos>c")
    assert ids == [257, 97, 98, 256, 99]
    assert make_echo("ab<eos>c", ids, adding) == Echo("ab<eos>c", (0, 0, 1, 2, 7))
    assert make_echo(ids, ids, adding) == Echo("<bos>ab<eos>c", (0, 5, 6, 7, 12))
