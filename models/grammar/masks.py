"""The grammar states of sequences, and masks of the tokens that may follow.

A state is a function of the grammar and the output so far, so every server can rebuild it. Masks are computed by
llguidance, in parallel and without the GIL.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import llguidance
import llguidance.numpy
import numpy as np
import numpy.typing as npt

from ...common.errors import PdserveError
from ...common.sampling import Grammar
from .compiler import MASK_THREADS, PLAIN_MASK_S, GrammarCompiler

Bitmask = npt.NDArray[np.int32]
"""[rows, ceil(vocabulary / 32)]: bit t % 32 of word t // 32 is set if token t is allowed."""
SLOW_MASK_S = 0.005
"""A row whose mask takes longer delays the other rows of its step. Its next masks are computed beside the steps."""
FAST_MASKS = 32
"""After so many masks in a row that were not slow, they are computed in the steps again."""
SUSPECT_MASKS = 4
"""The same for a row of which only the time of its whole group is known."""


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

    def __init__(
        self,
        grammar: Grammar,
        matcher: llguidance.LLMatcher,
        end_tokens: frozenset[int],
        has_stop_tokens: bool,
    ) -> None:
        self.grammar = grammar
        self.matcher = matcher
        self.end_tokens = end_tokens
        """EOS tokens of the model and stop tokens of the request."""
        self.has_stop_tokens = has_stop_tokens
        ends = np.fromiter(end_tokens, np.int64)
        self.end_words = ends >> 5
        self.end_bits = (np.uint32(1) << (ends & 31).astype(np.uint32)).view(np.int32)
        self.length = 0
        self.ended = False
        self.prepared: npt.NDArray[np.int32] | None = None
        """The mask of the next token, if it was computed beside the steps."""
        self.fast_masks = FAST_MASKS
        """The number of masks in a row that were not slow."""

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
        self.slow = False
        """The next mask of this sequence is to be computed beside the steps (`GrammarMasks.prepare`)."""


class GrammarMasks:
    """The states of running sequences on the rank that samples. One thread calls `compute`; others may call `prepare`
    for sequences that are not in a step.

    `capacity` bounds the states that are kept: more sequences than run at once.
    """

    def __init__(self, compiler: GrammarCompiler, capacity: int) -> None:
        self.compiler = compiler
        self._capacity = capacity
        self._states: OrderedDict[int, GrammarState] = OrderedDict()
        self._lock = threading.Lock()
        self._times_groups = False
        """A slow mask was among more masks than there are threads: find out which."""
        self._executor: llguidance.LLExecutor | None = None

    def begin(
        self, grammar: Grammar, stop_token_ids: Iterable[int], output: Sequence[int], key: int | None
    ) -> GrammarState:
        """The state of a sequence after `output`; raises GrammarError or GrammarStateError. With a `key`, `advance`
        finds it again.
        """
        eos_token_ids = self.compiler.vocabulary.eos_token_ids
        ends = frozenset((*eos_token_ids, *stop_token_ids))
        matcher = self.compiler.new_matcher(grammar)
        state = GrammarState(grammar, matcher, ends, has_stop_tokens=len(ends) > len(eos_token_ids))
        if self.compiler.is_slow(grammar):
            state.fast_masks = 0
        if key is not None:
            with self._lock:
                self._states[key] = state
                self._states.move_to_end(key)
                if len(self._states) > self._capacity:
                    self._states.popitem(last=False)
        state.consume(output)
        return state

    def advance(self, key: int, token: int, length: int) -> GrammarState:
        """The state of a sequence after one more `token`, its output then being `length` tokens long."""
        with self._lock:
            state = self._states.get(key)
            if state is not None:
                self._states.move_to_end(key)
        if state is not None and state.prepared is not None and state.length == length:
            return state
        if state is None or state.length != length - 1:
            found = "no state" if state is None else f"a state after {state.length} tokens"
            raise GrammarStateError(f"{found} of sequence {key}, whose output has {length} tokens: a bug")
        state.consume((token,))
        return state

    def drop(self, key: int) -> None:
        """Forget the state of a sequence that does not run any more."""
        with self._lock:
            self._states.pop(key, None)

    @property
    def words(self) -> int:
        """Words of a mask."""
        return -(-self.compiler.vocabulary.size // 32)

    def compute(self, rows: Sequence[MaskRow], masks: Bitmask) -> None:
        """Fill a mask per row. If a mask cannot be computed, it allows everything, and the row's `problem` is set. Rows
        whose mask may have been slow are marked.
        """
        masks.fill(-1)
        running: list[tuple[MaskRow, int]] = []
        for at, row in enumerate(rows):
            if row.state.prepared is not None:
                masks[at], row.state.prepared = row.state.prepared, None
            elif not row.state.ended:
                running.append((row, at))
        size = MASK_THREADS if self._times_groups else max(1, len(running))
        self._times_groups = False
        for first in range(0, len(running), size):
            group = running[first : first + size]
            began_s = time.monotonic()
            self._fill(group, masks)
            mask_s = time.monotonic() - began_s
            for row, _ in group if mask_s > PLAIN_MASK_S * len(group) else ():
                self.compiler.charge(row.state.grammar, mask_s / len(group))
            if mask_s > SLOW_MASK_S:
                self._times_groups = len(group) > MASK_THREADS
                for row, _ in group if not self._times_groups else ():
                    row.slow = True
                    row.state.fast_masks = FAST_MASKS - SUSPECT_MASKS
        for row, at in running:
            _allow_ends(masks[at], row)

    def _fill(self, rows: Sequence[tuple[MaskRow, int]], masks: Bitmask) -> None:
        if len(rows) == 1:
            row, at = rows[0]
            llguidance.numpy.fill_next_token_bitmask(row.state.matcher, masks, at)
            return
        if self._executor is None:
            self._executor = llguidance.LLExecutor(MASK_THREADS)
        matchers = [(row.state.matcher, at) for row, at in rows]
        llguidance.numpy.fill_next_token_bitmask_par(self._executor, matchers, masks)

    def prepare(self, row: MaskRow) -> bool:
        """Compute the mask of a row for the next `compute`, which then takes no time. Returns whether the mask after it
        should be prepared too. Raises GrammarLimitError.
        """
        state = row.state
        mask = np.full((1, self.words), -1, np.int32)
        began_s = time.thread_time()
        if not state.ended:
            self._fill([(row, 0)], mask)
            _allow_ends(mask[0], row)
        if row.problem is not None:
            raise row.problem
        mask_s = time.thread_time() - began_s
        self.compiler.charge(state.grammar, mask_s)
        state.fast_masks = 0 if mask_s > SLOW_MASK_S else state.fast_masks + 1
        state.prepared = mask[0]
        slow = state.fast_masks < FAST_MASKS
        self.compiler.set_slow(state.grammar, slow=slow)
        return slow


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
