"""Invalid /generate bodies: the error names the field, the limit and the value. Valid ones: what the leader gets."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from pdserve.common.sampling import NEUTRAL_SAMPLING, LogprobParams, SamplingParams
from pdserve.configs.schema import DecodeConfig
from pdserve.scheduler.messages.frontend import Submit
from pdserve.server.api.common.fields import validate
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.openai.models import ChatBody
from tests.server.http_harness import RunningServer, load_byte_tokenizer, running_server
from tests.server.scripted_leader import make_finished, make_ready

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningServer]:
    config = DecodeConfig(
        max_prompt_tokens=300,
        max_new_tokens_limit=350,
        max_batch_items=4,
        max_body_bytes=20_000,
        bootstrap_allow=("p1",),
    )
    async with running_server(load_byte_tokenizer(tmp_path_factory.mktemp("bytes")), config) as running:
        yield running


def sampling(**params: object) -> dict[str, object]:
    return {"text": "hello", "sampling_params": params}


# (body, field in the error, parts of the message)
REFUSED: list[tuple[object, str | None, tuple[str, ...]]] = [
    ({}, "text", ("input_ids", "neither")),
    ({"text": None, "input_ids": None}, "text", ("neither",)),
    ({"text": "a", "input_ids": [1]}, "text", ("both",)),
    ({"text": ""}, "text", ("empty",)),
    ({"text": []}, "text", ("empty",)),
    ({"text": ["a", ""]}, "text[1]", ("empty",)),
    ({"text": 5}, "text", ("string", "5")),
    ({"text": {"a": 1}}, "text", ("string", "object")),
    ({"text": ["a", 5]}, "text[1]", ("string", "5")),
    ({"text": ["a"] * 5}, "text", ("5 prompts", "at most 4")),
    ({"input_ids": []}, "input_ids", ("empty",)),
    ({"input_ids": [[]]}, "input_ids[0]", ("empty",)),
    ({"input_ids": 7}, "input_ids", ("array of token ids", "7")),
    ({"input_ids": "abc"}, "input_ids", ("array of token ids", '"abc"')),
    ({"input_ids": [1, -1]}, "input_ids[1]", ("0 to 257", "-1")),
    ({"input_ids": [258]}, "input_ids[0]", ("0 to 257", "258")),
    ({"input_ids": [True]}, "input_ids[0]", ("integer", "true")),
    ({"input_ids": [1.0]}, "input_ids[0]", ("integer", "1.0")),
    ({"input_ids": [1, None]}, "input_ids[1]", ("integer", "null")),
    ({"input_ids": ["a"] * 1000}, "input_ids[0]", ("0 to 257", '"a"')),
    ({"input_ids": [[1], 2]}, "input_ids[1]", ("array of token ids", "2")),
    ({"input_ids": [10**30]}, "input_ids[0]", ("0 to 257",)),
    ({"input_ids": [[1]] * 5}, "input_ids", ("5 prompts", "at most 4")),
    ({"text": "a", "stream": "yes"}, "stream", ("true or false", '"yes"')),
    ({"text": "a", "stream": 1}, "stream", ("true or false", "1")),
    ({"text": "a", "rid": ""}, "rid", ("1 to 256", "0")),
    ({"text": "a", "rid": "r" * 257}, "rid", ("256", "257")),
    ({"text": "a", "rid": 5}, "rid", ("string", "5")),
    ({"text": "a", "rid": "a\nb"}, "rid", ("control characters",)),
    ({"text": "a", "rid": ["x"]}, "rid", ("array of 1", "single prompt")),
    ({"text": ["a", "b"], "rid": ["x"]}, "rid", ("array of 1", "2 prompts")),
    ({"text": "a", "sampling_params": 3}, "sampling_params", ("object", "3")),
    ({"text": "a", "sampling_params": [{}]}, "sampling_params", ("array of 1", "single prompt")),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params", ("array of 1", "2 prompts")),
    ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params[1].top_p", ("2.0",)),
    (sampling(max_new_tokens=0), "sampling_params.max_new_tokens", ("at least 1", "0")),
    (sampling(max_new_tokens=-3), "sampling_params.max_new_tokens", ("at least 1", "-3")),
    (sampling(max_new_tokens=1.5), "sampling_params.max_new_tokens", ("integer", "1.5")),
    (sampling(max_new_tokens="9"), "sampling_params.max_new_tokens", ("integer", '"9"')),
    (sampling(max_new_tokens=True), "sampling_params.max_new_tokens", ("integer", "true")),
    (
        sampling(max_new_tokens=351),
        "sampling_params.max_new_tokens",
        ("between 1 and 350", "351", "max_new_tokens_limit"),
    ),
    (sampling(max_new_tokens=10**40), "sampling_params.max_new_tokens", ("between 1 and 350",)),
    (sampling(temperature=-0.1), "sampling_params.temperature", ("at least 0", "-0.1")),
    (sampling(temperature="hot"), "sampling_params.temperature", ("number", '"hot"')),
    (sampling(temperature=10**400), "sampling_params.temperature", ("finite",)),
    (sampling(top_p=0), "sampling_params.top_p", ("above 0", "at most 1", "0.0")),
    (sampling(top_p=1.01), "sampling_params.top_p", ("above 0", "1.01")),
    (sampling(top_p=-1), "sampling_params.top_p", ("above 0", "-1.0")),
    (sampling(top_k=-2), "sampling_params.top_k", ("-1", "-2")),
    (sampling(top_k=2.5), "sampling_params.top_k", ("integer", "2.5")),
    (sampling(stop_token_ids=[258]), "sampling_params.stop_token_ids[0]", ("0 to 257", "258")),
    (sampling(stop_token_ids=5), "sampling_params.stop_token_ids", ("array", "5")),
    (sampling(stop_token_ids=[1] * 257), "sampling_params.stop_token_ids", ("257", "256")),
    (sampling(ignore_eos=1), "sampling_params.ignore_eos", ("true or false", "1")),
    (sampling(seed=-2), "sampling_params.seed", ("between -1 and", "-2")),
    (sampling(sampling_seed=2**63), "sampling_params.sampling_seed", ("between -1 and", str(2**63))),
    (sampling(stop=7), "sampling_params.stop", ("a string or an array of strings", "7")),
    (sampling(stop=[""]), "sampling_params.stop", ("1 to 256",)),
    (sampling(stop=["x"] * 17), "sampling_params.stop", ("17", "at most 16")),
    (sampling(stop="x" * 257), "sampling_params.stop", ("1 to 256", "257")),
    (sampling(stop=["x", 5]), "sampling_params.stop", ("string", "5")),
    (sampling(no_stop_trim="x"), "sampling_params.no_stop_trim", ("true or false", '"x"')),
    (sampling(skip_special_tokens=0), "sampling_params.skip_special_tokens", ("true or false", "0")),
    (sampling(min_p=-0.1), "sampling_params.min_p", ("between 0 and 1", "-0.1")),
    (sampling(min_p=1.5), "sampling_params.min_p", ("between 0 and 1", "1.5")),
    (sampling(min_p=True), "sampling_params.min_p", ("number", "true")),
    (sampling(repetition_penalty=0), "sampling_params.repetition_penalty", ("above 0 and at most 2", "0.0")),
    (sampling(repetition_penalty=2.1), "sampling_params.repetition_penalty", ("above 0 and at most 2", "2.1")),
    (sampling(presence_penalty=-2.5), "sampling_params.presence_penalty", ("between -2 and 2", "-2.5")),
    (sampling(presence_penalty="1"), "sampling_params.presence_penalty", ("number", '"1"')),
    (sampling(frequency_penalty=3), "sampling_params.frequency_penalty", ("between -2 and 2", "3.0")),
    (sampling(min_new_tokens=-1), "sampling_params.min_new_tokens", ("between 0 and 128", "-1")),
    (sampling(max_new_tokens=9, min_new_tokens=10), "sampling_params.min_new_tokens", ("between 0 and 9", "10")),
    (sampling(min_new_tokens=200), "sampling_params.min_new_tokens", ("between 0 and 128", "max_new_tokens is 128")),
    ({"text": "a", "temprature": 0}, "temprature", ("did you mean temperature, which belongs in sampling_params?",)),
    (sampling(logit_bias=[1]), "sampling_params.logit_bias", ("object", "array of 1")),
    (sampling(logit_bias={"a": 1}), "sampling_params.logit_bias", ("0 to 257", '"a"')),
    (sampling(logit_bias={"258": 1}), "sampling_params.logit_bias", ("0 to 257", '"258"')),
    (sampling(logit_bias={"-1": 1}), "sampling_params.logit_bias", ("0 to 257", '"-1"')),
    (sampling(logit_bias={"\u0663": 1}), "sampling_params.logit_bias", ("0 to 257",)),
    (sampling(logit_bias={"9" * 5000: 1}), "sampling_params.logit_bias", ("0 to 257", "characters")),
    (sampling(logit_bias={"7": 1, "07": 2}), "sampling_params.logit_bias", ("token 7 twice",)),
    (sampling(logit_bias={"7": 101}), "sampling_params.logit_bias.7", ("between -100 and 100", "101.0")),
    (sampling(logit_bias={"7": None}), "sampling_params.logit_bias.7", ("number", "null")),
    (sampling(logit_bias={str(i): 1 for i in range(1025)}), "sampling_params.logit_bias", ("1025", "at most 1024")),
    (sampling(n=0), "sampling_params.n", ("between 1 and 16", "0")),
    (sampling(n=17), "sampling_params.n", ("between 1 and 16", "17")),
    (sampling(n=1.5), "sampling_params.n", ("integer", "1.5")),
    (sampling(n=17.0), "sampling_params.n", ("between 1 and 16", "17")),
    (sampling(max_new_tokens=float(1 << 80)), "sampling_params.max_new_tokens", ("between 1 and 350",)),
    ({"text": "a", "lora_path": "adapter"}, "lora_path", ("not supported",)),
    (sampling(n=5), "sampling_params.n", ("1 prompt x 5 samples = 5", "at most 4")),
    ({"text": ["a", "b", "c"], "sampling_params": {"n": 2}}, "sampling_params.n", ("3 prompts x 2 samples = 6", "4")),
    ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "sampling_params[1].n", ("same", "2 and 1")),
    (sampling(n=2, seed=2**63 - 1), "sampling_params.seed", (str(2**63 - 2), str(2**63 - 1))),
    (sampling(regex=5), "sampling_params.regex", ("must be a string", "5")),
    (sampling(json_schema=[1]), "sampling_params.json_schema", ("must be a JSON schema", "an array")),
    (sampling(regex="a", ebnf="b"), "sampling_params.ebnf", ("cannot be combined", "sampling_params.regex")),
    (sampling(stop_regex=["a("]), "sampling_params.stop_regex", ("not a valid regular expression",)),
    ({"text": "a", "return_logprob": 1}, "return_logprob", ("true or false", "1")),
    ({"text": "a", "return_logprob": [True]}, "return_logprob", ("array of 1", "single prompt")),
    ({"text": ["a"], "return_logprob": ["x"]}, "return_logprob[0]", ("true or false", '"x"')),
    ({"text": "a", "top_logprobs_num": 21}, "top_logprobs_num", ("between 0 and 20", "21")),
    ({"text": ["a", "b"], "top_logprobs_num": [0, -1]}, "top_logprobs_num[1]", ("between 0 and 20", "-1")),
    ({"text": "abc", "logprob_start_len": 3}, "logprob_start_len", ("between -1 and 2", "3")),
    ({"text": "abc", "logprob_start_len": -2}, "logprob_start_len", ("between -1 and 2", "-2")),
    ({"text": "a", "return_text_in_logprobs": 1}, "return_text_in_logprobs", ("true or false", "1")),
    ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob", ("not supported",)),
    ({"text": "a", "priority": 101}, "priority", ("between -100 and 100", "101")),
    ({"text": "a", "priority": -101}, "priority", ("between -100 and 100", "-101")),
    ({"text": "a", "priority": "high"}, "priority", ("integer", '"high"')),
    ({"text": "a", "slo_ttft_ms": 0.5}, "slo_ttft_ms", ("between 1 and 3600000", "0.5")),
    ({"text": "a", "slo_ttft_ms": 3600001}, "slo_ttft_ms", ("between 1 and 3600000", "3600001")),
    ({"text": "a", "slo_itl_ms": 0}, "slo_itl_ms", ("between 1 and 3600000", "0.0")),
    ({"text": "a", "slo_itl_ms": 3600001}, "slo_itl_ms", ("between 1 and 3600000", "3600001")),
    ({"text": "a", "timeout_s": 0}, "timeout_s", ("above 0 and at most 86400", "0.0")),
    ({"text": "a", "timeout": -1}, "timeout", ("above 0", "-1.0")),
    ({"text": "a", "timeout": 86401}, "timeout", ("at most 86400", "86401.0")),
    ({"text": "a", "timeout": "10"}, "timeout", ("number", '"10"')),
    ({"text": "a", "bootstrap_room": -1}, "bootstrap_room", ("between 0 and", "-1")),
    ({"text": "a", "bootstrap_room": 2**63}, "bootstrap_room", ("between 0 and", str(2**63))),
    ({"text": "a", "bootstrap_room": "x"}, "bootstrap_room", ("integer", '"x"')),
    ({"text": ["a", "b"], "bootstrap_room": [1]}, "bootstrap_room", ("array of 1", "2 prompts")),
    ({"text": ["a", "b"], "bootstrap_room": [1, 1]}, "bootstrap_room", ("twice",)),
    ({"text": "a", "bootstrap_host": "a b"}, "bootstrap_host", ("host name", '"a b"')),
    ({"text": "a", "bootstrap_host": "p1", "bootstrap_port": 0}, "bootstrap_port", ("between 1 and 65535", "0")),
    ({"text": "a", "bootstrap_host": "10.9.8.7"}, "bootstrap_host", ("10.9.8.7", "--bootstrap-allow")),
    (sampling(temprature=0), "sampling_params.temprature", ("did you mean sampling_params.temperature?",)),
    (sampling(max_tokens=5), "sampling_params.max_tokens", ("did you mean sampling_params.max_new_tokens?",)),
    (sampling(field_of_tomorrow=0), "sampling_params.field_of_tomorrow", ("is not a field of this request",)),
    (
        {"text": ["a", "b"], "sampling_params": [{}, {"zzz": 1}]},
        "sampling_params[1].zzz",
        ("is not a field of this request",),
    ),
    (
        sampling(**{"z" * 900: 1}),
        f"sampling_params.{'z' * 60}... (900 characters)",
        ("is not a field of this request",),
    ),
    ({"text": "a", "max_new_tokens": 5}, "max_new_tokens", ("belongs in sampling_params",)),
    ({"text": "a", "temperature": 0}, "temperature", ("belongs in sampling_params",)),
    ({"text": "a", "sampling_parameters": {}}, "sampling_parameters", ("did you mean sampling_params?",)),
    ({"texts": "a"}, "texts", ("did you mean text?",)),
    ({"text": "a", "image_data": "x"}, "image_data", ("not supported", "only [] is accepted")),
    ([1, 2], None, ("JSON object", "array of 2")),
    ("text", None, ("JSON object", '"text"')),
]


@pytest.mark.parametrize(("body", "field", "words"), REFUSED)
async def test_invalid_field_is_refused_with_its_name_limit_and_value(
    server: RunningServer, body: object, field: str | None, words: tuple[str, ...]
) -> None:
    response = await server.http.post("/generate", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["code"] == "invalid_request"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    for word in words:
        assert word in error["message"]
    await server.leader.expect_nothing(for_s=0.02)


LONGEST = "this model's maximum context length is"


@pytest.mark.parametrize(
    ("body", "field", "problem"),
    [
        (
            {"text": "a" * 301},
            "text",
            f"has 301 tokens; {LONGEST} 300 prompt tokens on this server (max_prompt_tokens)",
        ),
        ({"text": ["a", "a" * 301]}, "text[1]", f"has 301 tokens; {LONGEST} 300 prompt tokens"),
        ({"input_ids": [1] * 301}, "input_ids", f"has 301 tokens; {LONGEST} 300 prompt tokens"),
        (
            {"text": "a" * 200, "sampling_params": {"max_new_tokens": 201}},
            "sampling_params.max_new_tokens",
            "is too large: 200 prompt tokens + 201 new tokens = 401; at most 200 new tokens fit: "
            f"{LONGEST} 400 tokens on this server, the size of its KV pool",
        ),
    ],
)
async def test_too_long_request_has_the_code_context_length_exceeded(
    server: RunningServer, body: object, field: str, problem: str
) -> None:
    response = await server.http.post("/generate", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert error["message"].startswith(f"{field} {problem}")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b'{"text": "a"} trailing',
        b'{"text": "\\ud800"}',
        b'{"text": "a", "sampling_params": {"temperature": NaN}}',
        b'{"text": "a", "sampling_params": {"temperature": Infinity}}',
        b'{"text": "a", "sampling_params": {"temperature": 1e999}}',
        b"[" * 5000,
    ],
)
async def test_malformed_json_is_a_400(server: RunningServer, raw: bytes) -> None:
    response = await server.http.post("/generate", content=raw)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] is None
    assert response.json()["error"]["message"].startswith("the body ")


async def test_empty_body_is_refused(server: RunningServer) -> None:
    response = await server.http.post("/generate")
    assert response.json()["error"]["message"] == "the body is empty; send a JSON object"


async def submitted(server: RunningServer, body: dict[str, object]) -> Submit:
    """The Submit of an accepted body."""
    asking = asyncio.create_task(server.http.post("/generate", json=body))
    submit = await server.leader.expect(Submit)
    await server.leader.send(*(make_finished(rid, 0) for rid in (submit.rid, *submit.more_rids)))
    assert (await asking).status_code == 200
    return submit


async def test_nulls_and_unknown_fields_take_the_defaults(server: RunningServer) -> None:
    call = (
        "rid",
        "stream",
        "bootstrap_room",
        "priority",
        "timeout",
        "timeout_s",
        "return_logprob",
        "logprob_start_len",
    )
    params = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "seed")
    more = ("stop", "n", "logit_bias", "min_new_tokens", "presence_penalty", "repetition_penalty", "no_stop_trim")
    submit = await submitted(
        server,
        {
            "text": "hello",
            "field_of_tomorrow": [1],
            "model": "bytes",
            "custom_labels": {"tenant": "a"},
            "sampling_params": {"spaces_between_special_tokens": False, **dict.fromkeys(params + more)},
            **dict.fromkeys(call),
        },
    )
    assert submit.sampling == SamplingParams(seed=submit.sampling.seed)
    assert submit == Submit(submit.rid, tuple(b"hello"), submit.sampling, client="127.0.0.1")


PARAMS: dict[str, object] = {
    "max_new_tokens": 7,
    "temperature": 0,
    "top_p": 0.5,
    "top_k": 40,
    "stop_token_ids": [1, 2],
    "ignore_eos": True,
    "sampling_seed": 11,
    "min_p": 0.25,
    "repetition_penalty": 2,
    "presence_penalty": -2,
    "frequency_penalty": 0.5,
    "logit_bias": {"257": -100, "7": 0.5},
    "min_new_tokens": 7,
    "n": 2,
}


async def test_given_values_reach_the_leader(server: RunningServer) -> None:
    body = {"input_ids": [3, 4], "rid": "mine", "sampling_params": PARAMS, "priority": -100, "timeout": 2.5}
    submit = await submitted(server, body | {"bootstrap_host": "p1", "bootstrap_room": 2**63 - 1})
    assert submit == Submit(
        rid="mine",
        prompt_ids=(3, 4),
        sampling=SamplingParams(
            max_new_tokens=7,
            temperature=0.0,
            top_p=0.5,
            top_k=40,
            stop_token_ids=(1, 2),
            ignore_eos=True,
            seed=11,
            min_p=0.25,
            repetition_penalty=2.0,
            presence_penalty=-2.0,
            frequency_penalty=0.5,
            logit_bias=((7, 0.5), (257, -100.0)),
            min_new_tokens=7,
        ),
        endpoint="p1:8998",
        room=2**63 - 1,
        timeout_s=2.5,
        more_rids=("mine_1",),
        priority=-100,
        client="127.0.0.1",
    )


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"return_logprob": False, "top_logprobs_num": 3}, None),
        ({"return_logprob": True}, LogprobParams()),
        ({"return_logprob": True, "top_logprobs_num": 20, "logprob_start_len": -1}, LogprobParams(top=20)),
        ({"return_logprob": True, "logprob_start_len": 0}, LogprobParams(start=0)),
        ({"return_logprob": True, "logprob_start_len": 4}, LogprobParams(start=4)),
    ],
)
async def test_logprob_fields_reach_the_leader(
    server: RunningServer, given: dict[str, object], wanted: LogprobParams | None
) -> None:
    assert (await submitted(server, {"text": "hello", **given})).logprobs == wanted


async def test_limits_on_latency_reach_the_leader(server: RunningServer) -> None:
    submit = await submitted(server, {"text": "a", "slo_ttft_ms": 1, "slo_itl_ms": 3_600_000})
    assert (submit.slo_ttft_ms, submit.slo_itl_ms) == (1.0, 3_600_000.0)


async def test_timeout_s_takes_precedence_over_timeout(server: RunningServer) -> None:
    assert (await submitted(server, {"text": "a", "timeout": 9, "timeout_s": 1})).timeout_s == 1.0


async def test_default_length_of_a_chat_is_what_fits() -> None:
    """The default of max_tokens is all that fits, as in vLLM and SGLang: reasoning models write thousands of tokens."""
    limits = Limits.of(DecodeConfig(), make_ready(max_total_tokens=4000), NEUTRAL_SAMPLING)
    limits = dataclasses.replace(limits, max_total_tokens=4000, max_new_tokens=3500)
    messages = [{"role": "user", "content": "hello"}]
    found = [
        validate(ChatBody, {"messages": messages, **given}).sampling(NEUTRAL_SAMPLING, limits, prompt_tokens, "")
        for given, prompt_tokens in (({}, 1000), ({}, 100), ({"n": 2}, 100), ({"max_tokens": 7}, 100))
    ]
    assert [sampling.max_new_tokens for sampling in found] == [3000, 3500, 1024, 7]


async def test_default_max_new_tokens_is_reduced_to_what_fits(server: RunningServer) -> None:
    submit = await submitted(server, {"input_ids": [1] * 300})
    assert submit.sampling.max_new_tokens == 100  # 400 tokens fit the pool


@pytest.mark.parametrize(("given", "kept"), [(-1, None), (0, None), (1, 1), (257, 257), (258, None), (10**30, None)])
async def test_top_k_of_the_whole_vocabulary_is_none(server: RunningServer, given: int, kept: int | None) -> None:
    submit = await submitted(server, {"text": "a", "sampling_params": {"top_k": given}})
    assert submit.sampling.top_k == kept


async def test_requests_without_a_seed_get_different_seeds(server: RunningServer) -> None:
    seeds = {(await submitted(server, {"text": "a"})).sampling.seed for _ in range(3)}
    assert len(seeds) == 3


async def test_integral_floats_are_accepted_as_integers(server: RunningServer) -> None:
    """Languages with a single number type write 3.0 for 3; SGLang and OpenAI accept it."""
    params = {"max_new_tokens": 3.0, "min_new_tokens": 1.0, "top_k": 5.0, "seed": 7.0, "n": 1.0}
    body = {"text": "a", "priority": 2.0, "lora_path": "", "sampling_params": params}
    asking = asyncio.create_task(server.http.post("/generate", json=body))
    submit = await server.leader.expect(Submit)
    await server.leader.send(make_finished(submit.rid, 0))
    assert (await asking).status_code == 200
    wanted = submit.sampling
    assert (wanted.max_new_tokens, wanted.min_new_tokens, wanted.top_k, wanted.seed) == (3, 1, 5, 7)
    assert (submit.priority, type(wanted.max_new_tokens)) == (2, int)
