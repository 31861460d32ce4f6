"""Sampling defaults from a checkpoint's generation_config.json; fields of a request override them."""

import asyncio
import json
import logging
from pathlib import Path

import pytest

from pdserve.common.errors import StartupError
from pdserve.common.sampling import NEUTRAL_SAMPLING, SamplingParams
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.frontend import Submit
from pdserve.server.api.default_sampling import read_default_sampling
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import RunningServer, running_server, write_byte_model
from tests.server.scripted_leader import VOCAB_SIZE, make_finished

QWEN3 = {
    "bos_token_id": 0,
    "do_sample": True,
    "eos_token_id": [1, 2],
    "pad_token_id": None,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "transformers_version": "4.51.0",
}


def recommended(directory: Path, generation_config: object) -> SamplingParams:
    write_byte_model(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return read_default_sampling(locate_model(str(directory)))


def test_sampling_defaults_are_read_from_the_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert recommended(tmp_path, QWEN3) == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
    assert "temperature 0.6, top_p 0.95, top_k 20" in caplog.text
    everything = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.1, "repetition_penalty": 1.05}
    expected = SamplingParams(temperature=0.0, min_p=0.1, repetition_penalty=1.05)
    assert recommended(tmp_path, everything) == expected
    assert recommended(tmp_path, {"top_k": VOCAB_SIZE}).top_k is None
    assert recommended(tmp_path, {"eos_token_id": 5}) == NEUTRAL_SAMPLING


def test_sampling_defaults_are_neutral_without_a_generation_config(tmp_path: Path) -> None:
    assert read_default_sampling(locate_model(str(write_byte_model(tmp_path)))) == NEUTRAL_SAMPLING


def test_embedded_model_has_the_sampling_defaults_of_its_authors() -> None:
    assert read_default_sampling(locate_model("smollm2")) == SamplingParams(temperature=0.2, top_p=0.9)


def test_invalid_sampling_default_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"generation_config\.json: top_p must be above 0.*--sampling-defaults"):
        recommended(tmp_path, {"top_p": 0})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}),
        ({"temperature": 0}, {"temperature": 0.0, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}),
        ({"top_k": -1, "top_p": 1}, {"temperature": 0.6, "top_k": None, "top_p": 1.0, "repetition_penalty": 1.1}),
        ({"top_k": 5, "repetition_penalty": 1}, {"top_k": 5, "repetition_penalty": 1.0}),
    ],
)
async def test_request_fields_override_the_sampling_defaults(
    tokenizer: Tokenizer, given: dict[str, float], expected: dict[str, float | None]
) -> None:
    default = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    bodies = {
        "/generate": {"text": "a", "sampling_params": given},
        "/v1/completions": {"prompt": "a", **given},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], **given},
    }
    async with running_server(tokenizer, default_sampling=default) as server:
        for path, body in bodies.items():
            sampling = (await submitted(server, path, body)).sampling
            assert {name: getattr(sampling, name) for name in expected} == expected, path
            assert (sampling.min_p, sampling.presence_penalty, sampling.ignore_eos) == (0.0, 0.0, False)


async def submitted(server: RunningServer, path: str, body: object) -> Submit:
    """The Submit that the leader gets; the leader finishes it without tokens."""
    posting = asyncio.create_task(server.http.post(path, json=body))
    submit = await server.leader.expect(Submit)
    await server.leader.send(make_finished(submit.rid, 0))
    assert (await posting).status_code == 200
    return submit
