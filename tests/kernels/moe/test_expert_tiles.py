"""Experts with fp8 weights and few tokens each, by csrc/moe/expert_tiles.cu, against the reference."""

import pytest
import torch

from pdserve.kernels.linear.fp8_format import Fp8Matrix
from pdserve.kernels.moe import experts as experts_module
from pdserve.kernels.moe.expert_tiles_cuda import suits_expert_tiles
from pdserve.kernels.moe.experts import experts_reference, grouped_experts
from tests.kernels.fp8_matrices import draw_block_scaled, draw_row_scaled, moved
from tests.kernels.poison import poisoned

CUDA = torch.device("cuda", 0)
TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


def draw(
    tokens: int, size: tuple[int, int, int, int], dtype: torch.dtype, *, row_group: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Fp8Matrix, Fp8Matrix]:
    """x, weights and numbers of the chosen experts, gate_up and down; without `row_group`, a scale per row."""
    experts, per_token, hidden, width = size
    generator = torch.Generator().manual_seed(tokens + hidden)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])

    def draw_matrix(*shape: int) -> Fp8Matrix:
        if row_group is None:
            return moved(draw_row_scaled(*shape, generator=generator), CUDA)
        return moved(draw_block_scaled(*shape, generator=generator, row_group=row_group), CUDA)

    gate_up, down = draw_matrix(experts, 2 * width, hidden), draw_matrix(experts, hidden, width)
    x = torch.randn(tokens, hidden, generator=generator).to(CUDA, dtype)
    weights = torch.rand(tokens, per_token, generator=generator).to(CUDA)
    return x, weights, chosen.to(CUDA), gate_up, down


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("row_group", [128, 32, None])
@pytest.mark.parametrize(
    ("tokens", "size"),
    [
        (5, (16, 3, 256, 128)),  # down: whole rows of 128 columns, several warps without columns of gate and up
        (32, (64, 8, 1280, 256)),  # down: whole rows of 256 columns; columns of gate and up in two steps
        (16, (6, 1, 1152, 1152)),  # no whole rows; the last step has one block of columns
        (40, (12, 1, 128, 384)),  # several tiles for an expert
        (9, (300, 2, 384, 24 * 128)),  # more experts than blocks, three steps for down
    ],
)
def test_equals_the_reference(
    tokens: int, size: tuple[int, int, int, int], row_group: int | None, dtype: torch.dtype
) -> None:
    """With all experts on this rank, some, and none of the chosen ones."""
    x, weights, chosen, gate_up, down = draw(tokens, size, dtype, row_group=row_group)
    if dtype == torch.bfloat16:
        x[0] *= 2.0**10
        x[1] *= 2.0**-10
    for first, own in ((0, slice(0, size[0])), (2, slice(2, 5)), (size[0], slice(0, 2))):
        part = gate_up[own], down[own]
        average = -(-chosen.numel() // size[0])
        assert suits_expert_tiles(x, *part, average)
        with poisoned("triton"):
            found = grouped_experts(x, weights, chosen, *part, first=first, num_experts=size[0])
        expected = experts_reference(x, weights, chosen, *part, first=first, exact=True)
        spread = expected.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-6)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(
            (found.float() / spread), (expected.float() / spread), rtol=tolerance, atol=2 * tolerance
        )


@pytest.mark.gpu
def test_a_token_does_not_depend_on_the_others() -> None:
    """Neither its position in a tile nor the block that computes it changes the result."""
    x, weights, chosen, gate_up, down = draw(32, (64, 8, 1280, 256), torch.bfloat16, row_group=128)
    together = grouped_experts(x, weights, chosen, gate_up, down)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).to(CUDA)
    shuffled = grouped_experts(x[order], weights[order], chosen[order], gate_up, down)
    assert torch.equal(shuffled, together[order])
    fewer = order[:20]
    assert torch.equal(grouped_experts(x[fewer], weights[fewer], chosen[fewer], gate_up, down), together[fewer])


@pytest.mark.gpu
def test_other_tensors_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, chosen, gate_up, down = draw(12, (6, 2, 256, 128), torch.bfloat16, row_group=128)
    assert suits_expert_tiles(x, gate_up, down, 4)
    assert not suits_expert_tiles(x, gate_up, down, 5)
    assert not suits_expert_tiles(x.float(), gate_up, down, 4)
    assert not suits_expert_tiles(x, torch.empty(6, 256, 256, dtype=x.dtype, device=CUDA), down, 4)
    unaligned = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    assert not suits_expert_tiles(unaligned, gate_up, down, 4)
    found = grouped_experts(x, weights, chosen, gate_up, down)
    monkeypatch.setattr(experts_module, "suits_expert_tiles", lambda *_: False)
    by_triton = grouped_experts(x, weights, chosen, gate_up, down)
    torch.testing.assert_close(found, by_triton, rtol=2**-5, atol=2**-5)
