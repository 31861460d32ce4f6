"""The formats in which families of models write calls of tools: by name, and which one a chat template has."""

import random
import string
from dataclasses import dataclass

from .call_parser import CallParser
from .json_calls import DeepSeekParser, HermesParser, Llama3Parser, MistralParser
from .pythonic import PythonicParser
from .xml_calls import DsmlParser, GlmParser, Qwen3CoderParser

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class CallFamily:
    """A format of calls. `in_template` are texts that all stand in the chat templates of the family. Ids of calls have
    `id_prefix` and so many letters: the templates of Mistral accept no others than theirs.
    """

    name: str
    parser: type[CallParser]
    in_template: tuple[str, ...]
    id_prefix: str = "call_"
    id_letters: int = 24

    def new_id(self) -> str:
        """The id of a new call."""
        return self.id_prefix + "".join(random.choices(_LETTERS, k=self.id_letters))


_FAMILIES = (
    # In this order templates are searched: a text of one family may stand in the template of another.
    CallFamily("deepseek-v4", DsmlParser, ("｜DSML｜", "tool_calls>")),
    CallFamily("deepseek-v32", DsmlParser, ("｜DSML｜",)),
    CallFamily("deepseek-v3", DeepSeekParser, ("<｜tool▁calls▁begin｜>", "```json")),
    CallFamily("deepseek-v31", DeepSeekParser, ("<｜tool▁calls▁begin｜>",)),
    CallFamily("glm47", GlmParser, ("<arg_key>", "</arg_key><arg_value>")),
    CallFamily("glm45", GlmParser, ("<arg_key>",)),
    CallFamily("qwen3-coder", Qwen3CoderParser, ("<function=", "<parameter=")),
    CallFamily("mistral-v11", MistralParser, ("[TOOL_CALLS]", "[ARGS]"), "", 9),
    CallFamily("mistral", MistralParser, ("[TOOL_CALLS]",), "", 9),
    CallFamily("hermes", HermesParser, ("<tool_call>",)),
    CallFamily("pythonic", PythonicParser, ("func_name1(",)),
    CallFamily("llama3-json", Llama3Parser, ('"parameters": dictionary of argument name',)),
    CallFamily("llama3-json", Llama3Parser, ("<|python_tag|>",)),
)
FAMILIES = {family.name: family for family in reversed(_FAMILIES)}


def family_of_template(template: str) -> CallFamily | None:
    """The family whose texts a chat template has."""
    return next((family for family in _FAMILIES if all(text in template for text in family.in_template)), None)
