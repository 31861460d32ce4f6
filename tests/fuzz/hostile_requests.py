"""Requests of legal size that cost a server as much as possible: those that once stopped one, and random ones."""

import gzip
import json
import random
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdserve.server.api.service.request_body import GZIP_FORMAT
from tests.random_schemas import random_schema, without_bounds

MIB = 1 << 20
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
SLOW_MASKS = "^(.*a.{14}b|.*c.{13}d|.*e.{12}f).*$"


@dataclass(frozen=True)
class Hostile:
    """A request, how many clients send it again and again, and the tool parser of their server."""

    name: str
    route: str
    body: bytes
    clients: int = 1
    parser: str = "qwen3-coder"
    headers: Mapping[str, str] = field(default_factory=dict)


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 64, "stream": True, **fields}


def _tool(parameters: dict[str, Any]) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


def _earlier_call(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def _paths(width: int, levels: int) -> dict[str, Any]:
    parts: dict[str, Any] = {f"p{at}": {"anyOf": [{"$ref": f"#/$defs/p{at + 1}"}] * width} for at in range(levels)}
    parts[f"p{levels}"] = {"type": "integer"}
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/p0"}}, "required": ["a"], "$defs": parts}


def _arguments(count: int, definition: int) -> dict[str, Any]:
    properties = {f"a{at}": {"$ref": "#/$defs/d"} for at in range(count)}
    return {"type": "object", "properties": properties, "$defs": {"d": {"description": "x" * definition}}}


def _open_objects(count: int) -> dict[str, Any]:
    options = [
        {"type": "object", "properties": {f"a{at}": {"type": "integer"}}, "additionalProperties": True}
        for at in range(count)
    ]
    return {"anyOf": options}


def _empty_blocks(size: int) -> bytes:
    header = zlib.compressobj(wbits=GZIP_FORMAT).flush(zlib.Z_SYNC_FLUSH)
    return header + bytes.fromhex("000000ffff") * ((size - len(header)) // 5)


def _json_schema(schema: object) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def known() -> list[Hostile]:
    """Each has once stopped or slowed down a server for everybody."""
    required = {"tool_choice": "required"}
    stops = {"max_new_tokens": 400, "ignore_eos": True, "stop_regex": [f"[^b].{{50}}Q{at}" for at in range(7)]}
    numbers = {"type": "object", "properties": {"a": {"type": "array", "minItems": 300, "items": {"enum": [1]}}}}
    patterns = {f"a{at}": {"type": "string", "pattern": f"(.*x.{{{at}}}y)*z{{{at}}}"} for at in range(20)}
    optional = {f"a{at}": {"type": "integer"} for at in range(500)}
    mebibytes = 4 * MIB - 1024
    return [
        Hostile("paths of a schema", CHAT, _encoded(_chat(tools=_tool(_paths(40, 4)), **required))),
        Hostile(
            "500 arguments", CHAT, _encoded(_chat(tools=_tool(_arguments(500, 8000)), **required)), parser="pythonic"
        ),
        Hostile(
            "a long call", CHAT, _encoded(_chat(tools=_tool(numbers), max_tokens=400, **required)), parser="pythonic"
        ),
        Hostile(
            "stop expressions",
            GENERATE,
            _encoded({"text": "Once upon a time", "sampling_params": stops, "stream": True}),
            clients=32,
        ),
        Hostile("200 open objects", CHAT, _encoded(_chat(**_json_schema(_open_objects(200))))),
        Hostile(
            "500 optional properties", CHAT, _encoded(_chat(**_json_schema({"type": "object", "properties": optional})))
        ),
        Hostile("20 patterns", CHAT, _encoded(_chat(**_json_schema({"type": "object", "properties": patterns})))),
        Hostile("slow masks", CHAT, _encoded(_chat(regex=SLOW_MASKS)), clients=4),
        Hostile("empty gzip blocks", CHAT, _empty_blocks(64 * MIB), headers={"Content-Encoding": "gzip"}),
        Hostile("4 MiB of arrays", CHAT, b'{"a":[' + b"[]," * (mebibytes // 3) + b"1]}"),
        Hostile("4 MiB of numbers", COMPLETION, b'{"prompt":[' + b"1e300," * (mebibytes // 6) + b"1]}"),
        Hostile("4 MiB of token ids", COMPLETION, b'{"prompt":[' + b"7," * (mebibytes // 2) + b"1]}"),
        Hostile("4 MiB of text", COMPLETION, _encoded({"prompt": "a b" * (mebibytes // 3)})),
        Hostile(
            "4 MiB of earlier arguments",
            CHAT,
            _encoded(_chat(messages=[_earlier_call('{"a":[' + "[]," * (mebibytes // 3 - 99) + "1]}")])),
        ),
        Hostile("a number of 4 MiB", CHAT, b'{"a":' + b"9" * mebibytes + b"}"),
    ]


# -- random requests -----------------------------------------------------------------------------------------------

_CHARACTERS = [
    "a",
    " ",
    "\n",
    '"',
    "\\",
    "{",
    "[",
    "\0",
    "é",
    "\u202e",
    "\ud83d\ude00",
    "\u0301",
    "\ufffd",
    "<|im_end|>",
]
_NUMBERS = [0, 1, -1, 7, 10**6, 2**31, 2**53, 2**63, -(2**63), 10**300, 1e-300, 1e308, 0.1, 1.5]
_PIECES = [
    "a",
    ".",
    "[^b]",
    r"\w",
    r"\b",
    "(a|b)",
    "(?:a?)",
    "[a-z]",
    "(.*x)",
    r"\d",
    "$",
    "^",
    "é",
    "(?i:k)",
    "[^\\W_]",
]
_TIMES = ["", "*", "+", "?", "{3}", "{0,9}", "{40}", "{2,}", "{250}"]


class Generator:
    """Makes random requests, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def next(self) -> Hostile:
        makers: list[Callable[[], Hostile]] = [
            self._schema,
            self._broken_schema,
            self._tools,
            self._expression,
            self._ebnf,
            self._stops,
            self._prompt,
            self._parameters,
            self._messages,
            self._deep,
            self._compressed,
        ]
        while len((made := self._rng.choice(makers)()).body) > 4 * MIB:
            pass
        return made

    def _made(self, route: str, fields: dict[str, Any]) -> Hostile:
        if route == GENERATE:
            fields = {"text": "Hi", "sampling_params": {"max_new_tokens": 16, **fields}}
        elif route == COMPLETION:
            fields = {"prompt": "Hi", "max_tokens": 16, **fields}
        else:
            fields = _chat(**{"max_tokens": 16, **fields})
        return Hostile("random", route, _encoded({**fields, "stream": self._rng.random() < 0.5}))

    def _schema(self) -> Hostile:
        schema = random_schema(self._rng.randrange(10**6))
        if self._rng.random() < 0.3:
            schema = without_bounds(schema)
        return self._made(CHAT, _json_schema(self._changed(schema)))

    def _broken_schema(self) -> Hostile:
        return self._made(CHAT, _json_schema(self._any_json(5)))

    def _tools(self) -> Hostile:
        made: list[Callable[[], Any]] = [
            lambda: _paths(self._rng.randrange(1, 60), self._rng.randrange(6)),
            lambda: _arguments(self._rng.randrange(600), self._rng.randrange(20_000)),
            lambda: self._changed(random_schema(self._rng.randrange(10**6))),
            lambda: self._any_json(4),
        ]
        tools = _tool(self._rng.choice(made)()) * self._rng.choice([1, 1, 2, 40])
        choice = self._rng.choice(["required", "auto", {"type": "function", "function": {"name": "f"}}])
        return self._made(CHAT, {"tools": tools, "tool_choice": choice})

    def _pattern(self) -> str:
        pieces = (self._rng.choice(_PIECES) + self._rng.choice(_TIMES) for _ in range(self._rng.randrange(1, 12)))
        pattern = "".join(pieces)
        return (
            f"({pattern}|{self._rng.choice(_PIECES)}){self._rng.choice(_TIMES)}"
            if self._rng.random() < 0.5
            else pattern
        )

    def _expression(self) -> Hostile:
        if self._rng.random() < 0.5:
            return self._made(CHAT, {"regex": self._pattern()})
        schema = {"type": "array", "items": {"type": "string", "pattern": self._pattern()}}
        return self._made(CHAT, _json_schema(schema))

    def _ebnf(self) -> Hostile:
        names = [f"r{at}" for at in range(self._rng.randrange(1, 30))]
        lines = [
            f"{name} ::= "
            + " | ".join(
                " ".join(
                    self._rng.choice([*names, '"a"', "[b-d]+", '""', f"{name} {name}", '"x"{2,9}']) for _ in range(3)
                )
                for _ in range(self._rng.randrange(1, 5))
            )
            for name in names
        ]
        return self._made(GENERATE, {"ebnf": "\n".join([f"root ::= {names[-1]}", *lines])})

    def _stops(self) -> Hostile:
        if self._rng.random() < 0.5:
            stop = [self._text(self._rng.choice([1, 5, 200, 4000])) for _ in range(self._rng.choice([1, 4, 60, 1000]))]
            return self._made(self._rng.choice([CHAT, COMPLETION, GENERATE]), {"stop": stop})
        return self._made(GENERATE, {"stop_regex": [self._pattern() for _ in range(self._rng.choice([1, 3, 8, 40]))]})

    def _prompt(self) -> Hostile:
        prompts: list[Callable[[], Any]] = [
            lambda: [self._rng.choice([1, 5, 49151, 49152, -1, 2**40, 1.0, "1", None]) for _ in range(9)],
            lambda: [7] * self._rng.choice([1, 1000, 200_000]),
            lambda: [[7] * 3] * self._rng.choice([2, 100, 5000]),
            lambda: self._text(self._rng.choice([0, 10, 100_000])),
            lambda: [self._text(3)] * self._rng.choice([2, 300, 30_000]),
            lambda: "a" * self._rng.choice([100_000, MIB]),
            lambda: " " * self._rng.choice([100_000, MIB]),
        ]
        return self._made(COMPLETION, {"prompt": self._rng.choice(prompts)()})

    def _parameters(self) -> Hostile:
        def number() -> float:
            return self._rng.choice(_NUMBERS)

        fields: dict[str, Callable[[], Any]] = {
            "n": lambda: self._rng.choice([1, 2, 16, 10**9]),
            "best_of": lambda: self._rng.choice([1, 4, 128]),
            "logit_bias": lambda: {
                str(self._rng.randrange(60_000)): number() for _ in range(self._rng.choice([1, 50, 5000]))
            },
            "logprobs": lambda: self._rng.choice([0, 1, 5, 20, 1000]),
            "echo": lambda: True,
            "stop_token_ids": lambda: list(range(self._rng.choice([1, 100, 100_000]))),
            **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty"), number),
            **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens", "priority", "timeout_s"), number),
            **{self._text(6): number for _ in range(self._rng.choice([1, 1, 3000]))},
        }
        chosen = self._rng.sample(sorted(fields), min(len(fields), self._rng.choice([1, 3, 3000])))
        return self._made(COMPLETION, {name: fields[name]() for name in chosen})

    def _messages(self) -> Hostile:
        count = self._rng.choice([1, 3, 300, 5000])
        content = self._rng.choice(
            [
                self._text(9),
                [{"type": "text", "text": self._text(3)}] * self._rng.choice([1, 300]),
                None,
                5,
                self._text(600),
            ]
        )
        message = {"role": self._rng.choice(["user", "system", "assistant", "tool", "x"]), "content": content}
        extra = {"continue_final_message": True, "add_generation_prompt": False} if self._rng.random() < 0.3 else {}
        return self._made(CHAT, {"messages": [message] * count, **extra})

    def _deep(self) -> Hostile:
        depth = self._rng.choice([10, 100, 900, 5000, 200_000])
        opening, closing = self._rng.choice([("[", "]"), ('{"a":', "}"), ('{"anyOf":[', "]}"), ('{"items":', "}")])
        inner = opening * depth + "1" + closing * (depth if self._rng.random() < 0.8 else depth - 1)
        before, after = self._rng.choice(
            [
                ('{"a":', "}"),
                ('{"prompt":', "}"),
                ('{"messages":[{"role":"user","content":"Hi"}],"max_tokens":16,"json_schema":', "}"),
                ('{"messages":[{"role":"user","content":"Hi"}],"max_tokens":16,"tools":', "}"),
            ]
        )
        return Hostile("random", CHAT, (before + inner + after).encode())

    def _compressed(self) -> Hostile:
        plain = self._rng.choice([b"{", b"[", b" ", b'"', b"\0"]) * self._rng.choice([10, 10**5, 8 * MIB])
        packed = gzip.compress(plain, 9)
        if self._rng.random() < 0.5:
            packed = (packed * 2000)[: 4 * MIB] if self._rng.random() < 0.5 else packed[: len(packed) // 2]
        return Hostile("random", CHAT, packed, headers={"Content-Encoding": "gzip"})

    def _text(self, length: int) -> str:
        if length > 100:
            return "".join(self._rng.choices(_CHARACTERS, k=50)) * (length // 50)
        return "".join(self._rng.choices(_CHARACTERS, k=length))

    def _any_json(self, depth: int) -> Any:
        keywords = ["type", "properties", "items", "anyOf", "allOf", "$ref", "$defs", "enum", "const", "pattern", "not"]
        keywords += ["minLength", "maxLength", "minItems", "maxItems", "required", "additionalProperties", "multipleOf"]
        leaves = ["object", "string", "#", "#/$defs/a", "^a*$", True, False, None, *_NUMBERS]
        kind = self._rng.random()
        if depth == 0 or kind < 0.2:
            return self._rng.choice(leaves)
        if kind < 0.4:
            return [self._any_json(depth - 1) for _ in range(self._rng.randrange(4))]
        return {self._rng.choice(keywords): self._any_json(depth - 1) for _ in range(self._rng.randrange(1, 5))}

    def _changed(self, schema: Any) -> Any:
        """A schema in which a few keywords have other values, or are repeated many times."""
        if isinstance(schema, dict):
            changed = {key: self._changed(value) for key, value in schema.items()}
            if self._rng.random() < 0.05:
                changed["anyOf"] = [changed.copy()] * self._rng.choice([2, 30])
            for key in changed:
                if isinstance(changed[key], int) and self._rng.random() < 0.2:
                    changed[key] = self._rng.choice(_NUMBERS)
            return changed
        return [self._changed(value) for value in schema] if isinstance(schema, list) else schema
