"""Products and experts with weights in NVFP4, against float64 products with the expanded weights."""

import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl, launcher
from pdserve.kernels.backends.few_rows_cuda import Tiles
from pdserve.kernels.nvfp4.nvfp4 import CUDA_ROWS, Nvfp4Matrix, nvfp4_linear, suits_cuda
from pdserve.kernels.nvfp4.nvfp4_experts import Nvfp4Experts, nvfp4_experts
from pdserve.kernels.packed4.group_format import E2M1
from tests.kernels.interpreter import INTERPRETED
from tests.kernels.nvfp4_weights import draw_nvfp4, draw_nvfp4_experts
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


@pytest.mark.parametrize("columns", [192, 512])
@pytest.mark.parametrize("kind", [Nvfp4Matrix, Nvfp4Experts])
def test_matrices_hold_what_they_were_filled_with(kind: type[Nvfp4Matrix | Nvfp4Experts], columns: int) -> None:
    """Also negative scales, and scales of 0."""
    generator = torch.Generator().manual_seed(2)
    weight = kind.allocate(3, columns, device=torch.device("cpu"))
    values = torch.randint(16, (3, columns), generator=generator, dtype=torch.uint8)
    scales = torch.randn(3, columns // 16, generator=generator).to(torch.float8_e4m3fn)
    scales[1, 3] = 0
    weight.fill(values, scales, torch.tensor(0.5))
    expected = [[E2M1[int(values[i, j])] * float(scales[i, j // 16]) / 2 for j in range(columns)] for i in range(3)]
    assert weight.expanded().equal(torch.tensor(expected))
    assert weight[1:3].expanded().equal(torch.tensor(expected[1:3]))
    padded = -(-columns // 128) * 128
    assert (weight.shape, weight.nbytes) == ((3, columns), 3 * (padded // 2 + padded // 16 + 4))


def test_bits_are_where_the_format_says() -> None:
    """The values of columns 48 to 55, group 3, and of columns 72 to 79, group 4; the scale of group 9."""
    weight = Nvfp4Matrix.allocate(1, 256, device=torch.device("cpu"))
    values = torch.zeros(1, 256, dtype=torch.uint8)
    values[0, 48:50] = torch.tensor([0b1101, 0b0010])  # in the first pair of a word
    values[0, 72 + 4 : 72 + 6] = torch.tensor([0b1000, 0b0111])  # in the third pair
    scales = torch.ones(1, 16)
    scales[0, 9] = 1.5
    weight.fill(values, scales.to(torch.float8_e4m3fn), 1.0)
    words = weight.packed.view(torch.int32)[0].tolist()
    found = {place: word & 0xFFFFFFFF for place, word in enumerate(words) if word}
    assert found == {12: 0x0080_8140, 3: 1 << 19 | 7 << 26}
    assert weight.scales.tolist() == [[[0xA8] * 6 + [0xAC] + [0xA8] * 9]]


@pytest.mark.parametrize(
    ("rows", "out_size", "in_size", "biased"),
    [(1, 96, 512, False), (5, 40, 192, True), (33, 192, 256, False), (3, 112, 208, True)],
)
@pytest.mark.parametrize("gated", [False, True])
def test_products_equal_float64(here: Place, rows: int, out_size: int, in_size: int, biased: bool, gated: bool) -> None:
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(rows)
    weight = draw_nvfp4(out_size, in_size, generator=generator, device=device)
    x = torch.randn(rows, in_size, generator=generator).to(device, dtype)
    bias = torch.randn(out_size, generator=generator).to(device, dtype) if biased else None
    on_cuda = impl == "triton" and suits_cuda(x, weight)
    assert on_cuda == (impl == "triton" and device.type == "cuda" and out_size % 16 == 0)
    expected = product(x, weight, bias, gated=gated)
    for tiles in (None, *((Tiles(outputs=32, warps=4, stages=3), Tiles(outputs=16)) if on_cuda else ())):
        with poisoned(impl):
            found = nvfp4_linear(x, weight, bias, gated=gated, tiles=tiles, impl=impl)
        limit = TOLERANCES[dtype]
        torch.testing.assert_close(found.double(), expected, rtol=limit, atol=limit * float(expected.abs().max()))


def product(x: torch.Tensor, weight: Nvfp4Matrix, bias: torch.Tensor | None, *, gated: bool) -> torch.Tensor:
    expected = x.double() @ weight.expanded().double().T + (0 if bias is None else bias.double())
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = gate * gate.sigmoid() * up
    return expected


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out_size", "in_size"), [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288)])
def test_layers_of_qwen3_8b(out_size: int, in_size: int, dtype: torch.dtype) -> None:
    """Both methods, with and without bias."""
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(in_size)
    weight = draw_nvfp4(out_size, in_size, generator=generator, device=device)
    bias = torch.randn(out_size, generator=generator).to(device, dtype)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        x, gated = torch.randn(rows, in_size, generator=generator).to(device, dtype), out_size == 24_576
        expected = product(x, weight, bias if rows % 4 else None, gated=gated)
        for method in ("cuda", "expand"):
            found = nvfp4_linear(x, weight, bias if rows % 4 else None, gated=gated, method=method)
            # gate and up are rounded before swiglu, and weights when they are expanded
            limit = TOLERANCES[dtype] / (2 if gated else 4)
            assert float((found.double() - expected).norm() / expected.norm()) < limit


def test_parts_of_rows_are_multiplied_like_matrices(here: Place) -> None:
    """In a fused matrix, of which a part is used alone."""
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(4)
    weight = draw_nvfp4(96, 256, generator=generator, device=device)
    x = torch.randn(2, 256, generator=generator).to(device, dtype)
    whole, part = nvfp4_linear(x, weight, impl=impl), nvfp4_linear(x, weight[32:80], impl=impl)
    torch.testing.assert_close(part, whole[:, 32:80], rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("columns", [192, 256])
def test_many_rows_are_multiplied_with_expanded_weights(here: Place, columns: int) -> None:
    impl, device, dtype = here
    generator = torch.Generator().manual_seed(5)
    weight = draw_nvfp4(72, columns, generator=generator, device=device)
    x = torch.randn(CUDA_ROWS + 6, columns, generator=generator).to(device, dtype)
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
    launcher("nvfp4.expand_triton", "launch_expand")(weight, out)
    assert out.float().equal(weight.expanded())


@pytest.mark.parametrize(("tokens", "own"), [(1, slice(0, 5)), (5, slice(2, 4)), (40, slice(0, 5)), (3, slice(4, 5))])
def test_experts_equal_float64(here: Place, tokens: int, own: slice) -> None:
    """The last expert has no tokens; with 40, two tiles of an expert."""
    impl, device, dtype = here
    generator, hidden, size = torch.Generator().manual_seed(tokens), 128, 96
    gate_up = draw_nvfp4_experts(5, 2 * size, hidden, generator=generator, device=device)
    down = draw_nvfp4_experts(5, hidden, size, generator=generator, device=device)
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

from pdserve.kernels.nvfp4.expand_triton import _expand
from pdserve.kernels.nvfp4.experts_triton import _experts

TYPES = {"words_ptr": "*i32", "packed_ptr": "*u8", "scales_ptr": "*u8", "factors_ptr": "*fp32", "sums_ptr": "*fp32"}
TYPES["counters_ptr"] = "*i32"
TYPES |= {f"{name}_ptr": "*i32" for name in ("order", "ends", "expert", "first")}


def compile_kernel(kernel, dtype, warps, **constants):
    signature, values, attributes = {}, {}, {}
    for number, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[number,] = "constexpr", constants[name]
            continue
        signature[name] = TYPES.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        if name != "splits":
            attributes[number,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=attributes)
    options = {"num_warps": warps, "num_stages": 3}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]


common = {"WHOLE": True, "PRECISION": "tf32", "OVERLAP": True, "GATHER": True, "SCATTER": False, "PER_TOKEN": 8}
few = compile_kernel(_experts, "bf16", 2, HALF=128, ROWS=16, OUTPUTS=64, GATED=True, SPLIT=True, **common)
assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in few
assert "fma.rn.bf16x2" in few
assert "cp.async.cg.shared.global" in few, "loads of weights are not pipelined"
many = compile_kernel(_experts, "fp16", 8, HALF=64, ROWS=64, OUTPUTS=128, GATED=False, SPLIT=False, **common)
assert "fma.rn.f16x2" in many
expand = compile_kernel(_expand, "bf16", 4, STEP=256, ROWS=16, OVERLAP=True)
assert "st.global.v4.b32" in expand
"""


@pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
def test_kernels_compile_for_hopper() -> None:
    code, errors = run_program(PROGRAM)
    assert code == 0, errors
