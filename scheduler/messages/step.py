"""A model step and its results, as plain data that the leader and its rank processes exchange."""

from collections.abc import Sequence

import msgspec

from ...common.sampling import SamplingParams, TokenLogprob
from ...memory.index_spaces import RequestSlot
from ...models.config.sharding import RankTokens


class Draw(msgspec.Struct, array_like=True, frozen=True):
    """One token to sample after the last token of a row, with the seed `sampling.seed`.

    `output_index` is the index of the token in its output. `output_ids` is the output so far; it is set for penalties,
    and if `sampling` has a grammar. The rank that samples keeps the state of that grammar under the number
    `grammar_state`. Later draws of the request have this number and no grammar.
    """

    sampling: SamplingParams
    output_index: int
    output_ids: Sequence[int] = ()
    grammar_state: int | None = None


class StepRow(msgspec.Struct, array_like=True, frozen=True):
    """One sequence of a step: run `token_ids` from position `start`, then sample a token for each draw.

    With `follows` there are no `token_ids`: the row runs the one token that row `follows` of the previous step sampled.
    A chunk that does not end its prompt has no draws; several draws are samples of one prompt. `prompt_ids` is the
    whole prompt, for the repetition penalty and the log-probabilities of the prompt. Each log-probability comes with
    `top_logprobs` alternatives; None means no log-probabilities for the draws.

    With `prompt_logprobs_from` = p, the results of all chunks of a prompt, joined, have one entry per prompt token from
    position p on. The entry of p needs the logits of p - 1, so the first chunk starts at or before p - 1 (at 0 for
    p = 0: the first token has no log-probability).
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
    """The slot of its hot buffer (HiSparse)."""

    @property
    def length(self) -> int:
        """Tokens to run."""
        return len(self.token_ids) if self.follows is None else 1

    @property
    def has_grammar(self) -> bool:
        return bool(self.draws) and (
            self.draws[0].grammar_state is not None or self.draws[0].sampling.grammar is not None
        )

    @property
    def scored(self) -> range:
        """Positions of the prompt whose log-probabilities come from the logits of this row."""
        if self.prompt_logprobs_from is None:
            return range(0)
        end = self.start + self.length
        return range(max(self.prompt_logprobs_from, self.start + 1), min(end + 1, len(self.prompt_ids)))


def tokens_of(rows: Sequence[StepRow]) -> RankTokens:
    """The tokens of a data-parallel rank. The last layer computes only the last token of each row, unless
    log-probabilities of a prompt need all.
    """
    tokens = sum(row.length for row in rows)
    return RankTokens(tokens, tokens if any(row.scored for row in rows) else len(rows))


class StepResult(msgspec.Struct, array_like=True, frozen=True):
    """The result of a row: a token per draw (with its log-probability if requested), and log-probabilities of the
    prompt. With a `problem`, its tokens do not follow its grammar, and the request fails. `too_complex`: because the
    grammar has become too expensive. `slow_mask`: the mask of the next token is to be computed beside the steps.
    """

    drawn: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    problem: str | None = None
    too_complex: bool = False
    slow_mask: bool = False
