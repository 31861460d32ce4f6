"""The router and the experts against transformers' modules."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DeepseekV32Config, Qwen3MoeConfig
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Experts, DeepseekV32TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from pdserve.kernels.moe.experts import grouped_experts
from pdserve.kernels.moe.router.selection import select_experts
from pdserve.models.config.moe import MoeConfig
from pdserve.models.layers.moe import MlpParameters, MoeParameters, mixture, router_logits, selection_rule
from pdserve.models.weights.plain import PlainWeight

HIDDEN, SIZE = 48, 24


def select(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, config: MoeConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    return select_experts(router_logits(x, router), bias, selection_rule(config))


def configs(
    experts: int, groups: int, groups_per_token: int, experts_per_token: int, normalised: bool
) -> tuple[MoeConfig, Any]:
    ours = MoeConfig(
        num_experts=experts,
        experts_per_token=experts_per_token,
        expert_size=SIZE,
        shared_size=SIZE,
        num_groups=groups,
        groups_per_token=groups_per_token,
        normalised=normalised,
        scale=1.75,
    )
    theirs = DeepseekV32Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=SIZE,
        n_routed_experts=experts,
        n_group=groups,
        topk_group=groups_per_token,
        num_experts_per_tok=experts_per_token,
        norm_topk_prob=normalised,
        routed_scaling_factor=1.75,
        num_hidden_layers=1,
    )
    return ours, theirs


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("experts", "groups", "groups_per_token"), [(32, 8, 4), (32, 8, 1), (12, 1, 1), (8, 2, 2)])
def test_router_equals_transformers(experts: int, groups: int, groups_per_token: int, normalised: bool) -> None:
    ours, theirs = configs(experts, groups, groups_per_token, 3, normalised)
    generator = torch.Generator().manual_seed(experts + groups)
    router = DeepseekV32TopkRouter(theirs)
    with torch.no_grad():
        router.weight.copy_(torch.randn(experts, HIDDEN, generator=generator) / HIDDEN**0.5)
        router.e_score_correction_bias.copy_(torch.randn(experts, generator=generator) * 0.2)
        x = torch.randn(200, HIDDEN, generator=generator)
        _, expected_weights, expected = router(x)
        weights, chosen = select(x, router.weight, router.e_score_correction_bias, ours)
        _, unbiased = select(x, router.weight, torch.zeros(experts), ours)
    order, expected_order = chosen.argsort(-1), expected.argsort(-1)
    assert chosen.gather(1, order).equal(expected.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order), expected_weights.gather(1, expected_order), rtol=1e-6, atol=1e-7
    )
    changed = (unbiased.sort(-1).values != chosen.sort(-1).values).any(dim=1)
    assert changed.float().mean() > 0.3  # the bias matters here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("normalised", [True, False])
def test_softmax_router_equals_transformers(normalised: bool, dtype: torch.dtype) -> None:
    """Also in bfloat16, in which transformers rounds the logits of these routers."""
    ours = replace(configs(16, 1, 1, 4, normalised)[0], scoring="softmax", scale=1.0)
    theirs = Qwen3MoeConfig(
        hidden_size=HIDDEN, num_experts=16, num_experts_per_tok=4, norm_topk_prob=normalised, num_hidden_layers=1
    )
    generator = torch.Generator().manual_seed(5)
    router = Qwen3MoeTopKRouter(theirs).to(dtype)
    with torch.no_grad():
        router.weight.copy_(torch.randn(16, HIDDEN, generator=generator) / HIDDEN**0.5)
        x = torch.randn(200, HIDDEN, generator=generator).to(dtype)
        _, expected_weights, expected = router(x)
        weights, chosen = select(x, router.weight, None, ours)
    order, expected_order = chosen.argsort(-1), expected.argsort(-1)
    assert chosen.gather(1, order).equal(expected.gather(1, expected_order))
    torch.testing.assert_close(
        weights.gather(1, order).to(dtype), expected_weights.gather(1, expected_order), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_experts_equal_transformers(tokens: int) -> None:
    _, theirs = configs(8, 1, 1, 3, True)
    generator = torch.Generator().manual_seed(tokens)
    experts = DeepseekV32Experts(theirs)
    with torch.no_grad():
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5)
        x = torch.randn(tokens, HIDDEN, generator=generator)
        chosen = torch.stack(
            [torch.randperm(7, generator=generator)[:3] for _ in range(tokens)]
        )  # the last expert gets no tokens
        weights = torch.rand(tokens, 3, generator=generator)
        expected = experts(x, chosen, weights)
        found = grouped_experts(x, weights, chosen, experts.gate_up_proj, experts.down_proj)
        parts = [
            grouped_experts(
                x,
                weights,
                chosen,
                experts.gate_up_proj[own],
                experts.down_proj[own],
                first=own.start,
                num_experts=8,
            )
            for own in (slice(0, 2), slice(2, 7), slice(7, 8))  # the last rank has no tokens
        ]
    assert float(expected.std()) > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(torch.stack(parts).sum(dim=0), expected, rtol=0, atol=4e-6)
    assert not parts[-1].any()


def test_result_of_a_token_does_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    gate_up, down = torch.randn(8, 2 * SIZE, HIDDEN, generator=generator), torch.randn(8, HIDDEN, SIZE)
    x, weights = torch.randn(40, HIDDEN, generator=generator), torch.rand(40, 3, generator=generator)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(40)])
    order = torch.randperm(40, generator=generator)
    whole = grouped_experts(x, weights, chosen, gate_up, down)
    shuffled = grouped_experts(x[order], weights[order], chosen[order], gate_up, down)
    torch.testing.assert_close(shuffled, whole[order], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("experts_here", [range(32), range(8, 24)])
def test_mixture_in_a_cuda_graph_routes_any_tokens(experts_here: range) -> None:
    """Nothing waits for the device, and experts can get other tokens, or none, in every replay."""
    ours, _ = configs(32, 8, 4, 6, True)
    generator = torch.Generator("cuda").manual_seed(3)

    def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device="cuda").mul_(shape[-1] ** -0.5)
        return values.to(dtype)

    gate_up, down = draw(len(experts_here), 2 * SIZE, HIDDEN), draw(len(experts_here), HIDDEN, SIZE)
    shared = draw(2 * SIZE, HIDDEN), draw(HIDDEN, SIZE)
    parameters = MoeParameters(
        router=draw(32, HIDDEN, dtype=torch.float32),
        router_bias=draw(32, dtype=torch.float32),
        experts=experts_here,
        gate_up=PlainWeight(gate_up),
        down=PlainWeight(down),
        shared=MlpParameters(PlainWeight(shared[0]), PlainWeight(shared[1])),
    )
    x = draw(5, HIDDEN)
    mixture(x, parameters, ours)  # compiles, which is forbidden during capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(x, parameters, ours)
    for _ in range(4):
        x.copy_(draw(5, HIDDEN) * 7)
        graph.replay()
        weights, experts = select(x, parameters.router, parameters.router_bias, ours)
        expected = _mlp(x, *shared)
        for row, column in itertools.product(range(5), range(6)):
            expert = int(experts[row, column]) - experts_here.start
            if not 0 <= expert < len(experts_here):
                continue
            part = _mlp(x[row], gate_up[expert], down[expert])
            expected[row] += weights[row, column] * part
        assert float(expected.std()) > 0.05
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


def _mlp(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x.float() @ gate_up.float().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.float().T
