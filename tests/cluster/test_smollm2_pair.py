"""A pair with the embedded model: tokens equal transformers, and documented requests and commands work."""

import io
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pdserve.models.loading.catalog import locate_model
from pdserve.server.cli import main, make_parser
from pdserve.server.terminal.chat import run_chat
from pdserve.server.terminal.options import read_chat_options
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.checkpoints import is_reference_greedy, load_smollm2_reference
from tests.cluster.servers import HTTP, Server, body, cluster
from tests.documented_commands import arguments, documented_commands
from tests.optional_libraries import needs

QUESTIONS = ("What is the capital of France?", "Name three primary colors.", "Write a haiku about the sea.")
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with cluster(tmp_path_factory.mktemp("smollm2")) as started:
        pool = ("--kv-tokens", "2048")
        # the model does not write reasoning: a client sends the beginning of a message with it
        flags = ("--reasoning-parser", "qwen3", *pool)
        prefill, decode = started.pair("smollm2", ("--chunk-size", "32", *pool), flags)
        yield decode
        prefill.check_clean()
        decode.check_clean()
        assert (decode.stop(), prefill.stop()) == (0, 0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2"))


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_smollm2_reference()


def test_greedy_tokens_equal_transformers(decode: Server, tokenizer: Tokenizer, reference: Any) -> None:
    prompts = [
        tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": question}]), add_special_tokens=False)
        for question in QUESTIONS
    ]
    response = HTTP.post(f"{decode.url}/generate", json=body(prompts, NEW_TOKENS), timeout=120).raise_for_status()
    outputs = [result["output_ids"] for result in response.json()]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output) == NEW_TOKENS
        assert is_reference_greedy(reference, prompt, output)
    assert decode.generate(prompts[-1], NEW_TOKENS) == outputs[-1]


def test_chat_ends_at_the_end_of_the_turn(decode: Server) -> None:
    request = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 40}
    answer = HTTP.post(f"{decode.url}/v1/chat/completions", json=request, timeout=60).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"


@needs("anthropic")
def test_clients_of_other_apis_get_the_same_answer(decode: Server) -> None:
    """OpenAI's /v1/responses and Anthropic's /v1/messages."""
    import anthropic  # takes two seconds of CPU time, which only the worker that runs this test needs

    direct: Any = {"max_retries": 0, "timeout": 60}
    with openai.OpenAI(
        base_url=f"{decode.url}/v1", api_key="any", http_client=openai.DefaultHttpxClient(trust_env=False), **direct
    ) as client:
        response = client.responses.create(model="any", input=QUESTIONS[0], temperature=0, max_output_tokens=40)
        with client.responses.stream(model="any", input=QUESTIONS[0], temperature=0, max_output_tokens=40) as stream:
            streamed = stream.get_final_response()
    assert (response.output_text, response.status) == ("The capital of France is Paris.", "completed")
    assert streamed.output_text == response.output_text
    with anthropic.Anthropic(
        base_url=decode.url, api_key="any", http_client=anthropic.DefaultHttpxClient(trust_env=False), **direct
    ) as other:
        messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
        greedy = {"temperature": 0}  # not a parameter of the client
        message = other.messages.create(model="any", messages=messages, max_tokens=40, extra_body=greedy)
        counted = other.messages.count_tokens(model="any", messages=messages)
    usage = message.usage
    assert (message.content[0].to_dict()["text"], message.stop_reason) == (response.output_text, "end_turn")
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_matched_stop_names_what_ended_the_output(decode: Server, tokenizer: Tokenizer) -> None:
    """A stop expression, a stop string, the end token, the length limit, as in SGLang's tests."""
    for stop, matched, text in (
        ({"stop_regex": "cap|tal"}, "cap|tal", "The "),
        ({"stop": " of"}, " of", "The capital"),
        ({}, tokenizer.encode("<|im_end|>")[0], "The capital of France is Paris."),
        ({"max_tokens": 3}, None, None),
    ):
        request = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "temperature": 0, "max_tokens": 40, **stop}
        answer = HTTP.post(f"{decode.url}/v1/chat/completions", json=request, timeout=60).raise_for_status().json()
        choice = answer["choices"][0]
        if "max_tokens" in stop:
            assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)
        else:
            assert (choice["message"]["content"], choice["matched_stop"]) == (text, matched)
            assert choice["finish_reason"] == "stop"


def test_grammar_begins_after_the_reasoning(decode: Server, tokenizer: Tokenizer) -> None:
    """logit_bias makes the model close its reasoning; the grammar applies only after that."""
    bias = dict.fromkeys(map(str, tokenizer.encode("</think>", add_special_tokens=False)), 100)
    request = {
        "messages": [
            {"role": "user", "content": "What is the weather in Rome for the next 3 days?"},
            {"role": "assistant", "content": "<think>\nIs it true? Let me close the tag: </think"},
        ],
        "continue_final_message": True,
        "json_schema": {"type": "boolean"},
        "logit_bias": bias,
        "temperature": 0,
        "max_tokens": 100,
    }
    answer = HTTP.post(f"{decode.url}/v1/chat/completions", json=request, timeout=120).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] in ("true", "false")
    reasoning_tokens = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert len(bias) <= reasoning_tokens < answer["usage"]["completion_tokens"]


def test_documented_requests_work(decode: Server) -> None:
    """The curl commands of README and docs, with short outputs."""
    commands = [found.command for found in documented_commands() if re.search(r"^curl.*:8200/", found.command)]
    assert len(commands) >= 5
    for command in commands:
        words = arguments(command)
        (url,) = [word for word in words if ":8200/" in word]
        request = json.loads(words[words.index("-d") + 1])
        if "messages" in request:
            request["max_tokens"] = 4
        else:
            request.setdefault("sampling_params", {})["max_new_tokens"] = 4
        response = HTTP.post(f"{decode.url}/{url.partition(':8200/')[2]}", json=request, timeout=60)
        assert response.status_code == 200, f"{command}: {response.text}"


def test_documented_commands_work(decode: Server) -> None:
    """`pdserve chat` and `pdserve bench` as documented, but with this server and few short requests."""
    short = ("--requests", "2", "--warmup", "0", "--output-len", "2", "--concurrency", "2")
    commands = [arguments(found.command) for found in documented_commands()]
    benches = [words[2:] for words in commands if words[:2] == ["pdserve", "bench"] and "--rate" not in words]
    chats = [words[4:] for words in commands if words[0] == "echo" and words[3:5] == ["pdserve", "chat"]]
    assert (len(benches), len(chats)) == (2, 1)
    for words in benches:
        assert main(["bench", *words, "--url", decode.url, *short]) == 0
    options, _ = make_parser().parse_known_args([*chats[0], "--url", decode.url])
    answer = io.StringIO()
    assert run_chat(read_chat_options(options, {}), io.StringIO(f"{QUESTIONS[0]}\n"), answer) == 0
    assert "Paris" in answer.getvalue()
