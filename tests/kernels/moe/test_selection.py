"""The selection of experts: the kernel against the reference, which tests of the model compare with transformers."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.moe.selection import select_experts, select_experts_reference
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

    def select(used: Impl | None) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"num_groups": groups, "groups_per_token": groups_per_token, "per_token": per_token}
        if used is None:
            return select_experts_reference(logits, bias, **options, normalised=normalised, scale=2.5)
        with poisoned(used):
            return select_experts(logits, bias, **options, normalised=normalised, scale=2.5, impl=used)

    (weights, chosen), (expected_weights, expected) = select(impl), select(None)
    order, expected_order = chosen.argsort(-1), expected.argsort(-1)
    assert chosen.gather(1, order).equal(expected.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order), expected_weights.gather(1, expected_order), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("logits", "said"),
    [
        (torch.zeros(1, 8, dtype=torch.int32), "must be contiguous rows of floats"),
        (torch.zeros(1, 6), "must be rows of 8 experts"),
    ],
)
def test_logits_of_another_type_or_size_are_refused(logits: torch.Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        select_experts(
            logits,
            torch.zeros(8),
            num_groups=1,
            groups_per_token=1,
            per_token=2,
            normalised=True,
            scale=1.0,
        )
