"""Parsers of tool calls, with outputs in the format of each family's chat template."""

import itertools
import json
import time
from typing import Any, get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdserve.configs.setting_types import ReasoningParserName, ToolParserName
from pdserve.server.text.parsers.events import CallArguments, CallBegin, CallEnd, Content, Event, merged
from pdserve.server.text.parsers.families import FAMILIES, family_of_template
from pdserve.server.text.parsers.output_parser import OutputParser
from pdserve.server.text.parsers.reasoning import STYLES, ReasoningParser

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "options": {},
        },
    },
    "now": {},
}
ARGUMENTS = {"city": 'New "York"\n{}', "days": 3, "unit": "C", "options": {"hourly": True, "none": None}}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CITY = json.dumps(ARGUMENTS["city"])

HERMES = f"""Let me look.
<tool_call>
{{"name": "get_weather", "arguments": {JSON}}}
</tool_call>
<tool_call>
{{"name": "now", "arguments": {{}}}}
</tool_call>"""
LLAMA3 = f'{{"name": "get_weather", "parameters": {JSON}}}; {{"name": "now", "parameters": {{}}}}'
MISTRAL = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {JSON}}}, {{"name": "now", "arguments": {{}}}}]'
MISTRAL_V11 = f"Let me look.[TOOL_CALLS]get_weather[ARGS]{JSON}[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{{}}"
DEEPSEEK_V3 = (
    "Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    f"{JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V31 = (
    f"Let me look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_V32 = """Let me look.

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">New "York"
{}</｜DSML｜parameter>
<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
<｜DSML｜parameter name="unit" string="true">C</｜DSML｜parameter>
<｜DSML｜parameter name="options" string="false">{"hourly": true, "none": null}</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="now">
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
QWEN3_CODER = """Let me look.
<tool_call>
<function=get_weather>
<parameter=city>
New "York"
{}
</parameter>
<parameter=days>
3
</parameter>
<parameter=unit>
C
</parameter>
<parameter=options>
{"hourly": True, "none": None}
</parameter>
</function>
</tool_call>
<tool_call>
<function=now>
</function>
</tool_call>"""
GLM45 = """Let me look.
<tool_call>get_weather
<arg_key>city</arg_key>
<arg_value>New "York"
{}</arg_value>
<arg_key>days</arg_key>
<arg_value>3</arg_value>
<arg_key>unit</arg_key>
<arg_value>C</arg_value>
<arg_key>options</arg_key>
<arg_value>{"hourly": true, "none": null}</arg_value>
</tool_call>
<tool_call>now
</tool_call>"""
PYTHONIC = f'[get_weather(city={CITY}, days=3, unit="C", options={{"hourly": True, "none": None}}), now()]'
OUTPUTS = {
    "hermes": HERMES,
    "hermes-lenient": HERMES,
    "llama3-json": LLAMA3,
    "mistral": MISTRAL,
    "mistral-v11": MISTRAL_V11,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v31": DEEPSEEK_V31,
    "deepseek-v32": DEEPSEEK_V32,
    "deepseek-v4": DEEPSEEK_V32.replace("function_calls>", "tool_calls>"),
    "qwen3-coder": QWEN3_CODER,
    "glm45": GLM45,
    "glm47": GLM45.replace("\n<arg", "<arg").replace("\n</tool_call>", "</tool_call>").replace(">\n<tool", "><tool"),
    "pythonic": PYTHONIC,
}


def parse(family: str, *pieces: str) -> list[Event]:
    parser = FAMILIES[family].parser(TOOLS)
    return merged([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


def calls_of(events: list[Event]) -> list[tuple[str, Any]]:
    names = [event.name for event in events if isinstance(event, CallBegin)]
    assert len([event for event in events if isinstance(event, CallEnd)]) == len(names)
    texts = [
        "".join(e.text for e in events if isinstance(e, CallArguments) and e.index == i) for i in range(len(names))
    ]
    return [(name, json.loads(text)) for name, text in zip(names, texts, strict=True)]


def content_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def test_settings_list_the_parsers() -> None:
    assert set(get_args(ToolParserName)) == {"auto", "none", *FAMILIES}
    assert set(OUTPUTS) == set(FAMILIES)
    assert set(get_args(ReasoningParserName)) == {"auto", "none", *STYLES}


@pytest.mark.parametrize("family", OUTPUTS)
def test_calls_of_a_family(family: str) -> None:
    events = parse(family, OUTPUTS[family])
    assert calls_of(events) == [("get_weather", ARGUMENTS), ("now", {})]
    assert content_of(events) == ("Let me look." if "Let me look." in OUTPUTS[family] else "")


@pytest.mark.parametrize("family", [name for name in OUTPUTS if name != "pythonic"])
def test_arguments_are_streamed(family: str) -> None:
    """The beginning of the city is sent before its end arrives, and nothing of the call is sent as content."""
    text = OUTPUTS[family]
    parser = FAMILIES[family].parser(TOOLS)
    events = parser.feed(text[: text.index("York")])
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert arguments.startswith('{"city": "New')
    assert content_of(events) in ("", "Let me look.")


@pytest.mark.parametrize("family", OUTPUTS)
def test_plain_text_is_streamed_without_delay(family: str) -> None:
    """Only white space and a possible beginning of a tag are held back."""
    parser, shown, sent = FAMILIES[family].parser(TOOLS), "", ""
    for character in "Use x < y, [1] and a tool.":
        sent += character
        shown += content_of(parser.feed(character))
        assert sent.rstrip(" <[") == shown.rstrip(" <[")
    assert shown == sent


@pytest.mark.parametrize("family", OUTPUTS)
def test_truncated_output_has_a_prefix_of_the_arguments(family: str) -> None:
    """For every length: no error, and the arguments are a prefix of those of the whole output."""
    whole = [event for event in parse(family, OUTPUTS[family]) if isinstance(event, CallArguments)]
    for cut in range(len(OUTPUTS[family])):
        events = parse(family, OUTPUTS[family][:cut])
        found = [event for event in events if isinstance(event, CallArguments)]
        for part, full in zip(found, whole, strict=False):
            assert full.text.startswith(part.text)
        assert sum(isinstance(e, CallBegin) for e in events) == sum(isinstance(e, CallEnd) for e in events)


MALFORMED = {
    "hermes": [
        "Write <tool_call> and </tool_call> around it.",
        '<tool_call>\n{"arguments": {"city": "x"}}\n</tool_call>',
        '<tool_call>\n{"name": 3}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": [1]}\n</tool_call>',
        "<tool_call>\n{'name': 'now'}\n</tool_call>",
        '<tool_call>{"name": "now"',
    ],
    "hermes-lenient": [
        "Write <tool_call> and </tool_call> around it.",
        "```json\n{}\n```",
        "```json\n[]\n``` and\n```\n{\n```",
        '```json\n{"name": "Anna", "arguments": {"age": 31}}\n``` is a person.',
        '```json\n{"name": "now"}\n```',
        '```json\n{"name": "now", "description": "The time.", "arguments": {}}\n```',
        '```json\n{"name": "now", "arguments": "{}"}\n```',
        '```json\n{"name": ["now"], "arguments": {}}\n```',
        '```json5\n{"name": "now", "arguments": {}}\n```',
        '```python\nprint(1)\n```\n{"name": "now", "arguments": {}}',
        '```\nls\n```\n\n```python\n{"name": "now", "arguments": {}}\n```\n',
        '```json\n{"name": "now", "argu',
        '{"name": "now", "arguments": {}}',
    ],
    "llama3-json": ['{"name": "Bob", "age": 3}', '{"a": {"name": "now"}}', '<|python_tag|>search.call(query="x")', "{"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] are tags", '[TOOL_CALLS][{"x": 1}]', "[TOOL_CALLS]now[ARGS"],
    "deepseek-v3": ["<｜tool▁calls▁begin｜> no", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>x\nnothing here {}"],
    "deepseek-v32": [
        "<｜DSML｜function_calls>\nno",
        "<｜DSML｜function_calls></｜DSML｜function_calls> has no calls",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="now',
    ],
    "qwen3-coder": ["<tool_call>\n{}\n</tool_call>", "<function=", "<tool_call>\n<function=>"],
    "glm45": ["<tool_call> is a tag\n", "<tool_call></tool_call>", "<tool_call>now"],
    "pythonic": ["[1, 2]", "[unknown(a=1)]", "[now(1)]", "[now(**{})]", "[now(a=b)]", "[now(", "[now() for x in y]"],
}


@pytest.mark.parametrize(("family", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_text_that_is_not_a_call_is_content(family: str, text: str) -> None:
    assert parse(family, text) == [Content(text)]


def test_hermes_tolerates_what_models_write() -> None:
    other = '<tool_call>{"arguments": {"city": "x"}, "name": "get_weather"}</tool_call>'
    assert calls_of(parse("hermes", other)) == [("get_weather", {"city": "x"})]
    as_text = '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"x\\"}"}}</tool_call>'
    assert calls_of(parse("hermes", as_text)) == [("get_weather", {"city": "x"})]
    assert calls_of(parse("hermes", '<tool_call>{"name": "now"}</tool_call>')) == [("now", {})]
    unclosed = '<tool_call>{"name": "now"}\n<tool_call>{"name": "now", "arguments": null}'
    assert calls_of(parse("hermes", unclosed)) == [("now", {}), ("now", {})]
    weather = '{"name": "get_weather", "arguments": {"days": 3}}'
    together = f'<tool_call>\n{{"name": "now", "arguments": {{}}}}\n{weather}\n{{"name": "now"}}\n</tool_call>'
    assert calls_of(parse("hermes", together)) == [("now", {}), ("get_weather", {"days": 3}), ("now", {})]
    assert content_of(parse("hermes", together)) == ""


FENCED_WEATHER = f'{{\n  "name": "get_weather",\n  "arguments": {JSON}\n}}'
FENCED_NOW = '{"name": "now", "arguments": {}}'
FENCED = [
    (f"```json\n{FENCED_WEATHER}\n```\n```json\n{FENCED_NOW}\n```", ""),
    (f"Let me look.\n\n```json\n{FENCED_WEATHER}\n{FENCED_NOW}\n```\n", "Let me look."),
    (f"Let me look.\n```\n[{FENCED_WEATHER}, {FENCED_NOW}]\n```\nDone.", "Let me look.Done."),
    (f"```sh\nls\n```\n```json\n{FENCED_WEATHER}\n```\n<tool_call>{FENCED_NOW}</tool_call>", "```sh\nls\n```"),
    (f"```json\n{FENCED_WEATHER}```\n```json\n{FENCED_NOW}", ""),
]


@pytest.mark.parametrize(("text", "content"), FENCED)
def test_lenient_hermes_reads_calls_in_code_blocks(text: str, content: str) -> None:
    events = parse("hermes-lenient", text)
    assert calls_of(events) == [("get_weather", ARGUMENTS), ("now", {})]
    assert content_of(events) == content
    assert parse("hermes-lenient", *text) == events


def test_lenient_hermes_streams_calls_and_other_code_blocks() -> None:
    """Other code blocks are held back up to the first character that cannot be in a call."""
    parser = FAMILIES["hermes-lenient"].parser(TOOLS)
    assert parser.feed("Use this:\n```") == [Content("Use this:")]
    assert parser.feed("json\n{") == []
    assert parser.feed('"na') == []
    assert parser.feed('ture"') == [Content('\n```json\n{"nature"')]
    assert parser.feed(": 1}\n```\nNow") == [Content(": 1}\n```\nNow")]
    assert parser.feed(" I look.\n\n```json") == [Content(" I look.")]
    assert parser.feed('\n{"name": "get_weather", ') == []
    assert parser.feed('"arguments": {"city": "Ro') == [CallBegin(0, "get_weather"), CallArguments(0, '{"city": "Ro')]
    assert parser.feed('me"}}\n``') == [CallArguments(0, 'me"}'), CallEnd(0)]
    assert parser.feed("`\nBye") == [Content("Bye")]
    assert parser.finish() == []


@pytest.mark.parametrize("other", ["[1]", "[]", '{"name": "Anna"}'])
def test_code_block_that_is_no_call_is_content_after_a_call(other: str) -> None:
    events = parse("hermes-lenient", f"```json\n{FENCED_NOW}\n```\n```json\n{other}\n```")
    assert calls_of(events) == [("now", {})]
    assert content_of(events) == f"```json\n{other}\n```"


def test_arguments_of_dsml_may_be_an_object() -> None:
    """DeepSeek-V3.2 sometimes writes one, and SGLang reads it too."""
    first = '<｜DSML｜invoke name="get_weather">\n{"days": 3}\n</｜DSML｜invoke>\n'
    second = '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
    events = parse("deepseek-v32", f"<｜DSML｜function_calls>\n{first}{second}</｜DSML｜function_calls>")
    assert calls_of(events) == [("get_weather", {"days": 3}), ("now", {})]
    assert content_of(events) == ""


@pytest.mark.parametrize(
    ("family", "text", "arguments"),
    [
        ("hermes", r'<tool_call>{"name": "now", "arguments": "\ud83d"}</tool_call>', "\ufffd"),
        ("pythonic", r'[now(a="\ud83d")]', '{"a": "\ufffd"}'),
        ("qwen3-coder", r"<function=now><parameter=a>'\ud83d'</parameter></function>", '{"a": "\ufffd"}'),
        ("qwen3-coder", "<function=now><parameter=a>NaN</parameter></function>", '{"a": "NaN"}'),
        ("qwen3-coder", "<function=now><parameter=a>{'b': 1e999}</parameter></function>", '{"a": "{\'b\': 1e999}"}'),
    ],
)
def test_lone_surrogates_and_infinite_numbers_become_valid_json(family: str, text: str, arguments: str) -> None:
    events = parse(family, text)
    assert "".join(event.text for event in events if isinstance(event, CallArguments)) == arguments


STRING_OR_NULL: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "null"]},
    {"oneOf": [{"$ref": "#/$defs/Text"}, {"type": "null"}]},
]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        *[(schema, "123", "123") for schema in STRING_OR_NULL],
        *[(schema, "true", "true") for schema in STRING_OR_NULL],
        *[(schema, "[1]", "[1]") for schema in STRING_OR_NULL],
        *[(schema, "null", None) for schema in STRING_OR_NULL],
        *[(schema, '"x"', "x") for schema in STRING_OR_NULL],  # as grammars write it
        ({"allOf": [{"$ref": "#/$defs/Text"}], "default": "0"}, "123", "123"),
        ({"type": ["string", "integer"]}, "123", 123),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1]", [1]),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "None", None),
        ({"$ref": "#/$defs/Missing"}, "123", 123),
        ({"$ref": "#/$defs/Loop"}, "123", 123),
    ],
)
def test_value_is_a_string_unless_it_parses_as_another_type_of_its_schema(
    schema: dict[str, Any], text: str, value: object
) -> None:
    definitions = {"Text": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    tools = {"now": {"type": "object", "properties": {"a": schema}, "$defs": definitions}}
    for family, output in (
        ("qwen3-coder", f"<function=now><parameter=a>\n{text}\n</parameter></function>"),
        ("glm45", f"<tool_call>now\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"),
    ):
        parser = FAMILIES[family].parser(tools)
        assert calls_of([*parser.feed(output), *parser.finish()]) == [("now", {"a": value})]


def test_lone_surrogate_in_a_name_is_replaced() -> None:
    assert CallBegin(0, "a\ufffd") in parse("hermes", r'<tool_call>{"name": "a\ud83d", "arguments": {}}</tool_call>')


def test_pythonic_calls_may_have_names_that_are_not_python_identifiers() -> None:
    tools: dict[str, dict[str, Any]] = {"get-fares.v2": {}, "now": {}}
    text = '[get-fares.v2(from="class = 1", to=\'a, in="b(c=1)"\', max-stops = 0, x={"is": "if=1"}), now()]'
    parser = FAMILIES["pythonic"].parser(tools)
    wanted = {"from": "class = 1", "to": 'a, in="b(c=1)"', "max-stops": 0, "x": {"is": "if=1"}}
    assert calls_of([*parser.feed(text), *parser.finish()]) == [("get-fares.v2", wanted), ("now", {})]


def test_list_with_an_infinite_number_is_content() -> None:
    assert parse("pythonic", "[now(a=1e999)]") == [Content("[now(a=1e999)]")]


def test_text_after_a_call_is_content() -> None:
    events = parse("hermes", '<tool_call>{"name": "now"}</tool_call>\n\nDone. <tool_call> is a tag.')
    assert calls_of(events) == [("now", {})]
    assert content_of(events) == "Done. <tool_call> is a tag."


@pytest.mark.parametrize(
    ("family", "call"),
    [("hermes", '<tool_call>{"name": "now"}'), ("deepseek-v3", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}")],
)
def test_text_after_a_call_without_its_closing_tag_is_content(family: str, call: str) -> None:
    parser = FAMILIES[family].parser(TOOLS)
    events = [event for piece in (call, *["text "] * 60) for event in parser.feed(piece)]
    assert calls_of(events) == [("now", {})]
    assert content_of(events).startswith("text text ")
    assert content_of([*events, *parser.finish()]) == "text " * 60


@pytest.mark.parametrize(
    ("family", "beginning"),
    [
        ("hermes", '<tool_call>{"name": "now"}'),
        ("hermes-lenient", '```json\n{"name": "now", "arguments": {"a": "'),
        ("hermes-lenient", "```json\n{"),
        ("qwen3-coder", "<function=now><parameter=a>"),
        ("qwen3-coder", "<function=now>"),
    ],
)
def test_parser_takes_linear_time(family: str, beginning: str) -> None:
    parser, started = FAMILIES[family].parser(TOOLS), time.process_time()
    for piece in (beginning, *[16 * "text"] * 25_000):
        parser.feed(piece)
    parser.finish()
    assert time.process_time() - started < 5  # 0.5 s; with a search of the whole text for each piece 8 s and more


@pytest.mark.parametrize(
    "value",
    [
        60_000 * "a",
        30_000 * "a" + 30_000 * " " + "b",
        "'" + 20_000 * "\\'" + "'",
    ],
    ids=["word", "space", "quotes"],
)
def test_list_of_pythonic_calls_takes_linear_time(value: str) -> None:
    parser, started = FAMILIES["pythonic"].parser(TOOLS), time.process_time()
    parser.feed(f"[now(a={value})]")
    parser.finish()
    assert time.process_time() - started < 1  # at most 0.07 s; 80 s for the word if it is searched from each character


@pytest.mark.parametrize("value", ["[" + 8192 * "1," + "]", "f'{1}'"])
def test_list_that_python_would_parse_for_too_long_is_content(value: str) -> None:
    assert parse("pythonic", f"[now(a={value})]") == [Content(f"[now(a={value})]")]
    assert calls_of(parse("pythonic", "[now(a=[" + 2000 * "1," + "])]")) == [("now", {"a": [1] * 2000})]


def test_space_at_the_beginning_of_a_list_takes_linear_time() -> None:
    parser, started = FAMILIES["pythonic"].parser(TOOLS), time.process_time()
    for piece in ("[", *[16 * " "] * 4000):
        parser.feed(piece)
    assert time.process_time() - started < 0.5  # 0.03 s; with a search of all space for each piece 1 s


def test_value_in_python_syntax_takes_linear_time() -> None:
    text = "(" + 300_000 * "1," + ")"
    parser, started = FAMILIES["qwen3-coder"].parser(TOOLS), time.process_time()
    events = [*parser.feed(f"<function=now><parameter=a>\n{text}\n</parameter></function>"), *parser.finish()]
    assert calls_of(events) == [("now", {"a": text})]
    assert time.process_time() - started < 0.5  # 0.03 s; 3 s if Python parses it


@pytest.mark.parametrize("family", ["glm45", "hermes"])
def test_long_text_of_tags_takes_linear_time(family: str) -> None:
    parser, started = FAMILIES[family].parser(TOOLS), time.process_time()
    text = "<tool_call>" * 20_000
    assert content_of([*parser.feed(text), *parser.finish()]) == text
    assert time.process_time() - started < 1  # 0.2 s; 4 s if each tag is searched in the rest of the text


def test_types_of_a_schema_are_found_in_linear_time() -> None:
    """Each part of the schema refers to the next one 60 times."""
    parts = {f"p{at}": {"anyOf": [{"$ref": f"#/$defs/p{at + 1}"} for _ in range(60)]} for at in range(4)}
    schema = {"properties": {"a": {"$ref": "#/$defs/p0"}}, "$defs": {**parts, "p4": {"type": "string"}}}
    parser, started = FAMILIES["qwen3-coder"].parser({"now": schema}), time.process_time()
    events = [*parser.feed("<function=now><parameter=a>\n1\n</parameter></function>"), *parser.finish()]
    assert calls_of(events) == [("now", {"a": "1"})]
    assert time.process_time() - started < 1  # 1 ms; 20 s if each path to a part is followed


def test_white_space_takes_linear_time() -> None:
    """A model may repeat white space until the context is full. It is held back, because a call may follow."""
    parser, started = FAMILIES["hermes"].parser(TOOLS), time.process_time()
    events = [event for piece in ("a", *[256 * " "] * 10_000) for event in parser.feed(piece)]
    assert content_of(events) == "a"
    assert content_of(parser.finish()) == 2_560_000 * " "
    assert time.process_time() - started < 8  # 0.3 s; with a copy of the held white space for each piece 20 s


def test_broken_arguments_end_the_call() -> None:
    events = parse("hermes", '<tool_call>{"name": "now", "arguments": {"a": ]}}</tool_call>')
    assert events[:3] == [CallBegin(0, "now"), CallArguments(0, '{"a": '), CallEnd(0)]


TAGS = sorted({tag for family in FAMILIES.values() for tag in family.parser.tags})
FRAGMENTS = st.sampled_from(
    [
        *TAGS,
        '{"name": "now"',
        ', "arguments": ',
        '{"a": "b"}',
        "}",
        "]",
        "[",
        "now(",
        "now",
        '">',
        "\n",
        " ",
        ";",
        ",",
        "```json",
        "```",
    ]
)


@st.composite
def split_texts(draw: st.DrawFn) -> tuple[str, str, list[str]]:
    """A family, a text with its tags, and pieces of the text."""
    family = draw(st.sampled_from(sorted(OUTPUTS)))
    noise = st.lists(FRAGMENTS | st.text(max_size=3), max_size=12).map("".join)
    text = draw(noise | st.just(OUTPUTS[family]) | st.sampled_from([fenced for fenced, _ in FENCED]))
    if draw(st.booleans()):
        text = draw(noise) + OUTPUTS[family][: draw(st.integers(0, len(OUTPUTS[family])))] + text
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return family, text, [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]


@settings(max_examples=100, deadline=None)
@given(split_texts())
def test_events_do_not_depend_on_the_pieces(case: tuple[str, str, list[str]]) -> None:
    family, text, pieces = case
    whole = parse(family, text)
    assert parse(family, *pieces) == whole
    assert parse(family, *text) == whole


def parse_all(text: str, pieces: list[str], is_open: bool) -> list[Event]:
    parser = OutputParser(ReasoningParser(STYLES["qwen3"], is_open=is_open), FAMILIES["hermes"].parser(TOOLS))
    assert "".join(pieces) == text
    return merged([event for piece in pieces for event in parser.feed(piece)] + parser.finish())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\n", "a", "<", "<tool_call>", '{"name": "now"}']), max_size=10)
)
@example(["<think>", "a", "</think>", "\n", "<tool_call>", '{"name": "now"}'])
def test_reasoning_and_calls_do_not_depend_on_the_pieces(parts: list[str]) -> None:
    text = "".join(parts)
    for is_open in (False, True):
        whole = parse_all(text, [text], is_open)
        assert parse_all(text, parts, is_open) == whole
        assert parse_all(text, list(text), is_open) == whole


def test_family_of_a_template() -> None:
    """Each family is recognised by a text of its published template."""
    templates = {
        "hermes": '{{- "\\n</tools>\\n\\nwithin <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <f>" }}',
        "qwen3-coder": "{{- '<tool_call>\\n<function=' + call.name + '>\\n' }}{{- '<parameter=' + name + '>\\n' }}",
        "glm45": "{{ '\\n<tool_call>' + tc.name }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
        "glm47": "{{ '<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>",
        "mistral": '{{- "[TOOL_CALLS] [" }}',
        "mistral-v11": "{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
        "deepseek-v3": "{{'<｜tool▁calls▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n' + '```json'}}",
        "deepseek-v31": "{{'<｜tool▁calls▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'}}",
        "deepseek-v32": "{{ '<｜DSML｜function_calls>' }}",
        "deepseek-v4": "{{ '<｜DSML｜tool_calls>' }}",
        "llama3-json": 'the format {"name": function name, "parameters": dictionary of argument name and its value}',
        "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
    }
    assert {*templates, "hermes-lenient"} == set(FAMILIES), "the lenient format is by option only"
    for name, template in templates.items():
        family = family_of_template(template)
        assert family is not None
        assert family.name == name
    assert family_of_template("{% for message in messages %}{{ message.content }}{% endfor %}") is None


def test_call_ids_are_unique_and_have_the_format_of_the_family() -> None:
    assert FAMILIES["hermes"].new_id().startswith("call_")
    assert len({FAMILIES["hermes"].new_id() for _ in range(100)}) == 100
    mistral = FAMILIES["mistral"].new_id()
    assert len(mistral) == 9
    assert mistral.isalnum()
