"""The checks of SGLang's test kits for structured output, stop conditions and the OpenAI API, written anew.

The kits are json_constrained, json_mode, regex_constrained, ebnf_constrained, matched_stop and test_openai_server. Two
things differ. The model here is smaller than those of the kits and may not end its output in time, so lengths are
bounded. A response of /v1/responses that reaches its limit is `incomplete`, as with OpenAI; with SGLang it is
`completed`.
"""

import itertools
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

TIMEOUT_S = 600
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": r"^[\w]{1,20}$"},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
    },
    "required": ["name", "population"],
    "additionalProperties": False,
}
SYSTEM = {"role": "system", "content": "You are a helpful AI assistant"}
STORY = "Write a long story with many characters. Once upon a time, there was a"
REGEXES = {
    "an email address": r"^user@example\.com$",
    "a greeting": r"^(Hello|Hi|Hey)$",
    "a three-digit number": r"^\d{3}$",
    "a phone number": r"^\(\d{3}\) \d{3}-\d{4}$",
    "a date": r"^2024-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])$",
    "a colour": r"^#[0-9A-F]{6}$",
    "a person": r'^\{\s{0,2}"name"\s{0,2}:\s{0,2}"[a-zA-Z0-9 ]{1,9}"\s{0,2},\s{0,2}"age": [1-9][0-9]{0,2}\s{0,2}\}$',
    "a log entry": r"^\[2024-01-01T12:00:00Z\] INFO: System\.process - Operation [a-z]{1,9} successfully$",
}
GRAMMARS = {
    'root ::= "user@example.com"': r"user@example\.com",
    'root ::= "Hello" | "Hi" | "Hey"': "Hello|Hi|Hey",
    "root ::= digit digit digit\n  digit ::= [0-9]": r"\d{3}",
    'root ::= "#" hex hex hex\n  hex ::= [0-9] |\n    [A-F]': "#[0-9A-F]{3}",
    'root ::= "{" ws pair (ws "," ws pair)? "}"\npair ::= "\\"name\\"" ws ":" ws text | "\\"age\\"" ws ":" ws number\n'
    'text ::= "\\"" [a-z] [a-z] "\\""\nnumber ::= [1-9] [0-9]\nws ::= [ ]?': r'\{ ?"(name|age)" ?: ?("..|..).*\}',
    'root ::= "{" ("\\"theme\\"" ":" ("\\"light\\"" | "\\"dark\\"") ("," "\\"on\\"" ":" ("true" | "false"))?)? "}"': (
        r'\{("theme":"(light|dark)"(,"on":(true|false))?)?\}'
    ),
}


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=TIMEOUT_S)


def openai_client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="sk-123456", max_retries=0, timeout=TIMEOUT_S)


def generate(url: str, text: str, n: int = 1, **sampling: Any) -> Any:
    """The reply to a /generate request with the fields that the kits send."""
    params = {"temperature": 0 if n == 1 else 0.5, "max_new_tokens": 128, "n": n, **sampling}
    logprobs = {"return_logprob": False, "top_logprobs_num": 0, "logprob_start_len": 0}
    return post(url, "/generate", {"text": text, "sampling_params": params, "stream": False, **logprobs}).json()


def check_city(text: Any) -> None:
    city = json.loads(text)
    assert isinstance(city["name"], str)
    assert isinstance(city["population"], int)


def json_schemas(url: str) -> None:
    """A schema on /generate and in a chat, an invalid schema, and concurrent requests with and without a schema."""
    schema = json.dumps(CITY)
    question = f"Introduce the capital of France. Return in a JSON format. The JSON Schema is: {schema}"
    check_city(generate(url, question, json_schema=schema, stop_token_ids=[1969])["text"])
    assert "error" in generate(url, question, json_schema="INVALID")
    messages: Any = [SYSTEM, {"role": "user", "content": question}]
    with openai_client(url) as client:
        answer = client.chat.completions.create(
            model="any",
            messages=messages,
            temperature=0,
            max_tokens=128,
            response_format={"type": "json_schema", "json_schema": {"name": "foo", "schema": CITY}},
        )
    check_city(answer.choices[0].message.content)
    with ThreadPoolExecutor(8) as threads:
        asked = [None, None, schema, schema] * 2
        found = list(threads.map(lambda each: generate(url, "A city:", json_schema=each, max_new_tokens=64), asked))
    for each, output in zip(asked, found, strict=True):
        if each is not None:
            check_city(output["text"])
        assert output["meta_info"]["completion_tokens"] > 0


def json_objects(url: str) -> None:
    """With `json_object` the output is an object although the prompt does not ask for JSON, whole and streamed."""
    question: list[Any] = [SYSTEM, {"role": "user", "content": "What is the capital of Bulgaria?"}]
    asked: dict[str, Any] = {"model": "any", "messages": question, "temperature": 0, "max_tokens": 128}
    asked["response_format"] = {"type": "json_object"}
    with openai_client(url) as client:
        choice = client.chat.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    text = "".join(chunk.delta.content or "" for chunk in chunks)
    assert text == choice.message.content
    assert text.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)


def regexes(url: str, names: tuple[str, ...] = tuple(REGEXES)) -> None:
    """Anchors are allowed in a `regex` and have no effect: it always describes the whole output."""
    for name in names:
        for output in generate(url, f"Generate {name}:", n=3, regex=REGEXES[name]):
            assert re.fullmatch(REGEXES[name], output["text"]), output["text"]
    fields = {"regex": r"""\{\n   "name": "[\w]{1,20}",\n   "population": [\d]{1,9}\n\}""", "max_tokens": 128}
    messages = [SYSTEM, {"role": "user", "content": "Introduce the capital of France."}]
    answer = post(url, "/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})
    content = answer.json()["choices"][0]["message"]["content"]
    assert re.fullmatch(fields["regex"], content), content  # type: ignore[call-overload]


def grammars(url: str) -> None:
    for grammar, pattern in GRAMMARS.items():
        for output in generate(url, "Generate one:", n=3, ebnf=grammar):
            assert re.fullmatch(pattern, output["text"]), (grammar, output["text"])


def matched_stops(url: str, paths: tuple[str, ...] = ("/v1/completions", "/v1/chat/completions")) -> None:
    """`matched_stop` is the stop string, the expression, the id of the end token or null, on both OpenAI routes."""
    sentence = r"[.!?]\s*$"
    for path in paths:
        for fields, reason, matched in (
            ({"max_tokens": 5}, "length", None),
            ({"stop": "e", "max_tokens": 200}, "stop", "e"),
            ({"stop_regex": "and|or", "max_tokens": 400}, "stop", "and|or"),
            ({"stop_regex": sentence, "max_tokens": 400}, "stop", sentence),
        ):
            choice = stopped(url, path, STORY, **fields)
            assert (choice["finish_reason"], choice["matched_stop"]) == (reason, matched), (path, fields, choice)
    end = stopped(url, "/v1/chat/completions", "What is 2 + 2?", max_tokens=400)
    assert end["finish_reason"] == "stop"
    assert isinstance(end["matched_stop"], int)


def stopped(url: str, path: str, prompt: str, **fields: Any) -> Any:
    asked = (
        {"prompt": prompt} if path == "/v1/completions" else {"messages": [SYSTEM, {"role": "user", "content": prompt}]}
    )
    response = post(url, path, {**asked, "model": "any", "temperature": 0, "top_p": 1, **fields})
    return response.json()["choices"][0]


def completions(url: str) -> None:
    """Half of the combinations of echo, logprobs, several prompts, several samples and token ids, whole and streamed.

    Every pair of values is in one of them: a combination is left out if an odd number of its options is on.
    """
    prompt = "The capital of France is"
    tokens = post(url, "/tokenize", {"prompt": prompt}).json()["tokens"]
    every = list(itertools.product((True, False), (5, None), (True, False), (2, 1), (True, False)))
    with openai_client(url) as client:
        for echo, logprobs, several, n, as_tokens in every:
            if sum((echo, logprobs is not None, several, n > 1, as_tokens)) % 2:
                continue
            given: Any = tokens if as_tokens else prompt
            asked: dict[str, Any] = {"model": "any", "prompt": [given, given] if several else given, "n": n}
            asked |= {"temperature": 0, "max_tokens": 6, "echo": echo, "logprobs": logprobs}
            whole = client.completions.create(**asked)
            assert whole.id
            assert whole.created > 0
            assert len(whole.choices) == (2 if several else 1) * n
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == len(tokens) * (2 if several else 1)
            for choice in whole.choices:
                assert choice.text.startswith(prompt) == echo
                check_logprobs(choice.logprobs, logprobs, first=1 if echo else 0)
            streamed: dict[int, str] = {}
            usages = []
            for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
                if chunk.usage is not None:
                    usages.append(chunk.usage)
                for each in chunk.choices:
                    if logprobs and each.text:
                        check_logprobs(each.logprobs, logprobs, first=1 if echo and each.index not in streamed else 0)
                    streamed[each.index] = streamed.get(each.index, "") + each.text
            assert streamed == {choice.index: choice.text for choice in whole.choices}
            assert usages == [whole.usage]


def check_logprobs(found: Any, wanted: int | None, first: int) -> None:
    """Check log-probabilities from token `first` on: the first token of an echoed prompt has none."""
    if not wanted:
        assert found is None
        return
    assert isinstance(found.tokens[0], str)
    for top, own in zip(found.top_logprobs[first:], found.token_logprobs[first:], strict=True):
        assert isinstance(own, float)
        assert 0 < len(top) <= wanted + 1


def chats(url: str) -> None:
    """Chats with and without log-probabilities and samples; every choice of a stream has one finish reason."""
    messages: Any = [SYSTEM, {"role": "user", "content": "What is the capital of France? Answer in a few words."}]
    with openai_client(url) as client:
        for top, n in itertools.product((None, 5), (1, 2)):
            asked: dict[str, Any] = {"model": "any", "messages": messages, "temperature": 0, "n": n, "max_tokens": 8}
            asked |= {"logprobs": top is not None, "top_logprobs": top}
            whole = client.chat.completions.create(**asked)
            assert len(whole.choices) == n
            assert whole.usage is not None
            assert min(whole.usage.prompt_tokens, whole.usage.completion_tokens) > 0
            for choice in whole.choices:
                assert choice.message.role == "assistant"
                assert isinstance(choice.message.content, str)
                if top:
                    assert choice.logprobs is not None
                    assert {len(each.top_logprobs) for each in choice.logprobs.content or ()} == {top}
            check_chat_stream(
                client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}), n
            )
        penalised = client.chat.completions.create(
            model="any", messages=messages, temperature=0, max_tokens=8, frequency_penalty=1.0
        )
        assert isinstance(penalised.choices[0].message.content, str)


def check_chat_stream(stream: Iterator[Any], n: int) -> None:
    begun: set[int] = set()
    reasons: list[int] = []
    usages = 0
    for chunk in stream:
        if chunk.usage is not None:
            usages += 1
            assert min(chunk.usage.prompt_tokens, chunk.usage.completion_tokens, chunk.usage.total_tokens) > 0
            continue
        choice = chunk.choices[0]
        if choice.index not in begun:
            assert choice.delta.role == "assistant"
        begun.add(choice.index)
        assert isinstance(choice.delta.content, str) or choice.finish_reason
        if choice.finish_reason:
            reasons.append(choice.index)
    assert sorted(reasons) == list(range(n)) == sorted(begun)
    assert usages == 1


def prefilled_answers(url: str) -> None:
    """`continue_final_message` continues the assistant's last message."""
    messages: Any = [{"role": "user", "content": "Describe a cat as JSON."}, {"role": "assistant", "content": "{\n"}]
    with openai_client(url) as client:
        answer = client.chat.completions.create(
            model="any",
            messages=messages,
            temperature=0,
            max_tokens=8,
            extra_body={"continue_final_message": True},
        )
    assert not (answer.choices[0].message.content or "").lstrip().startswith("{")


def models(url: str) -> None:
    with openai_client(url) as client:
        (model,) = client.models.list()
        assert isinstance(getattr(model, "max_model_len", None), int)
        found = client.models.retrieve(model.id)
        assert found.id == model.id
        assert getattr(found, "root", None)
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("non-existent-model")


def responses(url: str) -> None:
    """/v1/responses whole and streamed, and the form of its errors."""
    with openai_client(url) as client:
        whole = client.responses.create(
            model="any", input="The capital of France is", temperature=0, max_output_tokens=16
        )
        assert (whole.object, whole.error) == ("response", None)
        assert whole.status in ("completed", "incomplete")
        assert whole.usage is not None
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        events = list(
            client.responses.create(
                model="any", input="The capital of France is", temperature=0, max_output_tokens=16, stream=True
            )
        )
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    for fields in ({"previous_response_id": "bad"}, {"tools": [{"type": "some_invalid_tool_type"}]}):
        refused = post(url, "/v1/responses", {"model": "any", "input": "Hi", **fields})
        assert refused.status_code == 400, refused.text
        assert {"message", "type", "code"} <= set(refused.json()["error"])


CONTRACTS = (
    json_schemas,
    json_objects,
    regexes,
    grammars,
    matched_stops,
    completions,
    chats,
    prefilled_answers,
    models,
    responses,
)
