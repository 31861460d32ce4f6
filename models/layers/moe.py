"""The feed-forward part of a layer: a gated MLP, or a mixture of experts whose router selects some experts per token.

    weights, selected  =  select_experts(x @ router.T)      kernels/moe/router/selection.py
    mixture(x)         =  sum over the selected e of weights[e] * mlp_e(x)  +  shared_mlp(x), if there is one

With tensor parallelism a rank has a part of every expert's width or, with expert parallelism, whole experts; in both
cases its result is a part of the sum. On CUDA, with experts in fp8, 4 bits or bfloat16, the host does not wait for the
device, so a CUDA graph can capture the computation. For other dtypes, torch's fallback of the grouped product waits.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...kernels.backends.streams import beside_if_few
from ...kernels.linear.float_linear import float_linear
from ...kernels.linear.linear import linear
from ...kernels.linear.rms_norm import add_rms_norm
from ...kernels.linear.row_tiles import RowTiles
from ...kernels.moe.router.norm_route_cuda import add_norm_route, suits_norm_route
from ...kernels.moe.router.routing import select_and_route
from ...kernels.moe.router.selection import SelectionRule, select_experts
from ..config.moe import MoeConfig
from ..weights.weight import AnyWeight


@dataclass(frozen=True)
class MlpParameters:
    """A gated MLP; `size` is this rank's part of its width."""

    gate_up: AnyWeight  # [2 * size, hidden]
    down: AnyWeight  # [hidden, size]
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gelu: bool = False  # its gate is GELU (tanh) instead of SiLU; not with quantised weights


@dataclass(frozen=True)
class MoeParameters:
    """The router of all E experts, this rank's experts, and the shared expert, if any; `size` is the rank's part of an
    expert's width. A router with a `router_bias` computes in float32, other routers in the model's dtype.
    """

    router: torch.Tensor  # [E, hidden]
    router_bias: torch.Tensor | None  # [E] float32
    experts: range  # which of the E
    gate_up: AnyWeight  # [len(experts), 2 * size, hidden]
    down: AnyWeight  # [len(experts), hidden, size]
    shared: MlpParameters | None
    logit_bias: torch.Tensor | None = None  # [E], of the router's product
    gate_up_bias: torch.Tensor | None = None  # [len(experts), 2 * size]
    down_bias: torch.Tensor | None = None  # [len(experts), hidden], on one rank of those that share an expert

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can capture it."""
        return self.gate_up.capturable


def feed_forward(x: torch.Tensor, parameters: MlpParameters | MoeParameters, moe: MoeConfig | None) -> torch.Tensor:
    """x [T, hidden] through the MLP or the mixture of a layer: this rank's part of the sum."""
    if isinstance(parameters, MlpParameters):
        return mlp(x, parameters)
    assert moe is not None
    return mixture(x, parameters, moe)


def add_feed_forward(
    x: torch.Tensor,
    y: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    parameters: MlpParameters | MoeParameters,
    moe: MoeConfig | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + y [T, hidden], and `feed_forward` of its norm."""
    if isinstance(parameters, MoeParameters) and parameters.shared is None and parameters.router_bias is None:
        assert moe is not None
        rule = selection_rule(moe)
        router = parameters.router, parameters.logit_bias, rule
        if suits_norm_route(x, norm, *router) and _routed_rows(x, parameters, moe) is None:
            total, normed, weights, experts = add_norm_route(x, y, norm, eps, *router)
            return total, _experts(normed, parameters, moe, weights, experts)
    total, normed = add_rms_norm(x, y, norm, eps)
    return total, feed_forward(normed, parameters, moe)


def mlp(x: torch.Tensor, parameters: MlpParameters) -> torch.Tensor:
    """x [T, hidden] through one MLP."""
    biases = parameters.gate_up_bias, parameters.down_bias
    return parameters.gate_up.mlp(x, parameters.down, *biases, gelu=parameters.gelu)


def mixture(x: torch.Tensor, parameters: MoeParameters, config: MoeConfig) -> torch.Tensor:
    """x [T, hidden] through the selected experts and the shared expert, which runs concurrently if T is small."""
    shared = None
    if parameters.shared is not None:
        shared = beside_if_few(x, functools.partial(mlp, x, parameters.shared))
    return _experts(x, parameters, config, *route(x, parameters, config), shared=shared)


def _experts(
    x: torch.Tensor,
    parameters: MoeParameters,
    config: MoeConfig,
    weights: torch.Tensor,
    experts: torch.Tensor,
    routing: RowTiles | None = None,
    *,
    shared: Callable[[], torch.Tensor] | None = None,
) -> torch.Tensor:
    return parameters.gate_up.experts(
        x,
        weights,
        experts,
        parameters.down,
        first=parameters.experts.start,
        num_experts=len(parameters.router),
        gate_up_bias=parameters.gate_up_bias,
        down_bias=parameters.down_bias,
        limit=config.limit,
        shared=shared,
        routing=routing,
    )


def route(
    x: torch.Tensor, parameters: MoeParameters, config: MoeConfig
) -> tuple[torch.Tensor, torch.Tensor, RowTiles | None]:
    """The weights [T, k] float32 and numbers [T, k] of each token's experts, in no particular order; and the tokens
    sorted by expert, if the kernel of the experts needs them sorted.
    """
    logits, rule = router_logits(x, parameters.router, parameters.logit_bias), selection_rule(config)
    rows = _routed_rows(x, parameters, config)
    if rows is None:
        return *select_experts(logits, parameters.router_bias, rule), None
    own = parameters.experts.start, len(parameters.gate_up)
    return select_and_route(logits, parameters.router_bias, rule, *own, rows)


def _routed_rows(x: torch.Tensor, parameters: MoeParameters, config: MoeConfig) -> int | None:
    """The rows of the tiles into which the tokens are sorted; None if they are not sorted."""
    return parameters.gate_up.routing_rows(
        x,
        config.experts_per_token,
        parameters.down,
        num_experts=len(parameters.router),
        plain=parameters.gate_up_bias is None and parameters.down_bias is None and config.limit is None,
        limit=config.limit,
    )


def router_logits(x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """[T, E] of x [T, hidden]: exact if the router is float32 and has no bias."""
    return float_linear(x, router) if router.dtype == torch.float32 and bias is None else linear(x, router, bias)


def selection_rule(config: MoeConfig) -> SelectionRule:
    return SelectionRule(
        config.experts_per_token, config.num_groups, config.groups_per_token, config.normalised, config.scale
    )
