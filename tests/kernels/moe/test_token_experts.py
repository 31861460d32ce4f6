"""The experts of very few tokens, in every format of weights, against the reference."""

from functools import partial
from typing import Any

import pytest
import torch

from pdserve.kernels.linear.fp8_format import Weight
from pdserve.kernels.moe.experts import experts_reference, grouped_experts
from pdserve.kernels.moe.token_experts_cuda import MOST_TOKENS, suits_token_experts
from tests.kernels.fp8_matrices import draw_block_scaled, draw_row_scaled, moved
from tests.kernels.group_scaled import draw_packed_experts
from tests.kernels.poison import poisoned

CUDA = torch.device("cuda", 0)
TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9}


def draw_weight(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, generator: torch.Generator) -> Weight:
    if kind == "plain":
        plain: torch.Tensor = torch.randn(shape, generator=generator) / shape[2] ** 0.5
        return plain.to(CUDA, dtype)
    if kind == "fp8":
        weight = draw_block_scaled(*shape, generator=generator, row_group=32)
        weight.scales.nan_to_num_(nan=0.0)
        return moved(weight, CUDA)
    if kind == "fp8 by row":
        return moved(draw_row_scaled(*shape, generator=generator), CUDA)
    group = 32 if kind == "int4 of 32" else 128
    return draw_packed_experts(*shape, generator=generator, group=group, dtype=dtype, device=CUDA)


def draw(kind: str, tokens: int, size: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Any, ...]:
    """x, weights and numbers of the chosen experts, gate_up and down."""
    experts, per_token, hidden, width = size
    generator = torch.Generator().manual_seed(tokens + hidden)
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:per_token] for _ in range(tokens)])
    return (
        torch.randn(tokens, hidden, generator=generator).to(CUDA, dtype),
        torch.rand(tokens, per_token, generator=generator).to(CUDA),
        chosen.to(CUDA),
        draw_weight(kind, (experts, 2 * width, hidden), dtype, generator),
        draw_weight(kind, (experts, hidden, width), dtype, generator),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(8, 3, 256, 128), (16, 8, 1280, 384), (5, 1, 128, 640)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "fp8", "fp8 by row", "int4", "int4 of 32"])
def test_equals_the_reference(kind: str, size: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """With all experts on this rank, some and none of the chosen ones, with and without a shared expert."""
    for tokens in range(1, MOST_TOKENS + 1):
        x, weights, chosen, gate_up, down = draw(kind, tokens, size, dtype)
        shared = torch.randn_like(x)
        for first, own in ((0, slice(0, size[0])), (2, slice(2, 5)), (4, slice(4, 5)), (size[0], slice(0, 2))):
            part = gate_up[own], down[own]
            assert suits_token_experts(x, size[1], *part)
            with poisoned("triton"):
                found = grouped_experts(x, weights, chosen, *part, first=first, num_experts=size[0])
                sums = grouped_experts(
                    x, weights, chosen, *part, first=first, num_experts=size[0], shared=partial(torch.clone, shared)
                )
            expected = experts_reference(x, weights, chosen, *part, first=first, exact=True)
            # kernels of 4-bit weights also round x; without that, errors are already close to the limit of float16
            limit = TOLERANCES[dtype] * (2 if kind.startswith("int4") and dtype == torch.float16 else 1)
            torch.testing.assert_close(found, expected, rtol=limit, atol=2 * limit)
            assert torch.equal(sums, found + shared)


@pytest.mark.gpu
def test_more_tokens_and_other_sizes_are_left_to_the_other_kernels() -> None:
    x, weights, chosen, gate_up, down = draw("plain", MOST_TOKENS + 1, (8, 3, 256, 128), torch.bfloat16)
    assert not suits_token_experts(x, 3, gate_up, down)
    few = x[:1], 3
    assert suits_token_experts(*few, gate_up, down)
    assert not suits_token_experts(x[:1], 33, gate_up, down)
    assert not suits_token_experts(x[:1].float(), 3, gate_up, down)
    for wrong in ((weights.bfloat16(), chosen), (weights, chosen.int())):
        with pytest.raises(ValueError, match="must be rows of float32 and int64"):
            grouped_experts(x, *wrong, gate_up, down)
    assert not suits_token_experts(*few, gate_up.half(), down)
    narrow = torch.empty(8, 256, 100, dtype=torch.bfloat16, device=CUDA)
    assert not suits_token_experts(*few, gate_up, narrow)
    found = grouped_experts(x, weights, chosen, gate_up, down)
    torch.testing.assert_close(
        found[:1], grouped_experts(x[:1], weights[:1], chosen[:1], gate_up, down), rtol=2**-6, atol=2**-5
    )
