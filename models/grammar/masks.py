"""The grammar states of sequences, and masks of the tokens that may follow.

A state is a function of the grammar and the output so far, so every server can rebuild it. Masks are computed by
llguidance, in parallel and without the GIL.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from ...configs.errors import PdserveError
from ...configs.sampling import Grammar
from .compiler import MASK_THREADS, GrammarCompiler

Bitmask = npt.NDArray[np.int32]
"""[rows, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set if token t is allowed."""


class GrammarStateError(PdserveError):
    """The output does not match the grammar, or the grammar has become too expensive."""


class GrammarLimitError(GrammarStateError):
    """The grammar has become too expensive: llguidance has reached one of its limits. The message is llguidance's."""

    @classmethod
    def of(cls, matcher: llguidance.LLMatcher) -> "GrammarLimitError":
        return cls(matcher.get_error().partition("\n")[0].strip())


_MISMATCH = "doesn't satisfy the grammar"
"""In llguidance's message about a token that the grammar does not allow. Its other messages are about limits."""


class GrammarState:
    """The state of one sequence after `length` output tokens. After an end token, everything is allowed: the request
    has ended, and tokens of steps in flight are dropped.
    """

    def __init__(self, matcher: llguidance.LLMatcher, end_tokens: frozenset[int], has_stop_tokens: bool) -> None:
        self.matcher = matcher
        self.end_tokens = end_tokens
        """EOS tokens of the model and stop tokens of the request."""
        self.has_stop_tokens = has_stop_tokens
        ends = np.fromiter(end_tokens, np.int64)
        self.end_words = ends >> 5
        self.end_bits = (np.uint32(1) << (ends & 31).astype(np.uint32)).view(np.int32)
        self.length = 0
        self.ended = False

    def consume(self, tokens: Iterable[int]) -> None:
        """Advance by output tokens; raises GrammarStateError."""
        for token in tokens:
            self.length += 1
            if self.ended or (token in self.end_tokens and self.matcher.is_accepting()):
                self.ended = True
            elif not self.matcher.consume_token(token):
                if _MISMATCH not in self.matcher.get_error():
                    raise GrammarLimitError.of(self.matcher)
                raise GrammarStateError(f"output token {self.length - 1} ({token}) does not match the grammar")


class MaskRow:
    """A mask to compute: for which state, and whether end tokens are excluded (`min_new_tokens`)."""

    def __init__(self, state: GrammarState, *, may_end: bool) -> None:
        self.state = state
        self.may_end = may_end
        self.problem: GrammarLimitError | None = None
        """Why there is no mask."""


class GrammarMasks:
    """The states of running sequences on the rank that samples. Used by one thread.

    `capacity` bounds the states that are kept: more sequences than run at once.
    """

    def __init__(self, compiler: GrammarCompiler, capacity: int) -> None:
        self.compiler = compiler
        self._capacity = capacity
        self._states: OrderedDict[int, GrammarState] = OrderedDict()
        self._executor: llguidance.LLExecutor | None = None

    def begin(
        self, grammar: Grammar, stop_token_ids: Iterable[int], output: Sequence[int], key: int | None
    ) -> GrammarState:
        """The state of a sequence after `output`; raises GrammarError or GrammarStateError. With a `key`, `advance`
        finds it again.
        """
        eos_token_ids = self.compiler.vocabulary.eos_token_ids
        ends = frozenset((*eos_token_ids, *stop_token_ids))
        state = GrammarState(self.compiler.new_matcher(grammar), ends, has_stop_tokens=len(ends) > len(eos_token_ids))
        if key is not None:
            self._states[key] = state
            self._states.move_to_end(key)
            if len(self._states) > self._capacity:
                self._states.popitem(last=False)
        state.consume(output)
        return state

    def advance(self, key: int, token: int, length: int) -> GrammarState:
        """The state of a sequence after one more `token`, its output then being `length` tokens long."""
        state = self._states.get(key)
        if state is None or state.length != length - 1:
            found = "no state" if state is None else f"a state after {state.length} tokens"
            raise GrammarStateError(f"{found} of sequence {key}, whose output has {length} tokens: a bug")
        self._states.move_to_end(key)
        state.consume((token,))
        return state

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-self.compiler.vocabulary.size // 32)

    def compute(self, rows: Sequence[MaskRow], masks: Bitmask) -> None:
        """Fill a mask per row. If a mask cannot be computed, it allows everything, and the row's `problem` is set."""
        masks.fill(-1)
        running = [(row.state.matcher, at) for at, row in enumerate(rows) if not row.state.ended]
        if len(running) == 1:
            llguidance.numpy.fill_next_token_bitmask(running[0][0], masks, running[0][1])
        elif running:
            if self._executor is None:
                self._executor = llguidance.LLExecutor(MASK_THREADS)
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, running, masks)
        for mask, row in zip(masks, rows, strict=True):
            if not row.state.ended:
                _allow_ends(mask, row)


def _allow_ends(mask: npt.NDArray[np.int32], row: MaskRow) -> None:
    """Allow end tokens exactly where the grammar may end. If nothing else can follow, they stay allowed."""
    state, matcher = row.state, row.state.matcher
    if matcher.is_error():
        row.problem = GrammarLimitError.of(matcher)
        mask.fill(-1)
        return
    accepting = matcher.is_accepting()
    if accepting and row.may_end:
        np.bitwise_or.at(mask, state.end_words, state.end_bits)
    elif accepting or state.has_stop_tokens:
        without = mask.copy()
        np.bitwise_and.at(without, state.end_words, ~state.end_bits)
        if without.any():
            mask[:] = without
        elif accepting:
            np.bitwise_or.at(mask, state.end_words, state.end_bits)
