"""What a request may ask of this server: the configured limits, and what the model and its KV pool can hold."""

from dataclasses import dataclass

from ..configs.schema import AnyServerConfig, DecodeConfig
from ..scheduler.front import Ready


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that requests are checked against."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    context_length: int
    max_total_tokens: int
    max_prompt_tokens: int
    max_new_tokens: int
    max_batch_items: int
    bootstrap_hosts: frozenset[str] | None
    """Hosts a request may name as its prefill server; None for any."""

    @classmethod
    def of(cls, config: AnyServerConfig, ready: Ready) -> "Limits":
        total = min(ready.model.context_length, ready.max_total_tokens)
        new_tokens = config.max_new_tokens_limit if isinstance(config, DecodeConfig) else None
        return cls(
            vocab_size=ready.model.vocab_size,
            eos_token_ids=frozenset(ready.model.eos_token_ids),
            context_length=ready.model.context_length,
            max_total_tokens=total,
            max_prompt_tokens=min(total, config.max_prompt_tokens or total),
            max_new_tokens=min(total, new_tokens or total),
            max_batch_items=config.max_batch_items,
            bootstrap_hosts=config.allowed_bootstrap_hosts if isinstance(config, DecodeConfig) else None,
        )

    def describe_total(self) -> str:
        """What bounds prompt + output, for error messages."""
        if self.max_total_tokens < self.context_length:
            return f"{self.max_total_tokens} tokens that fit the KV pool"
        return f"context length of {self.context_length} tokens"
