"""Experts with 4-bit weights, against float64 products with the expanded weights."""

from typing import Any, Literal, NamedTuple

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.moe.experts import grouped_experts
from pdserve.kernels.packed4.group_format import E2M1, GroupScaled
from tests.kernels.group_scaled import draw_mxfp4_experts, draw_packed_experts
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

here = each_of(
    ("reference", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float16),
)
Place = tuple[Impl, torch.device, torch.dtype]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}
EXPERTS, PER_TOKEN, LIMIT = 6, 2, 1.5


class Case(NamedTuple):
    x: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor
    gate_up: GroupScaled
    down: GroupScaled
    biases: dict[str, Any]

    def compute(self, impl: Impl, own: slice = slice(0, EXPERTS)) -> torch.Tensor:
        options: dict[str, Any] = {
            name: value[own] if isinstance(value, torch.Tensor) else value for name, value in self.biases.items()
        }
        with poisoned(impl):
            return grouped_experts(
                self.x,
                self.weights,
                self.chosen,
                self.gate_up[own],
                self.down[own],
                first=own.start,
                num_experts=EXPERTS,
                impl=impl,
                **options,
            )

    def expected(self, own: slice = slice(0, EXPERTS)) -> torch.Tensor:
        """In float64, token by token, by the definitions of experts.py and clamped_gate.py."""
        gate_up, down = self.gate_up.expanded().double(), self.down.expanded().double()
        result = torch.zeros(self.x.shape, dtype=torch.float64, device=self.x.device)
        for token, row in enumerate(self.chosen.tolist()):
            for choice, expert in enumerate(row):
                if expert not in range(own.start, own.stop):
                    continue
                both = gate_up[expert] @ self.x[token].double()
                if self.biases:
                    both += self.biases["gate_up_bias"][expert].double()
                    gate, up = both[::2].clamp(max=LIMIT), both[1::2].clamp(-LIMIT, LIMIT)
                    part = down[expert] @ ((up + 1) * gate * (1.702 * gate).sigmoid())
                    part += self.biases["down_bias"][expert].double()
                else:
                    gate, up = both.chunk(2)
                    part = down[expert] @ (gate * gate.sigmoid() * up)
                result[token] += self.weights[token, choice].double() * part
        return result


def draw(
    place: Place, tokens: int, kind: Literal["int4", "mxfp4"], *, hidden: int = 128, size: int = 96, group: int = 32
) -> Case:
    _, device, dtype = place
    generator = torch.Generator().manual_seed(tokens)
    # the last expert has no tokens; with many tokens, only the first two experts have any
    busy = EXPERTS - 1 if tokens < 40 else 2
    chosen = torch.stack([torch.randperm(busy, generator=generator)[:PER_TOKEN] for _ in range(tokens)])
    shapes = (EXPERTS, 2 * size, hidden), (EXPERTS, hidden, size)
    if kind == "int4":
        weights = [
            draw_packed_experts(*shape, generator=generator, group=group, dtype=dtype, device=device)
            for shape in shapes
        ]
        biases: dict[str, Any] = {}
    else:
        weights = [draw_mxfp4_experts(*shape, generator=generator, device=device) for shape in shapes]
        biases = {
            name: torch.randn(EXPERTS, rows, generator=generator).to(device, dtype)
            for name, rows in (("gate_up_bias", 2 * size), ("down_bias", hidden))
        }
        biases["limit"] = LIMIT
    return Case(
        torch.randn(tokens, hidden, generator=generator).to(device, dtype),
        torch.rand(tokens, PER_TOKEN, generator=generator).to(device),
        chosen.to(device),
        weights[0],
        weights[1],
        biases,
    )


@pytest.mark.parametrize(
    ("tokens", "kind", "own"),
    [
        (1, "int4", slice(0, EXPERTS)),
        (5, "int4", slice(2, 4)),
        (40, "int4", slice(0, EXPERTS)),  # two tiles of an expert
        (1, "mxfp4", slice(0, EXPERTS)),
        (5, "mxfp4", slice(2, 4)),
        (40, "mxfp4", slice(0, 1)),
    ],
)
def test_results_are_those_of_the_expanded_weights(
    here: Place, tokens: int, kind: Literal["int4", "mxfp4"], own: slice
) -> None:
    """96 columns are an odd number of groups."""
    case = draw(here, tokens, kind)
    found, limit = case.compute(here[0], own), TOLERANCES[here[2]]
    torch.testing.assert_close(found.double(), case.expected(own), rtol=limit, atol=4 * limit)


@pytest.mark.parametrize(("hidden", "size", "group"), [(1024, 128, 128), (64, 192, 64)])
def test_groups_of_other_sizes_and_divided_columns(here: Place, hidden: int, size: int, group: int) -> None:
    case = draw(here, 1, "int4", hidden=hidden, size=size, group=group)
    limit = TOLERANCES[here[2]]
    torch.testing.assert_close(case.compute(here[0]).double(), case.expected(), rtol=limit, atol=4 * limit)


def test_rank_whose_experts_have_no_tokens_adds_nothing(here: Place) -> None:
    assert not draw(here, 3, "mxfp4").compute(here[0], slice(EXPERTS - 1, EXPERTS)).any()


def test_mxfp4_values_are_where_the_format_says() -> None:
    generator = torch.Generator().manual_seed(2)
    values = torch.randint(16, (3, 96), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (3, 3), generator=generator, dtype=torch.uint8)
    weight = GroupScaled.allocate_mxfp4(3, 96, device=torch.device("cpu"))
    weight.fill(values, scales)
    expanded = weight.expanded()
    for row in range(3):
        for column in range(96):
            scale = 2.0 ** (int(scales[row, column // 32]) - 127)
            assert float(expanded[row, column]) == E2M1[int(values[row, column])] * scale
    assert weight.nbytes == 3 * 64 + 4 * 3  # 96 columns take the bytes of 128
