"""How one request wants its tokens chosen. Travels from the HTTP front to decode and on to prefill unchanged."""

import msgspec


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """Validated sampling parameters. Array-encoded on the wire: fields are only ever appended
    (transfer/protocol/messages.py).

    `temperature == 0` is greedy. `top_k is None` keeps the whole vocabulary. `seed` is always set by the front: the
    token at output position i is a function of (seed, i) and the logits, whoever samples it and whatever else is in
    the batch. Penalties count as in SGLang and vLLM: repetition over prompt and output, presence and frequency over the
    output. Until `min_new_tokens` tokens are out, neither EOS nor a stop token can be chosen.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_new_tokens: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether a token depends on those before it by more than the logits: on how often each of them came."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


NEUTRAL_SAMPLING = SamplingParams()
"""The model's own distribution, as OpenAI's API has it by default."""


class LogprobParams(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities that a request wants: `top` alternatives per token; of the prompt, tokens from `start` on.

    They are those of the model: log-softmax of the raw logits, before temperature, filters and penalties. The prompt's
    first token has none (nothing precedes it).
    """

    top: int = 0
    start: int | None = None
    """First prompt position; None for output tokens only."""


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """One token, its log-probability, and the most likely tokens in its place with theirs, best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
