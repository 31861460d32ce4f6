"""The executor on a tiny model: results equal those of transformers, and do not depend on chunks and batches."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch

from pdserve.common.sampling import SamplingParams, TokenLogprob
from pdserve.memory.pages import pages_for
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from pdserve.scheduler.messages.step import Draw, StepResult, StepRow
from pdserve.scheduler.ranks import executor as executor_module
from pdserve.scheduler.ranks.executor import Executor
from tests.checkpoints import EOS_ID, VOCAB_SIZE, load_reference, make_checkpoint, reference_greedy, reference_logits

PAGE_SIZE = 8
NUM_PAGES = 64
GREEDY = SamplingParams(temperature=0.0)
PROMPT = tuple(random.Random(1).choices(range(256), k=50))


@dataclasses.dataclass
class Tiny:
    """A model in an executor, and the same model in transformers."""

    executor: Executor
    reference: Any
    free: list[int]

    def row(self, prompt: Sequence[int], start: int = 0, end: int | None = None, **fields: Any) -> StepRow:
        """A chunk of `prompt` in new pages; with `pages` in `fields`, it continues a sequence."""
        if "pages" not in fields:
            fields["pages"] = [self.free.pop() for _ in range(pages_for(len(prompt) + 20, PAGE_SIZE))]
        return StepRow(prompt[start:end], start, prompt_ids=prompt, **fields)

    def run(self, *rows: StepRow) -> list[StepResult]:
        results = self.executor.start(rows).finish()
        assert results is not None
        return results

    def logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """The log-softmax of transformers after every token."""
        return reference_logits(self.reference, list(prompt)).log_softmax(dim=-1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelRunner, Any]:
    directory = make_checkpoint(tmp_path_factory.mktemp("tiny-llama"), "llama")
    runner = ModelRunner.load(locate_model(str(directory)), device=torch.device("cpu"), dtype=torch.float32)
    return runner, load_reference(directory)


@pytest.fixture
def tiny(model: tuple[ModelRunner, Any]) -> Tiny:
    runner, reference = model
    cache = runner.make_cache(NUM_PAGES, PAGE_SIZE)
    cache.pools[0].data.fill_(50.0)  # a read of unwritten memory changes the result
    return Tiny(Executor(runner, cache, [EOS_ID], overlap=True), reference, list(range(NUM_PAGES)))


def check_prompt_logprobs(
    found: Sequence[TokenLogprob], prompt: Sequence[int], first: int, top: int, expected: torch.Tensor
) -> None:
    """One entry per token from `first` on; `expected[j]` is the log-softmax of transformers after token j."""
    assert [entry.token for entry in found] == list(prompt[first:])
    for position, entry in enumerate(found, start=first):
        if position == 0:
            assert entry == TokenLogprob(prompt[0], None)
            continue
        assert entry.logprob == pytest.approx(float(expected[position - 1, entry.token]), abs=1e-4)
        best = expected[position - 1].topk(top)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("top", [0, 5])
@pytest.mark.parametrize("first", [0, 1, 17, 49, 50])
@pytest.mark.parametrize("chunks", [[50], [16, 16, 18], [1, 1, 15, 32, 1], [17, 33]])
def test_prompt_logprobs_equal_transformers_for_all_chunk_sizes(
    tiny: Tiny, chunks: list[int], first: int, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "_SCORED_ELEMENTS", 7 * VOCAB_SIZE)  # seven tokens at a time
    found: list[TokenLogprob] = []
    pages, start = list(range(20, 30)), 0
    for length in chunks:
        row = tiny.row(PROMPT, start, start + length, pages=pages, top_logprobs=top or None, prompt_logprobs_from=first)
        (result,) = tiny.run(row)
        assert result.drawn == ()
        found += result.prompt_logprobs
        start += length
    check_prompt_logprobs(found, PROMPT, first, top, tiny.logprobs(PROMPT))


def test_chunk_after_a_cached_prefix_scores_from_its_second_token(tiny: Tiny) -> None:
    row = tiny.row(PROMPT, 0, 30)
    tiny.run(row)
    (result,) = tiny.run(tiny.row(PROMPT, 30, pages=row.pages, prompt_logprobs_from=31, draws=(Draw(GREEDY, 0),)))
    expected = tiny.logprobs(PROMPT)
    check_prompt_logprobs(result.prompt_logprobs, PROMPT, 31, 0, expected)
    assert result.drawn == (TokenLogprob(int(expected[-1].argmax()), None),)


def test_sampled_tokens_have_the_logprobs_of_the_raw_logits(tiny: Tiny) -> None:
    """Temperature, filters and bias do not change reported log-probabilities."""
    odd = SamplingParams(temperature=0.3, top_k=2, logit_bias=((7, 100.0),), seed=3)
    draws = (Draw(GREEDY, 0), Draw(odd, 0))
    (result,) = tiny.run(tiny.row(PROMPT, draws=draws, top_logprobs=4))
    expected = tiny.logprobs(PROMPT)[-1]
    best = expected.topk(4)
    assert [entry.token for entry in result.drawn] == [int(expected.argmax()), 7]
    for entry in result.drawn:
        assert entry.logprob == pytest.approx(float(expected[entry.token]), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)


def test_log_softmax_is_computed_only_when_requested(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted(*_: object) -> None:
        raise AssertionError("no request has log-probabilities")

    monkeypatch.setattr(executor_module, "score", unwanted)
    (result,) = tiny.run(tiny.row(PROMPT, draws=(Draw(GREEDY, 0),)))
    assert [entry.logprob for entry in result.drawn] == [None]
    assert [entry.top for entry in result.drawn] == [()]
    with pytest.raises(AssertionError, match="no request has"):
        tiny.run(tiny.row(PROMPT, draws=(Draw(GREEDY, 0),), top_logprobs=0))


def generate(tiny: Tiny, prompt: Sequence[int], sampling: SamplingParams, count: int) -> list[int]:
    """Generate with one row per step and the prompt in one chunk."""
    row = tiny.row(prompt, draws=(Draw(sampling, 0),))
    output = [tiny.run(row)[0].drawn[0].token]
    while len(output) < count:
        step = StepRow(
            output[-1:],
            len(prompt) + len(output) - 1,
            row.pages,
            draws=(Draw(sampling, len(output), output),),
            prompt_ids=prompt,
        )
        output.append(tiny.run(step)[0].drawn[0].token)
    return output


def test_greedy_generation_equals_transformers(tiny: Tiny) -> None:
    assert generate(tiny, PROMPT, GREEDY, 16) == reference_greedy(tiny.reference, list(PROMPT), 16)


def test_generation_with_repetition_penalty_equals_transformers(tiny: Tiny) -> None:
    prompt = torch.tensor([PROMPT])
    out = tiny.reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=16,
        min_new_tokens=16,
        do_sample=False,
        repetition_penalty=1.5,
        eos_token_id=None,
        pad_token_id=0,
    )
    penalised = generate(tiny, PROMPT, SamplingParams(temperature=0.0, repetition_penalty=1.5), 16)
    assert penalised == out[0, len(PROMPT) :].tolist()
    assert penalised != generate(tiny, PROMPT, GREEDY, 16)


def test_mixed_step_gives_each_row_the_result_of_a_single_step(tiny: Tiny) -> None:
    """Decode rows, an inner chunk, prompts that end with several samples; with and without log-probabilities."""
    numbers = random.Random(5)
    samplings = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=1),
        SamplingParams(temperature=1.2, top_p=0.8, seed=2),
        SamplingParams(temperature=0.9, top_k=20, min_p=0.1, frequency_penalty=0.5, seed=3),
    ]
    rows = []
    for index in range(6):
        prompt = tuple(numbers.choices(range(256), k=numbers.randrange(5, 40)))
        start = numbers.choice([0, 4, len(prompt) - 1])
        row = tiny.row(
            prompt,
            start,
            draws=tuple(Draw(sampling, 2, [9, 9, 30]) for sampling in samplings[index % 3 :: 2]),
            top_logprobs=numbers.choice([None, 0, 3]),
            prompt_logprobs_from=numbers.choice([None, 0, 6]),
        )
        if start:
            tiny.run(tiny.row(prompt, 0, start, pages=row.pages))
        rows.append(row)
    rows.insert(3, tiny.row(PROMPT, 0, 20, prompt_logprobs_from=0, top_logprobs=1))
    rows.insert(1, tiny.row(PROMPT, 0, 20))
    together = tiny.run(*rows)
    assert [len(result.drawn) for result in together] == [len(row.draws) for row in rows]
    for row, result in zip(rows, together, strict=True):
        (alone,) = tiny.run(row)
        for found, expected in zip(
            (*result.drawn, *result.prompt_logprobs), (*alone.drawn, *alone.prompt_logprobs), strict=True
        ):
            assert found.token == expected.token
            assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
            assert [token for token, _ in found.top] == [token for token, _ in expected.top]


def test_samples_of_one_prompt_equal_separate_requests(tiny: Tiny) -> None:
    draws = tuple(Draw(SamplingParams(temperature=1.5, seed=seed), 0) for seed in range(20))
    (shared,) = tiny.run(tiny.row(PROMPT, draws=draws))
    pages = list(range(30, 40))
    separate = [tiny.run(tiny.row(PROMPT, pages=pages, draws=(draw,)))[0].drawn[0] for draw in draws]
    assert list(shared.drawn) == separate
    assert len({entry.token for entry in separate}) > 5


def test_top_p_beyond_the_candidates_samples_from_the_whole_vocabulary(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = tuple(Draw(SamplingParams(temperature=2.0, top_p=0.95, seed=seed), 0) for seed in range(50))
    row = tiny.row(PROMPT, draws=draws, top_logprobs=1, prompt_logprobs_from=0)
    (expected,) = tiny.run(row)
    monkeypatch.setattr("pdserve.kernels.sampling.keep_top_p.SHORT_LIST", 5)
    (found,) = tiny.run(row)
    assert found == expected
    assert len({entry.token for entry in found.drawn}) > 5


def test_eos_and_stop_tokens_are_not_sampled_before_min_new_tokens(tiny: Tiny) -> None:
    """The bias forces the end as soon as it is allowed."""
    params = SamplingParams(
        temperature=0.0,
        min_new_tokens=3,
        stop_token_ids=(77,),
        logit_bias=((EOS_ID, 100.0), (77, 90.0)),
    )
    output = generate(tiny, PROMPT, params, 5)
    assert not {EOS_ID, 77} & set(output[:3])
    assert output[3:] == [EOS_ID, EOS_ID]


def test_step_without_draws_or_scores_has_empty_results(tiny: Tiny) -> None:
    assert tiny.run(tiny.row(PROMPT, 0, 20), tiny.row(PROMPT, 0, 7)) == [StepResult((), ())] * 2


@pytest.mark.gpu
def test_step_on_cuda_equals_step_on_the_cpu(tiny: Tiny, tmp_path: Any) -> None:
    directory = make_checkpoint(tmp_path, "llama")
    runner = ModelRunner.load(locate_model(str(directory)), device=torch.device("cuda", 0), dtype=torch.float32)
    on_cuda = Tiny(Executor(runner, runner.make_cache(NUM_PAGES, PAGE_SIZE), [EOS_ID]), None, list(range(NUM_PAGES)))
    rows = [
        tiny.row(PROMPT, draws=(Draw(GREEDY, 0), Draw(SamplingParams(top_p=0.9, seed=2), 0)), prompt_logprobs_from=0),
        tiny.row(PROMPT[:30], draws=(Draw(SamplingParams(top_k=9, seed=3), 0),), top_logprobs=3),
    ]
    for found, expected in zip(on_cuda.run(*rows), tiny.run(*rows), strict=True):
        assert [entry.token for entry in found.drawn] == [entry.token for entry in expected.drawn]
        for one, other in zip(found.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert one.token == other.token
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_step_can_follow_a_step_whose_tokens_are_unknown(tiny: Tiny) -> None:
    """Two rows follow in another order, and a third joins with a known token."""
    sampled = SamplingParams(temperature=1.0, seed=5)
    prompts = [PROMPT[:20], PROMPT[5:30], PROMPT[10:27]]
    first = [tiny.row(prompt, draws=(Draw(sampled, 0),)) for prompt in prompts]
    known = [result.drawn[0].token for result in tiny.run(*first)]

    def after(index: int, **fields: Any) -> StepRow:
        return StepRow(start=len(prompts[index]), pages=first[index].pages, draws=(Draw(sampled, 1),), **fields)

    expected = tiny.run(*(after(index, token_ids=(known[index],)) for index in (2, 1, 0)))
    tiny.run(*first[:2])
    rows = after(2, token_ids=(known[2],)), after(1, token_ids=(), follows=1), after(0, token_ids=(), follows=0)
    assert tiny.run(*rows) == expected


def test_step_that_follows_a_failed_step_fails(tiny: Tiny) -> None:
    row = tiny.row(PROMPT[:20], draws=(Draw(GREEDY, 0),))
    tiny.run(row)
    with pytest.raises(ValueError, match="do not fit"):
        tiny.run(msgspec.structs.replace(row, pages=()))
    with pytest.raises(RuntimeError, match="has failed"):
        tiny.run(StepRow((), 20, row.pages, draws=(Draw(GREEDY, 1),), follows=0))


@pytest.mark.parametrize("scored", [{}, {"prompt_logprobs_from": 3}], ids=["plain", "logprobs"])
def test_step_with_chunks_can_follow_a_step_that_has_sampled_several_tokens_of_a_prompt(
    tiny: Tiny, scored: dict[str, int]
) -> None:
    """As on a decode server that computes prompts: decode rows first, then a chunk."""
    sampled = SamplingParams(temperature=1.0, seed=5)
    running, prompt, chunk = PROMPT[:20], PROMPT[5:30], PROMPT[10:27]
    first = [
        tiny.row(running, draws=(Draw(sampled, 0),)),
        tiny.row(prompt, draws=tuple(Draw(SamplingParams(temperature=1.0, seed=seed), 0) for seed in (5, 6))),
    ]
    token = tiny.run(*first)[0].drawn[0].token
    following = StepRow((token,), len(running), first[0].pages, draws=(Draw(sampled, 1),))
    last = tiny.row(chunk, draws=(Draw(sampled, 0), Draw(GREEDY, 0)), **scored)
    expected = tiny.run(following, last)
    tiny.run(*first)
    assert tiny.run(msgspec.structs.replace(following, token_ids=(), follows=0), last) == expected
    assert len(expected[1].prompt_logprobs) == (len(chunk) - 3 if scored else 0)
