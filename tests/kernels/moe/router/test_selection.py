"""The selection of experts: the kernel against the reference, which tests of the model compare with transformers."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.moe.router.routing import route_reference, select_and_route
from pdserve.kernels.moe.router.select_route_cuda import suits_select_route
from pdserve.kernels.moe.router.selection import SelectionRule, select_experts, select_experts_reference
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

here = each_of(("triton", "cpu"), ("triton", "cuda"))


@pytest.mark.parametrize(
    ("tokens", "experts", "groups", "groups_per_token", "per_token", "normalised", "softmax"),
    [
        (6, 256, 8, 4, 8, True, False),
        (9, 160, 1, 1, 6, False, False),
        (5, 24, 3, 2, 3, True, False),
        (1, 8, 2, 1, 1, True, False),
        (6, 128, 1, 1, 8, True, True),
        (3, 60, 1, 1, 4, False, True),
    ],
)
def test_kernel_selects_the_reference_experts(
    here: tuple[Impl, torch.device],
    tokens: int,
    experts: int,
    groups: int,
    groups_per_token: int,
    per_token: int,
    normalised: bool,
    softmax: bool,
) -> None:
    impl, device = here
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(tokens, experts, generator=generator).to(device, torch.bfloat16 if tokens == 3 else None)
    bias = None if softmax else (0.2 * torch.randn(experts, generator=generator)).to(device)

    rule = SelectionRule(per_token, groups, groups_per_token, normalised, 2.5)
    with poisoned(impl):
        weights, chosen = select_experts(logits, bias, rule, impl=impl)
    check(weights, chosen, *select_experts_reference(logits, bias, rule))


def check(weights: torch.Tensor, chosen: torch.Tensor, expected_weights: torch.Tensor, expected: torch.Tensor) -> None:
    order, expected_order = chosen.argsort(-1), expected.argsort(-1)
    assert chosen.gather(1, order).equal(expected.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order), expected_weights.gather(1, expected_order), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(1, 8, dtype=torch.int32), "must be contiguous rows of floats"),
        (torch.zeros(1, 6), "must be rows of 8 experts"),
    ],
)
def test_logits_of_another_type_or_size_are_refused(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_experts(logits, torch.zeros(8), SelectionRule(2, 1, 1, True, 1.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("experts", "rule", "softmax"),
    [
        (256, SelectionRule(8, 8, 4, True, 2.5), False),
        (256, SelectionRule(8, 1, 1, True, 2.5), False),
        (384, SelectionRule(8, 1, 1, True, 2.8), False),
        (128, SelectionRule(8, 1, 1, True, 1.0), True),
        (64, SelectionRule(6, 16, 3, False, 1.0), False),
        (32, SelectionRule(4, 2, 1, False, 1.0), True),
        (1024, SelectionRule(32, 1, 1, True, 1.0), True),
    ],
    ids=str,
)
def test_tokens_are_selected_and_sorted_in_one_kernel(
    dtype: torch.dtype, experts: int, rule: SelectionRule, softmax: bool
) -> None:
    """With all experts on this rank, and with some; tiles of 8 and of 16 rows."""
    device, generator = torch.device("cuda", 0), torch.Generator().manual_seed(experts)
    bias = None if softmax else (0.2 * torch.randn(experts, generator=generator)).to(device)
    for tokens in (1, 5, 31, 32, 33, 64):
        logits = torch.randn(tokens, experts, generator=generator)
        logits[:, :5] += 2.0  # some experts have many tokens
        logits = logits.to(device, dtype)
        assert suits_select_route(logits, rule)
        for first, count, rows in ((0, experts, 8), (experts // 4, experts // 2, 16)):
            with poisoned("triton"):
                weights, chosen, routing = select_and_route(logits, bias, rule, first, count, rows)
            if dtype == torch.float32:  # 16-bit logits have ties, of which the reference selects any
                check(weights, chosen, *select_experts_reference(logits, bias, rule))
            expected = route_reference(chosen, first, count, rows)
            used = int(expected.ends[-1])
            assert torch.equal(routing.ends, expected.ends)
            assert torch.equal(routing.order[:used], expected.order[:used])
            here = expected.order[:used].long()
            assert torch.equal(routing.place[here], expected.place[here])
            assert torch.equal(routing.expert, expected.expert)
            tiles = expected.expert >= 0
            assert torch.equal(routing.first[tiles], expected.first[tiles])
            assert torch.equal(routing.counts, expected.counts)


@pytest.mark.gpu
def test_ties_select_the_lowest_experts() -> None:
    rule = SelectionRule(8, 8, 4, True, 1.0)
    logits = torch.zeros(3, 256, device="cuda:0")
    for bias in (None, torch.zeros(256, device="cuda:0")):
        weights, chosen, _ = select_and_route(logits, bias, rule, 0, 256, 8)
        assert chosen.tolist() == [list(range(8))] * 3
        torch.testing.assert_close(weights, torch.full_like(weights, 0.125))
