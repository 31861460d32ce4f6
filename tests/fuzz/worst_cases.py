"""Kinds of input whose cost could grow faster than their size. Each has a strategy, a cost, and the most it may cost.

A case is JSON: a few numbers and pieces that are repeated, so that a search finds what a person would write. Costs are
CPU time, memory for each byte of the input, and for grammars the time that the other rows of a step wait for masks.
"""

import asyncio
import json
import math
import time
import tracemalloc
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st
from starlette.requests import Request

from pdserve.common.errors import ClientError
from pdserve.common.sampling import Grammar, LogprobParams, PackedLogprobs, SamplingParams, TokenLogprob, pack_logprobs
from pdserve.memory.index_spaces import KvPage
from pdserve.memory.pages import PageAllocator
from pdserve.models.grammar.compiler import GrammarCompiler, Vocabulary
from pdserve.models.grammar.dialects import GrammarError
from pdserve.models.grammar.masks import SLOW_MASK_S, GrammarLimitError, GrammarMasks, GrammarStateError, MaskRow
from pdserve.models.loading.catalog import locate_model
from pdserve.scheduler.decode.placement.peers import PrefillPeer
from pdserve.scheduler.decode.requests.limits import DecodeLimits
from pdserve.scheduler.decode.scheduler import DecodeScheduler
from pdserve.scheduler.messages.frontend import Prefilled, Submit, ToFrontendBatch
from pdserve.server.api.common.calls import check_prompt_logprobs
from pdserve.server.api.common.fields import FieldError, decode_object
from pdserve.server.api.common.sampling_fields import check_stop_regexes
from pdserve.server.api.generate.models import NativeSampling
from pdserve.server.api.service.arriving_bodies import ArrivingBodies
from pdserve.server.api.service.lanes import INLINE_BYTES
from pdserve.server.api.service.request_body import GZIP_FORMAT, read_body
from pdserve.server.text.parsers.call_grammars import FunctionSchema, UnwritableCallsError
from pdserve.server.text.parsers.families import FAMILIES
from pdserve.server.text.stop_regexes import StopRegexes
from pdserve.server.text.unfinished_json import ends_inside_json
from pdserve.transfer.control.events import MessageReceived
from pdserve.transfer.protocol.messages import ChunkArrived, InstanceId, PrefillDone, TransferKey
from tests.fuzz.request_fields import (
    FIELDS,
    MAX_BODY_BYTES,
    PROMPTS,
    REPETITIONS,
    Case,
    begin_prompts,
    parse_field,
    repeat_prompts,
)

WORK_S = 0.15
"""The rule is 50 ms of CPU time (docs/architecture.md). A test machine may be three times slower."""
SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Kind:
    cases: st.SearchStrategy[Case]
    cost: Callable[[Case], float]
    limit: float


@dataclass(frozen=True)
class Work:
    """What a server does for one case, and how many bytes the client or the model has written for it."""

    run: Callable[[], object]
    input_bytes: int


def cpu_s(prepare: Callable[[Case], Work]) -> Callable[[Case], float]:
    """The cost is CPU time."""

    def cost(case: Case) -> float:
        work = prepare(case)
        began_s = time.thread_time()
        work.run()
        return time.thread_time() - began_s

    return cost


def memory_per_byte(prepare: Callable[[Case], Work]) -> Callable[[Case], float]:
    """The cost is the most memory that the work takes, in bytes, for each byte of the input. SMALL_BYTES more are free:
    they are no attack, whatever they are made of.
    """

    def cost(case: Case) -> float:
        work = prepare(case)
        tracemalloc.start()
        try:
            work.run()
            return tracemalloc.get_traced_memory()[1] / (work.input_bytes + SMALL_BYTES)
        finally:
            tracemalloc.stop()

    return cost


def repeated(case: Case, most: int) -> str:
    """`begin`, as many times `unit` as there is room for, and `end`."""
    return str(case["begin"] + case["unit"] * (most // len(case["unit"])) + case["end"])


# -- the text of a call --------------------------------------------------------------------------------------------

BEGINNINGS = ["", "[f(a=", "[f(a=[", "[f(a='", "[", "<function=f>", "<function=f><parameter=a>", "<think>"]
BEGINNINGS += ['<tool_call>{"name": "f", "arguments": {"a": ', "<tool_call>f<arg_key>a</arg_key><arg_value>"]
UNITS = ["a", " ", "\\'", "1,", "x(),", '"', "[", "(", "{", "-", "not ", "a=1,", "f'{1}'", "\n", "<tool_call>", "''"]


def parse_call(case: Case) -> Work:
    parser = FAMILIES[case["family"]].parser({"f": {"properties": {"a": {}}}})
    text = repeated(case, case["characters"])
    return Work(lambda: (parser.feed(text), parser.finish()), len(text))


CALL_TEXTS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(sorted(FAMILIES)),
        "begin": st.sampled_from(BEGINNINGS),
        "unit": st.lists(st.sampled_from(UNITS), min_size=1, max_size=2).map("".join),
        "characters": st.integers(1, 15).map(lambda count: 4000 * count),
        "end": st.sampled_from(["", ")]", "])]", "')]", "</parameter></function>", "</arg_value></tool_call>"]),
    }
)

# -- the beginning of an answer that a client has written ----------------------------------------------------------


def look_for_json(case: Case) -> Work:
    """Of a body that is parsed on the event loop."""
    text = repeated(case, INLINE_BYTES)
    return Work(lambda: ends_inside_json(text), len(text))


BEGUN_UNITS = ["[", "]", "{", "}", '"', ":", ",", "1", " ", "a", "tru", '""', "\\u00e9", "-", "1e"]
BEGUN = st.fixed_dictionaries(
    {
        "begin": st.sampled_from(["", "[", '{"a":', '"']),
        "unit": st.lists(st.sampled_from(BEGUN_UNITS), min_size=1, max_size=6).map("".join),
        "end": st.sampled_from(["", "]", "}", '"', "x"]),
    }
)

# -- the schema of a call's argument -------------------------------------------------------------------------------


def find_types(case: Case) -> Work:
    """Each of `levels` parts refers to the next one `width` times."""
    parts: dict[str, Any] = {
        f"p{at}": {case["keyword"]: [{"$ref": f"#/$defs/p{at + 1}"}] * case["width"]} for at in range(case["levels"])
    }
    parts[f"p{case['levels']}"] = {"type": "integer"}
    tools = {"f": {"properties": {"a": {"$ref": "#/$defs/p0"}}, "$defs": parts}}
    parser = FAMILIES["qwen3-coder"].parser(tools)
    call = "<function=f><parameter=a>\n1\n</parameter></function>"
    return Work(lambda: parser.feed(call), len(json.dumps(tools)))


SCHEMAS = st.fixed_dictionaries(
    {"keyword": st.sampled_from(["anyOf", "oneOf"]), "width": st.integers(1, 40), "levels": st.integers(0, 4)}
)

# -- tools that must be called -------------------------------------------------------------------------------------


def write_grammar(case: Case) -> Work:
    argument: dict[str, Any] = {"$ref": "#/$defs/d"} if case["refers"] else {"type": "integer"}
    parameters: dict[str, Any] = {"properties": {f"a{at}": argument for at in range(case["arguments"])}}
    parameters["$defs"] = {"d": {"description": "x" * case["definition"]}}
    if case["required"]:
        parameters["required"] = list(parameters["properties"])

    def write() -> None:
        with suppress(UnwritableCallsError):
            json.dumps(FAMILIES[case["family"]].tags.calls([FunctionSchema("f", parameters)], parallel=True))

    return Work(write, len(json.dumps(parameters)))


TOOLS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(sorted(FAMILIES)),
        "arguments": st.integers(0, 700),
        "definition": st.integers(0, 20_000),
        "refers": st.booleans(),
        "required": st.booleans(),
    }
)

# -- stop expressions ----------------------------------------------------------------------------------------------

STOP_CHARACTERS = 300


def find_stops(case: Case) -> float:
    """CPU time for each character of the output."""
    patterns = [case["pattern"].replace("N", str(case["times"])) + f"Q{at}" for at in range(case["patterns"])]
    try:
        compiled = check_stop_regexes([(NativeSampling(stop_regex=patterns), "")])
    except FieldError:
        return 0.0
    stops = StopRegexes([], compiled.values())
    text = (case["text"] * STOP_CHARACTERS)[:STOP_CHARACTERS]

    began_s = time.thread_time()
    for at in range(0, len(text), 4):
        stops.push(text[at : at + 4])
    return (time.thread_time() - began_s) / STOP_CHARACTERS


STOPS = st.fixed_dictionaries(
    {
        "pattern": st.sampled_from(
            [".{N}", "(?:a?){N}a", "[^b].{N}", "(?:a|b)*a(?:a|b){N}", "(?s)(?:.?){N}x", r"(?:.*\b){N}", r"\w{N} "]
        ),
        "times": st.integers(1, 250),
        "patterns": st.integers(1, 8),
        "text": st.text("ab x.", min_size=1, max_size=12),
    }
)

# -- bodies --------------------------------------------------------------------------------------------------------


def decode(case: Case, most_bytes: int = MAX_BODY_BYTES) -> Work:
    body = repeated(case, most_bytes - 64).encode()

    def work() -> None:
        with suppress(ClientError):
            decode_object(body)

    return Work(work, len(body))


BODIES = st.fixed_dictionaries(
    {
        "begin": st.sampled_from(['{"a":[', '{"a":"', "{", '{"a":', '{"b":"' + 1001 * "0" + '","a":[']),
        "unit": st.sampled_from(
            ["[],", "{},", '"",', '{"a":1},', "1,", "1.5,", "1e300,", "[[]],", "[", '\\"', "\\u00e9", "9"]
        ),
        "end": st.sampled_from(["1]}", '"}', "}", ""]),
    }
)


def read_gzip(case: Case) -> float:
    """Bytes read from the client."""
    header = zlib.compressobj(wbits=GZIP_FORMAT).flush(zlib.Z_SYNC_FLUSH)
    sent = 0

    async def receive() -> Case:
        nonlocal sent
        piece = bytes.fromhex(case["unit"]) * (65_536 // len(case["unit"]))
        piece = header + piece if not sent else piece
        sent += len(piece)
        return {"type": "http.request", "body": piece, "more_body": sent < case["bytes"]}

    async def read() -> None:
        request = Request({"type": "http", "headers": [(b"content-encoding", b"gzip")]}, receive)
        with suppress(ClientError):
            await read_body(request, 1 << 20, ArrivingBodies(1 << 20))

    asyncio.run(read())
    return float(sent)


GZIP_BODIES = st.fixed_dictionaries(
    {"unit": st.sampled_from(["000000ffff", "00", "4b4c04"]), "bytes": st.integers(1, 32).map(lambda size: size << 18)}
)

# -- log-probabilities of a prompt -----------------------------------------------------------------------------------


def receive_prompt_logprobs(case: Case) -> float:
    """CPU time in which a frontend receives the log-probabilities of a prompt, which come in one message."""
    prompts, wanted = [tuple(range(case["tokens"]))], [LogprobParams(case["top"], 0)]
    try:
        check_prompt_logprobs(prompts, wanted, case["samples"], "echo")
    except FieldError:
        return 0.0
    top = tuple((at, -0.5) for at in range(case["top"]))
    packed = pack_logprobs([TokenLogprob(token, -1.5, top) for token in prompts[0]])
    payload = msgspec.msgpack.encode([Prefilled(f"r{at}", 0, packed) for at in range(case["samples"])])
    receive = msgspec.msgpack.Decoder(ToFrontendBatch).decode

    def work() -> None:
        for message in receive(payload):
            assert isinstance(message, Prefilled)
            assert len(PackedLogprobs(message.input_logprobs)) == case["tokens"]

    return cpu_s(lambda _: Work(work, len(payload)))(case)


PROMPT_LOGPROBS = st.fixed_dictionaries(
    {"tokens": st.integers(1, 1 << 17), "top": st.integers(0, 20), "samples": st.integers(1, 16)}
)

# -- samples of a long prompt, which end with their first token -----------------------------------------------------


def schedule_samples(case: Case) -> float:
    """CPU time of the longest of three turns of decode's engine loop: dispatch, arrival and end."""
    limits = DecodeLimits(
        page_size=16,
        max_running_requests=256,
        max_queued_requests=64,
        growth_tokens=16,
        retract_pages=0,
        queue_timeout_s=60,
        prefill_wait_s=30,
        prefill_timeout_s=60,
        request_timeout_s=600,
        quarantine_s=6,
    )
    scheduler = DecodeScheduler(limits, PageAllocator[KvPage](case["tokens"] // 8 + 64), [])
    peer, tokens = InstanceId("peer"), case["tokens"]
    scheduler.peer_up(PrefillPeer(peer, {"here:1"}))
    rids = [f"r{at}" for at in range(case["samples"])]
    firsts = tuple(TokenLogprob(5, None) for _ in rids)
    sampling = SamplingParams(max_new_tokens=case["new_tokens"])
    scheduler.handle(Submit(rids[0], tuple(range(tokens)), sampling, more_rids=tuple(rids[1:])), 0.0)

    def receive() -> None:
        prompt = scheduler.requests["r0"].prompt
        key = TransferKey(prompt.prompt_id, prompt.attempts)
        scheduler.handle(MessageReceived(peer, ChunkArrived(key, 0, tokens, ()), ()), 0.0)
        done = PrefillDone(key, firsts, tokens, 1, 1, 8, 0, 0, 0)
        scheduler.handle(MessageReceived(peer, done, ()), 0.0)

    def turn() -> None:
        scheduler.advance(0.0)
        scheduler.next_step(0.0)

    costs_s = [cpu_s(lambda _: Work(turn, tokens))(case), cpu_s(lambda _: Work(receive, tokens))(case)]
    costs_s.append(cpu_s(lambda _: Work(turn, tokens))(case))
    assert scheduler.counters["generation_tokens"] == len(rids)
    return max(costs_s)


SAMPLES = st.one_of(
    [
        st.fixed_dictionaries({"tokens": st.integers(1, most), "samples": samples, "new_tokens": st.integers(1, 2)})
        for most, samples in ((200_000, st.integers(1, 16)), (1_048_000, st.integers(1, 4)))
    ]
)

# -- grammars ------------------------------------------------------------------------------------------------------


@cache
def compiler() -> GrammarCompiler:
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
    vocabulary = Vocabulary(tokens, special={}, eos_token_ids=(256,), encode=lambda text: list(text.encode()))
    return GrammarCompiler(lambda: vocabulary)


def follow_grammar(case: Case) -> float:
    """Infinite if the output of an accepted grammar fails for another reason than a limit."""
    properties = {f"a{at}": {"type": "integer"} for at in range(case["properties"])}
    schema: Case = {"type": "object", "properties": properties, "additionalProperties": case["open"]}
    grammar = Grammar("json_schema", json.dumps({"anyOf": [schema] * case["options"]}))
    try:
        GrammarMasks(compiler(), 8).begin(grammar, (), case["output"].encode(), None)
    except (GrammarError, GrammarLimitError):
        return 1.0
    except GrammarStateError:
        return math.inf
    return 0.0


GRAMMARS = st.fixed_dictionaries(
    {
        "properties": st.integers(1, 40),
        "options": st.integers(1, 250),
        "open": st.booleans(),
        "output": st.sampled_from(["", "{", '{"', '{"a', '{"a0"']),
    }
)

MASKED_TOKENS = 48
LETTERS = "abcdef"


@cache
def large_compiler() -> GrammarCompiler:
    """With a vocabulary of 49,152 tokens."""
    return GrammarCompiler.of(locate_model("smollm2", "auto"))


def wait_for_masks(case: Case) -> float:
    """CPU seconds that the other rows of steps wait for slow masks of one request, without its first slow mask."""
    parts = (f".*{LETTERS[2 * at]}.{{{case['times'] - at}}}{LETTERS[2 * at + 1]}" for at in range(case["alternatives"]))
    pattern = f"({'|'.join(parts)})" + case["end"]
    grammar = Grammar("regex", pattern)
    if case["strings"]:
        grammar = Grammar("json_schema", json.dumps({"type": "array", "items": {"type": "string", "pattern": pattern}}))
    masks = GrammarMasks(large_compiler(), 8)
    slow_s: list[float] = []
    mask, beside = np.zeros((1, masks.words), np.int32), False
    encode = masks.compiler.vocabulary
    text = (case["text"] * MASKED_TOKENS)[:MASKED_TOKENS]
    tokens = [*(encode(b'["') if case["strings"] else ()), *(encode(letter.encode())[0] for letter in text)]
    with suppress(GrammarError, GrammarStateError):
        state = masks.begin(grammar, (), (), None)
        for token in tokens:
            row = MaskRow(state, may_end=True)
            beside = beside and masks.prepare(row)
            began_s = time.thread_time()
            masks.compute([row], mask)
            if (mask_s := time.thread_time() - began_s) > SLOW_MASK_S:
                slow_s.append(mask_s)
            beside = beside or row.slow
            state.consume([token])
    return sum(slow_s[1:])


MASKS = st.fixed_dictionaries(
    {
        "alternatives": st.integers(1, len(LETTERS) // 2),
        "times": st.integers(3, 30),
        "end": st.sampled_from(["", ".*"]),
        "strings": st.booleans(),
        "text": st.text(LETTERS + "x ", min_size=1, max_size=16),
    }
)

KINDS = {
    "call_text": Kind(CALL_TEXTS, cpu_s(parse_call), 3 * WORK_S),  # a model writes it in thousands of pieces
    "call_text_memory": Kind(CALL_TEXTS, memory_per_byte(parse_call), 100),
    "begun_json": Kind(BEGUN, cpu_s(look_for_json), WORK_S),
    "schema": Kind(SCHEMAS, cpu_s(find_types), WORK_S),
    "tools": Kind(TOOLS, cpu_s(write_grammar), WORK_S),
    "tools_memory": Kind(TOOLS, memory_per_byte(write_grammar), 40),
    "stops": Kind(STOPS, find_stops, 0.0005),
    "body": Kind(BODIES, cpu_s(decode), 2 * WORK_S),  # several pieces
    "body_memory": Kind(BODIES, memory_per_byte(partial(decode, most_bytes=MAX_BODY_BYTES // 8)), 16),
    "field": Kind(FIELDS, parse_field, WORK_S),
    "prompts": Kind(PROMPTS, begin_prompts, WORK_S),
    "repeated": Kind(REPETITIONS, repeat_prompts, WORK_S),
    "prompt_logprobs": Kind(PROMPT_LOGPROBS, receive_prompt_logprobs, WORK_S),
    "samples": Kind(SAMPLES, schedule_samples, WORK_S),
    "gzip": Kind(GZIP_BODIES, read_gzip, float(2 << 20)),
    "grammar": Kind(GRAMMARS, follow_grammar, 10.0),
    "masks": Kind(MASKS, wait_for_masks, 0.05),
}
