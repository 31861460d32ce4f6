"""Structured output and tools of the embedded model through a real pair: the fields of OpenAI, SGLang and vLLM."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from pdserve.common.sampling import Grammar
from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import load_smollm2_reference
from tests.clients.sglang_contracts import matched_stops, models, prefilled_answers, regexes
from tests.cluster.greedy import is_masked_greedy
from tests.cluster.servers import HTTP, Server, cluster
from tests.random_schemas import random_schema, without_bounds

SCHEMAS = min(200, int(os.environ.get("PDSERVE_SCHEMAS", "5")))
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee"]}, "maxItems": 2},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
CITIES = 'root ::= city | city " is in " country\ncity ::= "Paris" | "Berlin"\ncountry ::= "France" | "Germany"'
QUESTION: list[Any] = [{"role": "user", "content": "Describe a person as JSON with name, age and likes."}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: int = pydantic.Field(ge=0, le=120)
    mood: Literal["happy", "sad"]


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with cluster(tmp_path_factory.mktemp("smollm2")) as started:
        pool = ("--kv-tokens", "4096")
        prefill, decode = started.pair("smollm2", ("--chunk-size", "64", *pool), pool)
        yield decode
        prefill.check_clean()
        decode.check_clean()


@pytest.fixture
def client(decode: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{decode.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2"))


def generate(decode: Server, text: str = "Q: Which city? A:", **sampling: Any) -> Any:
    params = {"max_new_tokens": 80, "temperature": 0, **sampling}
    response = HTTP.post(f"{decode.url}/generate", json={"text": text, "sampling_params": params}, timeout=120)
    assert response.is_success, response.text
    return response.json()


def test_parse_method_of_the_openai_client(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="any", messages=QUESTION, response_format=Person, temperature=0.8, seed=1, max_tokens=80, n=2
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)


def test_streamed_parse_of_the_openai_client(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="any", messages=QUESTION, response_format=Person, temperature=0.8, seed=2, max_tokens=80
    ) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion().choices[0].message
    assert final.content == deltas
    assert Person.model_validate_json(deltas) == final.parsed


def test_json_object_is_an_object(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=QUESTION, response_format={"type": "json_object"}, temperature=0, max_tokens=24
    )
    content = answer.choices[0].message.content
    assert content is not None
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


def test_log_probabilities_are_those_of_the_model(client: openai.OpenAI) -> None:
    """Log-probabilities do not depend on the grammar: a token that it forces may be unlikely."""
    answer = client.chat.completions.create(
        model="any",
        messages=QUESTION,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
        temperature=0,
        max_tokens=80,
        logprobs=True,
        top_logprobs=3,
    )
    choice = answer.choices[0]
    jsonschema.validate(json.loads(choice.message.content or ""), PERSON)
    entries = choice.logprobs.content if choice.logprobs is not None else None
    assert entries is not None
    assert "".join(entry.token for entry in entries).startswith(choice.message.content or "")
    assert any(entry.token not in [top.token for top in entry.top_logprobs] for entry in entries)


def answers(
    decode: Server, schemas: list[dict[str, Any]], temperature: float, max_tokens: int
) -> list[tuple[str, str]]:
    """Why each answer has ended, and its text."""

    def answer(seed: int) -> tuple[str, str]:
        request = {
            "messages": [{"role": "user", "content": "Answer in JSON."}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": schemas[seed]}},
            "temperature": temperature,
            "seed": seed,
            "max_tokens": max_tokens,
        }
        response = HTTP.post(f"{decode.url}/v1/chat/completions", json=request, timeout=600)
        assert response.is_success, response.text
        choice = response.json()["choices"][0]
        return choice["finish_reason"], choice["message"]["content"]

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(answer, range(len(schemas))))


def test_small_model_invents_no_properties(decode: Server) -> None:
    schema = {"properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}
    output = generate(decode, "Bob is 5", json_schema={"type": "object", **schema})
    assert output["meta_info"]["finish_reason"]["type"] == "stop", output["text"]
    assert json.loads(output["text"]).keys() == {"name", "age"}


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_small_model_ends_the_json_of_random_schemas(decode: Server, temperature: float) -> None:
    """`make test-schemas` sends 200 schemas. All their values are bounded."""
    schemas = [random_schema(seed) for seed in range(SCHEMAS)]
    for schema, (reason, text) in zip(schemas, answers(decode, schemas, temperature, 600), strict=True):
        assert reason == "stop", (text, schema)
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_small_model_does_not_fill_endless_json_with_white_space(decode: Server, temperature: float) -> None:
    schemas = [without_bounds(PERSON), *(without_bounds(random_schema(seed)) for seed in range(SCHEMAS))]
    for _, text in answers(decode, schemas, temperature, 60):
        assert not re.search(r"\s{2}|[^\S ]", re.sub(r'"(\\.|[^"\\])*("|$)', '""', text)), text


@pytest.mark.parametrize(
    ("sampling", "pattern"),
    [
        ({"regex": r"(Paris|Rome), \d{4}"}, r"(Paris|Rome), \d{4}"),
        ({"ebnf": CITIES}, r"(Paris|Berlin)( is in (France|Germany))?"),
    ],
    ids=["regex", "ebnf"],
)
def test_grammar_fields_of_sglang(decode: Server, sampling: dict[str, str], pattern: str) -> None:
    outputs = [generate(decode, **sampling), *generate(decode, **sampling, temperature=1.5, n=4, seed=3)]
    for output in outputs:
        assert re.fullmatch(pattern, output["text"]), output
        assert output["meta_info"]["finish_reason"]["type"] == "stop"


def test_checks_from_sglangs_test_kits(decode: Server) -> None:
    """A part of its test kits; `make test-clients` runs all of them."""
    regexes(decode.url, ("an email address", "a three-digit number"))
    matched_stops(decode.url, ("/v1/completions",))
    prefilled_answers(decode.url)
    models(decode.url)


def test_structural_tag_constrains_only_what_follows_a_trigger(decode: Server) -> None:
    tag = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<call=city>", "schema": {"enum": ["Paris", "Berlin"]}, "end": "</call>"},
        ],
        "triggers": ["<call="],
    }
    text = 'Repeat exactly: <call=city>"Rome"</call>\n<call=city>"Rome"</call>\n<call=city>'
    output = generate(decode, text, structural_tag=json.dumps(tag), max_new_tokens=40)
    for name in re.findall(r"<call=city>(.*?)</call>", output["text"]):
        assert name in ('"Paris"', '"Berlin"')
    assert "<call=city>" in output["text"], "the model did not write the trigger, so nothing was tested"


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"regex": "[0-9]{3}"}, "[0-9]{3}"),
        ({"grammar": CITIES}, r"(Paris|Berlin)( is in (France|Germany))?"),
        ({"json": {"type": "boolean"}}, "true|false"),
    ],
    ids=["choice", "regex", "grammar", "json"],
)
def test_grammar_fields_of_vllm(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model="any", prompt="Great film! Sentiment:", max_tokens=40, extra_body={"structured_outputs": fields}
    )
    assert re.fullmatch(pattern, answer.choices[0].text), answer


def test_greedy_output_equals_transformers_with_masked_logits(decode: Server, tokenizer: Tokenizer) -> None:
    """The reference masks the logits of transformers with llguidance directly."""
    prompt = tokenizer.encode(tokenizer.render_chat(QUESTION), add_special_tokens=False)
    grammar = Grammar("json_schema", json.dumps(PERSON))
    params = {"max_new_tokens": 80, "temperature": 0, "json_schema": json.dumps(PERSON)}
    response = HTTP.post(f"{decode.url}/generate", json={"input_ids": prompt, "sampling_params": params}, timeout=120)
    output = response.json()["output_ids"]
    assert is_masked_greedy(load_smollm2_reference(), "smollm2", prompt, grammar, output, 80)
    jsonschema.validate(json.loads(response.json()["text"]), PERSON)


def test_stop_strings_end_a_constrained_output(decode: Server) -> None:
    output = generate(decode, "a", regex="[a-z]{3}END[a-z]+", stop=["END"])
    assert re.fullmatch("[a-z]{3}", output["text"])


@pytest.mark.parametrize(
    ("sampling", "param", "message"),
    [
        ({"json_schema": '{"type": 3}'}, "sampling_params.json_schema", "cannot be enforced"),
        ({"json_schema": '{"not": {}}'}, "sampling_params.json_schema", "not"),
        ({"regex": "("}, "sampling_params.regex", "unclosed group"),
        ({"regex": "((a{99}){99}){99}"}, "sampling_params.regex", "970299 characters with its repetitions"),
        ({"ebnf": 'root ::= "a'}, "sampling_params.ebnf", "is not a valid EBNF grammar"),
        ({"regex": "a", "ebnf": "b"}, "sampling_params.ebnf", "cannot be combined"),
        ({"structural_tag": "{}"}, "sampling_params.structural_tag", "is not a valid structural_tag"),
    ],
)
def test_invalid_grammar_is_refused(decode: Server, sampling: dict[str, Any], param: str, message: str) -> None:
    response = HTTP.post(f"{decode.url}/generate", json={"text": "a", "sampling_params": sampling}, timeout=60)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


def test_schema_that_takes_too_long_to_compile_is_refused(decode: Server) -> None:
    properties: dict[str, Any] = {f"k{index}": {} for index in range(8000)}  # take 13 s to compile
    response = HTTP.post(
        f"{decode.url}/generate",
        json={"text": "a", "sampling_params": {"json_schema": {"type": "object", "properties": properties}}},
        timeout=120,
    )
    # 429 where other processes leave the compiler, which has the lowest priority, less than 3 s in a minute
    reason = {400: "takes longer than 3 s to compile", 429: "got too little CPU time"}[response.status_code]
    assert reason in response.json()["error"]["message"]
    assert generate(decode, regex="ab")["text"] == "ab", "the grammar compiler was not restarted"


def test_output_without_a_grammar_is_unchanged(decode: Server) -> None:
    free = generate(decode, "The capital of France is", max_new_tokens=8)
    both = [{"max_new_tokens": 8, "temperature": 0}, {"max_new_tokens": 8, "temperature": 0, "regex": "[0-9]+"}]
    texts = ["The capital of France is"] * 2
    mixed = HTTP.post(f"{decode.url}/generate", json={"text": texts, "sampling_params": both}, timeout=60).json()
    assert mixed[0]["output_ids"] == free["output_ids"]
    assert re.fullmatch("[0-9]{8,}", mixed[1]["text"])


class GetWeather(pydantic.BaseModel):
    """Get the weather of a city."""

    city: Literal["Paris", "Rome"]
    days: int = pydantic.Field(ge=1, le=7)


class Add(pydantic.BaseModel):
    """Add two numbers."""

    a: int = pydantic.Field(ge=0, le=99)
    b: int = pydantic.Field(ge=0, le=99)


MODELS = {model.__name__: model for model in (GetWeather, Add)}
STRICT = [openai.pydantic_function_tool(model) for model in MODELS.values()]
LENIENT: list[Any] = [
    {"type": "function", "function": {key: value for key, value in tool["function"].items() if key != "strict"}}
    for tool in STRICT
]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Rome for the next 3 days?"}]


def check_calls(message: Any) -> list[pydantic.BaseModel]:
    """The arguments of the calls, which match the schemas of their functions."""
    calls = message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    return [MODELS[call.function.name].model_validate_json(call.function.arguments) for call in calls]


def test_required_tool_call(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any",
        messages=WEATHER,
        tools=LENIENT,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0.8,
        seed=4,
        n=2,
        max_tokens=80,
    )
    for choice in answer.choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert len(check_calls(choice.message)) == 1


def test_result_of_a_tool_continues_the_chat(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "GetWeather"}}
    asked = client.chat.completions.create(
        model="any", messages=WEATHER, tools=LENIENT, tool_choice=named, temperature=0, max_tokens=80
    )
    message: Any = asked.choices[0].message
    (arguments,) = check_calls(message)
    assert isinstance(arguments, GetWeather)
    result: Any = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny, 25 degrees."}
    answer = client.chat.completions.create(
        model="any", messages=[*WEATHER, message, result], tools=LENIENT, temperature=0, max_tokens=30
    )
    assert answer.choices[0].message.content or answer.choices[0].message.tool_calls
    assert answer.usage is not None
    assert asked.usage is not None
    assert answer.usage.prompt_tokens > asked.usage.prompt_tokens


def test_parse_method_with_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="any", messages=WEATHER, tools=STRICT, tool_choice="required", temperature=0, max_tokens=200
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    for call in calls:
        assert isinstance(call.function.parsed_arguments, GetWeather | Add)


async def test_streamed_call_of_the_async_client(decode: Server) -> None:
    """The helper assembles the call from its deltas and checks them."""
    named: Any = {"type": "function", "function": {"name": "Add"}}
    async with (
        openai.AsyncOpenAI(base_url=f"{decode.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
        client.chat.completions.stream(
            model="any", messages=WEATHER, tools=STRICT, tool_choice=named, temperature=0, max_tokens=80
        ) as stream,
    ):
        deltas = [e.arguments_delta async for e in stream if e.type == "tool_calls.function.arguments.delta"]
        choice = (await stream.get_final_completion()).choices[0]
    (arguments,) = check_calls(choice.message)
    assert Add.model_validate_json("".join(deltas)) == arguments
    assert len(deltas) > 3
    assert choice.finish_reason == "tool_calls"


def test_optional_calls_of_strict_functions_match_their_schemas(client: openai.OpenAI) -> None:
    """The model may call a function or not; calls match their schemas."""
    answer = client.chat.completions.create(
        model="any", messages=WEATHER, tools=STRICT, temperature=0.7, seed=1, n=3, max_tokens=60
    )
    for choice in answer.choices:
        assert choice.message.content or choice.message.tool_calls
        if choice.finish_reason == "tool_calls":
            assert check_calls(choice.message)
