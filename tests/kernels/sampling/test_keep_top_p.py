"""keep_top_p against a loop over ranked tokens. Logits have few distinct values, as in 16-bit models: many are ties."""

import math
import random

import pytest
import torch

from pdserve.kernels.backends.nvrtc import CudaImpl
from pdserve.kernels.sampling.keep_top_p import SHORT_LIST, keep_top_p
from tests.kernels.places import each_of

Where = tuple[CudaImpl, torch.device]
SCALE = 1 << 40

where = each_of(("reference", "cpu"), ("reference", "cuda"), ("cuda", "cuda"))


def kept(logits: list[float], weights: list[int], needed: int) -> list[int]:
    mass, left = 0, [0] * len(weights)
    for token in sorted(range(len(logits)), key=lambda token: (-logits[token], token)):
        if mass < needed:
            left[token] = weights[token]
        mass += weights[token]
    return left


def weights_of(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    best = logits.amax(dim=-1, keepdim=True).double()
    return ((logits.double() - best) / temperature).exp().mul(SCALE).round().long()


def check(where: Where, logits: torch.Tensor, weights: torch.Tensor, needed: list[int]) -> None:
    impl, device = where
    on_device = weights.to(device)
    keep_top_p(logits.to(device), on_device, torch.tensor(needed, device=device).unsqueeze(1), impl=impl)
    for row, mass in enumerate(needed):
        assert on_device[row].tolist() == kept(logits[row].tolist(), weights[row].tolist(), mass), row


@pytest.mark.parametrize("vocabulary", [1, 7, 1024, 1025, 5000])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 40.0])
def test_fewest_tokens_that_hold_the_mass_are_kept(where: Where, vocabulary: int, temperature: float) -> None:
    numbers = random.Random(vocabulary)
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(6, vocabulary, generator=generator)).bfloat16().float()
    logits[0, : vocabulary // 3] = -math.inf
    logits[1] = 0.25
    logits[2] = logits[2].abs() * torch.tensor([0.0, -0.0]).repeat(vocabulary)[:vocabulary]
    weights = weights_of(logits, temperature)
    masses = weights.sum(dim=-1).tolist()
    check(where, logits, weights, [math.ceil(numbers.random() * mass) or 1 for mass in masses])
    check(where, logits, weights, [1] * 6)
    check(where, logits, weights, masses)


def test_mass_reached_exactly_at_a_token(where: Where) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.5, 2.0]])
    weights = torch.tensor([[20, 100, 50, 100, 10, 50]])
    for needed in (100, 101, 200, 201, 250, 251, 300, 301, 320, 321, 330):
        check(where, logits, weights, [needed])


def test_more_tokens_than_the_short_list_can_be_needed(where: Where) -> None:
    logits = torch.zeros(2, 3 * SHORT_LIST)
    check(where, logits, torch.ones_like(logits, dtype=torch.int64), [SHORT_LIST, SHORT_LIST + 1])


def test_rows_can_be_views_of_wider_ones(where: Where) -> None:
    impl, device = where
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    weights = weights_of(logits)
    wide_logits, wide_weights = logits.repeat(1, 2).to(device), weights.repeat(1, 2).to(device)
    needed = weights.sum(dim=-1, keepdim=True) // 2
    keep_top_p(wide_logits[::2, :300], wide_weights[::2, :300], needed[::2].to(device), impl=impl)
    assert torch.equal(wide_weights[:, 300:].cpu(), weights)
    assert torch.equal(wide_weights[1::2, :300].cpu(), weights[1::2])
    for row in (0, 2):
        assert wide_weights[row, :300].tolist() == kept(logits[row].tolist(), weights[row].tolist(), int(needed[row]))


def test_invalid_arguments_are_refused() -> None:
    logits, weights = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.int64)
    needed = torch.ones(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"weights \[2, 4\] and needed \[1, 1\] do not fit logits \[2, 4\]"):
        keep_top_p(logits, weights, needed[:1])
    with pytest.raises(ValueError, match="logits must be float32, weights and needed int64, got"):
        keep_top_p(logits.double(), weights, needed)
    with pytest.raises(ValueError, match="contiguous"):
        keep_top_p(logits[:, ::2], weights[:, ::2], needed)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0])
def test_whole_vocabularies_equal_the_reference(temperature: float) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (2.5 * torch.randn(40, 151936, generator=generator)).bfloat16().float()
    weights = weights_of(logits, temperature)
    needed = (weights.sum(dim=-1, keepdim=True).double() * torch.rand(40, 1, generator=generator)).ceil().long()
    expected, found = weights.clone(), weights.cuda()
    keep_top_p(logits, expected, needed)
    keep_top_p(logits.cuda(), found, needed.cuda())
    assert torch.equal(found.cpu(), expected)


@pytest.mark.gpu
def test_nan_logits_do_not_fail() -> None:
    logits = torch.full((2, 5000), math.nan, device="cuda")
    weights = torch.ones(2, 5000, dtype=torch.int64, device="cuda")
    keep_top_p(logits, weights, torch.full((2, 1), 700, device="cuda"))
    torch.cuda.synchronize()
