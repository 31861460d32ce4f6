"""Masks and states of grammars, with the tokenizer of the tiny checkpoint, whose tokens are bytes."""

import json
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pdserve.common.sampling import MAX_GRAMMAR_CHARACTERS, Grammar
from pdserve.models.grammar import compiler as compiler_module
from pdserve.models.grammar import masks as masks_module
from pdserve.models.grammar.compiler import MASK_THREADS, MAX_CACHED_MASK_S, PLAIN_MASK_S, GrammarCompiler, Vocabulary
from pdserve.models.grammar.dialects import GrammarError
from pdserve.models.grammar.masks import (
    FAST_MASKS,
    Bitmask,
    GrammarLimitError,
    GrammarMasks,
    GrammarState,
    GrammarStateError,
    MaskRow,
)
from pdserve.models.grammar.regex_size import regex_size
from pdserve.models.loading.catalog import locate_model
from tests.checkpoints import EOS_ID, make_checkpoint

STRUCTURES = {
    "type": "structural_tag",
    "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f="],
}

SLASH = {"type": "regex", "pattern": "a/b"}


def triggered(trigger: str = "<f=", **options: bool) -> str:
    """A structural tag with two tags, `<f=a>` and `<f=b>`, after `trigger`, which may be a special token."""
    tags = [{"begin": f"{trigger}{name}>", "content": SLASH, "end": "</f>"} for name in "ab"]
    return json.dumps({"format": {"type": "triggered_tags", "triggers": [trigger], "tags": tags, **options}})


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    return GrammarCompiler.of(locate_model(str(make_checkpoint(tmp_path_factory.mktemp("tiny")))), max_cached=4)


def state_after(compiler: GrammarCompiler, grammar: Grammar, text: str, stop: tuple[int, ...] = ()) -> GrammarState:
    return GrammarMasks(compiler, 8).begin(grammar, stop, encode(compiler, text), None)


def encode(compiler: GrammarCompiler, text: str) -> list[int]:
    """As a model writes it: with special tokens."""
    vocabulary = compiler.vocabulary
    parts = re.split(f"({'|'.join(map(re.escape, vocabulary.special))})", text)
    return [
        token
        for part in parts
        for token in ([vocabulary.special[part]] if part in vocabulary.special else vocabulary(part.encode()))
    ]


def computed(masks: GrammarMasks, rows: list[MaskRow]) -> Bitmask:
    found = np.empty((len(rows), masks.words), dtype=np.int32)
    masks.compute(rows, found)
    return found


def allowed(compiler: GrammarCompiler, *states: GrammarState, may_end: bool = True) -> list[set[int]]:
    masks = computed(GrammarMasks(compiler, 8), [MaskRow(state, may_end=may_end) for state in states])
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def accepts(compiler: GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """Whether the grammar may end after this text."""
    try:
        return EOS_ID in allowed(compiler, state_after(compiler, grammar, text))[0]
    except GrammarStateError:
        return False


@pytest.mark.parametrize(
    ("kind", "text", "matching", "others"),
    [
        (
            "json_schema",
            '{"type": "object"}',
            ['{"a": [1, null]}', "{}", "{ }", '{"a":1 , "b" : 2 }'],
            ["[]", '{"a"', "{  }", "{\n}", '{"a":\t1}', ' {"a": 1}', '{"a": 1} '],
        ),
        ("json_schema", "true", ["5", '{"a": [ ]}'], ["x", "[  ]", "[\n]"]),
        ("json_schema", '{"properties": {"a": {}}}', ['{"a": 1}', "{}", "[1]"], ['{"a": 1, "b": 1}', '{"b"']),
        (
            "json_schema",
            '{"properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "additionalProperties": true}',
            ['{"b": 1}', '{"a": {"a": null, "b": 1}}'],
            ['{"b": }'],
        ),
        (
            "structural_tag",
            json.dumps({"format": {"type": "json_schema", "json_schema": {"properties": {"a": {}}}, "lenient": True}}),
            ['{"a": 1}'],
            ['{"b": 1}'],
        ),
        (
            "structural_tag",
            json.dumps({"format": {"type": "json_schema", "json_schema": {"type": "object"}, "lenient": True}}),
            ['{"a": [ 1]}', '{"a":{}}'],
            ['{"a":  1}', '{"a":\n1}'],
        ),
        ("json_schema", '{"type": "integer", "maximum": 5}', ["5", "-17"], ["6", "1.5", '"5"']),
        (
            "json_schema",
            '{"properties": {"enum": {"type": "string", "format": "date", "allOf": [{"pattern": "^[12]"}]}}}',
            [f'{{"enum": "{date}"}}' for date in ("2024-02-29", "2000-02-29", "1999-02-28", "1999-12-31")],
            [f'{{"enum": "{date}"}}' for date in ("2023-02-29", "1900-02-29", "3000-01-01", "2023-04-31")],
        ),
        (
            "json_schema",
            '{"anyOf": [{"format": "date-time", "type": "string"}, {"const": {"format": "date"}}]}',
            ['"2024-02-29T10:00:00Z"', '{"format": "date"}'],
            ['"2023-02-29T10:00:00Z"', '"0000-01-01T10:00:00Z"'],
        ),
        (
            "json_schema",
            '{"properties": {"format": {"type": "string", "format": "password"}}}',
            ['{"format": "anything"}'],
            ['{"format": 1}'],
        ),
        ("regex", r"[a-c]{2}\d?", ["ab", "cc3"], ["a", "abd", "ab33"]),
        ("ebnf", 'root ::= "x" tail*\ntail ::= [0-9] | "-"', ["x", "x1-2"], ["1", "y"]),
        ("choice", '["yes", "no, \\"never\\""]', ["yes", 'no, "never"'], ["no", "ye"]),
        ("structural_tag", json.dumps(STRUCTURES), ["free", "a<f=a>12</f> b"], ["<f=b>", "<f=a>x"]),
        (
            "structural_tag",
            json.dumps({"format": {"type": "tag", "begin": "<|im_start|>", "content": SLASH, "end": ""}}),
            ["<|im_start|>a/b"],
            ["a/b"],
        ),
        (
            "structural_tag",
            triggered(),
            ["", "free", "<f=a>a/b</f>", "x <f=b>a/b</f>\n<f=a>a/b</f> y"],
            ["<f=", "x <f=c>", "<f=a>b"],
        ),
        (
            "structural_tag",
            triggered(stop_after_first=True),
            ["", "free < text", "<f=a>a/b</f>", "some\ntext <f=b>a/b</f>"],
            ["x <f=c>", "<f=a>b", "<f=a>a/b</f> more", "<f=a>a/b</f><f=a>a/b</f>"],
        ),
        (
            "structural_tag",
            triggered("<|im_start|>", stop_after_first=True),
            ["", "free", "<|im_start|>a>a/b</f>", "text <|im_start|>b>a/b</f>"],
            ["<|im_start|>c>", "<|im_start|>a>a/b</f>x"],
        ),
        (
            "structural_tag",
            triggered(at_least_one=True),
            ["<f=a>a/b</f>", "<f=a>a/b</f> x <f=b>a/b</f> y"],
            ["", "free", "x <f=a>a/b</f>", "<f=a>a/b</f><f=c>"],
        ),
        (
            "structural_tag",
            triggered(at_least_one=True, stop_after_first=True),
            ["<f=a>a/b</f>"],
            ["", "x <f=a>a/b</f>", "<f=a>a/b</f> "],
        ),
    ],
)
def test_what_a_grammar_accepts(
    compiler: GrammarCompiler, kind: Any, text: str, matching: list[str], others: list[str]
) -> None:
    grammar = Grammar(kind, text)
    assert [accepts(compiler, grammar, each) for each in matching] == [True] * len(matching)
    assert [accepts(compiler, grammar, each) for each in others] == [False] * len(others)


@pytest.mark.parametrize(
    ("whitespace", "matching", "others"),
    [
        ("", ['{"a":1}'], ['{"a": 1}', "{ }"]),
        (r"[\n\t ]*", ['{"a":1}', '{\n\t\t"a":  1\n}'], ['{"a":\r1}']),
        (None, ['{"a":1}', '{ "a": 1 }'], ['{"a":  1}']),
    ],
    ids=["none", "any", "default"],
)
def test_whitespace_of_the_request_holds_in_schemas_and_in_structural_tags(
    compiler: GrammarCompiler, whitespace: str | None, matching: list[str], others: list[str]
) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "object"}}
    for grammar in (
        Grammar("json_schema", '{"type": "object"}', json_whitespace=whitespace),
        Grammar("structural_tag", json.dumps({"format": content}), json_whitespace=whitespace),
        Grammar("ebnf", 'start: %json {"type": "object"}', json_whitespace=whitespace),
    ):
        assert [accepts(compiler, grammar, each) for each in matching] == [True] * len(matching)
        assert [accepts(compiler, grammar, each) for each in others] == [False] * len(others)


def test_schema_in_a_lark_grammar_may_set_its_own_options(compiler: GrammarCompiler) -> None:
    """Strings, expressions and comments are no schemas."""
    text = """
        start: "%json {" ok // %json {
        ok: /%json {2}/ | %json {"type": "array", "x-guidance": {"whitespace_pattern": "-"}}
    """
    assert accepts(compiler, Grammar("ebnf", text), "%json {[1,-2]")
    assert accepts(compiler, Grammar("ebnf", text), "%json {%json  ")
    assert not accepts(compiler, Grammar("ebnf", text), "%json {[1, 2]")
    with pytest.raises(GrammarError, match="at most 10000 is allowed"):
        compiler.compile(Grammar("ebnf", 'start: %json {"type": "integer", "multipleOf": 99999}'))


def test_masks_have_exactly_the_allowed_tokens(compiler: GrammarCompiler) -> None:
    digits, letter = set(encode(compiler, "0123456789")), encode(compiler, "a")[0]
    grammar = Grammar("regex", "a[0-9]{2}")
    states = [state_after(compiler, grammar, text) for text in ("", "a", "a1", "a12")]
    assert allowed(compiler, *states) == [{letter}, digits, digits, {EOS_ID}]
    assert allowed(compiler, states[1]) == [digits]  # a single row takes another path


def test_end_tokens_are_allowed_exactly_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    stop = encode(compiler, "b")[0]
    grammar = Grammar("regex", "a+b?c")
    assert stop not in allowed(compiler, state_after(compiler, grammar, "a", (stop,)))[0]
    assert allowed(compiler, state_after(compiler, grammar, "ac", (stop,))) == [{EOS_ID, stop}]
    needed = Grammar("regex", "ab")
    assert allowed(compiler, state_after(compiler, needed, "a", (stop,))) == [{stop}]  # nothing else can follow


def test_min_new_tokens_excludes_end_tokens_while_others_are_left(compiler: GrammarCompiler) -> None:
    letter = encode(compiler, "a")[0]
    grammar = Grammar("regex", "a{1,2}")
    assert allowed(compiler, state_after(compiler, grammar, "a"), may_end=False) == [{letter}]
    assert allowed(compiler, state_after(compiler, grammar, "aa"), may_end=False) == [{EOS_ID}]


def test_kept_states_advance_by_single_tokens(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, capacity=2)
    grammar, tokens = Grammar("regex", "abc"), encode(compiler, "abc")
    masks.begin(grammar, (), tokens[:1], key=5)
    assert masks.advance(5, tokens[1], length=2).length == 2
    assert masks.advance(5, tokens[2], length=3).matcher.is_accepting()
    ended = masks.advance(5, EOS_ID, length=4)
    assert ended.ended
    assert masks.advance(5, tokens[0], length=5) is ended  # rows in flight after the end are ignored
    with pytest.raises(GrammarStateError, match="a state after 5 tokens of sequence 5"):
        masks.advance(5, tokens[0], length=9)
    for key in (6, 7):
        masks.begin(grammar, (), (), key)
    with pytest.raises(GrammarStateError, match="no state of sequence 5"):
        masks.advance(5, tokens[0], length=6)


def test_least_recently_used_state_is_dropped(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, capacity=2)
    grammar, tokens = Grammar("regex", "abc"), encode(compiler, "abc")
    for key in (5, 6):
        masks.begin(grammar, (), (), key)
    masks.advance(5, tokens[0], length=1)
    masks.begin(grammar, (), (), key=7)
    assert masks.advance(5, tokens[1], length=2).length == 2
    with pytest.raises(GrammarStateError, match="no state of sequence 6"):
        masks.advance(6, tokens[0], length=1)


def test_state_of_a_sequence_that_does_not_run_any_more_is_dropped(compiler: GrammarCompiler) -> None:
    masks = GrammarMasks(compiler, capacity=8)
    dropped = weakref.ref(masks.begin(Grammar("regex", "abc"), (), (), key=5))
    masks.drop(5)
    masks.drop(5)  # or one that has never begun
    assert dropped() is None


def test_output_that_does_not_match_is_an_error(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarStateError, match="output token 1"):
        state_after(compiler, Grammar("regex", "ab"), "ax")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", "{", "is not valid JSON"),
        ("json_schema", '{"maxLength": 1' + 1000 * "0" + "}", "^has a number of 1001 digits; at most 1000 are allowed"),
        ("json_schema", "[]", "must be a JSON schema"),
        ("json_schema", "false", "allows no value"),
        ("json_schema", '{"uniqueItems": true, "type": "array"}', "uniqueItems"),
        (
            "json_schema",
            '{"oneOf": [{"type": "integer"}, {"type": "number"}]}',
            "enforced: oneOf of overlapping .* anyOf$",
        ),
        ("json_schema", '{"type": "string", "format": "json-pointer"}', "json-pointer"),
        ("json_schema", '{"type": "string", "pattern": "(a{900}){900}"}', "810000 characters with its repetitions"),
        ("json_schema", '{"type": "integer", "multipleOf": 999983}', "multipleOf 999983; at most 10000"),
        ("regex", "(?=a)b", "look-around"),
        (
            "regex",
            "a" * (MAX_GRAMMAR_CHARACTERS + 1),
            f"has {MAX_GRAMMAR_CHARACTERS + 1} characters; at most {MAX_GRAMMAR_CHARACTERS}",
        ),
        ("ebnf", "root := a", "is not a valid EBNF grammar"),
        ("choice", "[]", "at least one string"),
        (
            "structural_tag",
            '{"structures": [{"begin": "a", "end": ""}], "triggers": ["b"]}',
            "no trigger is a prefix of 'a'",
        ),
        ("structural_tag", '{"structures": [{"end": ""}], "triggers": ["b"]}', "structural_tag: begin is missing$"),
        ("structural_tag", '{"format": {"type": "image"}}', "'image' is not supported"),
        ("structural_tag", "{}", "it has neither structures nor format"),
        ("structural_tag", '{"structures": [{"begin": "<f>", "end": "</f>"}]}', "triggers is missing"),
    ],
)
def test_refused_grammars(compiler: GrammarCompiler, kind: Any, text: str, message: str) -> None:
    for _ in range(2):  # errors are cached
        with pytest.raises(GrammarError, match=message):
            compiler.compile(Grammar(kind, text))


def test_cache_drops_the_least_recently_used_grammars(compiler: GrammarCompiler) -> None:
    grammars = [Grammar("regex", f"a{index}") for index in range(6)]
    for index in (0, 1, 2, 3, 0, 4, 5):
        compiler.compile(grammars[index])
    assert [compiler.is_cached(grammar) for grammar in grammars] == [True, False, False, True, True, True]
    assert compiler.new_matcher(grammars[1]).is_accepting() is False  # compiled again


def test_cache_drops_grammars_whose_masks_took_long(compiler: GrammarCompiler) -> None:
    """Their automata may be large. A sequence that runs keeps its own."""
    grammars = [Grammar("regex", f"b{index}") for index in range(4)]
    masks = GrammarMasks(compiler, 8)
    states = [masks.begin(grammar, (), (), None) for grammar in grammars]
    for grammar in grammars[1:]:
        compiler.charge(grammar, 0.4 * MAX_CACHED_MASK_S)
    for _ in range(2000):
        compiler.charge(grammars[0], PLAIN_MASK_S)
    assert [compiler.is_cached(grammar) for grammar in grammars] == [True, False, True, True]
    compiler.charge(grammars[3], 2 * MAX_CACHED_MASK_S)
    assert [compiler.is_cached(grammar) for grammar in grammars] == [True, False, False, False]
    assert len(allowed(compiler, *states)) == 4


@pytest.mark.parametrize("beside", [False, True])
def test_time_of_masks_is_counted(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    """Of those in the steps and of those beside them."""
    for module in (masks_module, compiler_module):
        monkeypatch.setattr(module, "PLAIN_MASK_S", 0.0)
    monkeypatch.setattr(compiler_module, "MAX_CACHED_MASK_S", 0.0)
    masks, grammar = GrammarMasks(compiler, 8), Grammar("regex", "c{1,9}")
    row = MaskRow(masks.begin(grammar, (), (), None), may_end=True)
    assert compiler.is_cached(grammar)
    if beside:
        masks.prepare(row)
    else:
        computed(masks, [row])
    assert not compiler.is_cached(grammar)


def test_masks_of_all_matchers_of_a_grammar_are_equal(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.models.grammar.compiler.MASK_THREADS", 3)
    grammar = Grammar("json_schema", '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}}}')
    compiler.add_matchers(grammar)  # not compiled yet
    assert not compiler.is_cached(grammar)
    compiler.compile(grammar)
    compiler.add_matchers(grammar)
    masks = GrammarMasks(compiler, capacity=8)
    text = compiler.vocabulary(b'{"name":"ab')
    rows = [MaskRow(masks.begin(grammar, (), text, key), may_end=True) for key in range(7)]
    found = computed(masks, rows)
    assert (found == found[0]).all()
    assert not any(row.problem for row in rows)


@pytest.mark.parametrize(
    ("pattern", "size"),
    [("abc", 3), ("a{5}", 5), ("(ab){2,3}c", 7), ("((a{10}){10}){10}", 1000), (r"\{a\}{2}", 4), ("[^]{}]{3}x*", 4)],
)
def test_regex_size_writes_repetitions_out(pattern: str, size: int) -> None:
    assert regex_size(pattern) == size


@pytest.mark.parametrize("changed", [" {}", "", "{}{}"], ids=["space", "nothing", "twice"])
def test_forced_text_is_followed_if_the_tokenizer_changes_it(changed: str) -> None:
    """SentencePiece does so: it inserts a space before every text."""
    tokens = [b"<eos>", *(bytes([byte]) for byte in range(256)), b"abc", b" abc", b"bc"]
    ids = {text: token for token, text in enumerate(tokens)}

    def encode(text: str) -> list[int]:
        return [ids[bytes([byte])] for byte in changed.format(text, text).encode()]

    compiler = GrammarCompiler(lambda: Vocabulary(tokens, special={}, eos_token_ids=(0,), encode=encode))
    states = [
        GrammarMasks(compiler, 8).begin(Grammar("regex", "abcd"), (), [ids[each] for each in given], None)
        for given in ([], [b"a"], [b"a", b"bc"])
    ]
    (first, second, third) = allowed(compiler, *states)
    assert first <= {ids[b"a"], ids[b"abc"]}
    assert second <= {ids[b"b"], ids[b"bc"]}
    assert third == {ids[b"d"]}
    assert first
    assert second


@pytest.mark.parametrize("text", ["x<|im_start|>y", "x<|im_end|>", "x[PAD]y"])
def test_forced_text_that_looks_like_a_token_is_text(text: str, tmp_path: Path) -> None:
    """Text never becomes a special token, nor a token of the tokenizer that the model does not have."""
    directory = make_checkpoint(tmp_path, vocab_size=EOS_ID + 1)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens(["[PAD]"])
    tokenizer.save(str(directory / "tokenizer.json"))
    compiler = GrammarCompiler.of(locate_model(str(directory)))
    state, written = GrammarMasks(compiler, 8).begin(Grammar("choice", json.dumps([text])), (), (), None), b""
    while not state.ended:
        ((token,),) = allowed(compiler, state)
        written += compiler.vocabulary.tokens[token]
        state.consume([token])
    assert written.decode() == f"{text}<|im_end|>"


def test_model_without_an_end_token_takes_no_grammar(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, eos_token_id=None)
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(GrammarError, match="no end token"):
        GrammarCompiler.of(locate_model(str(directory))).compile(Grammar("regex", "a"))


def test_grammar_that_becomes_too_expensive_says_so(compiler: GrammarCompiler) -> None:
    """Its first mask is cheap. A token that does not match is another error."""
    options = [
        {"type": "object", "additionalProperties": True, "properties": {f"a{at}": {"type": "integer"}}}
        for at in range(200)
    ]
    grammar = Grammar("json_schema", json.dumps({"anyOf": options}))
    assert allowed(compiler, state_after(compiler, grammar, ""))[0]
    with pytest.raises(GrammarLimitError, match="Current row has 2200 items; max is 2000"):
        state_after(compiler, grammar, "{")
    with pytest.raises(GrammarStateError, match=r"output token 0 .* does not match the grammar") as mismatch:
        state_after(compiler, grammar, "x")
    assert not isinstance(mismatch.value, GrammarLimitError)


def test_slow_mask_among_many_is_found_in_the_next_step(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All masks of a step are computed in one call, so the next one computes as many at a time as there are threads."""
    masks = GrammarMasks(compiler, 8)
    states = [masks.begin(Grammar("regex", "[a-d]{6}"), (), [], None) for _ in range(MASK_THREADS + 1)]

    def marked() -> list[bool]:
        rows = [MaskRow(state, may_end=True) for state in states]
        computed(masks, rows)
        return [row.slow for row in rows]

    monkeypatch.setattr(masks_module, "SLOW_MASK_S", 60.0)
    assert not any(marked())
    monkeypatch.setattr(masks_module, "SLOW_MASK_S", -1.0)
    assert not any(marked())
    assert all(marked())


def test_masks_are_computed_in_the_steps_again_after_many_fast_ones(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = GrammarMasks(compiler, 8)
    grammar = Grammar("regex", "[a-c]+")
    state = masks.begin(grammar, (), [], 1)

    def prepare() -> bool:
        state.prepared = None
        return masks.prepare(MaskRow(state, may_end=True))

    monkeypatch.setattr(masks_module, "SLOW_MASK_S", -1.0)
    assert prepare()
    assert compiler.is_slow(grammar)
    monkeypatch.setattr(masks_module, "SLOW_MASK_S", 60.0)
    assert [prepare() for _ in range(FAST_MASKS)] == [True] * (FAST_MASKS - 1) + [False]
    assert not compiler.is_slow(grammar)
