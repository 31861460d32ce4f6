"""Penalties, biases and the EOS mask against a plain Python reference."""

import math
import random

import pytest
import torch

from pdserve.common.sampling import SamplingParams
from pdserve.models.sampling.penalties import Choice, Penalties
from pdserve.models.sampling.sampler import Sampler

VOCAB_SIZE = 64
EOS = (5, 9)


def reference(logits: list[float], choice: Choice) -> list[float]:
    """The rule of transformers' RepetitionPenaltyLogitsProcessor, OpenAI's formula for the other two, bias, mask."""
    params, out = choice.params, list(logits)
    for token in {*choice.prompt_ids, *choice.output_ids}:
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in range(VOCAB_SIZE):
        count = choice.output_ids.count(token)
        out[token] -= count * params.frequency_penalty + (1 if count else 0) * params.presence_penalty
    for token, bias in params.logit_bias:
        out[token] += bias
    if choice.output_index < params.min_new_tokens:
        for token in (*EOS, *params.stop_token_ids):
            out[token] = -math.inf
    return out


def random_choices(count: int) -> list[Choice]:
    numbers = random.Random(1)
    return [
        Choice(
            row,
            SamplingParams(
                repetition_penalty=numbers.choice([1.0, 1.3, 0.7]),
                presence_penalty=numbers.choice([0.0, 0.6, -0.4]),
                frequency_penalty=numbers.choice([0.0, 0.25, -0.1]),
                logit_bias=numbers.choice([(), ((3, 2.5), (40, -100.0))]),
                min_new_tokens=numbers.choice([0, 6]),
                stop_token_ids=numbers.choice([(), (11,), (5, 11)]),
            ),
            numbers.randrange(12),
            prompt_ids=tuple(numbers.choices(range(VOCAB_SIZE), k=20)),
            output_ids=numbers.choices(range(VOCAB_SIZE), k=numbers.randrange(30)),
        )
        for row in range(count)
    ]


def test_every_change_equals_the_reference() -> None:
    logits = torch.randn(100, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    before = logits.clone()
    choices = random_choices(100)
    penalties = Penalties(EOS)
    for _ in range(2):  # the second time, with cached prompts
        changed = penalties.apply(logits, choices)
        expected = [reference(row, choice) for row, choice in zip(logits.tolist(), choices, strict=True)]
        torch.testing.assert_close(changed, torch.tensor(expected), rtol=0, atol=1e-5)
    assert logits.equal(before)


def test_logits_without_changes_are_not_copied() -> None:
    logits = torch.randn(2, VOCAB_SIZE)
    plain = SamplingParams(min_new_tokens=3, presence_penalty=1.0)  # min_new_tokens is reached, and the output is empty
    assert Penalties(EOS).apply(logits, [Choice(0, SamplingParams(), 0), Choice(1, plain, 3)]) is logits


def test_end_tokens_stay_allowed_before_min_new_tokens_if_a_grammar_decides_where_the_output_ends() -> None:
    logits, params = torch.zeros(2, VOCAB_SIZE), SamplingParams(min_new_tokens=3)
    free, in_grammar = Penalties(EOS).apply(logits, [Choice(0, params, 0), Choice(1, params, 0, may_end=True)])
    assert set(free.isinf().nonzero().flatten().tolist()) == {*EOS}
    assert not in_grammar.isinf().any()


def test_cached_prompts_are_not_confused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.models.sampling.penalties._REMEMBERED_PROMPTS", 2)
    penalties, params = Penalties(()), SamplingParams(repetition_penalty=2.0)
    logits = torch.ones(1, VOCAB_SIZE)
    growing = [1]
    for round_ in range(50):
        prompts = (tuple(range(round_, round_ + 3)), growing)
        for prompt in prompts:
            changed = penalties.apply(logits, [Choice(0, params, 0, prompt_ids=prompt)])
            assert set((changed[0] != 1).nonzero().flatten().tolist()) == set(prompt)
        growing.append(round_ + 2)


def test_greedy_and_sampled_rows_both_apply_penalties() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, EOS[0]] = 50.0
    logits[0, 11] = 40.0
    logits[0, 20] = 30.0
    sampler = Sampler(EOS)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, min_new_tokens=2, stop_token_ids=(11,), seed=4)
        drawn = [int(sampler.sample(logits, [Choice(0, params, index)])[0]) for index in range(3)]
        assert drawn == [20, 20, EOS[0]]
        biased = SamplingParams(temperature=temperature, logit_bias=((33, 100.0),), seed=4)
        assert int(sampler.sample(logits, [Choice(0, biased, 0)])[0]) == 33
        repeated = SamplingParams(temperature=temperature, repetition_penalty=5.0, seed=4)
        assert int(sampler.sample(logits, [Choice(0, repeated, 0, (EOS[0],), (20,))])[0]) == 11


@pytest.mark.parametrize("token", [VOCAB_SIZE, -1])
def test_token_outside_the_vocabulary_is_refused(token: int) -> None:
    params = SamplingParams(logit_bias=((token, 1.0),))
    with pytest.raises(ValueError, match="outside the vocabulary of 64"):
        Penalties(EOS).apply(torch.zeros(1, VOCAB_SIZE), [Choice(0, params, 0)])


def test_remembered_biases_are_bounded_and_never_those_of_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new tuple may have the address of one that is gone."""
    monkeypatch.setattr("pdserve.models.sampling.penalties._REMEMBERED_BIASES", 3)
    penalties = Penalties(EOS)
    for step in range(200):
        choices = [
            Choice(row, SamplingParams(logit_bias=((step % VOCAB_SIZE, float(step)), (row, -1.0))), 0)
            for row in (32, 33)
            if row != step % VOCAB_SIZE
        ]
        logits = torch.zeros(len(choices), VOCAB_SIZE)
        for _ in range(2):
            wanted = [reference([0.0] * VOCAB_SIZE, choice) for choice in choices]
            assert penalties.apply(logits, choices).tolist() == wanted
    held = [id(bias) for bias, *_ in penalties._biases.values()]
    assert list(penalties._biases) == held  # so no other tuple gets the address
    assert len(held) == 3
