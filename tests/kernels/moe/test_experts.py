"""Grouped experts, with block-scaled and plain weights, against float64 and against the reference."""

from typing import NamedTuple

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.linear.fp8_format import Fp8Matrix, Weight
from pdserve.kernels.linear.quantise import quantise_reference, swiglu_quantise_reference
from pdserve.kernels.moe import experts as module
from pdserve.kernels.moe.experts import experts_reference, grouped_experts, has_few_rows, tile_rows
from tests.kernels.fp8_matrices import draw_block_scaled, draw_row_scaled, moved
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

here = each_of(
    ("reference", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.bfloat16),
)
Place = tuple[Impl, torch.device, torch.dtype]
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-6}
HIDDEN, SIZE, EXPERTS, PER_TOKEN = 200, 136, 8, 3  # last blocks are partial, and gate and up share one


class Case(NamedTuple):
    x: torch.Tensor
    weights: torch.Tensor
    chosen: torch.Tensor
    gate_up: Fp8Matrix
    down: Fp8Matrix

    def part(self, own: slice) -> tuple[Weight, Weight]:
        return self.gate_up[own], self.down[own]


def draw(tokens: int, device: torch.device, dtype: torch.dtype, *, last_idle: bool = False) -> Case:
    generator = torch.Generator().manual_seed(tokens)
    number = EXPERTS - last_idle
    chosen = torch.stack([torch.randperm(number, generator=generator)[:PER_TOKEN] for _ in range(tokens)])
    gate_up = draw_block_scaled(EXPERTS, 2 * SIZE, HIDDEN, generator=generator, row_group=8)
    down = draw_block_scaled(EXPERTS, HIDDEN, SIZE, generator=generator)
    for weight in (gate_up, down):
        weight.scales.nan_to_num_(nan=0.0)
    return Case(
        torch.randn(tokens, HIDDEN, generator=generator).to(device, dtype),
        torch.rand(tokens, PER_TOKEN, generator=generator).to(device),
        chosen.to(device),
        moved(gate_up, device),
        moved(down, device),
    )


def exact(case: Case, own: range) -> torch.Tensor:
    """In float64, with activations that are not quantised."""
    result = torch.zeros(case.x.shape, dtype=torch.float64, device=case.x.device)
    gate_up, down = case.gate_up.expanded().double(), case.down.expanded().double()
    for token, row in enumerate(case.chosen.tolist()):
        for choice, expert in enumerate(row):
            if expert in own:
                gate, up = (gate_up[expert] @ case.x[token].double()).chunk(2)
                part = down[expert] @ (gate * gate.sigmoid() * up)
                result[token] += case.weights[token, choice].double() * part
    return result


@pytest.mark.parametrize(
    ("tokens", "own"), [(1, range(8)), (5, range(2, 5)), (5, range(7, 8)), (21, range(8)), (50, range(2, 5))]
)
def test_few_tokens_are_exact(here: Place, tokens: int, own: range) -> None:
    impl, device, dtype = here
    case = draw(tokens, device, dtype, last_idle=True)
    assert has_few_rows(case.chosen.numel(), EXPERTS)
    part = slice(own.start, own.stop)
    with poisoned(impl):
        found = grouped_experts(
            case.x,
            case.weights,
            case.chosen,
            *case.part(part),
            first=own.start,
            num_experts=EXPERTS,
            impl=impl,
        )
    expected = exact(case, own)
    if own == range(7, 8):
        assert not found.any()
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("expanded", [False, True])
def test_the_shared_expert_is_added_last(here: Place, expanded: bool) -> None:
    impl, device, dtype = here
    case = draw(5, device, dtype)
    weights = [weight.expanded().to(dtype) if expanded else weight for weight in (case.gate_up, case.down)]
    shared = torch.randn_like(case.x)
    routed = grouped_experts(case.x, case.weights, case.chosen, *weights, impl=impl)
    with poisoned(impl):
        found = grouped_experts(case.x, case.weights, case.chosen, *weights, shared=lambda: shared, impl=impl)
    assert torch.equal(found, routed + shared)


@pytest.mark.parametrize(("tokens", "few_rows"), [(3, 32), (30, 32), (30, 4)])
def test_plain_weights_are_exact(here: Place, tokens: int, few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton kernel computes few tokens per expert, torch's grouped product more."""
    impl, device, dtype = here
    monkeypatch.setattr(module, "FEW_ROWS", few_rows)
    case = draw(tokens, device, dtype, last_idle=True)
    gate_up, down = (weight.expanded().to(dtype) for weight in (case.gate_up, case.down))
    for own in (slice(0, 8), slice(2, 5)):
        with poisoned(impl):
            found = grouped_experts(
                case.x,
                case.weights,
                case.chosen,
                gate_up[own],
                down[own],
                first=own.start,
                num_experts=EXPERTS,
                impl=impl,
            )
        expected = exact(case, range(own.start, own.stop))
        torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=2 * TOLERANCES[dtype])


@pytest.mark.parametrize("own", [range(8), range(2, 5)])
def test_many_tokens_equal_the_quantised_reference(here: Place, own: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lower limit for few tokens, because many tokens would take minutes in the interpreter."""
    impl, device, dtype = here
    monkeypatch.setattr(module, "FEW_ROWS", 4)
    if (impl, device.type) == ("triton", "cpu"):  # the interpreter rounds to fp8 wrongly
        monkeypatch.setattr(module, "quantise", lambda x, **_: quantise_reference(x))
        monkeypatch.setattr(module, "swiglu_quantise", lambda x, **_: swiglu_quantise_reference(x))
    case = draw(30, device, dtype)
    part = slice(own.start, own.stop)
    with poisoned(impl):
        found = grouped_experts(
            case.x,
            case.weights,
            case.chosen,
            *case.part(part),
            first=own.start,
            num_experts=EXPERTS,
            impl=impl,
        )
    expected = experts_reference(case.x, case.weights, case.chosen, *case.part(part), first=own.start, exact=False)
    error = float((found.double() - expected.double()).std() / expected.double().std())
    unquantised = float((exact(case, own) - expected.double()).std() / expected.double().std())
    assert unquantised > 0.02
    assert error < (0.01 if dtype == torch.bfloat16 else 1e-3)  # an element may be rounded to the next fp8


@pytest.mark.parametrize("few_rows", [32, 4])
def test_experts_with_a_scale_per_row(here: Place, few_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact and with quantised activations."""
    impl, device, dtype = here
    monkeypatch.setattr(module, "FEW_ROWS", few_rows)
    if (impl, device.type) == ("triton", "cpu"):  # the interpreter rounds to fp8 wrongly
        monkeypatch.setattr(module, "quantise", lambda x, **_: quantise_reference(x))
        monkeypatch.setattr(module, "swiglu_quantise", lambda x, **_: swiglu_quantise_reference(x))
    generator = torch.Generator().manual_seed(3)
    case = draw(15, device, dtype)._replace(
        gate_up=moved(draw_row_scaled(EXPERTS, 2 * SIZE, HIDDEN, generator=generator), device),
        down=moved(draw_row_scaled(EXPERTS, HIDDEN, SIZE, generator=generator), device),
    )
    with poisoned(impl):
        found = grouped_experts(*case, impl=impl)
    if few_rows == 32:
        expected, limit = exact(case, range(EXPERTS)), TOLERANCES[dtype]
    else:
        expected = experts_reference(*case, first=0, exact=False).double()
        limit = 0.01 if dtype == torch.bfloat16 else 1e-3
    assert float((found.double() - expected).std() / expected.std()) < limit


def test_one_matrix_is_expanded_and_one_is_fp8(here: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank's part of `down` begins inside a block, `down` is expanded, and activations are not quantised."""
    impl, device, dtype = here
    monkeypatch.setattr(module, "FEW_ROWS", 4)
    case = draw(30, device, dtype)
    with poisoned(impl):
        found = grouped_experts(*case[:4], case.down.expanded().to(dtype), impl=impl)
    torch.testing.assert_close(
        found.double(), exact(case, range(8)), rtol=TOLERANCES[dtype], atol=2 * TOLERANCES[dtype]
    )


def test_result_of_a_token_does_not_depend_on_the_batch(here: Place) -> None:
    impl, device, dtype = here
    case = draw(20, device, dtype)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(device)
    rows = case.x, case.weights, case.chosen
    whole = grouped_experts(*rows, case.gate_up, case.down, impl=impl)
    x, weights, chosen = (each[order].contiguous() for each in rows)
    shuffled = grouped_experts(x, weights, chosen, case.gate_up, case.down, impl=impl)
    torch.testing.assert_close(shuffled, whole[order], rtol=0, atol=1e-5 if impl == "reference" else 0)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "own"), [(1, range(256)), (64, range(256)), (32, range(32, 64)), (2048, range(32))])
def test_geometry_of_deepseek_on_a_gpu(tokens: int, own: range) -> None:
    """256 experts, of which a token selects 8; a rank has a part of all (intermediate size 256), or some whole."""
    device = torch.device("cuda", 0)
    generator = torch.Generator().manual_seed(tokens)
    size = 256 if len(own) == 256 else 2048
    weights = [
        Fp8Matrix(
            (torch.randn(len(own), rows, columns, device=device) * 64).clamp_(-448, 448).to(torch.float8_e4m3fn),
            (torch.rand(len(own), rows // 128, -(-columns // 512) * 4, device=device) + 0.5) / 64 / columns**0.5,
        )
        for rows, columns in ((2 * size, 1024), (1024, size))
    ]
    x = torch.randn(tokens, 1024, generator=generator).to(device, torch.bfloat16)
    chosen = torch.stack([torch.randperm(256, generator=generator)[:8] for _ in range(tokens)]).to(device)
    factors = torch.rand(tokens, 8, generator=generator).to(device)
    found = grouped_experts(x, factors, chosen, *weights, first=own.start, num_experts=256)
    few = has_few_rows(chosen.numel(), 256)
    expected = experts_reference(x, factors, chosen, weights[0], weights[1], first=own.start, exact=few)
    errors = (found.float() - expected.float()).abs()
    assert errors.mean() < 2**-8  # tensor cores add fp8 products with about 14 bits
    # sums in another order may round to the next fp8 number before the second product
    assert errors.max() < (2**-6 if few else 2**-4) * expected.abs().max()


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    sizes = [tile_rows(8 * tokens, 256) for tokens in (1, 64, 256, 1024, 2048, 8192)]
    assert sizes == [16, 16, 16, 64, 64, 128]


def test_mismatched_shapes_are_refused() -> None:
    case = draw(2, torch.device("cpu"), torch.float32)
    with pytest.raises(ValueError, match="contiguous rows for experts"):
        grouped_experts(case.x[:, :100].contiguous(), *case[1:], impl="triton")
