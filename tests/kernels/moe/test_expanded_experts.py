"""Experts whose 4-bit weights are expanded, against the reference of experts.py."""

from typing import Any, Literal

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.moe.expanded_experts import EXPANDED_ROWS, expanded_results, expansion_pays
from pdserve.kernels.moe.experts import experts_reference
from pdserve.kernels.moe.router.routing import route_reference
from tests.kernels.group_scaled import draw_mxfp4_experts, draw_packed_experts
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

here = each_of(
    ("reference", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.bfloat16),
)
Place = tuple[Impl, torch.device, torch.dtype]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-5}
EXPERTS, PER_TOKEN, TOKENS, HIDDEN, SIZE = 6, 2, 14, 160, 192


@pytest.mark.parametrize(
    ("kind", "biased", "limit", "own", "scratch_bytes"),
    [
        ("int4", False, None, slice(0, EXPERTS), 1 << 30),
        ("int4", False, None, slice(2, 5), 1),  # parts of 128 outputs, and the rest
        ("int4", True, None, slice(0, EXPERTS), 1),
        ("mxfp4", True, 1.5, slice(0, EXPERTS), 1 << 30),
        ("mxfp4", True, 1.5, slice(1, EXPERTS), 1),
        ("mxfp4", False, None, slice(EXPERTS - 1, EXPERTS), 1 << 30),  # no rows at all
    ],
)
def test_results_are_those_of_the_reference(
    here: Place, kind: Literal["int4", "mxfp4"], *, biased: bool, limit: float | None, own: slice, scratch_bytes: int
) -> None:
    """Experts have rows, or none. 160 columns are an odd number of groups. Rows of experts on other ranks are NaN."""
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(own.start)
    shapes = (EXPERTS, 2 * SIZE, HIDDEN), (EXPERTS, HIDDEN, SIZE)
    if kind == "int4":
        options: dict[str, Any] = {"generator": generator, "group": 32, "dtype": dtype, "device": device}
        gate_up, down = (draw_packed_experts(*shape, **options)[own] for shape in shapes)
    else:
        gate_up, down = (draw_mxfp4_experts(*shape, generator=generator, device=device)[own] for shape in shapes)
    gate_up_bias, down_bias = (
        torch.randn(shape[:2], generator=generator).to(device, dtype)[own] if biased else None for shape in shapes
    )
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(device, dtype)
    weights = torch.rand(TOKENS, PER_TOKEN, generator=generator).to(device)
    busy = torch.tensor([0, 2, 3, 4])  # experts 1 and 5 have no tokens
    chosen = torch.stack([busy[torch.randperm(4, generator=generator)[:PER_TOKEN]] for _ in range(TOKENS)]).to(device)

    routing = route_reference(chosen, own.start, len(gate_up), 16)
    end = int(routing.ends[-1])
    rows = x[routing.order // PER_TOKEN]
    rows[end:] = torch.nan
    with poisoned(impl if device.type == "cpu" else "reference"):
        results = expanded_results(
            rows, routing.ends, gate_up, down, gate_up_bias, down_bias, limit, scratch_bytes=scratch_bytes, impl=impl
        )
    assert results.shape == rows.shape
    assert results.dtype == dtype
    numbers = routing.order[:end].long()
    found = torch.zeros(TOKENS, HIDDEN, device=device)
    parts = results[:end].float() * weights.flatten()[numbers, None]
    found.index_add_(0, numbers // PER_TOKEN, parts)
    expected = experts_reference(
        x,
        weights,
        chosen,
        gate_up,
        down,
        first=own.start,
        exact=True,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        limit=limit,
    )
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found, expected.float(), rtol=tolerance, atol=4 * tolerance)
    assert bool(found.any()) == (end > 0)


def test_no_rows(here: Place) -> None:
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(1)
    gate_up, down = (
        draw_mxfp4_experts(2, *shape, generator=generator, device=device) for shape in ((128, 32), (32, 64))
    )
    ends = torch.zeros(2, dtype=torch.int32, device=device)
    rows = torch.empty(0, 32, device=device, dtype=dtype)
    assert expanded_results(rows, ends, gate_up, down, impl=impl).shape == (0, 32)


def test_unsuitable_arguments_are_refused() -> None:
    generator, cpu = torch.Generator().manual_seed(1), torch.device("cpu")
    gate_up, down = (draw_mxfp4_experts(2, *shape, generator=generator, device=cpu) for shape in ((128, 32), (32, 64)))
    rows, ends = torch.zeros(3, 32), torch.tensor([1, 3], dtype=torch.int32)
    with pytest.raises(ValueError, match="must be contiguous, for experts"):
        expanded_results(torch.zeros(3, 64), ends, gate_up, down)
    with pytest.raises(ValueError, match="int32 ends of 2 experts"):
        expanded_results(rows, ends.long(), gate_up, down)
    assert not expansion_pays(1 << 20, 8, torch.bfloat16, cpu)


@pytest.mark.gpu
def test_many_rows_per_expert_are_expanded_on_hopper() -> None:
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs a GPU of compute capability 9")
    assert expansion_pays(8 * EXPANDED_ROWS, 8, torch.bfloat16, device)
    assert not expansion_pays(8 * EXPANDED_ROWS - 1, 8, torch.bfloat16, device)
    assert not expansion_pays(8 * EXPANDED_ROWS, 8, torch.float16, device)
