"""The format of tool calls and reasoning, from a chat template or the settings, and the special tokens of parsers."""

import json
from pathlib import Path

import pytest
import tokenizers

from pdserve.models.loading.catalog import locate_model
from pdserve.server.api.openai.chat_requests import render_chat
from pdserve.server.api.openai.models import ChatBody
from pdserve.server.text.chat_format import Arguments, ChatFormat
from pdserve.server.text.output_text import OutputText, TextRules
from pdserve.server.text.parsers.families import FAMILIES
from pdserve.server.text.parsers.reasoning import STYLES, THINK
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer
from tests.server.http_harness import write_byte_model

LLAMA3 = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{%- if tools is not none %}
Respond in the format {"name": function name, "parameters": dictionary of argument name}{% endif %}"""
SPECIAL = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<other>")


def make_tokenizer(directory: Path, template: str, special: tuple[str, ...] = ()) -> Tokenizer:
    """Tokens are bytes, <eos> (256), <bos> (257) and `special`."""
    write_byte_model(directory)
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.add_special_tokens(list(special))
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    return load_tokenizer(locate_model(str(directory)))


@pytest.mark.parametrize(
    ("template", "family", "has_tools", "reasoning"),
    [
        ("{% if tools %}<tool_call>{% endif %}<think>", "hermes", True, True),
        ("{{ messages[0].content }}", "hermes", False, False),
        ("{{ tools }}", None, True, False),
        (LLAMA3, "llama3-json", True, False),
    ],
)
def test_parsers_are_chosen_from_the_template_or_the_settings(
    tmp_path: Path, template: str, family: str | None, has_tools: bool, reasoning: bool
) -> None:
    tokenizer = make_tokenizer(tmp_path, template)
    chat = ChatFormat.of(tokenizer, "auto", "auto")
    assert chat.family is (None if family is None else FAMILIES[family])
    assert (chat.has_tools, chat.reasoning) == (has_tools, THINK if reasoning else None)
    given = ChatFormat.of(tokenizer, "mistral", "deepseek-r1")
    assert (given.family, given.reasoning) == (FAMILIES["mistral"], STYLES["deepseek-r1"])
    none = ChatFormat.of(tokenizer, "none", "none")
    assert (none.family, none.reasoning) == (None, None)


_THINKING = """{% for m in messages %}<{{ m.role }}>
{% if m.role == 'assistant' and loop.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content | trim }}<end>
{% endfor %}{% if add_generation_prompt %}<assistant>
<think>
{% endif %}"""
_CHANNELS = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>"
    "{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


@pytest.mark.parametrize(
    ("begun", "expected", "is_open"),
    [
        ("{", "<think>\n\n</think>\n\n{", False),
        (" <end", "<think>\n\n</think>\n\n <end", False),
        ("<think>\nSo", "<think>\nSo", True),
        ("<think>\nSo\n</think>\n{", "<think>\nSo\n</think>\n{", False),
        ("So\n</think>\n{", "<think>\nSo\n</think>\n{", False),
        ("", "<think>\n", True),
    ],
)
def test_continued_message_is_reasoning_only_with_think_tags(
    tmp_path: Path, begun: str, expected: str, is_open: bool
) -> None:
    """The template opens `<think>` before every answer. A message without tags is put after an empty block."""
    tokenizer = make_tokenizer(tmp_path, _THINKING)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
    fields = ChatBody.model_validate({"messages": messages, "continue_final_message": True})
    for parser in ("auto", "none"):  # without a parser the model still reasons
        chat = ChatFormat.of(tokenizer, "none", parser)
        rendered = render_chat(fields, fields.messages, tokenizer, chat)
        assert rendered.text == "<user>\nHi<end>\n<assistant>\n" + expected
    assert THINK.is_open(rendered.text, rendered.begun) == is_open


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("Yes", "<|channel|>final<|message|>Yes"),
        ("<|channel|>final<|message|>Yes", "<|channel|>final<|message|>Yes"),
        ("<|channel|>analysis<|message|>So", "<|channel|>analysis<|message|>So"),
    ],
)
def test_continued_message_without_a_channel_is_in_the_final_channel(tmp_path: Path, begun: str, expected: str) -> None:
    tokenizer = make_tokenizer(tmp_path, _CHANNELS)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": begun}]
    fields = ChatBody.model_validate({"messages": messages, "continue_final_message": True})
    rendered = render_chat(fields, fields.messages, tokenizer, ChatFormat.of(tokenizer, "none", "gpt-oss"))
    assert rendered.text == "<|start|>user<|message|>Hi<|end|><|start|>assistant" + expected


def test_channels_of_gpt_oss_stay_in_the_text(tmp_path: Path) -> None:
    special = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>")
    tokenizer = make_tokenizer(tmp_path, "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}", special)
    chat = ChatFormat.of(tokenizer, "auto", "auto")
    assert chat.reasoning is STYLES["gpt-oss"]
    assert chat.kept_token_ids(calls=False, reasoning=True) == {258, 259, 260, 261}


def test_special_tokens_that_parsers_need_stay_in_the_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path, "{{ tools }}<tool_call><think>", SPECIAL)
    chat = ChatFormat.of(tokenizer, "auto", "auto")
    tokens = [260, 97, 261, 258, 98, 259, 262, 99, 256]

    def shown(calls: bool, reasoning: bool) -> str:
        kept = chat.kept_token_ids(calls=calls, reasoning=reasoning)
        text = OutputText(tokenizer, TextRules(kept_token_ids=kept))
        return "".join(map(text.push, tokens)) + text.finish()

    assert shown(calls=True, reasoning=True) == "<think>a</think><tool_call>b</tool_call>c"
    assert shown(calls=True, reasoning=False) == "a<tool_call>b</tool_call>c"
    assert shown(calls=False, reasoning=False) == "abc"


def test_arguments_are_an_object_that_templates_can_use_as_text() -> None:
    arguments = Arguments.of('{"a": "é"}')
    assert isinstance(arguments, dict)
    assert arguments == {"a": "é"}
    assert ("x" + arguments, arguments + "y", f"{arguments}") == ('x{"a": "é"}', '{"a": "é"}y', '{"a": "é"}')
    assert Arguments.of("") == {}
    assert Arguments.of("{broken") == "{broken"
    assert Arguments.of("[1]") == "[1]"
