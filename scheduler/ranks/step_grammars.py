"""The grammars of a step: which tokens each of its rows may sample. Only the rank that samples uses them."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from ...models.grammar.compiler import GrammarCompiler
from ...models.grammar.dialects import GrammarError
from ...models.grammar.masks import GrammarMasks, GrammarStateError, MaskRow
from ...models.layers.host_copies import UploadBuffer
from ...models.sampling.sampler import TokenMasks
from ..messages.step import Draw, StepRow


class StepMasks(NamedTuple):
    """The masks of a step. `problems` has the rows, by index, whose grammar cannot be followed: they allow all
    tokens. `slow` has the indices of rows whose next mask is to be computed beside the steps.
    """

    allowed: TokenMasks | None
    problems: "dict[int, GrammarProblem]"
    slow: frozenset[int] = frozenset()


GrammarProblem: TypeAlias = GrammarError | GrammarStateError
LEAST_BUFFER_ROWS = 64
NO_MASKS = StepMasks(None, {})


class StepGrammars:
    """Follows the grammars of running requests. `max_rows` is the largest number of requests in a step, which runs on
    `device`.
    """

    def __init__(self, compiler: GrammarCompiler, max_rows: int, device: torch.device) -> None:
        self.compiler = compiler
        self._device = device
        self._buffers: dict[int, UploadBuffer] = {}
        """By the number of rows."""
        # more than a step has: with pipeline stages other requests run too, and states of ended ones stay until evicted
        self._masks = GrammarMasks(compiler, capacity=4 * max_rows + 64)

    def masks(self, rows: Sequence[StepRow], sampled: Sequence[int]) -> StepMasks:
        """The masks of all rows that have a grammar. `sampled` are the tokens of the previous step, for rows that
        follow it. All draws of a row have the same grammar and output.
        """
        masked: list[int] = []
        wanted: list[MaskRow] = []
        problems: dict[int, GrammarProblem] = {}
        for index, row in enumerate(rows):
            if not row.has_grammar:
                continue
            try:
                mask = self._row(row.draws[0], row.token_ids[0] if row.follows is None else sampled[row.follows])
            except (GrammarError, GrammarStateError) as error:
                problems[index] = error
                continue
            masked.append(index)
            wanted.append(mask)
        if not masked:
            return StepMasks(None, problems)
        buffer = self._buffer(len(wanted))
        self._masks.compute(wanted, buffer.rows(len(wanted)))
        problems |= {index: row.problem for index, row in zip(masked, wanted, strict=True) if row.problem is not None}
        slow = frozenset(index for index, row in zip(masked, wanted, strict=True) if row.slow)
        return StepMasks(TokenMasks(masked, buffer.upload(len(wanted))), problems, slow)

    def prepare(self, token: int, draw: Draw) -> bool:
        """Compute the mask of a row of the next step, after its newest `token`. Returns whether the mask after it
        should be prepared too. Called from other threads; raises GrammarError or GrammarStateError.
        """
        return self._masks.prepare(self._row(draw, token))

    def drop(self, key: int) -> None:
        """Forget a state. Called from another thread."""
        self._masks.drop(key)

    def _buffer(self, rows: int) -> UploadBuffer:
        rows = max(LEAST_BUFFER_ROWS, 1 << (rows - 1).bit_length())
        if rows not in self._buffers:
            self._buffers[rows] = UploadBuffer(rows, self._masks.words, torch.int32, self._device)
        return self._buffers[rows]

    def _row(self, draw: Draw, token: int) -> MaskRow:
        grammar = draw.sampling.grammar
        if grammar is not None:
            state = self._masks.begin(grammar, draw.sampling.stop_token_ids, draw.output_ids, draw.grammar_state)
        else:
            assert draw.grammar_state is not None
            state = self._masks.advance(draw.grammar_state, token, draw.output_index)
        return MaskRow(state, may_end=draw.output_index >= draw.sampling.min_new_tokens)
