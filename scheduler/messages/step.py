"""A step as the ranks get it, and what comes of it. Plain data: it travels from the leader to its rank processes."""

from collections.abc import Sequence

import msgspec

from ...configs.sampling import SamplingParams, TokenLogprob
from ...memory.index_spaces import RequestSlot


class Draw(msgspec.Struct, array_like=True, frozen=True):
    """One token to choose after a row's last one. Its seed is `sampling.seed`.

    `output_index` is the token's index in its output. `output_ids` is the output so far; only penalties look at it.
    """

    sampling: SamplingParams
    output_index: int
    output_ids: Sequence[int] = ()


class StepRow(msgspec.Struct, array_like=True, frozen=True):
    """One sequence of a step: run `token_ids` from position `start`, then choose a token for each draw.

    With `follows` there are no `token_ids`: the one token to run is what that row of the step before has drawn. A chunk
    that does not end its prompt has no draws; several draws are samples of one prompt. `prompt_ids` is the whole
    prompt, for the repetition penalty and the prompt's log-probabilities. `top_logprobs` alternatives come with each
    log-probability; None wants none for the draws. With `prompt_logprobs_from`, the results of a prompt's chunks have,
    joined, one entry per prompt token from that position on: if the position is p, the first chunk to ask starts at or
    before p - 1, whose logits they are (0 for the first token, which has no log-probability).
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    draws: tuple[Draw, ...] = ()
    prompt_ids: Sequence[int] = ()
    top_logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    follows: int | None = None
    hot_slot: RequestSlot | None = None
    """Its hot buffer (HiSparse)."""

    @property
    def length(self) -> int:
        """Tokens to run."""
        return len(self.token_ids) if self.follows is None else 1

    @property
    def scored(self) -> range:
        """Positions of the prompt whose log-probabilities this step's logits give."""
        if self.prompt_logprobs_from is None:
            return range(0)
        end = self.start + self.length
        return range(max(self.prompt_logprobs_from, self.start + 1), min(end + 1, len(self.prompt_ids)))


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """What a row's step gave: a token per draw (with a log-probability where asked for), and its prompt's part."""

    drawn: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
