"""Grammars of tool calls: they accept what the parsers read, and only calls that match the schema."""

import json
import re
import time
from typing import Any

import pytest

from pdserve.common.sampling import Grammar, ReasoningTags
from pdserve.models.grammar.compiler import GrammarCompiler, Vocabulary
from pdserve.server.text.parsers.call_grammars import Format, FunctionSchema, UnwritableCallsError
from pdserve.server.text.parsers.families import FAMILIES
from pdserve.server.text.parsers.reasoning import CHANNELS
from tests.server.text.parsers.test_call_parsers import OUTPUTS, calls_of, parse

SPECIAL = ["[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "｜DSML｜", "<tool_call>", "<think>"]
SPECIAL += ["<|start|>", "<|end|>", "<|message|>", "<|channel|>"]
WEATHER = FunctionSchema(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"], "type": "string"},
            "options": {"$ref": "#/$defs/Options"},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"Options": {"type": "object"}},
    },
)
NOW = FunctionSchema("now", {})


@pytest.fixture(scope="module", params=[[], SPECIAL], ids=["text", "special tokens"])
def compiler(request: pytest.FixtureRequest) -> GrammarCompiler:
    """A vocabulary of bytes, in which some tags may be special tokens."""
    special = {text: 257 + index for index, text in enumerate(request.param)}
    tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>", *(text.encode() for text in special)]
    vocabulary = Vocabulary(tokens, special=special, eos_token_ids=(256,), encode=lambda text: list(text.encode()))
    return GrammarCompiler(lambda: vocabulary)


def grammar_of(content: Format, after: ReasoningTags | None = None) -> Grammar:
    return Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": content}), after)


def accepted(compiler: GrammarCompiler, grammar: Grammar, text: str) -> str:
    """The beginning of `text` that the grammar accepts; with a `.` after the whole text if the output may end there."""
    matcher = compiler.new_matcher(grammar)
    special = compiler.vocabulary.special
    at = 0
    while at < len(text):
        tag = next((tag for tag in special if text.startswith(tag, at)), None)
        tokens = [special[tag]] if tag is not None else list(text[at].encode())
        if not all(matcher.consume_token(token) for token in tokens):
            return text[:at]
        at += len(tag) if tag is not None else 1
    return text + "." * matcher.is_accepting()


def calls_text(family: str) -> str:
    """The calls of the family's sample output, without the text before them and as the grammar spells them."""
    text = OUTPUTS[family].removeprefix("Let me look.").lstrip()
    return text.replace("True", "true").replace("None", "null").replace("[CALL_ID]a1b2c3d4e", "")


@pytest.mark.parametrize("family", OUTPUTS)
def test_grammar_of_required_calls_accepts_the_format_of_the_family(compiler: GrammarCompiler, family: str) -> None:
    tags, text = FAMILIES[family].tags, calls_text(family)
    grammar = grammar_of(tags.calls([WEATHER, NOW], parallel=True))
    assert accepted(compiler, grammar, text) == text + "."
    assert [name for name, _ in calls_of(parse(family, text))] == ["get_weather", "now"]
    assert accepted(compiler, grammar, "Hello") == ""
    assert accepted(compiler, grammar, "") == ""
    wrong = text.replace("get_weather", "get_whether", 1)
    assert accepted(compiler, grammar, wrong) == wrong[: wrong.index("get_wh") + len("get_w")]


@pytest.mark.parametrize("family", OUTPUTS)
def test_values_match_their_schema(compiler: GrammarCompiler, family: str) -> None:
    text = calls_text(family)
    grammar = grammar_of(FAMILIES[family].tags.calls([WEATHER, NOW], parallel=True))
    days = text.index("3", text.index("days"))
    wrong = text[:days] + '"x"' + text[days + 1 :]
    assert accepted(compiler, grammar, wrong) == wrong[:days]
    unit = text.index("C", text.index("unit"))
    wrong = text[:unit] + "K" + text[unit + 1 :]
    assert accepted(compiler, grammar, wrong) == wrong[:unit]


@pytest.mark.parametrize("family", OUTPUTS)
def test_grammar_allows_one_call_without_parallel_calls(compiler: GrammarCompiler, family: str) -> None:
    text = calls_text(family)
    grammar = grammar_of(FAMILIES[family].tags.calls([WEATHER, NOW], parallel=False))
    one = accepted(compiler, grammar, text)
    assert one != text + "."
    complete = one.removesuffix(", ") + "]" if family == "pythonic" else one
    assert calls_of(parse(family, complete))[0][0] == "get_weather"


@pytest.mark.parametrize("space", ["", "\n", " \n\n"])
@pytest.mark.parametrize("family", OUTPUTS)
def test_white_space_and_the_end_may_follow_each_call(compiler: GrammarCompiler, family: str, space: str) -> None:
    """Many models write a line break after a call, and then their end token. If the grammar allowed only another call
    after the line break, they would invent one.
    """
    tags = FAMILIES[family].tags
    call = tags.begin.replace("{name}", "now") + ("{}" if tags.arguments is None else "") + tags.end
    call += tags.close
    one = f"{tags.list_begin}{call}{space}{tags.list_end}{space}"
    two = f"{tags.list_begin}{call}{space}{tags.separator.strip()}{space}{call}{space}{tags.list_end}{space}"
    grammars = [grammar_of(tags.calls([WEATHER, NOW], parallel=parallel)) for parallel in (True, False)]
    grammars.append(grammar_of(tags.text_with_calls([WEATHER, NOW])))
    assert [accepted(compiler, grammar, one) for grammar in grammars] == [one + "."] * 3
    assert [accepted(compiler, grammar, two) == two + "." for grammar in grammars] == [True, False, True]
    assert calls_of(parse(family, one)) == [("now", {})]
    assert calls_of(parse(family, two)) == [("now", {})] * 2


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.tags.close])
def test_output_may_end_before_the_closing_tag_of_the_last_call(compiler: GrammarCompiler, family: str) -> None:
    """Small models write their end token there: after the closing tag, which is new to them, they would go on."""
    tags = FAMILIES[family].tags
    call = tags.begin.replace("{name}", "now") + ("{}" if tags.arguments is None else "") + tags.end
    for parallel in (True, False):
        grammar = grammar_of(tags.calls([WEATHER, NOW], parallel=parallel))
        assert accepted(compiler, grammar, call) == call + "."
        assert accepted(compiler, grammar, f"{call}\n{call}") in (f"{call}\n", f"{call}\n<"), "only the last call"
    assert calls_of(parse(family, call)) == [("now", {})]


@pytest.mark.parametrize("family", OUTPUTS)
def test_strict_functions_constrain_only_calls(compiler: GrammarCompiler, family: str) -> None:
    strict = FunctionSchema(WEATHER.name, WEATHER.parameters, strict=True)
    tags, text = FAMILIES[family].tags, calls_text(family)
    grammar = grammar_of(tags.text_with_calls([strict, NOW]))
    assert accepted(compiler, grammar, "Hello, I am x.") == "Hello, I am x.."
    assert accepted(compiler, grammar, text) == text + "."
    days = text.index("3", text.index("days"))
    wrong = text[:days] + '"x"' + text[days + 1 :]
    assert accepted(compiler, grammar, wrong) == wrong[:days]
    if not tags.first_character:
        assert accepted(compiler, grammar, f"Let me look. {text}") == f"Let me look. {text}."


def test_schema_that_cannot_be_enforced_is_lenient_unless_strict(compiler: GrammarCompiler) -> None:
    parameters: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tags = FAMILIES["hermes"].tags
    lenient = grammar_of(tags.calls([FunctionSchema("f", parameters)], parallel=True))
    text = '<tool_call>\n{"name": "f", "arguments": {"a": [1, 1]}}\n</tool_call>'
    assert accepted(compiler, lenient, text) == text + "."
    strict = grammar_of(tags.calls([FunctionSchema("f", parameters, strict=True)], parallel=True))
    with pytest.raises(Exception, match="uniqueItems"):
        compiler.compile(strict)


@pytest.mark.parametrize("family", ["qwen3-coder", "glm45", "deepseek-v32"])
@pytest.mark.parametrize("schema", [{"enum": ["C", "F"]}, {"enum": ["C", None]}, {"type": ["string", "null"]}])
def test_parser_reads_strings_in_the_format_of_the_grammar(
    compiler: GrammarCompiler, family: str, schema: dict[str, Any]
) -> None:
    """With schemas that allow strings in other ways than `"type": "string"`."""
    parameters = {"type": "object", "properties": {"unit": schema}, "required": ["unit"]}
    tags = FAMILIES[family].tags
    assert tags.arguments is not None
    grammar = grammar_of(tags.calls([FunctionSchema("f", parameters)], parallel=False))
    texts = [
        f"{tags.list_begin}{tags.begin}{tags.arguments.begin}{value}{tags.arguments.end}{tags.end}{tags.list_end}".replace(
            "{string}", string
        ).format(name="f", key="unit")
        for value, string in (("C", "true"), ('"C"', "false"))
    ]
    (text,) = [text for text in texts if accepted(compiler, grammar, text) == text + "."]
    parser = FAMILIES[family].parser({"f": parameters})
    assert calls_of([*parser.feed(text), *parser.finish()]) == [("f", {"unit": "C"})]


@pytest.mark.parametrize("family", ["qwen3-coder", "glm45", "deepseek-v32"])
def test_grammar_and_parser_end_a_string_at_the_same_place(compiler: GrammarCompiler, family: str) -> None:
    """Both end it at the closing tag, whatever is around the tag. Otherwise the model could not end its call."""
    parameters = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tags = FAMILIES[family].tags
    assert tags.arguments is not None
    grammar = grammar_of(tags.calls([FunctionSchema("f", parameters)], parallel=False))
    close = tags.arguments.end.strip()
    begin = f"{tags.list_begin}{tags.begin}{tags.arguments.begin}".replace("{string}", "true").format(name="f", key="a")
    text = f"{begin}x{close}\n{tags.end}{tags.list_end}"
    assert accepted(compiler, grammar, text) == text + "."
    assert accepted(compiler, grammar, f"{begin}x{close}y") == f"{begin}x{close}"
    parser = FAMILIES[family].parser({"f": parameters})
    assert calls_of([*parser.feed(text), *parser.finish()]) == [("f", {"a": "x"})]


@pytest.mark.parametrize("family", ["qwen3-coder", "glm45", "deepseek-v32"])
@pytest.mark.parametrize("listed", [{"enum": ["<think>", "[TOOL_CALLS]x"]}, {"const": "[TOOL_CALLS]x"}])
def test_special_tokens_in_listed_strings_are_written_as_text(
    compiler: GrammarCompiler, family: str, listed: dict[str, Any]
) -> None:
    schema = {"type": "string", **listed}
    tags = FAMILIES[family].tags
    assert tags.arguments is not None
    call = tags.calls(
        [FunctionSchema("f", {"type": "object", "properties": {"a": schema}, "required": ["a"]})], parallel=False
    )
    matcher = compiler.new_matcher(grammar_of(call))
    special = compiler.vocabulary.special
    begin = f"{tags.list_begin}{tags.begin}{tags.arguments.begin}".replace("{string}", "true").format(name="f", key="a")
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", begin) if special else [begin]
    tokens = [token for part in parts for token in ([special[part]] if part in special else part.encode())]
    assert all(matcher.consume_token(token) for token in (*tokens, *b"[TOOL_CALLS]x"))


@pytest.mark.parametrize("family", ["qwen3-coder", "glm45", "deepseek-v32"])
def test_values_with_the_closing_tag_are_refused(family: str) -> None:
    tags = FAMILIES[family].tags
    assert tags.arguments is not None
    value = f"a{tags.arguments.end.strip()}b"
    for schema in ({"type": "string", "enum": ["a", value]}, {"const": value}, {"anyOf": [{"enum": [[value]]}]}):
        function = FunctionSchema("f", {"properties": {"a": schema}})
        with pytest.raises(UnwritableCallsError, match=r'a value of "a" of "f", .* which ends a value'):
            tags.calls([function], parallel=True)
    described = FunctionSchema("f", {"properties": {"a": {"type": "string", "description": value}}})
    tags.calls([described], parallel=True)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("definitions", [{}, {"Long": {"description": 4000 * "x"}}], ids=["arguments", "definitions"])
def test_grammar_of_too_many_arguments_is_refused_while_it_is_built(family: str, definitions: dict[str, Any]) -> None:
    argument = {"$ref": "#/$defs/Long"} if definitions else {"type": "integer", "description": 200 * "x"}
    schema = {"properties": {f"a{at}": argument for at in range(1000)}, "$defs": definitions}
    tags, started = FAMILIES[family].tags, time.process_time()
    if tags.arguments is None and definitions:
        tags.calls([FunctionSchema("f", schema)], parallel=True)  # definitions are written once
    else:
        with pytest.raises(UnwritableCallsError, match="make a grammar of more than 131072 characters"):
            tags.calls([FunctionSchema("f", schema)], parallel=True)
    assert time.process_time() - started < 0.5  # at most 5 ms; with all copies more than 1 s


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("wrong", [1, True, {}, "a", [1, ["a"]]])
def test_fields_of_other_types_than_schemas_have_make_a_grammar(family: str, wrong: object) -> None:
    """Clients send whatever; what is wrong in a schema is found where it is compiled."""
    tags = FAMILIES[family].tags
    for field in ("required", "properties", "$defs", "type"):
        schema = {"properties": {"a": {"enum": wrong, "const": wrong, "type": wrong}}, field: wrong}
        tags.calls([FunctionSchema("f", schema)], parallel=True)
        tags.text_with_calls([FunctionSchema("f", schema)])


def test_definitions_are_copied_only_to_arguments_that_refer_to_them() -> None:
    properties = {"a": {"$ref": "#/$defs/A"}, "b": {"type": "integer"}}
    function = FunctionSchema("f", {"properties": properties, "$defs": {"A": {"type": "null"}}})
    assert json.dumps(FAMILIES["qwen3-coder"].tags.calls([function], parallel=True)).count("$defs") == 2


def test_optional_arguments_of_pythonic_calls(compiler: GrammarCompiler) -> None:
    parameters = {"type": "object", "properties": {name: {"type": "integer"} for name in "abc"}, "required": ["b"]}
    grammar = grammar_of(FAMILIES["pythonic"].tags.calls([FunctionSchema("f", parameters)], parallel=True))
    for text in ("[f(a=1, b=2, c=3)]", "[f(b=2)]", "[f(b=2, c=3), f(a=1, b=2)]"):
        assert accepted(compiler, grammar, text) == text + "."
    assert accepted(compiler, grammar, "[f()]") == "[f("
    assert accepted(compiler, grammar, "[f(a=1, c=2)]") == "[f(a=1, "


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("json_schema", '{"type": "boolean"}', "true"),
        ("regex", "[0-9]{3}", "123"),
        ("choice", '["yes", "no"]', "yes"),
        ("ebnf", 'root ::= "a" | "b"', "a"),
        ("structural_tag", json.dumps({"format": {"type": "const_string", "value": "x"}}), "x"),
    ],
)
def test_grammar_begins_after_the_reasoning(compiler: GrammarCompiler, kind: Any, text: str, answer: str) -> None:
    opened = Grammar(kind, text, ReasoningTags("<think>", "</think>", is_open=True))
    for output in (f"Hm {{}}.</think>\n\n{answer}", f"</think>{answer}"):
        assert accepted(compiler, opened, output) == output + "."
    assert accepted(compiler, opened, "Hm.") == "Hm.", "the output must not end before the answer"
    assert not accepted(compiler, opened, answer).endswith(".")
    assert accepted(compiler, opened, "Hm.</think>\n!") == "Hm.</think>\n"
    closed = Grammar(kind, text, ReasoningTags("<think>", "</think>", is_open=False))
    for output in (answer, f"<think>Hm.</think>\n{answer}", f"\n<think>\n\n</think>\n\n{answer}"):
        assert accepted(compiler, closed, output) == output + "."
    assert accepted(compiler, closed, "Hm") == ""


def test_grammar_begins_in_the_final_channel_of_gpt_oss(compiler: GrammarCompiler) -> None:
    grammar = Grammar("choice", '["yes", "no"]', ReasoningTags(CHANNELS.open, CHANNELS.close, is_open=False))
    output = f"{CHANNELS.open}Hm.{CHANNELS.close}yes"
    assert accepted(compiler, grammar, output) == output + "."
    assert accepted(compiler, grammar, f"{CHANNELS.open}Hm.{CHANNELS.close}maybe") == output.removesuffix("yes")
