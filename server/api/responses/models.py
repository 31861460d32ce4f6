"""OpenAI's `/v1/responses` as models: the body and its reply.

Reply types describe what responses/replies.py writes. Extensions of the body: `top_k`, `min_p`, `repetition_penalty`,
`seed`, `chat_template_kwargs`, `rid`, `priority`, `slo_*`, `timeout_s` and `bootstrap_*`.
"""

from typing import Annotated, Any, Literal, NotRequired

from annotated_types import MaxLen
from pydantic import Field, PlainValidator, WithJsonSchema
from typing_extensions import TypedDict

from ....common.words import shown
from ..common.fields import Body, Boolean, FirstError, Integer, Text, TextOrParts, Within, optional, problem
from ..common.routing import RoutingFields
from ..common.sampling_fields import MAX_SEED, ONLY_IN_CHATS, DistributionFields
from ..openai.tool_models import MAX_TOOLS, FunctionDefinition, ModeOrFunction


class InputText(Body):
    """`output_text` in earlier messages of the assistant."""

    type: Literal["input_text", "output_text", "text"]
    text: Text


Content = TextOrParts[InputText]


def text_of(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class FunctionCallItem(Body):
    """An earlier call of a function."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text


class FunctionCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: Text
    output: Content


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Body):
    """Earlier reasoning; `summary` and `encrypted_content` are ignored."""

    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None


InputItem = InputMessage | FunctionCallItem | FunctionCallOutput | ReasoningItem
ITEMS: dict[str, type[InputItem]] = {
    "message": InputMessage,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
}


def _text_or_items(value: object) -> object:
    """The items are checked one by one (responses/requests.py)."""
    if not isinstance(value, str | list):
        raise problem(f"must be a string or an array of items, got {shown(value)}")
    if not value:
        raise problem("is required and must not be empty")
    return value


class _Typed(Body):
    type: Literal["function"]


class FunctionTool(FunctionDefinition, _Typed):
    """A function. `type` is the first field, so that tools that OpenAI runs itself, which have no name, are refused
    because of their type.
    """


class FunctionChoice(Body):
    type: Literal["function"]
    name: Text


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema", description="With json_schema: the schema.")
    strict: Boolean | None = optional("Schemas are always enforced completely.")


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: Text | None = optional("As `reasoning_effort` of a chat.")


class ResponsesBody(RoutingFields, DistributionFields):
    unknown_fields = "refused if similar"
    unsupported = {  # noqa: RUF012 (a ClassVar of Body)
        **ONLY_IN_CHATS,
        "stop": ([],),
        "store": (False, True),  # true is what OpenAI does by default; the reply says that nothing is stored
        "background": (False,),
        "previous_response_id": (),
        "conversation": (),
        "prompt": (),
        "truncation": ("disabled",),
        "max_tool_calls": (),
        "top_logprobs": (0,),
        "include": ([], ["reasoning.encrypted_content"]),  # reasoning is returned as text
        "context_management": ([],),
    }
    elsewhere = {  # noqa: RUF012 (a ClassVar of Body)
        "messages": "is for /v1/chat/completions; here it is input",
        "max_tokens": "is for /v1/chat/completions; here it is max_output_tokens",
        "max_completion_tokens": "is for /v1/chat/completions; here it is max_output_tokens",
        "response_format": "is for /v1/chat/completions; here it is text.format",
    }

    model: Annotated[Any, WithJsonSchema({"type": "string"})] = optional("Ignored: the server has one model.")
    input: Annotated[str | list[Any], PlainValidator(_text_or_items, json_schema_input_type=str | list[InputItem])] = (
        Field(description="Text of the user, or the items of a conversation.")
    )
    instructions: Text | None = optional("A system message before the input.")
    max_output_tokens: Annotated[Integer, Within(1)] | None = optional("Default: as many as fit.")
    seed: Annotated[Integer, Within(-1, MAX_SEED)] | None = optional(
        "The same seed gives the same tokens. Default, and -1: random."
    )
    tools: Annotated[list[FunctionTool], FirstError(), MaxLen(MAX_TOOLS)] | None = optional(
        "Functions that the model may call. Tools that OpenAI runs itself are refused."
    )
    tool_choice: ModeOrFunction[FunctionChoice] | None = optional(
        "auto, none, required, or the function to call. Default auto."
    )
    parallel_tool_calls: Boolean | None = optional("Several calls in one response. Default true.")
    text: TextOptions | None = optional("`format`: text, json_object or json_schema.")
    reasoning: ReasoningOptions | None = optional("`effort`, for chat templates that have one.")
    chat_template_kwargs: dict[str, Any] | None = optional("Variables of the model's chat template.")
    metadata: dict[str, Any] | None = optional("Returned as it is.")
    stream: Boolean | None = optional("Reply with server-sent events. Default false.")


Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputItem(TypedDict):
    """A message has `role` and `content`; reasoning `content` and `summary`; a call `call_id`, `name`, `arguments`."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputText | OutputReasoningText]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]


class InputTokensDetails(TypedDict):
    cached_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseFailure(TypedDict):
    code: str
    message: str


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[Any]
    text: dict[str, Any]
    metadata: dict[str, Any]
    previous_response_id: None
    background: bool
    store: bool
    truncation: str


class ResponseEvent(TypedDict):
    """`type` is the name of the event and says which of the other fields it has."""

    type: str
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    content_index: NotRequired[int]
    item_id: NotRequired[str]
    item: NotRequired[OutputItem]
    part: NotRequired[OutputText | OutputReasoningText]
    delta: NotRequired[str]
    text: NotRequired[str]
    name: NotRequired[str]
    arguments: NotRequired[str]
    logprobs: NotRequired[list[Any]]
