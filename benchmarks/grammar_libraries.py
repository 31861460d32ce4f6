"""Compares llguidance and xgrammar: time to compile a schema, time of masks at batch 32, and coverage of JSON Schema.

    python -m benchmarks.grammar_libraries llguidance [--suite tests/draft2020-12] [--vocabulary N]

pdserve uses llguidance and does not depend on xgrammar: install it (with transformers and apache-tvm-ffi) to compare.
The vocabulary is that of the embedded model, extended by concatenated tokens for a larger N. Each
instance of the suite (the JSON Schema Test Suite) is tokenized and given to the grammar: a valid instance should be
accepted, and accepting an invalid one is an error.
"""

import argparse
import collections
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pdserve.common.sampling import Grammar
from pdserve.models.grammar.compiler import GrammarCompiler, Vocabulary
from pdserve.models.grammar.masks import GrammarMasks, GrammarState, GrammarStateError, MaskRow
from pdserve.models.loading.catalog import locate_model
from pdserve.server.text.tokenizer import Tokenizer, load_tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "email", "tags"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "person": PERSON,
    "enum of 500": {"enum": [f"value-{index}-{index * index}" for index in range(500)]},
    "30 optional": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(30)}},
}
ANSWER = (
    '{"name": "Alice Cooper of Springfield", "age": 42, "email": "alice.cooper@example.org", '
    '"tags": ["friend", "work colleague", "something longer than usual, with a comma"]}'
)


class Library(Protocol):
    """A grammar library. States are its own objects."""

    def compile(self, schema: object) -> Any: ...
    def state(self, compiled: Any) -> Any: ...
    def consume(self, state: Any, token: int) -> bool: ...
    def may_end(self, state: Any) -> bool: ...
    def masks(self, states: Sequence[Any]) -> None: ...


class Llguidance:
    """As pdserve uses it."""

    def __init__(self, tokens: list[bytes], tokenizer: Tokenizer, eos: int) -> None:
        vocabulary = Vocabulary(
            tokens, special={}, eos_token_ids=(eos,), encode=lambda text: tokenizer.encode(text, False)
        )
        self._compiler = GrammarCompiler(lambda: vocabulary, max_cached=1)
        self._masks = GrammarMasks(self._compiler, 64)

    def compile(self, schema: object) -> Grammar:
        grammar = Grammar("json_schema", json.dumps(schema))
        self._compiler.compile(grammar)
        return grammar

    def state(self, compiled: Grammar) -> GrammarState:
        return self._masks.begin(compiled, (), (), None)

    def consume(self, state: GrammarState, token: int) -> bool:
        try:
            state.consume((token,))
        except GrammarStateError:
            return False
        return True

    def may_end(self, state: GrammarState) -> bool:
        return bool(state.matcher.is_accepting())

    def masks(self, states: Sequence[GrammarState]) -> None:
        found = np.empty((len(states), self._masks.words), dtype=np.int32)
        self._masks.compute([MaskRow(state, may_end=True) for state in states], found)


class Xgrammar:
    def __init__(self, tokens: list[bytes], _tokenizer: Tokenizer, eos: int) -> None:
        import xgrammar

        self._library, self._eos = xgrammar, eos
        info = xgrammar.TokenizerInfo(
            tokens, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(tokens), stop_token_ids=[self._eos]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=2, cache_enabled=False)
        self._bits = xgrammar.allocate_token_bitmask(64, len(tokens))
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=2)

    def compile(self, schema: object) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), strict_mode=False)

    def state(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled)

    def consume(self, state: Any, token: int) -> bool:
        return bool(state.accept_token(token))

    def may_end(self, state: Any) -> bool:
        return self.consume(state, self._eos)

    def masks(self, states: Sequence[Any]) -> None:
        self._batch.batch_fill_next_token_bitmask(list(states), self._bits, list(range(len(states))))


def time_schemas(library: Library) -> None:
    for name, schema in SCHEMAS.items():
        times: list[float] = []
        for _ in range(3):
            begun = time.perf_counter()
            library.masks([library.state(library.compile({**schema, "title": str(len(times))}))])
            times.append((time.perf_counter() - begun) * 1e3)
        print(f"compile and first mask, {name}: {min(times):.1f} ms")


def time_masks(library: Library, tokenizer: Tokenizer) -> None:
    states = [library.state(library.compile(PERSON))]
    states += [library.state(library.compile(PERSON)) for _ in range(31)]
    times = []
    for token in tokenizer.encode(ANSWER, add_special_tokens=False):
        begun = time.perf_counter()
        library.masks(states)
        times.append((time.perf_counter() - begun) * 1e3)
        for state in states:
            assert library.consume(state, token)
    print(
        f"masks of 32 rows: median {statistics.median(times):.2f}, mean {statistics.fmean(times):.2f}, "
        f"max {max(times):.2f} ms"
    )


def run_suite(library: Library, tokenizer: Tokenizer, directory: Path) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for file in sorted(directory.glob("*.json")):
        for group in json.loads(file.read_text("utf-8")):
            counts["schemas"] += 1
            try:
                compiled = library.compile(group["schema"])
            except Exception:  # each library has its own
                counts["schemas refused"] += 1
                continue
            for test in group["tests"]:
                state, kind = library.state(compiled), "valid" if test["valid"] else "invalid"
                text = json.dumps(test["data"], ensure_ascii=False)
                tokens = tokenizer.encode(text, add_special_tokens=False)
                counts[kind] += 1
                if all(library.consume(state, token) for token in tokens) and library.may_end(state):
                    counts[f"{kind} accepted"] += 1
    print(", ".join(f"{name}: {count}" for name, count in sorted(counts.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=("llguidance", "xgrammar"))
    parser.add_argument("--vocabulary", type=int, default=0, help="extend the vocabulary to this many tokens")
    parser.add_argument("--suite", type=Path, help="folder tests/draft2020-12 of the JSON-Schema-Test-Suite")
    options = parser.parse_args()
    source = locate_model("smollm2")
    tokenizer, (eos, *_) = load_tokenizer(source), source.config.eos_token_ids
    tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    rng, words = random.Random(0), tokens[100:]
    while len(tokens) < options.vocabulary:
        tokens.append(rng.choice(words) + rng.choice(words))
    begun = time.perf_counter()
    library: Library = (Llguidance if options.library == "llguidance" else Xgrammar)(tokens, tokenizer, eos)
    print(f"{options.library}, {len(tokens)} tokens: ready in {time.perf_counter() - begun:.2f} s")
    time_schemas(library)
    time_masks(library, tokenizer)
    if options.suite is not None:
        run_suite(library, tokenizer, options.suite)


if __name__ == "__main__":
    main()
