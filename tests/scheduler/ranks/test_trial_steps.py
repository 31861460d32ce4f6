"""The trial steps that a server runs before it sizes its KV pool: they use a single page, and no later step needs more
memory.
"""

import pytest
import torch

from pdserve.configs.schema import AnyServerConfig, DecodeConfig, PrefillConfig
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from pdserve.scheduler.ranks.builder import trial_steps
from pdserve.scheduler.ranks.executor import Executor
from tests.checkpoints import EOS_ID, make_checkpoint, make_dsa_checkpoint

LONGEST = 100


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v32"])
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Executor:
    make = make_dsa_checkpoint if request.param == "deepseek_v32" else make_checkpoint
    directory = make(tmp_path_factory.mktemp("model"), request.param)
    runner = ModelRunner.load(locate_model(str(directory)), device=torch.device("cpu"), dtype=torch.float32)
    return Executor(runner, runner.make_cache(1, 4), [EOS_ID])


@pytest.mark.parametrize(
    ("config", "limit"),
    [(DecodeConfig(page_size=4), 5), (PrefillConfig(page_size=4), 24)],
    ids=["decode", "prefill"],
)
def test_every_trial_row_samples_a_token(executor: Executor, config: AnyServerConfig, limit: int) -> None:
    for rows in trial_steps(config, limit, LONGEST):
        results = executor.start(rows).finish()
        assert results is not None
        assert [len(result.drawn) for result in results] == [1] * len(rows)


def test_decode_tries_its_largest_batch_and_one_token() -> None:
    step, one = trial_steps(DecodeConfig(page_size=4, local_prefill="never"), 7, LONGEST)
    assert [(row.start, row.length) for row in step] == [(0, 1)] * 7
    assert [(row.start, row.length) for row in one] == [(0, 1)]


def test_decode_tries_the_last_chunk_of_the_longest_prompt_with_and_without_the_batch() -> None:
    _, _, mixed, alone = trial_steps(DecodeConfig(page_size=4, max_step_tokens=24), 7, LONGEST)
    assert [(row.start, row.length) for row in mixed] == [(0, 1)] * 7 + [(83, 17)]
    assert [(row.start, row.length) for row in alone] == [(76, 24)]


def test_prefill_tries_the_last_chunk_of_the_longest_prompt_and_several_numbers_of_prompts() -> None:
    config = PrefillConfig(page_size=4, max_queued_requests=20)
    longest, *others = trial_steps(config, 24, LONGEST)
    assert [(row.start, row.length) for row in longest] == [(76, 24)]
    assert [len(rows) for rows in others] == [1, 2, 4, 8, 16, 20]
    assert all(sum(row.length for row in rows) <= 24 for rows in others)


def test_trial_chunk_is_not_longer_than_the_longest_prompt() -> None:
    longest, *others = trial_steps(PrefillConfig(page_size=4), 512, 48)
    assert [(row.start, row.length) for row in longest] == [(0, 48)]
    assert [len(rows) for rows in others] == [1, 2, 4, 8, 16, 32, 48]


@pytest.mark.parametrize(
    ("config", "limit"),
    [(DecodeConfig(page_size=4, max_step_tokens=24), 7), (PrefillConfig(page_size=4), 24)],
    ids=["decode", "prefill"],
)
@pytest.mark.parametrize(("rows", "expected"), [(62, [(36, 24)]), (241, [(72, 8)] * 3), (24, [])])
def test_prompts_with_as_many_rows_as_a_step_unpacks_are_tried(
    config: AnyServerConfig, limit: int, rows: int, expected: list[tuple[int, int]]
) -> None:
    without = trial_steps(config, limit, LONGEST)
    steps = trial_steps(config, limit, LONGEST, unpacked_rows=lambda tokens: rows if tokens == 24 else 0)
    assert steps[: len(without)] == without
    assert [[(row.start, row.length) for row in step] for step in steps[len(without) :]] == (
        [expected] if expected else []
    )
