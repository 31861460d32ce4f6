"""The limits of requests, from the configuration, the model and the KV pool, and the sampling defaults."""

from dataclasses import dataclass

from ....common.sampling import NEUTRAL_SAMPLING, SamplingParams
from ....configs.allowed_hosts import ANY_HOST, AllowedHosts
from ....configs.schema import AnyServerConfig, DecodeConfig
from ....scheduler.messages.frontend import Ready
from .fields import FieldError

_MAXIMUM = "this model's maximum context length is"


class ContextLengthError(FieldError):
    """The prompt, or the prompt and the output together, are longer than this server allows.

    The code and the wording of `Limits.describe_total` are OpenAI's: clients use them to detect that a shorter prompt
    would fit.
    """

    code = "context_length_exceeded"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    context_length: int
    max_total_tokens: int
    max_prompt_tokens: int
    max_new_tokens: int
    max_batch_items: int
    bootstrap_hosts: AllowedHosts
    """Hosts that a request may name as its prefill server. A prefill server allows all, because it connects to none."""
    default_sampling: SamplingParams = NEUTRAL_SAMPLING
    """Used for fields that a request does not set."""
    json_whitespace: str | None = None
    """`Grammar.json_whitespace` of requests that do not set it."""

    @classmethod
    def of(cls, config: AnyServerConfig, ready: Ready, default_sampling: SamplingParams) -> "Limits":
        total, new_tokens = ready.model.context_length, None
        if isinstance(config, DecodeConfig):  # its KV pool holds prompt and output; prefill holds prompts only
            total, new_tokens = min(total, ready.max_total_tokens), config.max_new_tokens_limit
        return cls(
            vocab_size=ready.model.vocab_size,
            eos_token_ids=frozenset(ready.model.eos_token_ids),
            context_length=ready.model.context_length,
            max_total_tokens=total,
            max_prompt_tokens=min(total, config.max_prompt_tokens or total),
            max_new_tokens=min(total, new_tokens or total),
            max_batch_items=config.max_batch_items,
            bootstrap_hosts=config.allowed_bootstrap_hosts if isinstance(config, DecodeConfig) else ANY_HOST,
            default_sampling=default_sampling,
            json_whitespace=config.json_whitespace if isinstance(config, DecodeConfig) else None,
        )

    def describe_total(self) -> str:
        """The limit of prompt and output together, for error messages."""
        if self.max_total_tokens < self.context_length:
            return f"{_MAXIMUM} {self.max_total_tokens} tokens on this server, the size of its KV pool"
        return f"{_MAXIMUM} {self.context_length} tokens"

    def describe_output(self) -> str:
        """The limit of the output, for error messages."""
        if self.max_new_tokens < self.max_total_tokens:
            return f"the limit of this server is {self.max_new_tokens} (max_new_tokens_limit)"
        return self.describe_total()

    def describe_prompt(self) -> str:
        """The limit of the prompt, for error messages."""
        if self.max_prompt_tokens < self.max_total_tokens:
            return f"{_MAXIMUM} {self.max_prompt_tokens} prompt tokens on this server (max_prompt_tokens)"
        return self.describe_total()
