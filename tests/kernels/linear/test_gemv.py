"""The kernel for very few rows of x and weights in 16 bits (csrc/linear/gemv.cu), on a CPU and on a GPU."""

import itertools
from pathlib import Path

import pytest
import torch

from pdserve.kernels.backends import gemv_cuda
from pdserve.kernels.backends.gemv_cuda import divide, launch_gemv, suits_gemv
from pdserve.kernels.linear.swiglu import swiglu_reference
from tests.kernels.fibers import COMPILER, FiberKernels

BF16 = torch.bfloat16
LIMITS = {torch.bfloat16: 2**-7, torch.float16: 2**-9}
"""Relative to results of order 1: one rounding."""
H200 = {"processors": 132, "limit": 227 << 10}


def check(
    rows: int, outputs: int, columns: int, *, gated: bool, dtype: torch.dtype = BF16, device: str = "cpu"
) -> None:
    """Gated layers have a bias."""
    generator = torch.Generator().manual_seed(outputs + columns)
    weight = torch.randn(outputs * (2 if gated else 1), columns, generator=generator) / columns**0.5
    x, weight = (part.to(device, dtype) for part in (torch.randn(rows, columns, generator=generator), weight))
    bias = torch.randn(len(weight), generator=generator).to(device, dtype) if gated else None
    out = torch.full((rows, outputs), torch.nan, device=device, dtype=dtype)
    launch_gemv(x, weight, bias, out, gated=gated)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    limit = LIMITS[dtype]
    if gated:
        torch.testing.assert_close(out, swiglu_reference(expected.to(dtype)), rtol=4 * limit, atol=4 * limit)
    else:
        torch.testing.assert_close(out.double(), expected, rtol=limit, atol=limit)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> FiberKernels:
    return FiberKernels(tmp_path_factory.mktemp("fibers"))


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
class TestOnFibers:
    """Four multiprocessors, so that a block has several units."""

    @pytest.fixture(autouse=True)
    def on_fibers(self, kernels: FiberKernels, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gemv_cuda, "load_kernel", kernels.load)
        monkeypatch.setattr(gemv_cuda, "multiprocessors", lambda _: 4)
        monkeypatch.setattr(gemv_cuda, "shared_memory", lambda _: 227 << 10)

    @pytest.mark.parametrize(
        ("rows", "outputs", "columns", "gated"),
        [
            (1, 100, 4096, False),  # all weights fit into the rings
            (1, 203, 4096, False),  # rings are filled again; the last unit is partial
            (2, 45, 768, True),
            (4, 20, 1024, False),
            (3, 64, 8960, False),  # 20 chunks of 448 columns for 8 warps
        ],
    )
    def test_products(self, rows: int, outputs: int, columns: int, gated: bool) -> None:
        check(rows, outputs, columns, gated=gated)

    @pytest.mark.parametrize(
        "change",
        [
            ("lane() / 8 % 2 * kHalfBytes", "0"),  # the address of weights
            ("piece % (kPieces / 2) * 16", "0"),  # the address of x
            ("shared.sums[buffer][other][lane()];", "shared.sums[buffer][0][lane()];"),
        ],
    )
    def test_wrong_kernel_is_detected(
        self, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gemv_cuda, "load_kernel", FiberKernels(tmp_path, dict([change])).load)
        with pytest.raises(AssertionError):
            check(1, 16, 1024, gated=False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [(1, 5120, 2048), (1, 2048, 4096), (1, 128, 2048), (4, 6144, 2048), (2, 203, 768), (1, 12288, 4096), (2, 7, 3584)],
)
def test_layers_on_a_gpu(rows: int, outputs: int, columns: int, gated: bool, dtype: torch.dtype) -> None:
    x = torch.empty(rows, columns, device="cuda", dtype=dtype)
    if not suits_gemv(x, torch.empty(8, columns, device="cuda", dtype=dtype)):
        pytest.skip("needs a Hopper GPU")
    check(rows, outputs, columns, gated=gated, dtype=dtype, device="cuda")


@pytest.mark.gpu
def test_layers_of_a_graph_wait_for_the_previous_layer() -> None:
    """A layer starts, and copies its weights, while the previous layer runs (programmatic dependent launch)."""
    generator = torch.Generator("cuda").manual_seed(1)
    weights = [torch.randn(2048, 2048, device="cuda", generator=generator).to(BF16) / 45 for _ in range(3)]
    x = torch.zeros(1, 2048, device="cuda", dtype=BF16)
    if not suits_gemv(x, weights[0]):
        pytest.skip("needs a Hopper GPU")
    rows = [x, *(torch.zeros_like(x) for _ in range(9))]

    def chain() -> None:
        for number, (before, after) in enumerate(itertools.pairwise(rows)):
            launch_gemv(before, weights[number % 3], None, after, gated=False)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        x.copy_(torch.randn(x.shape, device="cuda", generator=generator))
        graph.replay()
        for number, (before, after) in enumerate(itertools.pairwise(rows)):
            expected = before.double() @ weights[number % 3].double().T
            torch.testing.assert_close(after.double(), expected, rtol=LIMITS[BF16], atol=LIMITS[BF16])


@pytest.mark.parametrize(("units", "columns", "blocks"), [(640, 2048, 214), (256, 4096, 86)])
def test_ring_holds_all_weights_of_small_layers(units: int, columns: int, blocks: int) -> None:
    """qkv and o of Qwen3-30B-A3B: a block has 3 units, and a warp has one chunk of each."""
    division = divide(units, 1, columns, **H200)
    assert (division.slots, division.blocks) == (3, blocks)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("units", [1, 16, 300, 5000])
@pytest.mark.parametrize("columns", [256, 512, 768, 1024, 2048, 2880, 3584, 4096, 8192])
def test_blocks_fit_into_shared_memory_of_their_multiprocessors(rows: int, units: int, columns: int) -> None:
    if rows * columns * 2 > 16 << 10:
        return
    division = divide(units, rows, columns, **H200)
    assert columns % division.columns == 0
    assert division.warps <= columns // division.columns, "a warp has no chunk"
    assert division.slots >= 1
    at_a_time = 8 // division.warps
    assert at_a_time * (division.shared_bytes + 1024) <= 228 << 10
    assert division.blocks <= min(units, at_a_time * 132)
