"""The formats in which model families write tool calls, by name, and the detection of the format of a chat template."""

import random
import string
from dataclasses import dataclass, replace

from .call_grammars import ArgumentTags, CallTags
from .call_parser import CallParser
from .json_calls import (
    CALL,
    CALL_END,
    CALLS,
    CALLS_END,
    SEPARATOR,
    DeepSeekParser,
    HermesLenientParser,
    HermesParser,
    Llama3Parser,
    MistralParser,
)
from .pythonic import PythonicParser
from .xml_calls import DsmlParser, GlmParser, Qwen3CoderParser

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallFamily:
    """A format of tool calls. `in_template` are texts that every chat template of the family contains. The id of a call
    is `id_prefix` and `id_letters` random letters and digits: Mistral's templates accept only ids of 9 such characters.
    """

    name: str
    parser: type[CallParser]
    in_template: tuple[str, ...]
    tags: CallTags
    id_prefix: str = "call_"
    id_letters: int = 24

    def new_id(self) -> str:
        """The id of a new call."""
        return self.id_prefix + "".join(random.choices(_LETTERS, k=self.id_letters))


_DSML_ARGUMENT = ArgumentTags('<｜DSML｜parameter name="{key}" string="{string}">', "</｜DSML｜parameter>\n")
_QWEN3_ARGUMENT = ArgumentTags("<parameter={key}>\n", "\n</parameter>\n")
_GLM45_ARGUMENT = ArgumentTags("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n")
_GLM47_ARGUMENT = ArgumentTags("<arg_key>{key}</arg_key><arg_value>", "</arg_value>")
_NAME_ARGUMENTS = '{"name": "{name}", "arguments": '
_LLAMA3 = CallTags('{"name": "{name}", "parameters": ', "}", "; ", first_character="{")


def _dsml(calls: str) -> CallTags:
    return CallTags(
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>\n",
        list_begin=f"<｜DSML｜{calls}>\n",
        list_end=f"</｜DSML｜{calls}>",
        arguments=_DSML_ARGUMENT,
    )


_FAMILIES = (
    # The first family whose texts are in a template counts. The order matters: a template may also contain the texts of
    # a later family.
    CallFamily("deepseek-v4", DsmlParser, ("｜DSML｜", "tool_calls>"), _dsml("tool_calls")),
    CallFamily("deepseek-v32", DsmlParser, ("｜DSML｜",), _dsml("function_calls")),
    CallFamily(
        "deepseek-v3",
        DeepSeekParser,
        (CALLS, "```json"),
        CallTags(f"{CALL}function{SEPARATOR}{{name}}\n```json\n", f"\n```{CALL_END}", "\n", CALLS, CALLS_END),
    ),
    CallFamily(
        "deepseek-v31",
        DeepSeekParser,
        (CALLS,),
        CallTags(f"{CALL}{{name}}{SEPARATOR}", CALL_END, "", CALLS, CALLS_END),
    ),
    CallFamily(
        "glm47",
        GlmParser,
        ("<arg_key>", "</arg_key><arg_value>"),
        CallTags("<tool_call>{name}", "</tool_call>", arguments=_GLM47_ARGUMENT),
    ),
    CallFamily(
        "glm45",
        GlmParser,
        ("<arg_key>",),
        CallTags("<tool_call>{name}\n", "</tool_call>", "\n", arguments=_GLM45_ARGUMENT),
    ),
    CallFamily(
        "qwen3-coder",
        Qwen3CoderParser,
        ("<function=", "<parameter="),
        CallTags(
            "<tool_call>\n<function={name}>\n",
            "</function>",
            "\n",
            arguments=_QWEN3_ARGUMENT,
            close="\n</tool_call>",
        ),
    ),
    CallFamily(
        "mistral-v11", MistralParser, ("[TOOL_CALLS]", "[ARGS]"), CallTags("[TOOL_CALLS]{name}[ARGS]", ""), "", 9
    ),
    CallFamily(
        "mistral",
        MistralParser,
        ("[TOOL_CALLS]",),
        CallTags(_NAME_ARGUMENTS, "}", ", ", "[TOOL_CALLS] [", "]"),
        "",
        9,
    ),
    CallFamily(
        "hermes",
        HermesParser,
        ("<tool_call>",),
        CallTags(f"<tool_call>\n{_NAME_ARGUMENTS}", "}", "\n", close="\n</tool_call>"),
    ),
    CallFamily(
        "pythonic",
        PythonicParser,
        ("func_name1(",),
        CallTags("{name}(", ")", ", ", "[", "]", ArgumentTags("{key}=", "", ", ", text=False), first_character="["),
    ),
    CallFamily("llama3-json", Llama3Parser, ('"parameters": dictionary of argument name',), _LLAMA3),
    CallFamily("llama3-json", Llama3Parser, ("<|python_tag|>",), _LLAMA3),
)
FAMILIES = {family.name: family for family in reversed(_FAMILIES)}
FAMILIES["hermes-lenient"] = replace(FAMILIES["hermes"], name="hermes-lenient", parser=HermesLenientParser)


def family_of_template(template: str) -> CallFamily | None:
    """Returns the first family whose texts are all in a chat template; None if there is none."""
    return next((family for family in _FAMILIES if all(text in template for text in family.in_template)), None)
