"""Reasoning and content of an output, the reasoning style of a chat template, and whether a prompt opens reasoning."""

import time

import pytest

from pdserve.server.text.parsers.events import Content, Event, Reasoning, merged
from pdserve.server.text.parsers.reasoning import STYLES, THINK, ReasoningParser, style_of_template


def parse(text: str, *, is_open: bool = False, style: str = "qwen3") -> list[Event]:
    parser = ReasoningParser(STYLES[style], is_open=is_open)
    return merged([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("Hm. It is", True, "Hm. It is", ""),
        ("Hm.</thin", True, "Hm.</thin", ""),
        ("Yes. <think> is a tag.</think>", False, "", "Yes. <think> is a tag.</think>"),
        ("\n Yes.\n", False, "", "\n Yes.\n"),
        ("Hm.</think>", True, "Hm.", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_content(text: str, is_open: bool, reasoning: str, content: str) -> None:
    expected: list[Event] = [Reasoning(reasoning), Content(content)]
    assert parse(text, is_open=is_open) == merged(expected)


def test_mistral_has_other_reasoning_tags() -> None:
    assert parse("[THINK]Hm.[/THINK]Yes.", style="mistral") == [Reasoning("Hm."), Content("Yes.")]


ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
JSON_FINAL = "<|channel|>final <|constrain|>json<|message|>"
CLOSE, AGAIN = f"<|end|><|start|>assistant{FINAL}", f"<|end|><|start|>assistant{ANALYSIS}"
UNFINISHED = "Hm.<|end|><|start|>assistant<|channel|>final json"
LONG_HEADER = f"<|end|><|start|>assistant<|channel|>final{65 * 'x'}"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant{FINAL}Yes.", "Hm.", "Yes."),
        (f"{FINAL}Yes.", "", "Yes."),
        (f"{ANALYSIS}Hm.", "Hm.", ""),
        (f"{ANALYSIS}Hm.\n<|end|><|start|>assistant{JSON_FINAL}{{}}", "Hm.", "{}"),
        (f"{ANALYSIS}Hm.<|end|><|start|>assistant<|channel|>final<|constrain|>json<|message|>{{}}", "Hm.", "{}"),
        (f"{JSON_FINAL}{{}}", "", "{}"),
        (f"{ANALYSIS}One. {AGAIN}Two.{AGAIN}\nThree.{CLOSE}Yes.", "One.\nTwo.\n\nThree.", "Yes."),
        (f"{ANALYSIS}{AGAIN} One.{AGAIN}Two.{CLOSE}Yes.", "One.\nTwo.", "Yes."),
        (f"{ANALYSIS} {AGAIN}{AGAIN}{CLOSE}Yes.", "", "Yes."),
        (f"{ANALYSIS}One.{AGAIN}{AGAIN}{CLOSE}Yes.", "One.", "Yes."),
        (f"{ANALYSIS}One.{AGAIN}", "One.\n", ""),
        (f"{ANALYSIS}One.{AGAIN[:-1]}", f"One.{AGAIN[:-1]}", ""),
        (f"{ANALYSIS}{UNFINISHED}", UNFINISHED, ""),
        (f"{ANALYSIS}{LONG_HEADER}<|message|>{{}}", f"{LONG_HEADER}<|message|>{{}}", ""),
        (f"{ANALYSIS}{LONG_HEADER}{CLOSE}Yes.", LONG_HEADER, "Yes."),
        ("<|channel|>fin", "", "<|channel|>fin"),
        ("Yes.", "", "Yes."),
    ],
)
def test_gpt_oss_writes_reasoning_and_answer_to_channels(text: str, reasoning: str, content: str) -> None:
    expected: list[Event] = [Reasoning(reasoning), Content(content)]
    assert parse(text, style="gpt-oss") == merged(expected)
    parser = ReasoningParser(STYLES["gpt-oss"], is_open=False)
    in_pieces = [event for character in text for event in parser.feed(character)]
    assert merged([*in_pieces, *parser.finish()]) == merged(expected)


def test_reasoning_and_content_are_streamed_without_delay() -> None:
    parser = ReasoningParser(THINK, is_open=True)
    assert parser.feed("I wonder <") == [Reasoning("I wonder")]
    assert parser.is_open
    assert parser.feed("b> ") == [Reasoning(" <b>")]
    assert parser.feed("</think>\nYes") == [Content("Yes")]
    assert not parser.is_open
    assert parser.feed(" <think>") == [Content(" <think>")]


def test_prompt_decides_whether_reasoning_is_open() -> None:
    r1 = STYLES["deepseek-r1"]
    assert THINK.is_open("<|im_start|>assistant\n<think>\n")
    assert not THINK.is_open("<|im_start|>assistant\n")
    assert not THINK.is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert r1.is_open("<|Assistant|>")
    assert not r1.is_open("<|Assistant|></think>")
    assert THINK.is_open("assistant: <think>\nSo", begun="<think>\nSo")
    assert not THINK.is_open("assistant: <think>\nSo</think>", begun="<think>\nSo</think>")


def test_style_of_a_template() -> None:
    assert style_of_template("{{ content.split('</think>')[-1] }}") is THINK
    assert style_of_template("{{ '<|assistant|>\\n<think>\\n' }}") is THINK
    assert style_of_template("{{ '[THINK]' + thinking }}") is STYLES["mistral"]
    assert style_of_template("{{ '<|start|>assistant<|channel|>analysis<|message|>' }}") is STYLES["gpt-oss"]
    assert style_of_template("{{ message.content }}") is None


def test_white_space_before_reasoning_takes_linear_time() -> None:
    parser, started = ReasoningParser(THINK, is_open=False), time.process_time()
    events = [event for piece in [256 * " "] * 4000 for event in parser.feed(piece)]
    assert merged([*events, *parser.feed("Yes.")]) == [Content(4000 * 256 * " " + "Yes.")]
    assert time.process_time() - started < 0.3  # 0.03 s; with a search of all white space for each piece 2 s
