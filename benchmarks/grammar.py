"""What a JSON grammar costs: decode steps and first tokens with and without one, at Qwen3-8B's geometry on one GPU.

    python -m benchmarks.grammar [--layers 36] [--json results.json]

Random weights, 151,936 made-up tokens. Every row has a state of its own, and rows begin their answers at different
steps, as requests do: masks inside strings of limited length take a hundred times longer than others. Steps run as a
rank runs them, with overlap scheduling: start the next step, finish the previous one, then mask and sample the next.
`masks` is the time of the masks of a step on the host, which the GPU does not wait for unless it exceeds the step.
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
from pdserve.configs.sampling import Grammar, SamplingParams
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
    """All bytes, and random words with the lengths of a real vocabulary. Text is tokenized greedily."""
    rng = random.Random(0)
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    tokens = [b"<eos>", *(bytes([byte]) for byte in range(256))][:size]
    known = set(tokens)
    while len(tokens) < size:
        word = "".join(rng.choices(letters, range(26, 0, -1), k=rng.randrange(2, 9)))
        styled = rng.choice((word, " " + word, " " + word.capitalize(), word + '"', '"' + word, word + ","))
        if styled.encode() not in known:
            known.add(styled.encode())
            tokens.append(styled.encode())
    return Vocabulary(tokens, special={"<eos>": EOS}, eos_token_ids=(EOS,), encode=lambda _text: [])


class TimedGrammars(StepGrammars):
    """Records how long the masks of each step take."""

    def __init__(self, compiler: GrammarCompiler, max_rows: int) -> None:
        super().__init__(compiler, max_rows)
        self.seconds: list[float] = []

    def masks(self, rows: Sequence[StepRow], sampled: Sequence[int]) -> StepMasks:
        begun = time.perf_counter()
        made = super().masks(rows, sampled)
        self.seconds.append(time.perf_counter() - begun)
        assert not made.problems, made.problems
        return made


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
    """Median ms from token ids on the host to the first token on the host, the schema being cached."""
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
    parser.add_argument("--layers", type=int, default=QWEN3_8B.num_layers, help="fewer for a quick look")
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
    print(f"{torch.cuda.get_device_name()}: vocabulary read in {read_s:.1f} s, schema compiled in {compile_ms:.1f} ms")
    grammars = TimedGrammars(compiler, 64)
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
