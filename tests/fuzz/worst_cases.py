"""Kinds of input whose cost could grow faster than their size. Each has a strategy, a cost, and the most it may cost.

A case is JSON: a few numbers and pieces that are repeated, so that a search finds what a person would write.
"""

import asyncio
import json
import math
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

from hypothesis import strategies as st
from starlette.requests import Request

from pdserve.configs.errors import ClientError
from pdserve.configs.sampling import Grammar
from pdserve.models.grammar.compiler import GrammarCompiler, Vocabulary
from pdserve.models.grammar.dialects import GrammarError
from pdserve.models.grammar.masks import GrammarLimitError, GrammarMasks, GrammarStateError
from pdserve.server.api.common.fields import FieldError, decode_object
from pdserve.server.api.common.sampling_fields import check_stop_regexes
from pdserve.server.api.native.models import NativeSampling
from pdserve.server.api.request_body import GZIP_FORMAT, read_body
from pdserve.server.text.parsers.call_grammars import FunctionSchema, UnwritableCallsError
from pdserve.server.text.parsers.families import FAMILIES
from pdserve.server.text.stop_regexes import StopRegexes

Case = dict[str, Any]
WORK_S = 0.15
"""The rule is 50 ms of CPU time (docs/architecture.md). A test machine may be three times slower."""
MAX_BODY_BYTES = 4 << 20
LONGEST_CALL = 60_000


@dataclass(frozen=True)
class Kind:
    cases: st.SearchStrategy[Case]
    cost: Callable[[Case], float]
    limit: float


def cpu_s(work: Callable[[], object]) -> float:
    began_s = time.thread_time()
    work()
    return time.thread_time() - began_s


def repeated(case: Case, most: int) -> str:
    """`begin`, as many times `unit` as there is room for, and `end`."""
    return str(case["begin"] + case["unit"] * (most // len(case["unit"])) + case["end"])


# -- the text of a call --------------------------------------------------------------------------------------------

BEGINNINGS = ["", "[f(a=", "[f(a=[", "[f(a='", "[", "<function=f>", "<function=f><parameter=a>", "<think>"]
BEGINNINGS += ['<tool_call>{"name": "f", "arguments": {"a": ', "<tool_call>f<arg_key>a</arg_key><arg_value>"]
UNITS = ["a", " ", "\\'", "1,", "x(),", '"', "[", "(", "{", "-", "not ", "a=1,", "f'{1}'", "\n", "<tool_call>", "''"]


def parse_call(case: Case) -> float:
    parser = FAMILIES[case["family"]].parser({"f": {"properties": {"a": {}}}})
    text = repeated(case, LONGEST_CALL)
    return cpu_s(lambda: (parser.feed(text), parser.finish()))


CALL_TEXTS = st.fixed_dictionaries(
    {
        "family": st.sampled_from(sorted(FAMILIES)),
        "begin": st.sampled_from(BEGINNINGS),
        "unit": st.lists(st.sampled_from(UNITS), min_size=1, max_size=2).map("".join),
        "end": st.sampled_from(["", ")]", "])]", "')]", "</parameter></function>", "</arg_value></tool_call>"]),
    }
)

# -- the schema of a call's argument -------------------------------------------------------------------------------


def find_types(case: Case) -> float:
    """Each of `levels` parts refers to the next one `width` times."""
    parts: dict[str, Any] = {
        f"p{at}": {case["keyword"]: [{"$ref": f"#/$defs/p{at + 1}"}] * case["width"]} for at in range(case["levels"])
    }
    parts[f"p{case['levels']}"] = {"type": "integer"}
    parser = FAMILIES["qwen3-coder"].parser(
        {"f": {"properties": {"a": {"$ref": "#/$defs/p0"}}, "$defs": parts}},
    )
    return cpu_s(lambda: parser.feed("<function=f><parameter=a>\n1\n</parameter></function>"))


SCHEMAS = st.fixed_dictionaries(
    {"keyword": st.sampled_from(["anyOf", "oneOf"]), "width": st.integers(1, 40), "levels": st.integers(0, 4)}
)

# -- tools that must be called -------------------------------------------------------------------------------------


def write_grammar(case: Case) -> float:
    argument: dict[str, Any] = {"$ref": "#/$defs/d"} if case["refers"] else {"type": "integer"}
    parameters: dict[str, Any] = {"properties": {f"a{at}": argument for at in range(case["arguments"])}}
    parameters["$defs"] = {"d": {"description": "x" * case["definition"]}}
    if case["required"]:
        parameters["required"] = list(parameters["properties"])

    def write() -> None:
        with suppress(UnwritableCallsError):
            json.dumps(FAMILIES[case["family"]].tags.calls([FunctionSchema("f", parameters)], parallel=True))

    return cpu_s(write)


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
        check_stop_regexes([(NativeSampling(stop_regex=patterns), "")])
    except FieldError:
        return 0.0
    stops = StopRegexes([], patterns)
    text = (case["text"] * STOP_CHARACTERS)[:STOP_CHARACTERS]

    def push() -> None:
        for at in range(0, len(text), 4):
            stops.push(text[at : at + 4])

    return cpu_s(push) / STOP_CHARACTERS


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


def decode(case: Case) -> float:
    body = (case["begin"] + repeated({**case, "begin": "", "end": ""}, MAX_BODY_BYTES - 64) + case["end"]).encode()

    def work() -> None:
        with suppress(ClientError):
            decode_object(body)

    return cpu_s(work)


BODIES = st.fixed_dictionaries(
    {
        "begin": st.sampled_from(['{"a":[', '{"a":"', "{", '{"a":']),
        "unit": st.sampled_from(["[],", "{},", '"",', '{"a":1},', "1,", "1.5,", "[[]],", "[", '\\"', "\\u00e9", "9"]),
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
            await read_body(request, 1 << 20)

    asyncio.run(read())
    return float(sent)


GZIP_BODIES = st.fixed_dictionaries(
    {"unit": st.sampled_from(["000000ffff", "00", "4b4c04"]), "bytes": st.integers(1, 32).map(lambda size: size << 18)}
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
        "output": st.sampled_from(["", "{", '{"', '{"a', '{"a1"']),
    }
)

KINDS = {
    "call_text": Kind(CALL_TEXTS, parse_call, 3 * WORK_S),  # a model writes it in thousands of pieces
    "schema": Kind(SCHEMAS, find_types, WORK_S),
    "tools": Kind(TOOLS, write_grammar, WORK_S),
    "stops": Kind(STOPS, find_stops, 0.0005),
    "body": Kind(BODIES, decode, 2 * WORK_S),  # several pieces
    "gzip": Kind(GZIP_BODIES, read_gzip, float(2 << 20)),
    "grammar": Kind(GRAMMARS, follow_grammar, 10.0),
}
