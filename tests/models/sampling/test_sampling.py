"""Sampling: the distribution of each filter (chi-square test), single tokens against plain Python, and independence of
the rest of the batch.
"""

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.common.sampling import SamplingParams
from pdserve.kernels.sampling.top_tokens import top_tokens
from pdserve.models.layers.host_copies import ReadBack
from pdserve.models.sampling import sampler as sampling_module
from pdserve.models.sampling.penalties import Choice
from pdserve.models.sampling.sampler import Sampler, TokenMasks, philox, uniform, uniforms

LOGITS = [2.0, 1.0, 0.0, -1.0, 1.5, 0.5, -3.0, 1.0]
RANKED = [0, 4, 1, 7, 5, 2, 3, 6]  # tokens 1 and 7 are equally likely: the lower id comes first
DRAWS = 20_000

FEATURES = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(temperature=1.0, top_p=0.9, seed=6),
    SamplingParams(temperature=2.0, top_p=0.999, seed=7),  # needs more than the short list
    SamplingParams(temperature=1.3, top_k=50, seed=8),
    SamplingParams(temperature=1.0, top_k=7, top_p=0.5, seed=9),
    SamplingParams(temperature=1.5, min_p=0.05, seed=10),
    SamplingParams(temperature=1.5, top_k=3000, top_p=0.95, min_p=0.001, seed=11),
    SamplingParams(temperature=0.0, repetition_penalty=1.7, logit_bias=((17, 3.0),)),
    SamplingParams(temperature=1.0, repetition_penalty=0.8, frequency_penalty=0.3, seed=12),
    SamplingParams(temperature=1.0, top_p=0.7, presence_penalty=-0.5, min_new_tokens=20, stop_token_ids=(3,), seed=13),
]


def choose(logits: torch.Tensor, choices: Sequence[Choice], eos_token_ids: Sequence[int] = ()) -> list[int]:
    return [int(token) for token in Sampler(eos_token_ids).sample(logits, choices)]


def many(params: SamplingParams) -> list[int]:
    """Tokens of DRAWS output positions."""
    return choose(torch.tensor([LOGITS]), [Choice(0, params, position) for position in range(DRAWS)])


def reference_probs(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """The distribution to sample from, in plain Python: token -> probability, most likely first."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    best = logits[order[0]]
    weights = {token: math.exp((logits[token] - best) / params.temperature) for token in order[: params.top_k]}
    total, mass, kept = math.fsum(weights.values()), 0.0, {}
    for token, weight in weights.items():
        if mass < params.top_p * total:
            kept[token] = weight
        mass += weight
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p}
    return {token: weight / math.fsum(kept.values()) for token, weight in kept.items()}


def reference_token(logits: Sequence[float], params: SamplingParams, position: int) -> int:
    """Inverse CDF over the ranked tokens with top_k, and otherwise over the vocabulary."""
    probs = reference_probs(logits, params)
    mass = 0.0
    for token in probs if params.top_k is not None else sorted(probs):
        mass += probs[token]
        if mass > uniform(params.seed, position):
            return token
    raise AssertionError("the probabilities do not add up to 1")


def chi_square_limit(freedom: int) -> float:
    """The 99.9 % point (Wilson-Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


# Probabilities at temperature 1, ranked: 0.3626 0.2200 0.1334 0.1334 0.0809 0.0491 0.0181 0.0024.
DISTRIBUTIONS = [
    SamplingParams(seed=11),
    SamplingParams(temperature=0.5, seed=12),
    SamplingParams(temperature=3.0, seed=13),
    SamplingParams(top_k=1, seed=14),
    SamplingParams(top_k=2, seed=15),
    SamplingParams(top_k=3, seed=16),  # the third and the fourth are equal: the lower id is kept
    SamplingParams(top_k=4, seed=17),
    SamplingParams(top_k=8, seed=18),
    SamplingParams(top_k=9, seed=19),
    SamplingParams(top_p=0.7, seed=20),
    SamplingParams(top_p=0.58, seed=21),  # the two largest hold 0.5827: enough ...
    SamplingParams(top_p=0.585, seed=22),  # ... and here not enough
    SamplingParams(top_p=0.01, seed=23),
    SamplingParams(top_p=0.999, seed=24),
    SamplingParams(min_p=0.36, seed=25),  # third to first: exp(-1) = 0.3679, so both thirds are kept ...
    SamplingParams(min_p=0.37, seed=26),  # ... and here they are dropped
    SamplingParams(min_p=1.0, seed=27),
    SamplingParams(
        temperature=2.0, min_p=0.6, seed=28
    ),  # relative to the maximum at this temperature: exp(-1/2) = 0.607
    SamplingParams(temperature=2.0, top_k=5, top_p=0.8, seed=29),
    SamplingParams(top_k=2, top_p=0.62, seed=30),  # the first holds 0.6225 of the two that top_k leaves
    SamplingParams(top_k=5, min_p=0.25, seed=31),
    SamplingParams(top_p=0.9, min_p=0.2, seed=32),
    SamplingParams(temperature=1.5, top_k=6, top_p=0.95, min_p=0.3, seed=33),
]


def label(params: SamplingParams) -> str:
    return f"{params.temperature}-{params.top_k}-{params.top_p}-{params.min_p}"


@pytest.mark.parametrize("params", DISTRIBUTIONS, ids=label)
def test_tokens_follow_the_filtered_distribution(params: SamplingParams) -> None:
    tokens = many(params)
    probs = reference_probs(LOGITS, params)
    assert set(tokens) <= set(probs)
    if len(probs) > 1:
        statistic = sum((tokens.count(token) - DRAWS * prob) ** 2 / (DRAWS * prob) for token, prob in probs.items())
        assert statistic < chi_square_limit(len(probs) - 1)


def test_reference_ranks_tokens_correctly() -> None:
    assert list(reference_probs(LOGITS, SamplingParams())) == RANKED
    assert list(reference_probs(LOGITS, SamplingParams(top_k=3))) == [0, 4, 1]


def test_single_tokens_equal_an_inverse_cdf_in_plain_python() -> None:
    """Vocabularies longer than the short list, with many equal logits, as bfloat16 models have them."""
    generator, numbers = torch.Generator().manual_seed(3), random.Random(3)
    logits = (torch.randn(48, 2000, generator=generator) * 2).bfloat16().float()
    choices = []
    for row in range(len(logits)):
        params = SamplingParams(
            temperature=numbers.choice([0.3, 1.0, 1.7]),
            top_k=numbers.choice([None, None, 1, 40, 1200]),
            top_p=numbers.choice([1.0, 0.2, 0.9, 0.999]),
            min_p=numbers.choice([0.0, 0.0, 0.1]),
            seed=numbers.getrandbits(63),
        )
        choices.append(Choice(row, params, numbers.randrange(5000)))
    expected = [reference_token(logits[c.row].tolist(), c.params, c.output_index) for c in choices]
    assert choose(logits, choices) == expected


def test_equal_logits_are_ranked_by_id() -> None:
    logits = torch.tensor([[-0.0, -1.0, 2.0, 0.0, 2.0, -1.0, -math.inf, 1e-40]])
    ids, values = top_tokens(logits, 7)
    assert ids[0].tolist() == [2, 4, 7, 0, 3, 1, 5]
    assert values[0].tolist() == logits[0, ids[0]].tolist()
    whole, _ = top_tokens(logits, 8)
    assert whole[0].tolist() == [2, 4, 7, 0, 3, 1, 5, 6]


def test_temperature_zero_is_argmax_with_any_filter() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0.0, top_k=5, top_p=0.1, min_p=0.5)
    rows = [4, 0, 3, 1, 2]
    assert choose(logits, [Choice(row, params, 0) for row in rows]) == logits.argmax(dim=-1)[rows].tolist()


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(min_p=0.3), SamplingParams(top_k=3)], ids=label)
def test_extreme_random_numbers_draw_no_token_of_weight_zero(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.tensor([[-math.inf, -200.0, 1.0, 2.0, 1.5, -200.0, -math.inf]])
    first, last = (3, 2) if params.top_k else (2, 4)  # ranked, or in the order of the vocabulary
    for number, expected in ((0.0, first), (1 - 2**-32, last)):
        monkeypatch.setattr(sampling_module, "uniform", lambda *_, number=number: number)
        assert choose(logits, [Choice(0, params, 0)]) == [expected]


def batch_of_everything() -> tuple[torch.Tensor, list[Choice]]:
    generator = torch.Generator().manual_seed(2)
    logits = (torch.randn(len(FEATURES) * 2, 5000, generator=generator) * 2).bfloat16().float()
    choices = [
        Choice(row, params, 3 + row, prompt_ids=tuple(range(row, 40 * row)), output_ids=[7, 9, 7, row])
        for row, params in enumerate(FEATURES * 2)
    ]
    return logits, choices


def test_row_does_not_depend_on_the_rest_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, choices = batch_of_everything()
    together = choose(logits, choices, [4])
    assert together == [choose(logits, [choice], [4])[0] for choice in choices]
    assert together[::-1] == choose(logits, choices[::-1], [4])
    monkeypatch.setattr(sampling_module, "_BLOCK_ELEMENTS", 5000 * 2)  # two rows at a time
    assert together == choose(logits, choices, [4])


def test_samples_of_one_row_equal_samples_of_separate_rows() -> None:
    logits, choices = batch_of_everything()
    shared = [Choice(3, c.params, c.output_index, c.prompt_ids, c.output_ids) for c in choices]
    separate = [Choice(row, c.params, c.output_index, c.prompt_ids, c.output_ids) for row, c in enumerate(choices)]
    assert choose(logits, shared, [4]) == choose(logits[3:4].repeat(len(choices), 1), separate, [4])


def test_philox_gives_the_published_numbers() -> None:
    """Known answers of the Random123 distribution."""
    ones = 0xFFFFFFFF
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("rows", [1, 15, 16, 128])
def test_vectorised_random_numbers_equal_those_of_each_row(rows: int) -> None:
    numbers = random.Random(rows)
    seeds = [numbers.choice((0, -1, (1 << 64) - 1, 1 << 64, numbers.getrandbits(66))) for _ in range(rows)]
    positions = [numbers.choice((0, 1, (1 << 32) - 1, 1 << 32, numbers.getrandbits(40))) for _ in range(rows)]
    assert uniforms(seeds, positions).tolist() == [uniform(*row) for row in zip(seeds, positions, strict=True)]


def test_seed_and_position_both_change_the_draw() -> None:
    seeds = [*range(15), *(seed << 32 for seed in range(1, 16))]
    assert len({uniform(seed, position) for seed in seeds for position in range(30)}) == 900
    assert uniform(5, 3) == uniform(5, 3)


def test_extreme_temperatures_and_logits_stay_in_range() -> None:
    params = [SamplingParams(temperature=temperature, top_p=0.9, seed=1) for temperature in (1e-300, 1e-6, 1e6)]
    logits = (torch.tensor([LOGITS]) * 1e4).repeat(3, 1)
    assert choose(logits, [Choice(row, params[row], 0) for row in range(3)])[:2] == [0, 0]
    broken = Sampler().sample(torch.full((1, 8), math.nan), [Choice(0, params[0], 0)])
    assert 0 <= int(broken) < 8


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_cuda_samples_equal_the_cpu_and_wait_only_for_the_read_back() -> None:
    logits, choices = batch_of_everything()
    expected = choose(logits, choices, [4])
    on_device = logits.cuda()
    sampler = Sampler([4])
    sampler.sample(on_device, choices)  # warms up allocators and kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = sampler.sample(on_device, choices)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ReadBack([tokens])() == [expected]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {}], ids=["greedy", "top_k", "top_p", "vocabulary"]
)
def test_masked_rows_sample_allowed_tokens_only_and_others_are_unchanged(fields: dict[str, Any]) -> None:
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    allowed = [{3, 40, 69}, {0}]
    masks = np.zeros((2, 3), dtype=np.int32)
    for row, those in enumerate(allowed):
        for token in those:
            masks[row, token // 32] |= np.int32(1 << token % 32)
    params = [SamplingParams(**{"temperature": 1.0, **fields}, seed=seed) for seed in range(30)]
    choices = [Choice(row, each, 0) for each in params for row in (0, 1, 2)]
    before = logits.clone()
    tokens = Sampler().sample(logits, choices, TokenMasks([2, 0], torch.from_numpy(masks))).view(-1, 3)
    assert set(tokens[:, 2].tolist()) <= allowed[0]
    assert set(tokens[:, 0].tolist()) == allowed[1]
    assert tokens[:, 1].tolist() == Sampler().sample(logits, choices).view(-1, 3)[:, 1].tolist()
    assert torch.equal(logits, before), "the raw logits are needed for log-probabilities"


def test_penalties_apply_to_masked_logits() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    mask = torch.tensor([[0b1100]], dtype=torch.int32)
    for bias, expected in (((), 2), (((2, -3.0), (0, 100.0)), 3)):
        choice = Choice(0, SamplingParams(temperature=0.0, logit_bias=bias), 0)
        assert Sampler().sample(logits, [choice], TokenMasks([0], mask)).tolist() == [expected]
