"""What a JSON grammar costs: decode steps and first tokens with and without one, at Qwen3-8B's geometry on one GPU.

    python -m benchmarks.grammar [--answers documents|sampled] [--layers 36] [--json results.json]

Random weights, 151,936 made-up tokens. Every row has a state of its own, and rows begin their answers at different
steps, as requests do: masks at the end of strings of limited length take a hundred times longer than others. Steps run
as a rank runs them, with overlap scheduling: start the next step, finish the previous one, then mask and sample the
next. `masks` is the time of the masks of a step on the host, which the GPU does not wait for unless it exceeds the
step.

A model with random weights hardly ever ends a string before its limit. So grammars follow random documents of the
schema (`--answers documents`): every mask is computed and applied, but the next state follows the document. With
`--answers sampled` it follows the sampled tokens, which is the worst case: nearly all rows are near a limit.

Targets: at most 5 % of throughput at batch 32, at most 5 ms of time to first token for a cached schema. Takes about a
minute.
"""

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.engine import QWEN3_8B, Engine
from pdserve.common.sampling import Grammar, SamplingParams
from pdserve.models.grammar.compiler import GrammarCompiler, Vocabulary
from pdserve.scheduler.messages.step import Draw, StepRow
from pdserve.scheduler.ranks.executor import Executor
from pdserve.scheduler.ranks.step_grammars import StepGrammars, StepMasks

EOS = 0
ANSWER_TOKENS = 96
"""A row begins a new answer after so many tokens."""
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["person", "company", "animal"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "kind", "tags", "active"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps({"type": "array", "items": ITEM, "minItems": 1000}))
"""It does not end during the measurement."""
GREEDY = SamplingParams(temperature=0.0)


def made_up_vocabulary(size: int) -> Vocabulary:
    """All bytes, and random words with the lengths of a real vocabulary and about as many quotes and commas: of the
    151,936 tokens of Qwen2.5, 0.9 % have a quote and 0.2 % end with a comma. Text is tokenized greedily.
    """
    rng = random.Random(0)
    styles = ("{}", " {}", " {}", '{}"', '"{}', "{},")
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    tokens = [b"<eos>", *(bytes([byte]) for byte in range(256))][:size]
    known = set(tokens)
    while len(tokens) < size:
        word = "".join(rng.choices(letters, range(26, 0, -1), k=rng.randrange(2, 9)))
        style = rng.choices(range(len(styles)), (60, 25, 13.9, 0.5, 0.4, 0.2))[0]
        token = styles[style].format(word.capitalize() if style == 2 else word).encode()
        if token not in known:
            known.add(token)
            tokens.append(token)
    return Vocabulary(tokens, special={"<eos>": EOS}, eos_token_ids=(EOS,), encode=lambda _text: [])


class TimedGrammars(StepGrammars):
    """Records how long the masks of each step take."""

    def __init__(self, compiler: GrammarCompiler, max_rows: int, device: torch.device) -> None:
        super().__init__(compiler, max_rows, device)
        self.seconds: list[float] = []

    def masks(self, rows: Sequence[StepRow], sampled: Sequence[int]) -> StepMasks:
        begun = time.perf_counter()
        made = super().masks(rows, sampled)
        self.seconds.append(time.perf_counter() - begun)
        assert not made.problems, made.problems
        return made


class DocumentGrammars(TimedGrammars):
    """Follows random documents of SCHEMA, one per row, instead of the sampled tokens."""

    def __init__(self, compiler: GrammarCompiler, max_rows: int, device: torch.device) -> None:
        super().__init__(compiler, max_rows, device)
        vocabulary, rng = compiler.vocabulary, random.Random(1)
        texts = (token.decode(errors="ignore").strip() for token in vocabulary.tokens)
        words = [text for text in texts if 2 < len(text) < 10 and text.isalpha()]
        self.documents = [vocabulary(make_document(rng, words).encode()) for _ in range(max_rows)]

    def masks(self, rows: Sequence[StepRow], sampled: Sequence[int]) -> StepMasks:
        followed = list(sampled)
        for row in rows:
            if row.has_grammar and row.follows is not None:
                followed[row.follows] = self.documents[row.follows][row.draws[0].output_index - 1]
        return super().masks(rows, followed)


def make_document(rng: random.Random, words: Sequence[str]) -> str:
    """A random answer of at least ANSWER_TOKENS tokens that SCHEMA allows."""
    items = [
        {
            "name": " ".join(rng.choices(words, k=rng.randint(1, 3)))[:30],
            "age": rng.randint(0, 120),
            "kind": rng.choice(("person", "company", "animal")),
            "tags": [rng.choice(words) for _ in range(rng.randint(0, 3))],
            "active": rng.random() < 0.5,
        }
        for _ in range(ANSWER_TOKENS // 8)
    ]
    return json.dumps(items)


@dataclasses.dataclass(frozen=True)
class Timing:
    median_ms: float
    mean_ms: float


def time_steps(engine: Engine, executor: Executor, batch: int, context: int, steps: int, grammar: bool) -> Timing:
    """Times between the ends of two steps of `batch` sequences. Their positions do not advance, their states do. Each
    begins a new answer every ANSWER_TOKENS steps.
    """
    pages = engine.pages([context] * batch)
    first = GREEDY if not grammar else msgspec.structs.replace(GREEDY, grammar=SCHEMA)

    def step_row(index: int, row: int) -> StepRow:
        offset = row * ANSWER_TOKENS // batch
        length = index if index < offset else (index - offset) % ANSWER_TOKENS
        sampling, fed = (first, {"token_ids": [1]}) if length == 0 else (GREEDY, {"token_ids": ()})
        return StepRow(
            start=context - 1,
            pages=pages[row],
            draws=(Draw(sampling, length, (), row if grammar else None),),
            follows=None if length == 0 else row,
            **fed,
        )

    def rows(index: int) -> list[StepRow]:
        return [step_row(index, row) for row in range(batch)]

    pending, ends = executor.start(rows(0)), []
    for index in range(1, steps):
        following = executor.start(rows(index))
        pending.finish()
        following.sample()
        pending = following
        ends.append(time.perf_counter())
    pending.finish()
    between = [(after - before) * 1e3 for before, after in itertools.pairwise(ends)][ANSWER_TOKENS:]
    return Timing(statistics.median(between), statistics.fmean(between))


def time_first_tokens(engine: Engine, executor: Executor, tokens: int, grammar: bool) -> float:
    """Median ms from token ids on the host to the first token on the host, with a cached schema."""
    sampling = GREEDY if not grammar else msgspec.structs.replace(GREEDY, grammar=SCHEMA)
    prompt, (pages,) = engine.tokens(tokens), engine.pages([tokens])
    times = []
    for _ in range(15):
        begun = time.perf_counter()
        executor.start([StepRow(prompt, 0, pages, draws=(Draw(sampling, 0),))]).finish()
        times.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(times[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--answers", choices=("documents", "sampled"), default="documents", help="what grammars follow")
    parser.add_argument(
        "--layers", type=int, default=QWEN3_8B.num_layers, help="number of layers; fewer for a quick look"
    )
    parser.add_argument("--steps", type=int, default=3 * ANSWER_TOKENS)
    options = parser.parse_args()

    engine = Engine(dataclasses.replace(QWEN3_8B, num_layers=options.layers), kv_tokens=200_000, page_size=16)
    engine.runner.capture_graphs(engine.cache, max_batch=64, max_context=2048)
    begun = time.perf_counter()
    compiler = GrammarCompiler(lambda: made_up_vocabulary(QWEN3_8B.vocab_size))
    compiler.read_vocabulary()
    read_s = time.perf_counter() - begun
    begun = time.perf_counter()
    compiler.compile(SCHEMA)
    compile_ms = (time.perf_counter() - begun) * 1e3
    compiler.add_matchers(SCHEMA)
    print(f"{torch.cuda.get_device_name()}: vocabulary read in {read_s:.1f} s, schema compiled in {compile_ms:.1f} ms")
    grammars = {"documents": DocumentGrammars, "sampled": TimedGrammars}[options.answers](
        compiler, 64, engine.cache.device
    )
    executor = Executor(engine.runner, engine.cache, (EOS,), overlap=True, grammars=grammars)
    results: dict[str, Any] = {"read_s": read_s, "decode": []}
    print("\nbatch  free ms  grammar ms  cost (mean)  masks ms (p50, max)")
    for batch in (1, 8, 32, 64):
        time_steps(engine, executor, batch, 1024, ANSWER_TOKENS + 20, True)  # warm
        free = time_steps(engine, executor, batch, 1024, options.steps, False)
        grammars.seconds.clear()
        masked = time_steps(engine, executor, batch, 1024, options.steps, True)
        cost = masked.mean_ms / free.mean_ms - 1
        masks = [seconds * 1e3 for seconds in grammars.seconds]
        row = {"batch": batch, "free_ms": free.mean_ms, "grammar_ms": masked.mean_ms, "cost": cost}
        results["decode"].append({**row, "masks_p50_ms": statistics.median(masks), "masks_max_ms": max(masks)})
        print(
            f"{batch:5}  {free.mean_ms:7.2f}  {masked.mean_ms:10.2f}  {cost:10.1%}  "
            f"{statistics.median(masks):.2f}, {max(masks):.2f}"
        )
    free_ms, grammar_ms = (time_first_tokens(engine, executor, 128, grammar) for grammar in (False, True))
    results["first_token"] = {"free_ms": free_ms, "grammar_ms": grammar_ms}
    print(f"\nfirst token of 128: {free_ms:.2f} ms, with a cached schema {grammar_ms:.2f} ms")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
