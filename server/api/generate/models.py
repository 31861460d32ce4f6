"""SGLang's native dialect as models: the `/generate` body and its replies.

Reply types describe what replies.py writes, which encodes growing parts only once.
"""

from typing import Annotated, Literal, NotRequired

from pydantic import Discriminator, Field, Tag
from typing_extensions import TypedDict

from ..common.errors import ErrorObject
from ..common.fields import EACH, ONE, Boolean, FirstError, Integer, OneOrEach, Text, TokenIds, Within, optional
from ..common.routing import RoutingFields
from ..common.sampling_fields import MAX_TOP_LOGPROBS, SamplingFields


class NativeSampling(SamplingFields):
    """`sampling_params` of `/generate`. Unknown fields are refused."""

    unknown_fields = "refused"

    max_new_tokens: Annotated[Integer, Within(1)] | None = optional("Default 128, or less where less fits.")
    min_new_tokens: Integer | None = optional(
        "Minimum output tokens: end and stop tokens are not sampled before. Up to max_new_tokens; default 0."
    )

    def new_tokens(self) -> tuple[str, int | None, str, int | None]:
        return "max_new_tokens", self.max_new_tokens, "min_new_tokens", self.min_new_tokens


def is_id_batch(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


InputIds = Annotated[
    Annotated[TokenIds, Tag(ONE)] | Annotated[list[TokenIds], FirstError(), Tag(EACH)],
    Discriminator(lambda value: EACH if is_id_batch(value) else ONE),
]


class GenerateBody(RoutingFields):
    """A call holds one prompt (`text` or `input_ids`) or a list of them. With a list, `sampling_params`, `rid`,
    `bootstrap_*` and the fields for log-probabilities may be lists of the same length; one value stands for all.
    """

    has_token_ids = True
    unknown_fields = "refused if similar"
    unsupported = {  # noqa: RUF012 (a ClassVar of Body)
        "token_ids_logprob": ([],),
        "return_hidden_states": (False,),
        "input_embeds": (),
        "image_data": ([],),
        "video_data": ([],),
        "audio_data": ([],),
        "lora_path": ("",),
        "custom_logit_processor": (),
        "session_params": (),
    }
    elsewhere = dict.fromkeys([*NativeSampling.model_fields, *NativeSampling.unsupported], "belongs in sampling_params")

    text: OneOrEach[Text] | None = optional("A prompt, or a list of prompts.")
    input_ids: InputIds | None = optional("Instead of `text`: token ids, or a list of such lists.")
    sampling_params: OneOrEach[NativeSampling | None] = optional(
        "For a list of prompts: one object for all, or a list."
    )
    stream: Boolean | None = optional("Reply with server-sent events. Default false.")
    return_logprob: OneOrEach[Boolean | None] = optional(
        "Log-probabilities of the output, in `meta_info`. Default false."
    )
    top_logprobs_num: OneOrEach[Annotated[Integer, Within(0, MAX_TOP_LOGPROBS)] | None] = optional(
        "Alternatives for each token. Default 0."
    )
    logprob_start_len: OneOrEach[Integer | None] = optional(
        "First prompt position with log-probabilities; -1, the default: only the output."
    )
    return_text_in_logprobs: Boolean | None = optional("The text of each token beside its id. Default false.")


class FinishReason(TypedDict):
    type: Literal["stop", "length", "abort"]
    matched: NotRequired[Annotated[int | str | None, Field(description="The stop token or stop string.")]]
    length: NotRequired[int]
    message: NotRequired[str]
    status_code: NotRequired[int]
    err_type: NotRequired[str]


LogprobEntry = tuple[float | None, int, str | None]
"""Log-probability, null for a prompt's first token; token id; with `return_text_in_logprobs`, the token's text."""


class CachedTokensDetails(TypedDict):
    """Cached tokens by memory: of the GPU, of the host, and of a KV store."""

    device: int
    host: int
    storage: int


class MetaInfo(TypedDict):
    id: Annotated[str, Field(description="The `rid`.")]
    finish_reason: Annotated[FinishReason | None, Field(description="null until the output has ended.")]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Annotated[int, Field(description="Prompt tokens whose KV was in a prefix cache.")]
    cached_tokens_details: Annotated[CachedTokensDetails, Field(description="Where their KV was.")]
    e2e_latency: NotRequired[Annotated[float, Field(description="Seconds.")]]
    timeline: NotRequired[Annotated[dict[str, float], Field(description="Seconds spent in each stage.")]]
    kv_path: NotRequired[
        Annotated[
            Literal["device", "host", "local"],
            Field(description="Where prefill wrote the KV of the prompt, or that decode computed it."),
        ]
    ]
    input_token_logprobs: NotRequired[list[LogprobEntry]]
    output_token_logprobs: NotRequired[list[LogprobEntry]]
    input_top_logprobs: NotRequired[list[list[LogprobEntry] | None]]
    output_top_logprobs: NotRequired[list[list[LogprobEntry] | None]]


class GenerateResult(TypedDict):
    """One output. In a stream all fields are cumulative."""

    text: str
    output_ids: Annotated[list[int], Field(description="With the end token, which `text` does not show.")]
    meta_info: MetaInfo
    index: NotRequired[Annotated[int, Field(description="In streams of several outputs: which one.")]]
    error: NotRequired[ErrorObject]


GenerateReply = GenerateResult | list[GenerateResult]
"""A list for a list of prompts and for n > 1, prompt by prompt and sample by sample."""
