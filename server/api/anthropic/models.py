"""Anthropic's `/v1/messages` as models: the body and its reply.

Reply types describe what anthropic/replies.py writes. Extensions of the body: `min_p`, `repetition_penalty`, `seed`,
`chat_template_kwargs`, `rid`, `priority`, `slo_*`, `timeout_s` and `bootstrap_*`.
"""

from typing import Annotated, Any, Literal, NotRequired

from annotated_types import MaxLen, MinLen
from pydantic import AfterValidator, PlainValidator, WithJsonSchema
from typing_extensions import TypedDict

from ....common.words import shown
from ..common.fields import Body, Boolean, FirstError, Integer, Text, TextOrParts, Within, optional, problem
from ..common.routing import RoutingFields
from ..common.sampling_fields import MAX_SEED, ONLY_IN_CHATS, DistributionFields, stop_strings
from ..openai.models import MAX_MESSAGES
from ..openai.tool_models import MAX_TOOLS, check_function_name


class TextBlock(Body):
    type: Literal["text"]
    text: Text


class ToolUseBlock(Body):
    """An earlier call of a tool."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


TextContent = TextOrParts[TextBlock]


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: TextContent | None = None
    is_error: Boolean | None = optional("Ignored: the model reads the error in the content.")


class ThinkingBlock(Body):
    """Earlier reasoning."""

    type: Literal["thinking"]
    thinking: Text


class RedactedThinkingBlock(Body):
    """Ignored: only Anthropic can read it."""

    type: Literal["redacted_thinking"]


ContentBlock = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
BLOCKS_OF_ROLE: dict[str, dict[str, type[ContentBlock]]] = {
    "system": {"text": TextBlock},
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {
        "text": TextBlock,
        "tool_use": ToolUseBlock,
        "thinking": ThinkingBlock,
        "redacted_thinking": RedactedThinkingBlock,
    },
}


def _text_or_blocks(value: object) -> object:
    """The blocks are checked one by one (anthropic/requests.py)."""
    if not isinstance(value, str | list):
        raise problem(f"must be a string or an array of content blocks, got {shown(value)}")
    return value


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        str | list[Any], PlainValidator(_text_or_blocks, json_schema_input_type=str | list[ContentBlock])
    ]


class Tool(Body):
    """A tool of the client. Tools that Anthropic runs itself are refused by their `type`."""

    type: Literal["custom"] | None = None
    name: Annotated[Text, AfterValidator(check_function_name)]
    description: Text | None = None
    input_schema: dict[str, Any]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = optional("With `tool`: which one.")
    disable_parallel_tool_use: Boolean | None = optional("At most one call. Default false.")


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"]


class OutputConfig(Body):
    effort: Text | None = optional("As `reasoning_effort` of a chat.")
    format: dict[str, Any] | None = optional('`{"type": "json_schema", "schema": ...}`: the output matches the schema.')


class CountTokensBody(RoutingFields, DistributionFields):
    """What the prompt consists of. `context_management`, which Claude Code always sends, is ignored: it drops parts of
    long conversations, and a conversation that is too long is refused.
    """

    unknown_fields = "refused if similar"
    unsupported = {  # noqa: RUF012 (a ClassVar of Body)
        "container": (),
        "mcp_servers": ([],),
        "output_format": (),
        "speed": ("standard", "fast"),  # it looks like a misspelt seed
    }
    elsewhere = {  # noqa: RUF012 (a ClassVar of Body)
        "stop": "is for OpenAI's routes; here it is stop_sequences",
        "response_format": "is for /v1/chat/completions; here it is output_config.format",
    }

    model: Annotated[Any, WithJsonSchema({"type": "string"})] = optional("Ignored: the server has one model.")
    messages: Annotated[list[InputMessage], FirstError(), MinLen(1), MaxLen(MAX_MESSAGES)]
    system: TextContent | None = optional("A system message before the others.")
    tools: Annotated[list[Tool], FirstError(), MaxLen(MAX_TOOLS)] | None = optional("Tools that the model may call.")
    tool_choice: ToolChoice | None = optional("auto, any, none, or the tool to call. Default auto.")
    thinking: Thinking | None = optional(
        "Sets `enable_thinking` and `thinking` of the model's chat template. Default: the template's."
    )
    output_config: OutputConfig | None = optional(
        "`effort`, for chat templates that have one; `format` constrains the output."
    )
    chat_template_kwargs: dict[str, Any] | None = optional("Variables of the model's chat template.")


class MessagesBody(CountTokensBody):
    unsupported = {**CountTokensBody.unsupported, **ONLY_IN_CHATS}  # noqa: RUF012 (a ClassVar of Body)

    max_tokens: Annotated[Integer, Within(1)]
    stop_sequences: Annotated[
        list[str] | None, PlainValidator(stop_strings, json_schema_input_type=list[str] | None)
    ] = optional("Strings that end the output.")
    seed: Annotated[Integer, Within(-1, MAX_SEED)] | None = optional(
        "The same seed gives the same tokens. Default, and -1: random."
    )
    stream: Boolean | None = optional("Reply with server-sent events. Default false.")


class CountTokensReply(TypedDict):
    input_tokens: int


class OutputBlock(TypedDict):
    """Text has `text`, reasoning `thinking` and an empty `signature`, a call `id`, `name` and `input`."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageUsage(TypedDict):
    """`input_tokens` are those whose KV was in no prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "abort"]


class MessageReply(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageError(TypedDict):
    type: str
    message: str


class MessageErrorReply(TypedDict):
    type: Literal["error"]
    error: MessageError


class MessageEvent(TypedDict):
    """`type` is the name of the event and says which of the other fields it has."""

    type: str
    message: NotRequired[MessageReply]
    index: NotRequired[int]
    content_block: NotRequired[OutputBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[MessageUsage]
    error: NotRequired[MessageError]
