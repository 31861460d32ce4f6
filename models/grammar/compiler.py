"""Compiled grammars of one model: the vocabulary as bytes, and the most recently used grammars. No torch.

Thread-safe. llguidance releases the GIL while it compiles and while it computes masks.
"""

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property

import llguidance

from ...common.machine.cpus import usable_cpus
from ...common.sampling import Grammar
from ..formats.token_bytes import TokenBytes
from ..loading.catalog import ModelSource
from ..loading.tokenizer_file import read_tokenizer
from .dialects import WITH_SCHEMAS, GrammarError, to_llguidance

log = logging.getLogger(__name__)

MAX_CACHED = 256
MAX_CACHED_MASK_S = 0.5
"""Most time for masks of all cached grammars. Masks that take long add states to the automaton of their grammar, 100 to
200 MB a second."""
PLAIN_MASK_S = 0.001
"""A mask that takes less adds few states."""
MASK_THREADS = max(1, min(16, usable_cpus() // 2))
MAX_FORCED_TEXTS = 4096
ADD_MATCHERS_S = 0.2

_ONE_OF_OPTION = "coerce_one_of"
"""In llguidance's message, an option that no client has."""
_OVERLAPPING = "oneOf of overlapping schemas is not supported: use anyOf"

LIMITS = llguidance.LLParserLimits(verbose_errors=False)

_TEXT = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(f"{_TEXT}{{1,{longest}}}" for longest in (2, 4, 6, 8, 10, 14, 20, 30)), f"{_TEXT}+"]
"""Groups of tokens that llguidance allows or excludes as a whole: white space, and text by its length. Its own groups
have text of up to 10 and 30 characters; near the end of a string of limited length it then checks nearly every token
alone.
"""


class Vocabulary:
    """The tokens of a model, by id, as llguidance needs them. `special` tokens, by their text, are not text."""

    def __init__(
        self,
        tokens: list[bytes],
        *,
        special: Mapping[str, int],
        eos_token_ids: tuple[int, ...],
        encode: Callable[[str], list[int]],
    ) -> None:
        self.size = len(tokens)
        self.special = special
        self.eos_token_ids = eos_token_ids
        self._encode = encode
        self._forced: dict[bytes, list[int]] = {}
        # read by llguidance's TokenizerWrapper
        self.tokens = tokens
        self._special = frozenset({*special.values(), *eos_token_ids})
        self.special_token_ids = sorted(self._special)
        self.bos_token_id = None
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else 0
        wrapper = llguidance.TokenizerWrapper(self)
        self.tokenizer = llguidance.LLTokenizer(
            wrapper, n_vocab=self.size, eos_token=list(eos_token_ids) or 0, slices=SLICES
        )

    @classmethod
    def read(cls, source: ModelSource) -> "Vocabulary":
        """Takes a second or more for a large vocabulary."""
        started = time.monotonic()
        backend, size = read_tokenizer(source), source.config.vocab_size
        token_bytes = TokenBytes(backend)
        vocabulary = cls(
            [token_bytes.find(token) for token in range(size)],
            special={token_bytes.find(token).decode(): token for token in token_bytes.special if token < size},
            eos_token_ids=tuple(token for token in source.config.eos_token_ids if token < size),
            encode=lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        )
        log.info("vocabulary of %d tokens read for grammars in %.1f s", size, time.monotonic() - started)
        return vocabulary

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of `text`, which llguidance requires where a grammar leaves no choice. The threads that compute
        masks take turns here (GIL), and most texts are names in a schema, so the most recent ones are kept.
        """
        tokens = self._forced.get(text)
        if tokens is None:
            tokens = self._tokenize(text)
            if len(self._forced) >= MAX_FORCED_TEXTS:
                self._forced.clear()
            self._forced[text] = tokens
        return tokens

    def _tokenize(self, text: bytes) -> list[int]:
        """The tokens from the tokenizer, or from greedy matching if the tokenizer changes the text. Some tokenizers put
        a space before a text; a tokenizer also changes a text if a part of it looks like a special token, or like a
        token that the model does not have.
        """
        tokens = self._encode(text.decode(errors="replace"))
        written = b"".join(self.tokens[token] for token in tokens if token < self.size and token not in self._special)
        return tokens if written == text else self._match_greedily(text)

    def _match_greedily(self, text: bytes) -> list[int]:
        found, at = [], 0
        while at < len(text):
            ends = range(min(len(text), at + self._longest), at, -1)
            token = next((self._ids[text[at:end]] for end in ends if text[at:end] in self._ids), None)
            if token is None:
                break  # llguidance checks what it gets
            found.append(token)
            at += len(self.tokens[token])
        return found

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {text: token for token, text in enumerate(self.tokens) if text and token not in self._special}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


class _Compiled:
    """Matchers of one grammar before its first token. All copies of a matcher share its lexer, which only one of them
    can use at a time, so several matchers take turns.
    """

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self.matchers = [matcher]
        self.slow = False
        """Its masks take long (`masks.SLOW_MASK_S`)."""
        self.mask_s = 0.0
        """The time of its masks beyond PLAIN_MASK_S each."""
        self._turns = itertools.count()

    def copy(self) -> llguidance.LLMatcher:
        return self.matchers[next(self._turns) % len(self.matchers)].deep_copy()


class GrammarCompiler:
    """Compiles grammars and caches them. The vocabulary is read once, at the latest for the first grammar."""

    def __init__(self, read: Callable[[], Vocabulary], max_cached: int = MAX_CACHED) -> None:
        self._read = read
        self._max_cached = max_cached
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._compiled: OrderedDict[Grammar, _Compiled | GrammarError] = OrderedDict()

    @classmethod
    def of(cls, source: ModelSource, max_cached: int = MAX_CACHED) -> "GrammarCompiler":
        """The compiler of a located model."""
        return cls(lambda: Vocabulary.read(source), max_cached)

    @property
    def vocabulary(self) -> Vocabulary:
        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = self._read()
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
                found = _Compiled(self._build(grammar))
            except GrammarError as error:
                found = error
            with self._lock:
                self._compiled[grammar] = found
                if len(self._compiled) > self._max_cached:
                    self._compiled.popitem(last=False)
        if isinstance(found, GrammarError):
            raise GrammarError(str(found))  # a new one: several threads may raise it

    def is_slow(self, grammar: Grammar) -> bool:
        """Whether its last masks took long. False if the grammar is not in the cache."""
        with self._lock:
            found = self._compiled.get(grammar)
        return isinstance(found, _Compiled) and found.slow

    def set_slow(self, grammar: Grammar, *, slow: bool) -> None:
        with self._lock:
            found = self._compiled.get(grammar)
        if isinstance(found, _Compiled):
            found.slow = slow

    def charge(self, grammar: Grammar, mask_s: float) -> None:
        """A mask of this grammar took so long. Forgets the least recently used grammars that may have become large."""
        with self._lock:
            found = self._compiled.get(grammar)
            if not isinstance(found, _Compiled) or mask_s <= PLAIN_MASK_S:
                return
            found.mask_s += mask_s - PLAIN_MASK_S
            grown = {
                key: one.mask_s for key, one in self._compiled.items() if isinstance(one, _Compiled) and one.mask_s
            }
            excess = sum(grown.values()) - MAX_CACHED_MASK_S
            for key, grown_s in grown.items():
                if excess > 0:
                    del self._compiled[key]
                    excess -= grown_s

    def add_matchers(self, grammar: Grammar) -> None:
        """Compile a grammar further times, so that up to MASK_THREADS of its masks can be computed at the same time.
        Stops after ADD_MATCHERS_S: other grammars wait.
        """
        with self._lock:
            found = self._compiled.get(grammar)
        ends_at = time.monotonic() + ADD_MATCHERS_S
        while isinstance(found, _Compiled) and len(found.matchers) < MASK_THREADS and time.monotonic() < ends_at:
            found.matchers.append(self._build(grammar))

    def new_matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        """The state before the first token; raises GrammarError. Compiles the grammar if it is not in the cache."""
        while True:
            self.compile(grammar)
            with self._lock:
                found = self._compiled.get(grammar)
            if isinstance(found, _Compiled):
                return found.copy()

    def _build(self, grammar: Grammar) -> llguidance.LLMatcher:
        vocabulary = self.vocabulary
        if not vocabulary.eos_token_ids:
            raise GrammarError("cannot be enforced: this model has no end token")
        matcher = None
        opened = to_llguidance(grammar, vocabulary.special, closes_objects=False)
        if grammar.kind in WITH_SCHEMAS:
            closed = to_llguidance(grammar, vocabulary.special)
            # alternatives of oneOf that overlap may no longer do so when they are closed, but the schema still excludes
            # what two of them allow
            if closed != opened and not ('"oneOf"' in opened and llguidance.LLMatcher.validate_grammar(opened)):
                matcher = self._matcher(closed)
        if matcher is None or matcher.is_error():
            matcher = self._matcher(opened)
        if matcher.is_error():
            problem = matcher.get_error().strip()
            raise GrammarError(f"cannot be enforced: {_OVERLAPPING if _ONE_OF_OPTION in problem else problem}")
        return matcher

    def _matcher(self, text: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self.vocabulary.tokenizer, text, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # builds the first states, which all copies share
        return matcher
