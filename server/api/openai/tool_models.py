"""Tools in OpenAI's dialect: what a chat may call, what was called, and the calls of a reply."""

import re
from typing import Annotated, Any, Literal, NotRequired, TypeVar

from annotated_types import MaxLen
from pydantic import AfterValidator, Discriminator, Tag, WithJsonSchema
from typing_extensions import TypedDict

from ....common.words import shown
from ...text.parsers.call_parser import LONGEST_NAME
from ..common.fields import EACH, ONE, Body, Boolean, FieldError, FirstError, Text, optional, problem

MAX_TOOLS = 1024
FLAT_TOOL = (r"(tools\[\d+\])\.function\.", r"\1.")
"""Renames fields of a function in errors (`fields_named`), for dialects in which a tool has no object `function`."""
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_NAME}}}")


def check_function_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise problem(f"must have 1 to {LONGEST_NAME} letters, digits, _, - and ., got {shown(name)}")
    return name


class FunctionDefinition(Body):
    name: Annotated[Text, AfterValidator(check_function_name)]
    description: Text | None = None
    parameters: dict[str, Any] | None = optional("A JSON schema of the arguments. Default: no arguments.")
    strict: Boolean | None = optional("The arguments always match the schema. Default false.")


class ToolDefinition(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: Text


class NamedChoice(Body):
    type: Literal["function"]
    function: FunctionName


FunctionT = TypeVar("FunctionT")
ModeOrFunction = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(ONE)] | Annotated[FunctionT, Tag(EACH)],
    Discriminator(lambda value: EACH if isinstance(value, dict | Body) else ONE),
]
"""A tool choice: a mode, or the function to call."""


class ToolFields(Body):
    """The tools of a chat."""

    tools: Annotated[list[ToolDefinition], FirstError(), MaxLen(MAX_TOOLS)] | None = optional(
        "Functions that the model may call."
    )
    tool_choice: ModeOrFunction[NamedChoice] | None = optional(
        "auto: the model decides; none: no call; required: at least one call; or the function to call. Default auto."
    )
    parallel_tool_calls: Boolean | None = optional("Several calls in one reply. Default true.")

    def offered_tools(self) -> list[ToolDefinition]:
        """The tools that may be called; raises FieldError when the fields do not fit together."""
        tools, choice = self.tools or [], self.tool_choice
        names: set[str] = set()
        for index, tool in enumerate(tools):
            if tool.function.name in names:
                raise FieldError(f"tools[{index}].function.name", f"is given twice: {shown(tool.function.name)}")
            names.add(tool.function.name)
        if isinstance(choice, NamedChoice) and choice.function.name not in names:
            raise FieldError("tool_choice", f"names a function that is not in tools: {shown(choice.function.name)}")
        if choice == "required" and not tools:
            raise FieldError("tool_choice", 'is "required", but there are no tools')
        return [] if choice == "none" else tools


class CalledFunction(Body):
    name: Text
    arguments: Text


class EarlierCall(Body):
    """A call in an assistant's message."""

    id: Text | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class FunctionCall(TypedDict):
    name: str
    arguments: Annotated[str, WithJsonSchema({"type": "string", "description": "JSON text."})]


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first of a call has its id, type and name; the others continue its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta
