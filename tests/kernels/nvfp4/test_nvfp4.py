"""Products and experts with weights in NVFP4, against float64 products with the expanded weights."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl, launcher
from pdserve.kernels.nvfp4.nvfp4 import FEW_ROWS, Nvfp4Matrix, nvfp4_experts, nvfp4_linear
from pdserve.kernels.packed4.group_format import E2M1
from tests.kernels.interpreter import INTERPRETED
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned
from tests.kernels.triton_programs import run_program

here = each_of(
    ("reference", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float16),
)
Place = tuple[Impl, torch.device, torch.dtype]
TOLERANCES = {torch.float32: 2e-5, torch.float16: 2**-8, torch.bfloat16: 2**-6}


def draw(rows: int, columns: int, generator: torch.Generator) -> Nvfp4Matrix:
    """Scales of all sizes, also subnormal ones, in which one misplaced changes the result."""
    weight = Nvfp4Matrix.allocate(rows, columns, device=torch.device("cpu"))
    values = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
    scales = torch.randint(1, 0x50, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    factors = torch.rand(rows, generator=generator) / columns**0.5
    weight.fill(values, scales.view(torch.float8_e4m3fn), factors)
    return weight


def draw_experts(count: int, rows: int, columns: int, generator: torch.Generator) -> Nvfp4Matrix:
    each = [draw(rows, columns, generator) for _ in range(count)]
    scales = torch.stack([one.scales.view(torch.uint8) for one in each]).view(torch.float8_e4m3fn)
    packed, factors = torch.stack([one.packed for one in each]), torch.stack([one.factors for one in each])
    return Nvfp4Matrix(packed, scales, factors, columns)


def moved(weight: Nvfp4Matrix, device: torch.device) -> Nvfp4Matrix:
    return Nvfp4Matrix(weight.packed.to(device), weight.scales.to(device), weight.factors.to(device), weight.columns)


def test_values_are_where_the_format_says() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = Nvfp4Matrix.allocate(3, 192, device=torch.device("cpu"))
    values = torch.randint(16, (3, 192), generator=generator, dtype=torch.uint8)
    scales = torch.rand(3, 12, generator=generator).to(torch.float8_e4m3fn)
    weight.fill(values, scales, torch.tensor(0.5))
    expected = [[E2M1[int(values[i, j])] * float(scales[i, j // 16]) / 2 for j in range(192)] for i in range(3)]
    assert weight.expanded().equal(torch.tensor(expected))
    assert weight[1:3].expanded().equal(torch.tensor(expected[1:3]))
    assert (weight.shape, weight.nbytes) == ((3, 192), 3 * (128 + 16 + 4))


@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "biased"), [(1, 96, 512, False), (5, 40, 192, True), (33, 192, 256, False)]
)
@pytest.mark.parametrize("gated", [False, True])
def test_products_equal_float64(here: Place, rows: int, out_size: int, in_size: int, biased: bool, gated: bool) -> None:
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(rows)
    weight = moved(draw(out_size, in_size, generator), device)
    x = torch.randn(rows, in_size, generator=generator).to(device, dtype)
    bias = torch.randn(out_size, generator=generator).to(device, dtype) if biased else None
    expected = x.double() @ weight.expanded().double().T + (0 if bias is None else bias.double())
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = gate * gate.sigmoid() * up
    with poisoned(impl):
        found = nvfp4_linear(x, weight, bias, gated=gated, impl=impl)
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit * float(expected.abs().max()))


def test_parts_of_rows_are_multiplied_like_matrices(here: Place) -> None:
    """In a fused matrix, of which a part is used alone."""
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(4)
    weight = moved(draw(96, 256, generator), device)
    x = torch.randn(2, 256, generator=generator).to(device, dtype)
    whole, part = nvfp4_linear(x, weight, impl=impl), nvfp4_linear(x, weight[32:80], impl=impl)
    torch.testing.assert_close(part, whole[:, 32:80], rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("columns", [192, 256])
def test_many_rows_are_multiplied_with_expanded_weights(here: Place, columns: int) -> None:
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(5)
    weight = moved(draw(72, columns, generator), device)
    x = torch.randn(FEW_ROWS + 6, columns, generator=generator).to(device, dtype)
    expected = x.double() @ weight.expanded().double().T
    with poisoned(impl):
        found = nvfp4_linear(x, weight, impl=impl)
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_values_and_scales_expand_exactly(dtype: torch.dtype) -> None:
    """Every product of a value and a scale, also of subnormal scales, is exact in 16 bits."""
    device = torch.device("cuda")
    weight = Nvfp4Matrix.allocate(0x7F, 256, device=device)
    values = torch.arange(256, dtype=torch.uint8, device=device).remainder(16).expand(0x7F, 256)
    scales = torch.arange(0x7F, dtype=torch.uint8, device=device).unsqueeze(1).expand(0x7F, 16).contiguous()
    weight.fill(values, scales.view(torch.float8_e4m3fn), 1.0)
    out = torch.empty(0x7F, 256, dtype=dtype, device=device)
    launcher("nvfp4.nvfp4_triton", "launch_expand")(weight, out)
    assert out.float().equal(weight.expanded())


@pytest.mark.parametrize(("tokens", "own"), [(1, slice(0, 5)), (5, slice(2, 4)), (40, slice(0, 5)), (3, slice(4, 5))])
def test_experts_equal_float64(here: Place, tokens: int, own: slice) -> None:
    """The last expert has no tokens; with 40, two tiles of an expert."""
    impl, device, dtype = here
    generator, hidden, size = torch.Generator().manual_seed(tokens), 128, 96
    gate_up = moved(draw_experts(5, 2 * size, hidden, generator), device)
    down = moved(draw_experts(5, hidden, size, generator), device)
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    weights = torch.rand(tokens, 2, generator=generator).to(device)
    busy = 4 if tokens < 40 else 2
    chosen = torch.stack([torch.randperm(busy, generator=generator)[:2] for _ in range(tokens)]).to(device)
    shared = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    expected = shared.double()
    for token, row in enumerate(chosen.tolist()):
        for choice, expert in enumerate(row):
            if own.start <= expert < own.stop:
                gate, up = (gate_up.expanded()[expert].double() @ x[token].double()).chunk(2)
                part = down.expanded()[expert].double() @ (gate * gate.sigmoid() * up)
                expected[token] += weights[token, choice].double() * part
    with poisoned(impl):
        found = nvfp4_experts(
            x,
            weights,
            chosen,
            gate_up[own],
            down[own],
            first=own.start,
            num_experts=5,
            shared=lambda: shared,
            impl=impl,
        )
    limit = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit * float(expected.abs().max()))


PROGRAM = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.nvfp4.nvfp4_triton import _expand, _nvfp4

TYPES = {"packed_ptr": "*u8", "scales_ptr": "*u8", "factors_ptr": "*fp32", "sums_ptr": "*fp32", "counters_ptr": "*i32"}
TYPES |= {f"{name}_ptr": "*i32" for name in ("order", "ends", "expert", "first")}


def compile_kernel(kernel, dtype, warps, **constants):
    signature, values, attributes = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[number,] = "constexpr", constants[name]
            continue
        signature[name] = TYPES.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        if name not in ("rows", "splits"):
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


common = {"WHOLE": True, "PRECISION": "tf32", "OVERLAP": True, "AHEAD": 512, "BIAS": False, "bias_ptr": None}
linear = {"GROUPED": False, "GATHER": False, "SCATTER": False, "PER_TOKEN": 1}
linear |= dict.fromkeys(("order_ptr", "ends_ptr", "expert_ptr", "first_ptr"))
few = compile_kernel(
    _nvfp4, "bf16", 2, HALF=128, ROWS=16, OUTPUTS=64, GATED=True, SPLIT=True, **common, **linear
)
assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in few
assert "fma.rn.bf16x2" in few
assert "cp.async.cg.shared.global" in few, "loads of weights are not pipelined"
experts = {"GROUPED": True, "GATHER": True, "SCATTER": False, "PER_TOKEN": 8}
many = compile_kernel(
    _nvfp4, "fp16", 8, HALF=64, ROWS=64, OUTPUTS=128, GATED=False, SPLIT=False, **common, **experts
)
assert "fma.rn.f16x2" in many
expand = compile_kernel(_expand, "bf16", 4, HALF=128, ROWS=32, OVERLAP=True)
assert "st.global.v4.b32" in expand
"""


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
def test_kernels_compile_for_hopper() -> None:
    code, errors = run_program(PROGRAM)
    assert code == 0, errors
