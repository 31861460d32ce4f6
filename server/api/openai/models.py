"""OpenAI's dialect as models: the bodies of `/v1/completions` and `/v1/chat/completions`, and their replies.

Reply types describe what openai/replies.py writes. Extensions of the bodies: the sampling
fields that OpenAI does not have, `rid`, `priority`, `slo_*`, `timeout_s`, `bootstrap_*` and, for chat, the template
fields.
"""

from abc import abstractmethod
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import MaxLen, MinLen
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, WithJsonSchema, model_validator
from typing_extensions import TypedDict

from ....common.words import shown
from ..common.errors import ErrorObject
from ..common.fields import (
    BY_LIST,
    EACH,
    ONE,
    Body,
    Boolean,
    Characters,
    FirstError,
    Integer,
    Text,
    TokenIds,
    Within,
    optional,
    problem,
)
from ..common.grammar_fields import OpenAiGrammarFields
from ..common.routing import RoutingFields
from ..common.sampling_fields import MAX_TOP_LOGPROBS, SamplingFields
from .tool_models import MAX_TOOLS, EarlierCall, ToolCall, ToolCallDelta, ToolFields

MAX_MESSAGES = 4096
NEW_TOKENS_OF_SEVERAL = 1024
"""Of each sample of a chat that asks for several and sets no maximum: they must fit the KV pool together."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class StreamOptions(Body):
    include_usage: Boolean | None = optional("A last chunk with `usage`. Default false.")
    continuous_usage_stats: Boolean | None = optional("`usage` so far in every chunk (vLLM). Default false.")


class OpenAiBody(OpenAiGrammarFields, SamplingFields, RoutingFields):
    """What both routes share. Sampling fields stand at the top level."""

    unknown_fields = "refused if similar"
    unsupported = {  # noqa: RUF012 (a ClassVar of Body)
        **SamplingFields.unsupported,
        "suffix": ("",),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
        "prompt_embeds": (),
        "truncate_prompt_tokens": (),
        "top_a": (0,),  # this and the next three: clients of several servers send the samplers of all of them
        "encoder_repetition_penalty": (1,),
        "repeat_penalty": (1,),
        "temperature_last": (False, True),
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "bad_words": ([],),
        "allowed_token_ids": (),
        "return_hidden_states": (False,),
        "lora_path": ("",),
        "custom_logit_processor": (),
    }
    elsewhere = {  # noqa: RUF012 (a ClassVar of Body)
        "max_new_tokens": "is for /generate; here it is max_tokens",
        "min_new_tokens": "is for /generate; here it is min_tokens",
        "sampling_params": "is for /generate; here its fields stand at the top level",
        "guided_json": "is now structured_outputs.json",
        "guided_regex": "is now structured_outputs.regex",
        "guided_choice": "is now structured_outputs.choice",
        "guided_grammar": "is now structured_outputs.grammar",
    }

    model: Annotated[Any, WithJsonSchema({"type": "string"})] = optional("Ignored: the server has one model.")
    max_tokens: Annotated[Integer, Within(1)] | None = optional(
        f"Default 128. For chat as many as fit, or {NEW_TOKENS_OF_SEVERAL} for each of several samples."
    )
    max_completion_tokens: Annotated[Integer, Within(1)] | None = optional(
        "OpenAI's newer name of `max_tokens`; it takes precedence."
    )
    min_tokens: Integer | None = optional(
        "Minimum output tokens: end and stop tokens are not sampled before. Up to max_tokens; default 0."
    )
    best_of: Annotated[Integer, Within(1)] | None = optional("1 or `n`: every sample is returned.")
    stream: Boolean | None = optional("Reply with server-sent events. Default false.")
    stream_options: StreamOptions | None = None
    return_token_ids: Boolean | None = optional("Token ids of the prompt and of the output (vLLM). Default false.")
    prompt_logprobs: Annotated[Integer, Within(0, MAX_TOP_LOGPROBS)] | None = optional(
        "Log-probabilities of the prompt, with this many alternatives (vLLM). Not in streams."
    )

    @property
    @abstractmethod
    def output_alternatives(self) -> int | None:
        """Alternatives for each output token; None without log-probabilities of the output."""

    def new_tokens(self) -> tuple[str, int | None, str, int | None]:
        newer = self.max_completion_tokens is not None
        name = "max_completion_tokens" if newer else "max_tokens"
        return name, self.max_completion_tokens if newer else self.max_tokens, "min_tokens", self.min_tokens


def is_prompt_batch(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | list)


Prompt = Annotated[Annotated[Text, Tag(ONE)] | Annotated[TokenIds, Tag(EACH)], BY_LIST]
Prompts = Annotated[
    Annotated[Prompt, Tag(ONE)] | Annotated[list[Prompt], FirstError(), Tag(EACH)],
    Discriminator(lambda value: EACH if is_prompt_batch(value) else ONE),
]


class CompletionBody(OpenAiBody):
    has_token_ids = True
    unsupported = {  # noqa: RUF012 (a ClassVar of Body)
        **OpenAiBody.unsupported,
        "add_special_tokens": (True,),
        "tools": ([],),
        "tool_choice": ("none", "auto"),
    }

    prompt: Prompts = Field(description="A string, a list of strings, token ids or a list of lists of them.")
    echo: Boolean | None = optional("Begin the text with the prompt. Default false.")
    logprobs: Annotated[
        Annotated[Integer, Within(0, MAX_TOP_LOGPROBS)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = optional("Log-probabilities, with this many alternatives; false: none.")

    @property
    def output_alternatives(self) -> int | None:
        return self.logprobs


class TextPart(Body):
    type: Literal["text"]
    text: Text


def _check_role(role: str) -> str:
    if role.lower() not in ROLES:
        raise problem(f"must be one of {', '.join(ROLES)}, got {shown(role)}")
    return role.lower()


def _check_content(value: object) -> object:
    if not isinstance(value, str | list | None):
        raise problem(_CONTENT_PROBLEM.format(shown(value)))
    return value


_CONTENT_PROBLEM = "must be a string or an array of text parts, got {}"


class Message(Body):
    """A message of text; other content parts are refused. An assistant's message with calls may have no content."""

    unsupported = {"function_call": ()}  # noqa: RUF012 (a ClassVar of Body)

    role: Annotated[
        Text, Characters(64), AfterValidator(_check_role), WithJsonSchema({"type": "string", "enum": list(ROLES)})
    ]
    content: Annotated[
        Annotated[Text | None, Tag(ONE)] | Annotated[list[TextPart], FirstError(), Tag(EACH)],
        BY_LIST,
        BeforeValidator(_check_content),
    ] = None
    tool_calls: Annotated[list[EarlierCall], FirstError(), MaxLen(MAX_TOOLS)] | None = optional(
        "Of an assistant's message: the calls that it made."
    )
    tool_call_id: Text | None = optional("Of a tool's message: the call that it answers.")
    name: Text | None = optional("Of a tool's message: the function.")
    reasoning_content: Text | None = optional("Of an assistant's message: its reasoning, for templates that use it.")
    reasoning: Text | None = optional("vLLM's name of `reasoning_content`.")

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise problem(f"are for messages of the assistant, not of {self.role}", "tool_calls")
        if self.content is None and not self.tool_calls:
            given = "content" in self.model_fields_set
            raise problem(_CONTENT_PROBLEM.format("null") if given else "is required", "content")
        return self

    @property
    def text(self) -> str | None:
        parts = self.content
        return parts if isinstance(parts, str | None) else "".join(part.text for part in parts)


Messages = Annotated[list[Message], FirstError(), MinLen(1), MaxLen(MAX_MESSAGES)]


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in sorted(variables.keys() & RESERVED_VARIABLES):
        raise problem("is a field of the request, not a variable of the chat template", name)
    return variables


class TemplateFields(ToolFields):
    """How messages and tools become text."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_variables)] | None = optional(
        "Variables of the model's chat template, such as Qwen3's `enable_thinking`."
    )
    reasoning_effort: Text | None = optional(
        "Template variable of the same name, as in gpt-oss. `none` disables reasoning if the template supports that."
    )
    add_generation_prompt: Boolean | None = optional(
        "End the prompt with the beginning of an assistant message. Default true."
    )
    continue_final_message: Boolean | None = optional(
        "The last message is the assistant's, and the output continues it. Default false."
    )

    def template_variables(self) -> dict[str, Any]:
        """`chat_template_kwargs`, and what `reasoning_effort` stands for unless they have it."""
        effort: dict[str, Any] = {}
        if self.reasoning_effort == "none":
            effort = {"enable_thinking": False, "thinking": False}  # Qwen3 and GLM; DeepSeek
        elif self.reasoning_effort is not None:
            effort = {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


class ChatBody(OpenAiBody, TemplateFields):
    unsupported = {  # noqa: RUF012 (a ClassVar of Body)
        **OpenAiBody.unsupported,
        "add_special_tokens": (False,),
        "reasoning_format": ("auto", "parsed", "deepseek"),  # llama.cpp's and Groq's names for separate reasoning
        "echo": (False,),
    }

    messages: Messages
    logprobs: Boolean | None = optional("Log-probabilities of the output. Default false.")
    top_logprobs: Annotated[Integer, Within(0, MAX_TOP_LOGPROBS)] | None = optional(
        "Alternatives for each token; needs `logprobs`. Default 0."
    )
    separate_reasoning: Boolean | None = optional(
        "Return reasoning in `reasoning_content`; false: in `content`, with its tags. Default true."
    )
    include_reasoning: Boolean | None = optional("Return `reasoning_content`. Default true.")

    @property
    def default_new_tokens(self) -> int | None:
        return None if self.samples == 1 else NEW_TOKENS_OF_SEVERAL

    @property
    def output_alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class PromptTokensDetails(TypedDict):
    cached_tokens: Annotated[int, Field(description="Prompt tokens whose KV was in a prefix cache.")]


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: Annotated[int, Field(description="Output tokens up to the end of the reasoning.")]


class Usage(TypedDict):
    """Tokens of the whole call. The samples of a prompt share it: it counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


FinishReason = Literal["stop", "length", "abort", "tool_calls"]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class Reply(TypedDict):
    id: str
    created: int
    model: str


class Choice(TypedDict):
    """In a stream, `matched_stop` and `stop_reason` are in the last chunk of a choice."""

    index: int
    finish_reason: FinishReason | None
    matched_stop: NotRequired[
        Annotated[
            int | str | None, Field(description="SGLang: the stop token, stop string or stop regex that ended it.")
        ]
    ]
    stop_reason: NotRequired[
        Annotated[int | str | None, Field(description="vLLM: the same, but null for the model's own end token.")]
    ]
    token_ids: NotRequired[Annotated[list[int], Field(description="With `return_token_ids`.")]]


class PromptLogprob(TypedDict):
    logprob: float
    rank: Annotated[
        int | None, Field(description="1 for the most likely token; null if the token is not among the alternatives.")
    ]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id; null for the first token. With `prompt_logprobs`."""


class PromptEcho(TypedDict):
    prompt_token_ids: NotRequired[Annotated[list[int], Field(description="With `return_token_ids`.")]]
    prompt_logprobs: NotRequired[PromptLogprobs]


class CompletionChoice(Choice, PromptEcho):
    text: str
    logprobs: CompletionLogprobs | None


class Completion(Reply):
    """A whole response, or a chunk of a stream, which has only the new text."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class AlternativeLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(AlternativeLogprob):
    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class ChatCompletion(Reply, PromptEcho):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str | None]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatChunk(Reply, PromptEcho):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class StreamError(TypedDict):
    """The last event of an output that failed."""

    error: ErrorObject
    index: int
