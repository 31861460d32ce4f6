"""Steps with grammars on a tiny model of one byte per token: grammar states across steps, and delayed sampling."""

import json
import queue
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from pdserve.common.sampling import Grammar, SamplingParams
from pdserve.models.grammar import masks as masks_module
from pdserve.models.grammar.compiler import GrammarCompiler
from pdserve.models.loading.catalog import ModelSource, locate_model
from pdserve.models.runner import ModelRunner
from pdserve.scheduler.messages.ranks import MaskReady, PrepareMask
from pdserve.scheduler.messages.step import Draw, StepResult, StepRow
from pdserve.scheduler.ranks.executor import Executor, PendingStep
from pdserve.scheduler.ranks.mask_threads import MaskThreads
from pdserve.scheduler.ranks.step_grammars import StepGrammars
from tests.checkpoints import EOS_ID, make_checkpoint

PROMPT = tuple(random.Random(1).choices(range(256), k=20))
WORDS = SamplingParams(temperature=1.0, seed=3, grammar=Grammar("regex", "[a-d]{6}(end|END)"))
FREE = SamplingParams(temperature=1.0, seed=4)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return locate_model(str(make_checkpoint(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def executor(source: ModelSource, request: pytest.FixtureRequest) -> Executor:
    device = torch.device(request.param)
    runner = ModelRunner.load(source, device=device, dtype=torch.float32)
    grammars = StepGrammars(GrammarCompiler.of(source), max_rows=4, device=device)
    return Executor(runner, runner.make_cache(32, 8), [EOS_ID], overlap=True, grammars=grammars)


def text_of(tokens: Sequence[int], source: ModelSource) -> str:
    vocabulary = GrammarCompiler.of(source).vocabulary
    return b"".join(vocabulary.tokens[token] for token in tokens).decode()


class Sequences:
    """Two sequences, of which the first has a grammar, with the rows that the leader of a decode server sends."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.samplings = (WORDS, FREE)
        self.pages = ([0, 1, 2, 3, 4], [5, 6, 7, 8, 9])

    def prompts(self, output: Sequence[int] = ()) -> list[StepRow]:
        ids = (*PROMPT, *output)
        return [
            StepRow(ids, 0, pages, draws=(Draw(sampling, len(output), output),))
            for sampling, pages in zip(self.samplings, self.pages, strict=True)
        ]

    def rows(self, outputs: Sequence[Sequence[int]], *, joined: bool, follows: bool = False) -> list[StepRow]:
        """One more token each; with `follows`, the last token of each output is not known to the leader."""
        made = []
        for index, (sampling, output) in enumerate(zip(self.samplings, outputs, strict=True)):
            known, given = tuple(output), sampling
            if sampling.grammar is not None and not joined:
                given = msgspec.structs.replace(sampling, grammar=None)
            state = None if sampling.grammar is None else 77
            draw = Draw(given, len(known), known if given.grammar is not None else (), state)
            fed: dict[str, Any] = {"token_ids": (), "follows": index} if follows else {"token_ids": known[-1:]}
            made.append(StepRow(start=len(PROMPT) + len(known) - 1, pages=self.pages[index], draws=(draw,), **fed))
        return made


def run(executor: Executor, rows: Sequence[StepRow]) -> list[StepResult]:
    results = executor.start(rows).finish()
    assert results is not None
    return results


def known_outputs(sequences: Sequences, steps: int) -> list[list[int]]:
    """The outputs without overlap: each step starts after the previous one has ended."""
    outputs: list[list[int]] = [[], []]
    rows = sequences.prompts()
    for step in range(steps):
        for output, result in zip(outputs, run(sequences.executor, rows), strict=True):
            assert result.problem is None
            output.append(result.drawn[0].token)
        rows = sequences.rows(outputs, joined=step == 0)
    return outputs


def test_output_follows_the_grammar_over_many_steps(executor: Executor, source: ModelSource) -> None:
    words, _ = known_outputs(Sequences(executor), 12)
    text = text_of(words[:9], source)
    assert set(text[:6]) <= set("abcd")
    assert text[6:] in ("end", "END")
    assert words[9] == EOS_ID, "nothing else is left"


@pytest.mark.parametrize("least", [0, 8])
def test_output_does_not_end_before_min_new_tokens_where_its_grammar_may_end(executor: Executor, least: int) -> None:
    ended = []
    for seed in range(4):
        sequences = Sequences(executor)
        letters = SamplingParams(temperature=1.0, seed=seed, grammar=Grammar("regex", "[a-d]*"), min_new_tokens=least)
        sequences.samplings = (letters, FREE)
        ended.append(EOS_ID in known_outputs(sequences, 8)[0])
    assert any(ended) == (least == 0)


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "after-the-previous-step"])
def test_overlapping_steps_sample_the_same_tokens(executor: Executor, later: bool) -> None:
    sequences = Sequences(executor)
    expected = known_outputs(sequences, 10)
    executor.samples_later = later
    outputs = [[result.drawn[0].token] for result in run(executor, sequences.prompts())]
    pending = executor.start(sequences.rows(outputs, joined=True))
    for step in range(2, 10):
        unknown = [[*output, *[0] * (step - len(output))] for output in outputs]
        following = executor.start(sequences.rows(unknown, joined=False, follows=True))
        assert (following._sample is not None) == later
        take(pending, outputs)
        following.sample()
        pending = following
    take(pending, outputs)
    assert outputs == expected


def test_masks_that_are_computed_beside_the_steps_lead_to_the_same_tokens(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequences = Sequences(executor)
    expected = known_outputs(sequences, 12)
    monkeypatch.setattr(masks_module, "SLOW_MASK_S", -1.0)  # every mask is slow
    grammars = executor.grammars
    assert grammars is not None
    outputs: list[list[int]] = [[], []]
    rows = sequences.prompts()
    for step in range(12):
        results = run(executor, rows)
        assert [result.slow_mask for result in results] == [step == 0, False], "a prepared mask takes no time"
        for output, result in zip(outputs, results, strict=True):
            output.append(result.drawn[0].token)
        rows = sequences.rows(outputs, joined=step == 0)
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(grammars.prepare, outputs[0][-1], rows[0].draws[0]).result()
        rows = sequences.rows(outputs, joined=False)
    assert outputs == expected
    assert grammars.compiler.is_slow(WORDS.grammar or Grammar("regex", "")), "other requests begin with prepared masks"


def test_mask_threads_report_each_mask_and_why_there_is_none(executor: Executor) -> None:
    grammars = executor.grammars
    assert grammars is not None
    reports: queue.SimpleQueue[MaskReady] = queue.SimpleQueue()
    threads = MaskThreads(grammars, 3, reports.put)
    (row, _) = Sequences(executor).rows([grammars.compiler.vocabulary(b"ab"), [1]], joined=True)
    threads.prepare(PrepareMask(0, row.draws[0].output_ids[-1], row.draws[0]))
    assert reports.get(timeout=60).problem is None
    wrong = msgspec.structs.replace(row.draws[0], output_ids=(1, 2), grammar_state=78)
    threads.prepare(PrepareMask(1, 2, wrong))
    failed = reports.get(timeout=60)
    threads.close()
    assert failed == MaskReady(3, 1, problem="output token 0 (1) does not match the grammar")


def take(step: PendingStep, outputs: list[list[int]]) -> None:
    results = step.finish()
    assert results is not None
    for output, result in zip(outputs, results, strict=True):
        output.append(result.drawn[0].token)


def test_next_step_completes_a_step_that_was_not_sampled(executor: Executor) -> None:
    sequences = Sequences(executor)
    expected = known_outputs(sequences, 4)
    executor.samples_later = True
    outputs = [[result.drawn[0].token] for result in run(executor, sequences.prompts())]
    steps = [executor.start(sequences.rows(outputs, joined=True))]
    for length in (2, 3):
        unknown = [[*output, *[0] * (length - 1)] for output in outputs]
        steps.append(executor.start(sequences.rows(unknown, joined=False, follows=True)))
    assert [step._sample is None for step in steps] == [True, True, False]
    for step in steps:
        take(step, outputs)
    assert outputs == expected


def test_state_is_rebuilt_from_the_output(executor: Executor) -> None:
    """As after a retraction: the KV is computed again with the output, and the request joins the batch again."""
    sequences = Sequences(executor)
    expected, _ = known_outputs(sequences, 9)
    (again, _) = run(executor, [sequences.prompts(expected[:4])[0], sequences.prompts()[1]])
    assert again.drawn[0].token == expected[4]
    row = sequences.rows([expected[:5], [1]], joined=True)[0]
    assert run(executor, [row])[0].drawn[0].token == expected[5]


def test_row_that_cannot_follow_its_grammar_does_not_affect_others(executor: Executor) -> None:
    sequences = Sequences(executor)
    words, free = run(executor, sequences.prompts((1, 2, 3)))
    assert words.problem is not None
    assert "output token 0 (1) does not match the grammar" in words.problem
    assert not words.too_complex
    assert free.problem is None


def test_grammar_that_becomes_too_expensive_ends_only_its_request(executor: Executor) -> None:
    options = [
        {"type": "object", "additionalProperties": True, "properties": {f"a{at}": {"type": "integer"}}}
        for at in range(200)
    ]
    grammar = Grammar("json_schema", json.dumps({"anyOf": options}))
    sequences = Sequences(executor)
    sequences.samplings = (SamplingParams(seed=3, grammar=grammar), FREE)
    assert executor.grammars is not None
    costly, free = run(executor, sequences.prompts(executor.grammars.compiler.vocabulary(b"{")))
    assert costly.problem is not None
    assert "max is 2000" in costly.problem
    assert costly.too_complex
    assert free.problem is None


def test_steps_without_grammars_need_no_compiler(executor: Executor) -> None:
    executor.grammars = None
    assert run(executor, [Sequences(executor).prompts()[1]])[0].problem is None
