"""Sampling and log-probability parameters of a request. The frontend sets them; decode and prefill only read them."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec


class ReasoningTags(msgspec.Struct, array_like=True, frozen=True):
    """The tags around reasoning at the beginning of an output. `is_open`: the prompt has the opening tag; otherwise
    the output may begin with it.
    """

    open: str
    close: str
    is_open: bool


MAX_GRAMMAR_CHARACTERS = 1 << 17


JSON_RULES = 1
"""The version of what the grammars of JSON allow (white space, closed objects). An increase lets decode servers compute
prompts again whose first token a prefill server of another version has sampled.
"""


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """What the output has to match (models/grammar/). Small text: every server compiles it itself.

    `text` is a JSON schema, a regular expression, an EBNF grammar (GBNF or Lark), a JSON list of strings for `choice`,
    or a JSON object for `structural_tag`.
    """

    kind: Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]
    text: str
    after: ReasoningTags | None = None
    """It begins after this reasoning, which is any text."""
    json_whitespace: str | None = None
    """Regular expression of what may stand between two JSON tokens, besides nothing; None: a blank."""
    closes_patterns: bool = False
    """Whether objects with `patternProperties` are closed as those with `properties` are (closed_objects.py)."""


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """Validated sampling parameters. Array-encoded on the wire: fields are only appended
    (transfer/protocol/messages.py).

    `temperature == 0` is greedy. `top_k is None` keeps the whole vocabulary. The frontend always sets `seed`: the token
    at output position i is a function of (seed, i) and the logits, independent of the sampling server and of the rest
    of the batch. Penalties count as in SGLang and vLLM: repetition over prompt and output, presence and frequency over
    the output. Before `min_new_tokens` output tokens, EOS and stop tokens cannot be chosen. With a `grammar`, they
    can be chosen exactly where the grammar may end, and EOS always ends the output.
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
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether sampling needs counts of the earlier tokens, in addition to the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


NEUTRAL_SAMPLING = SamplingParams()
"""The model's own distribution: the defaults of OpenAI's API."""


class LogprobParams(msgspec.Struct, array_like=True, frozen=True):
    """Requested log-probabilities: `top` alternatives per token; for the prompt, tokens from `start` on.

    Values are the log-softmax of the raw logits, before temperature, filters and penalties. The first prompt token has
    none, because nothing precedes it.
    """

    top: int = 0
    start: int | None = None
    """First prompt position; None for output tokens only."""


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """One token, its log-probability, and the most likely tokens at its position with theirs, best first."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


NO_LOGPROBS = msgspec.Raw(b"\x90")
"""An empty array."""
_ENTRIES = msgspec.msgpack.Decoder(list[msgspec.Raw])
_ENTRY = msgspec.msgpack.Decoder(TokenLogprob)


def pack_logprobs(entries: Sequence[TokenLogprob]) -> msgspec.Raw:
    """Those of a prompt as a part of a message, which the servers pass on as it is: making objects of them takes a
    decoder up to 0.2 s, in which it holds the interpreter's lock.
    """
    return msgspec.Raw(msgspec.msgpack.encode(entries))


class PackedLogprobs:
    """Reads what `pack_logprobs` has made, entry by entry."""

    def __init__(self, packed: msgspec.Raw = NO_LOGPROBS) -> None:
        self._entries = _ENTRIES.decode(packed)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[TokenLogprob]:
        for entry in self._entries:  # a generator: `map` would not let other threads run in between
            yield _ENTRY.decode(entry)
