"""Bodies of requests with one field that is as large as a whole body may be."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from types import FrameType
from typing import Any

import msgspec
from hypothesis import strategies as st

from pdserve.common.errors import ClientError
from pdserve.common.sampling import NEUTRAL_SAMPLING
from pdserve.configs.schema import DecodeConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.messages.frontend import Finished, FinishReason
from pdserve.server.api.anthropic.models import MessagesBody
from pdserve.server.api.anthropic.requests import parse_message
from pdserve.server.api.app import AbortBody
from pdserve.server.api.common.fields import Body, parse_body
from pdserve.server.api.common.limits import Limits
from pdserve.server.api.generate.models import GenerateBody, NativeSampling
from pdserve.server.api.generate.requests import parse_generate
from pdserve.server.api.openai.chat_requests import parse_chat
from pdserve.server.api.openai.models import ChatBody, CompletionBody
from pdserve.server.api.openai.replies import CompletionRendering
from pdserve.server.api.openai.requests import parse_completion
from pdserve.server.api.responses.models import ResponsesBody
from pdserve.server.api.responses.replies import ResponsesRendering
from pdserve.server.api.responses.requests import parse_response
from pdserve.server.api.service.lanes import INLINE_BYTES
from pdserve.server.api.service.service import begin_outputs
from pdserve.server.api.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize
from pdserve.server.engine.inbox import Progress
from pdserve.server.text.chat_format import ChatFormat
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.scripted_leader import make_ready

Case = dict[str, Any]
MAX_BODY_BYTES = 4 << 20
CONTEXT = 1 << 20
MESSAGE = {"role": "user", "content": "Hi"}
CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CHAT = {"messages": [MESSAGE], "max_tokens": 4}
Path = tuple[str | int, ...]

VALUES: dict[str, Callable[[int], Any]] = {
    "numbers by id": lambda room: {str(at): 1 for at in range(min(95_000, room // 12))},
    "texts by name": lambda room: {f"key{at}": "x" for at in range(min(48_000, room // 18))},
    "few numbers": lambda room: [7] * min(95_000, room // 3),
    "numbers": lambda room: [7] * (room // 3),
    "a whole context": lambda room: [7] * min(CONTEXT - 64, room // 3),
    "a whole context of words": lambda room: [1000] * min(CONTEXT - 64, room // 6),
    "different ids": lambda room: [at % 49_152 for at in range(min(1 << 18, room // 7))],
    "texts": lambda room: ["x"] * min(95_000, room // 5),
    "long texts": lambda room: ["x" * 40] * min(95_000, room // 44),
    "different texts": lambda room: [f"k{at}" for at in range(min(95_000, room // 10))],
    "empty texts": lambda room: [""] * min(95_000, room // 4),
    "nulls": lambda room: [None] * min(95_000, room // 6),
    "objects": lambda room: [{}] * min(95_000, room // 4),
    "filled objects": lambda room: [{"a": 1}] * min(47_000, room // 10),
    "text parts": lambda room: [{"type": "text", "text": "x"}] * min(19_000, room // 31),
    "arrays": lambda room: [[]] * min(95_000, room // 4),
    "arrays of ids": lambda room: [[7] * 20] * min(90_000, room // 64),
    "words": lambda room: "a b" * (room // 3),
    "letters": lambda room: "a" * room,
    "escapes": lambda room: "\n" * (room // 2),
    "quotes": lambda room: '"' * (room // 2),
    "accents": lambda room: "é" * (room // 6),
    "JSON": lambda room: '{"a":[' + "[]," * min(90_000, room // 3) + "1]}",
    "a number": lambda room: 10 ** min(4_200, room),
}


def paths() -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """Route, place of a field, and a body that has this place."""
    models: dict[str, tuple[type[Body], dict[str, Any]]] = {
        "chat": (ChatBody, CHAT),
        "completion": (CompletionBody, {"prompt": "Hi"}),
        "generate": (GenerateBody, {"text": "Hi"}),
        "response": (ResponsesBody, {"input": "Hi"}),
        "message": (MessagesBody, CHAT),
        "tokenize": (TokenizeBody, {}),
        "detokenize": (DetokenizeBody, {}),
        "abort": (AbortBody, {}),
    }
    for route, (model, body) in models.items():
        yield from ((route, (name,), body) for name in names(model))
    sampling = {"text": "Hi", "sampling_params": {}}
    yield from (("generate", ("sampling_params", name), sampling) for name in names(NativeSampling))
    for name in ("role", "content", "tool_calls", "tool_call_id", "name", "reasoning_content", "x"):
        yield "chat", ("messages", 0, name), CHAT
        yield "message", ("messages", 0, name), CHAT
        yield "response", ("input", 0, name), {"input": [MESSAGE]}
    assistant = {**CHAT, "messages": [{"role": "assistant", "tool_calls": [CALL]}]}
    use = {**CHAT, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]}
    yield from (("chat", ("messages", 0, "tool_calls", 0, "function", name), assistant) for name in CALL["function"])
    yield "message", ("messages", 0, "content", 0, "input"), use
    required = {**CHAT, "tools": [TOOL], "tool_choice": "required"}
    yield from (("chat", ("tools", 0, "function", name), required) for name in ("name", "description", "parameters"))
    yield "response", ("tools", 0, "parameters"), {"input": "Hi", "tools": [{"type": "function", "name": "f"}]}
    yield "message", ("tools", 0, "input_schema"), {**CHAT, "tools": [{"name": "f"}]}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}
    for name in ("type", "properties", "required", "$defs", "enum", "anyOf", "x"):
        yield "chat", ("tools", 0, "function", "parameters", name), required
        yield "chat", ("response_format", "json_schema", "schema", name), {**CHAT, "response_format": schema}
    structured = {**CHAT, "structured_outputs": {}}
    for name in ("json", "regex", "choice", "grammar", "structural_tag"):
        yield "chat", ("structured_outputs", name), structured
    yield "response", ("metadata", "x"), {"input": "Hi", "metadata": {}}
    yield "chat", ("chat_template_kwargs", "x"), {**CHAT, "chat_template_kwargs": {}}


def names(model: type[Body]) -> list[str]:
    return [*model.model_fields, *model.unsupported, "a_field_of_nobody"]


def filled(body: dict[str, Any], path: Path, value: object) -> bytes:
    copy = json.loads(json.dumps(body))
    at = copy
    for part in path[:-1]:
        at = at[part]
    at[path[-1]] = value
    return json.dumps(copy).encode()


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(locate_model("smollm2", "auto"))


@cache
def limits() -> Limits:
    ready = make_ready(CONTEXT)
    model = msgspec.structs.replace(ready.model, vocab_size=49_152, context_length=CONTEXT)
    return Limits.of(DecodeConfig(), msgspec.structs.replace(ready, model=model), NEUTRAL_SAMPLING)


def parse(route: str, body: bytes) -> object:
    chat = ChatFormat.of(tokenizer(), "hermes", "none")
    parsers: dict[str, Callable[[], object]] = {
        "chat": lambda: parse_chat(body, limits(), tokenizer(), chat),
        "completion": lambda: parse_completion(body, limits(), tokenizer()),
        "generate": lambda: parse_generate(body, limits(), tokenizer()),
        "response": lambda: parse_response(body, limits(), tokenizer(), chat),
        "message": lambda: parse_message(body, limits(), tokenizer(), chat),
        "tokenize": lambda: tokenize(body, limits(), tokenizer(), chat),
        "detokenize": lambda: detokenize(body, limits().vocab_size, tokenizer()),
        "abort": lambda: parse_body(AbortBody, body),
    }
    return parsers[route]()


def answer(route: str, parsed: Any) -> None:
    """What repeats or reads fields of the request, on the event loop."""
    if route in ("completion", "generate"):
        begin_outputs(parsed, tokenizer())
    if route == "response":
        call, fields = parsed
        rendering = ResponsesRendering(call, fields, "m")
        (output,) = begin_outputs(call, tokenizer())
        end = Finished(output.rid, FinishReason("length", length=0), output.prompt_tokens, 0, 0, timeline={})
        for event in rendering.events(0, output, output.advance(Progress(output.rid, terminal=end))):
            msgspec.json.encode(event)


def longest_call_s(work: Callable[[], object]) -> float:
    """CPU time of the longest piece of `work` in which no other thread can run: of a call of C between its calls of
    Python. Tokenizers do not hold the interpreter's lock while they encode.
    """
    longest_s, in_c, began_s = 0.0, list[bool](), time.thread_time()

    def event(_frame: FrameType, kind: str, function: Any) -> None:
        nonlocal longest_s, began_s
        now_s = time.thread_time()
        if in_c and in_c[-1]:
            longest_s = max(longest_s, now_s - began_s)
        if kind in ("call", "c_call"):
            in_c.append(kind == "c_call" and getattr(function, "__name__", "") != "encode_batch_fast")
        elif in_c:
            in_c.pop()
        began_s = time.thread_time()

    sys.setprofile(event)
    try:
        work()
    finally:
        sys.setprofile(None)
    return longest_s


PLACES = {f"{route} {'.'.join(map(str, path))}": (route, path, body) for route, path, body in paths()}


def parse_field(case: Case) -> float:
    """CPU time of the longest piece that stops other threads; of a body that is parsed on the event loop, of all."""
    route, path, body = PLACES[case["place"]]
    most_bytes = INLINE_BYTES if case["inline"] else MAX_BODY_BYTES
    content = filled(body, path, VALUES[case["value"]](most_bytes - len(json.dumps(body)) - 64))
    assert len(content) <= most_bytes

    parsed: object = None

    def work() -> None:
        nonlocal parsed
        with suppress(ClientError):
            parsed = parse(route, content)

    parsing_s, began_s = 0.0 if case["inline"] else longest_call_s(work), time.thread_time()
    if case["inline"]:
        work()
    if parsed is not None:
        answer(route, parsed)
    return max(parsing_s, time.thread_time() - began_s)


FIELDS = st.fixed_dictionaries(
    {
        "place": st.sampled_from(sorted(PLACES)),
        "value": st.sampled_from(sorted(VALUES)),
        "inline": st.sampled_from([False] * 7 + [True]),  # long bodies cost most
    }
)


# -- calls with many prompts -----------------------------------------------------------------------------------------

SHARED: dict[str, Callable[[int], Case]] = {
    "stop": lambda room: {"stop": [chr(97 + at) * min(256, room // 18) for at in range(16)]},
    "logit_bias": lambda room: {"logit_bias": {str(at): 1 for at in range(min(1024, room // 12))}},
    "stop_token_ids": lambda room: {"stop_token_ids": list(range(min(256, room // 6)))},
    "regex": lambda room: {"regex": "a" * room},
    "stop_regex": lambda _: {"stop_regex": [f".{{40}}Q{at}" for at in range(8)]},
}


def own_stops(prompt: int) -> Case:
    """Stop expressions that no other prompt has."""
    return {"stop_regex": [chr(0x4E00 + 8 * prompt + at) for at in range(8)]}


def begin_prompts(case: Case) -> float:
    """CPU time on the event loop until the requests of a call are sent to the leader."""
    prompts, inline = case["prompts"], case["inline"]
    room = (INLINE_BYTES if inline else MAX_BODY_BYTES // prompts) - 2000
    params: Case | list[Case]
    if case["field"] == "own stop_regex":
        prompts = min(prompts, 128)
        params = [own_stops(prompt) for prompt in range(prompts)]
    else:
        fields = {"n": case["samples"], **SHARED[case["field"]](room)}
        params = fields if inline else [fields] * prompts
    body = json.dumps({"text": ["Hi"] * prompts, "sampling_params": params}).encode()
    assert len(body) <= (INLINE_BYTES if inline else MAX_BODY_BYTES)
    began_s = time.thread_time()
    try:
        call = parse_generate(body, limits(), tokenizer())
    except ClientError:
        return time.thread_time() - began_s if inline else 0.0
    if not inline:
        began_s = time.thread_time()
    begin_outputs(call, tokenizer())
    for submit in call.submits:
        msgspec.msgpack.encode(submit)
    return time.thread_time() - began_s


REPEATED: dict[str, Callable[[int], Case]] = {
    "echo": lambda size: {"prompt": '"' * size, "echo": True},
    "return_token_ids": lambda size: {"prompt": [7] * (size // 3), "return_token_ids": True},
}


def repeat_prompts(case: Case) -> float:
    """CPU time of writing what an answer repeats of its prompts, for each sample."""
    fields = REPEATED[case["field"]](min(case["characters"], MAX_BODY_BYTES // (3 * case["prompts"])))
    body = {**fields, "prompt": [fields["prompt"]] * case["prompts"], "n": case["samples"], "max_tokens": 1}
    try:
        call = parse_completion(json.dumps(body).encode(), limits(), tokenizer())
    except ClientError:
        return 0.0
    outputs, rendering = begin_outputs(call, tokenizer()), CompletionRendering(call, "m", tokenizer())
    for output in outputs:
        end = Finished(output.rid, FinishReason("length", length=0), output.prompt_tokens, 0, 0, timeline={})
        output.advance(Progress(output.rid, terminal=end))
    began_s = time.thread_time()
    msgspec.json.encode(rendering.result(outputs))
    return time.thread_time() - began_s


REPETITIONS = st.fixed_dictionaries(
    {
        "prompts": st.integers(1, 16),
        "samples": st.integers(1, 16),
        "characters": st.integers(1, 390_000),
        "field": st.sampled_from(sorted(REPEATED)),
    }
)

PROMPTS = st.fixed_dictionaries(
    {
        "prompts": st.integers(1, 256),
        "samples": st.integers(1, 16),
        "field": st.sampled_from([*sorted(SHARED), "own stop_regex"]),
        "inline": st.booleans(),
    }
)
