"""The output of one request as it grows: the text never shrinks and ends at a stop string."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.common.sampling import LogprobParams, TokenLogprob, pack_logprobs
from pdserve.scheduler.messages.frontend import Failed, Finished, FinishReason, Prefilled
from pdserve.server.api.common.outputs import Delta, Output
from pdserve.server.engine.inbox import Progress
from pdserve.server.text.output_text import OutputText, TextRules
from pdserve.server.text.tokenizer import Tokenizer
from tests.server.http_harness import load_byte_tokenizer
from tests.server.scripted_leader import EOS, make_finished


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_byte_tokenizer(Path(tmp_path_factory.mktemp("bytes")))


def make_output(tokenizer: Tokenizer, rules: TextRules, logprobs: LogprobParams | None = None) -> Output:
    return Output("r", 1, OutputText(tokenizer, rules), logprobs)


def tokens(data: bytes | list[int], terminal: Finished | Failed | None = None) -> Progress:
    return Progress("r", list(data), terminal=terminal)


def test_stop_token_ends_the_text(tokenizer: Tokenizer) -> None:
    output = make_output(tokenizer, TextRules(hidden_token_ids=frozenset({EOS, 33})))
    assert output.advance(tokens([104, 33])) == Delta("h", first_token=0)
    assert output.advance(tokens([], make_finished("r", 2))) == Delta("", first_token=2)
    assert (output.text, output.token_ids, output.ended) == ("h", [104, 33], True)


def test_possible_beginning_of_a_stop_string_is_held_back(tokenizer: Tokenizer) -> None:
    output = make_output(tokenizer, TextRules(stop_strings=("<end>",)))
    assert output.advance(tokens(b"a <e")).text == "a "
    assert output.advance(tokens(b"x<")).text == "<ex"
    assert output.advance(tokens(b"", make_finished("r", 6))).text == "<"
    assert output.text == "a <ex<"


def test_first_token_can_complete_a_stop_string(tokenizer: Tokenizer) -> None:
    output = make_output(tokenizer, TextRules(stop_strings=("!",)))
    assert output.advance(tokens(b"!")) == Delta("", first_token=0)
    assert (output.stop_string, output.token_ids, output.ended) == ("!", [33], False)


@pytest.mark.parametrize(
    ("min_new_tokens", "kept"), [(0, b"a!"), (2, b"a!"), (3, b"a!b!"), (4, b"a!b!"), (5, b"a!b!c")]
)
def test_stop_string_counts_after_min_new_tokens(tokenizer: Tokenizer, min_new_tokens: int, kept: bytes) -> None:
    output = make_output(tokenizer, TextRules(stop_strings=("!",), min_new_tokens=min_new_tokens))
    output.advance(tokens(b"a!b!c", make_finished("r", 5)))
    assert bytes(output.token_ids) == kept
    assert output.text == kept.decode().removesuffix("!")


def test_stop_string_is_kept_with_show_stop(tokenizer: Tokenizer) -> None:
    output = make_output(tokenizer, TextRules(stop_strings=("END",), show_stop=True))
    assert output.advance(tokens(b"one EN")).text == "one "
    assert output.advance(tokens(b"D two")).text == "END"


def test_tokens_after_a_stop_string_are_ignored(tokenizer: Tokenizer) -> None:
    output = make_output(tokenizer, TextRules(stop_strings=("!",)))
    output.advance(tokens(b"hi!x"))
    assert (output.complete, output.ended) == (True, False)
    assert output.advance(tokens(b"more", make_finished("r", 8, FinishReason("stop")))) == Delta("", first_token=3)
    assert (output.text, bytes(output.token_ids), output.cached_tokens) == ("hi", b"hi!", 3)


def test_failure_after_a_stop_string_is_ignored(tokenizer: Tokenizer) -> None:
    failure = Failed("r", 504, "deadline", "too late")
    complete = make_output(tokenizer, TextRules(stop_strings=("!",)))
    complete.advance(tokens(b"hi!", failure))
    assert (complete.ended, complete.failed, complete.stop_string) == (True, None, "!")
    broken = make_output(tokenizer, TextRules(stop_strings=("!",)))
    broken.advance(tokens(b"hi", failure))
    assert (broken.failed, broken.stop_string) == (failure, None)


def test_logprobs_follow_the_tokens(tokenizer: Tokenizer) -> None:
    """They end with the token that completes the stop string. Each token has its offset in the text."""
    output = make_output(tokenizer, TextRules(stop_strings=("!",)), LogprobParams(start=0))
    data = list("é!x".encode())
    entries = [TokenLogprob(token, -float(token)) for token in data]
    prompt = (TokenLogprob(7, None), TokenLogprob(8, -0.5))
    output.advance(Progress("r", data, entries, Prefilled("r", 1, pack_logprobs(prompt))))
    assert output.logprobs == entries[:3]
    assert output.text_offsets == [0, 0, 1]
    assert (tuple(output.input_logprobs), output.cached_tokens) == (prompt, 1)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé🦀", max_size=20),
    cuts=st.lists(st.integers(0, 60), max_size=6),
    stops=st.lists(st.text(alphabet="abé🦀", min_size=1, max_size=3), max_size=3),
    min_new_tokens=st.integers(0, 12),
)
def test_any_grouping_of_tokens_gives_the_same_text(
    tokenizer: Tokenizer, text: str, cuts: list[int], stops: list[str], min_new_tokens: int
) -> None:
    """For any grouping of tokens and any split of characters, text and ids end at the first stop string."""
    ids = list(text.encode())
    output = make_output(tokenizer, TextRules(stop_strings=tuple(stops), min_new_tokens=min_new_tokens))
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    deltas, start = [], 0
    for end in ends:
        final = make_finished("r", len(ids)) if end == len(ids) else None
        deltas.append(output.advance(tokens(ids[start:end], final)))
        start = end
    expected_text, expected_ids, expected_stop = text, ids, None
    for end in range(1, len(text) + 1):
        count = len(text[:end].encode())
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending and count >= min_new_tokens:
            expected_stop = max(ending, key=len)
            expected_text, expected_ids = text[: end - len(expected_stop)], ids[:count]
            break
    assert "".join(delta.text for delta in deltas) == output.text == expected_text
    assert (output.token_ids, output.stop_string) == (expected_ids, expected_stop)
