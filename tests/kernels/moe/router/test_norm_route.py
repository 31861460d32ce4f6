"""Norm, router and selection for very few tokens in one kernel (csrc/moe/norm_route.cu), on a CPU and on a GPU."""

from pathlib import Path

import pytest
import torch

from pdserve.kernels.linear.rms_norm import add_rms_norm_reference
from pdserve.kernels.moe.router import norm_route_cuda
from pdserve.kernels.moe.router.norm_route_cuda import launch_norm_route, suits_norm_route
from pdserve.kernels.moe.router.selection import SelectionRule, select_experts_reference
from tests.kernels.fibers import COMPILER, FiberKernels

BF16, F16 = torch.bfloat16, torch.float16
LIMITS = {BF16: 2**-7, F16: 2**-9}
"""Relative to results of order 1: one rounding."""


def check(
    tokens: int,
    hidden: int,
    experts: int,
    per_token: int,
    *,
    normalised: bool = True,
    biased: bool = False,
    dtype: torch.dtype = BF16,
    device: str = "cpu",
) -> None:
    generator = torch.Generator().manual_seed(hidden + experts)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, y, norm = random(tokens, hidden), random(tokens, hidden), random(hidden)
    x *= torch.arange(1, tokens + 1, device=device).unsqueeze(1)  # norms differ
    router, bias = random(experts, hidden) / hidden**0.5, random(experts) if biased else None
    rule = SelectionRule(per_token, 1, 1, normalised, 1.5)
    total, normed = (torch.full_like(x, torch.nan) for _ in range(2))
    weights = torch.full((tokens, per_token), torch.nan, device=device)
    chosen = torch.full((tokens, per_token), -1, device=device)
    launch_norm_route(x, y, norm, 1e-6, router, bias, rule, total, normed, weights, chosen)
    expected_total, expected_normed = add_rms_norm_reference(x, y, norm, 1e-6)
    torch.testing.assert_close(total, expected_total, rtol=0, atol=0)
    limit = LIMITS[dtype]
    torch.testing.assert_close(normed, expected_normed, rtol=2 * limit, atol=0)
    # The following uses the norms of the kernel, so that only nearly equal logits may be selected differently.
    logits = normed.double() @ router.double().T + (0 if bias is None else bias.double())
    for token in range(tokens):
        mine = set(chosen[token].tolist())
        assert len(mine) == per_token
        others = [expert for expert in range(experts) if expert not in mine]
        assert logits[token, list(mine)].min() >= logits[token, others].max() - 2 * limit * logits[token].abs().max()
    reference, by = select_experts_reference(logits.to(dtype), None, rule)
    if (chosen.sort().values == by.sort().values).all():  # otherwise one of nearly equal logits was rounded differently
        order, by_order = chosen.sort().indices, by.sort().indices
        torch.testing.assert_close(weights.gather(1, order), reference.gather(1, by_order), rtol=4 * limit, atol=1e-3)
    assert torch.equal(chosen.gather(1, weights.sort(descending=True, stable=True).indices), chosen), (
        "not sorted by weight"
    )


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
class TestOnFibers:
    @pytest.fixture(autouse=True)
    def kernels(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(norm_route_cuda, "load_kernel", FiberKernels(tmp_path, cluster=8).load)
        monkeypatch.setattr(norm_route_cuda, "shared_memory", lambda _: 227 << 10)

    @pytest.mark.parametrize("tokens", [1, 3])
    def test_qwen3_30b_a3b(self, tokens: int) -> None:
        check(tokens, 2048, 128, 8)

    def test_biases_unnormalised_weights_and_blocks_without_experts(self) -> None:
        check(2, 2880, 6, 2, normalised=False, biased=True)

    def test_more_experts_per_block_than_an_mma_has_rows(self) -> None:
        check(4, 64, 200, 10)

    @pytest.mark.parametrize(
        "change",
        [
            ("columns[2 * half + 1]", "columns[2 * half]"),
            ("logit += shared.sums[other][row][token]", "logit = shared.sums[other][row][token]"),
            ("left[i] == most ? 0 : left[i]", "left[i]"),
            ("squares += shared.squares[other][token]", "squares = shared.squares[other][token]"),
        ],
    )
    def test_wrong_kernel_is_detected(
        self, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        kernels = FiberKernels(tmp_path / "changed", dict([change]), cluster=8)
        monkeypatch.setattr(norm_route_cuda, "load_kernel", kernels.load)
        with pytest.raises(AssertionError):
            check(1, 512, 32, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("hidden", "experts", "per_token"), [(2048, 128, 8), (4096, 128, 8), (4096, 8, 2), (2880, 32, 4), (64, 200, 10)]
)
def test_on_a_gpu(tokens: int, hidden: int, experts: int, per_token: int, dtype: torch.dtype) -> None:
    x = torch.empty(tokens, hidden, device="cuda", dtype=dtype)
    router = torch.empty(experts, hidden, device="cuda", dtype=dtype)
    if not suits_norm_route(x, x[0], router, None, SelectionRule(per_token, 1, 1, True, 1.0)):
        pytest.skip("needs a Hopper GPU")
    check(tokens, hidden, experts, per_token, biased=tokens == 2, normalised=tokens != 3, dtype=dtype, device="cuda")
