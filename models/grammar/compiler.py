"""Compiled grammars of one model: the vocabulary as bytes, and the most recently used grammars. No torch.

Thread-safe. llguidance releases the GIL while it compiles and while it computes masks.
"""

import logging
import threading
import time
from collections import OrderedDict

import llguidance

from ...configs.sampling import Grammar
from ..formats.token_bytes import TokenBytes
from ..loading.catalog import ModelSource
from ..loading.tokenizer_file import read_tokenizer
from .dialects import GrammarError, to_llguidance

log = logging.getLogger(__name__)

MAX_CACHED = 256

LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class Vocabulary:
    """The tokens of a model as llguidance needs them. Reading it takes a second or more for a large vocabulary."""

    def __init__(self, source: ModelSource) -> None:
        started = time.monotonic()
        self._backend = read_tokenizer(source)
        token_bytes = TokenBytes(self._backend)
        self.size = source.config.vocab_size
        self.eos_token_ids = tuple(token for token in source.config.eos_token_ids if token < self.size)
        self.special = {token_bytes.find(token).decode(): token for token in token_bytes.special if token < self.size}
        # read by llguidance's TokenizerWrapper
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else 0
        self.bos_token_id = None
        self.tokens = [token_bytes.find(token) for token in range(self.size)]
        self.special_token_ids = sorted({*self.special.values(), *self.eos_token_ids})
        wrapper = llguidance.TokenizerWrapper(self)
        self.tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self.size, eos_token=list(self.eos_token_ids) or 0)
        log.info("vocabulary of %d tokens read for grammars in %.1f s", self.size, time.monotonic() - started)

    def __call__(self, text: bytes) -> list[int]:
        return list(self._backend.encode(text.decode(errors="replace"), add_special_tokens=False).ids)


class GrammarCompiler:
    """Compiles grammars and caches them. The vocabulary is read once, at the latest for the first grammar."""

    def __init__(self, source: ModelSource, max_cached: int = MAX_CACHED) -> None:
        self._source = source
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, llguidance.LLMatcher | GrammarError] = OrderedDict()

    @property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._source)
            return self._vocabulary

    def read_vocabulary(self) -> None:
        """Read it now. Without it the server works, but every grammar is refused with the reason."""
        try:
            _ = self.vocabulary
        except Exception:
            log.exception("the tokenizer cannot be used for grammars")

    def is_cached(self, grammar: Grammar) -> bool:
        with self._lock:
            return grammar in self._compiled

    def compile(self, grammar: Grammar) -> None:
        """Compile a grammar, or find it in the cache; raises GrammarError. Errors are cached too."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
        if found is None:
            try:
                found = self._build(grammar)
            except GrammarError as error:
                found = error
            with self._lock:
                self._compiled[grammar] = found
                if len(self._compiled) > self._max_cached:
                    self._compiled.popitem(last=False)
        if isinstance(found, GrammarError):
            raise found

    def new_matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """The state before the first token; raises GrammarError. Compiles the grammar if it is not in the cache."""
        while True:
            self.compile(grammar)
            with self._lock:
                found = self._compiled.get(grammar)
            if isinstance(found, llguidance.LLMatcher):
                return found.deep_copy()

    def _build(self, grammar: Grammar) -> llguidance.LLMatcher:
        vocabulary = self.vocabulary
        if not vocabulary.eos_token_ids:
            raise GrammarError("cannot be enforced: this model has no end token")
        matcher = llguidance.LLMatcher(
            vocabulary.tokenizer, to_llguidance(grammar, vocabulary.special), log_level=0, limits=LIMITS
        )
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the first states, which all copies share
        if matcher.is_error():
            raise GrammarError(f"cannot be enforced: {matcher.get_error().strip()}")
        return matcher
