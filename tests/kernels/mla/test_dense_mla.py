"""dense_mla against float64, with a pool that is NaN except in rows of the sequences."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.mla.dense_mla import DenseMlaImpl, dense_mla
from pdserve.kernels.mla.dense_mla_cuda import launch_dense_mla_cuda
from pdserve.kernels.mla.tile_plan import TilePlan, plan_tiles
from tests.kernels import cuda_sources
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

LAYERS, LAYER = 3, 1
Where = tuple[Impl, torch.device, torch.dtype]

# Triton 3.6's interpreter converts an array of one element for a loop whose bound it loaded
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

where = each_of(
    ("auto", "cpu", torch.float32),
    ("triton", "cpu", torch.float32),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
)


class Batch:
    """Random sequences, (queries, keys) each, in scattered pages of a pool that is NaN elsewhere."""

    def __init__(
        self, lengths: list[tuple[int, int]], *, heads: int, dim: int, page_size: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
        self.lengths, self.page_size, self.heads = lengths, page_size, heads
        counts = [-(-keys // page_size) for _, keys in lengths]
        numbers = draw.sample(range(sum(counts) + 3), sum(counts))
        self.page_ids = [[numbers.pop() for _ in range(count)] for count in counts]
        pool = torch.full((sum(counts) + 3, LAYERS, page_size, dim), torch.nan, dtype=dtype)
        self.rows = []
        for (_, keys), ids in zip(lengths, self.page_ids, strict=True):
            self.rows.append(torch.randn(keys, dim, generator=generator).to(dtype))
            for position, row in enumerate(self.rows[-1]):
                pool[ids[position // page_size], LAYER, position % page_size] = row
        self.pool = pool
        tokens = sum(queries for queries, _ in lengths)
        self.query = torch.randn(tokens, heads, dim, generator=generator).to(dtype)

    def plan(self, device: torch.device, at_once: int | None = None) -> TilePlan:
        return plan_tiles(
            [queries for queries, _ in self.lengths],
            [keys for _, keys in self.lengths],
            self.page_ids,
            page_size=self.page_size,
            heads=self.heads,
            device=device,
            at_once=at_once,
        )

    def run(
        self, impl: DenseMlaImpl, device: torch.device, *, scale: float, value_dim: int, at_once: int | None
    ) -> torch.Tensor:
        with poisoned("auto" if impl == "cuda" else impl):
            return dense_mla(
                self.query.to(device),
                self.pool.to(device)[:, LAYER],
                self.plan(device, at_once),
                scale=scale,
                value_dim=value_dim,
                impl=impl,
            )

    def exact(self, *, scale: float, value_dim: int) -> torch.Tensor:
        parts, row = [], 0
        for (queries, keys), rows in zip(self.lengths, self.rows, strict=True):
            query, latent = self.query[row : row + queries].double(), rows.double()
            score = torch.einsum("qhd,kd->qhk", query, latent) * scale
            hidden = torch.arange(keys) > torch.arange(keys - queries, keys).unsqueeze(1)
            weights = score.masked_fill(hidden.unsqueeze(1), -torch.inf).softmax(-1)
            parts.append(weights @ latent[:, :value_dim])
            row += queries
        return torch.cat(parts)


@pytest.mark.parametrize("at_once", [1, 4])
@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "value_dim", "page_size"),
    [
        pytest.param([(1, 300), (1, 1), (1, 64)], 4, 48, 32, 16, id="decode"),
        pytest.param([(4, 4), (1, 40), (5, 150)], 20, 40, 24, 5, id="chunks-beside-decode"),
        pytest.param([(3, 150)], 3, 32, 32, 1, id="all-of-a-row-is-value"),
        pytest.param([(1, 140)], 70, 48, 32, 64, id="heads-in-several-blocks"),
    ],
)
def test_attention_equals_float64(
    lengths: list[tuple[int, int]], heads: int, dim: int, value_dim: int, page_size: int, at_once: int, where: Where
) -> None:
    """Whole tiles, and tiles that are divided into pieces of at least 128 keys."""
    impl, device, dtype = where
    batch = Batch(lengths, heads=heads, dim=dim, page_size=page_size, dtype=dtype, seed=heads)
    assert bool(batch.plan(device, at_once).splits.shape[1]) == (at_once > 1)
    out = batch.run(impl, device, scale=0.3, value_dim=value_dim, at_once=at_once)
    assert out.dtype == dtype
    # bfloat16: weights and the result are rounded to 8 bits; values are of order 1
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    expected = batch.exact(scale=0.3, value_dim=value_dim)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


def test_padding_rows_are_zero_and_unused_entries_have_no_effect(where: Where) -> None:
    """As in a CUDA graph: rows without keys, and entries of pieces and splits that are not in use."""
    impl, device, dtype = where
    batch = Batch([(1, 200), (1, 3)], heads=4, dim=32, page_size=8, dtype=dtype)
    plan = batch.plan(device, 2)
    pieces = np.zeros((7, plan.pieces.shape[1] + 3), dtype=np.int32)
    pieces[:, :-3] = plan.pieces.cpu().numpy()
    pieces[:, -3] = (0, 2, 1, 0, 0, 0, -1)
    splits = np.zeros((4, plan.splits.shape[1] + 2), dtype=np.int32)
    splits[:, :-2] = plan.splits.cpu().numpy()
    padded = TilePlan(
        tokens=4,
        page_size=8,
        tile_tokens=plan.tile_tokens,
        pages=plan.pages,
        pieces=torch.from_numpy(pieces).to(device),
        splits=torch.from_numpy(splits).to(device),
        num_partials=plan.num_partials + 4,
    )
    query = torch.cat((batch.query, torch.full((2, 4, 32), torch.nan, dtype=dtype)))
    with poisoned(impl):
        out = dense_mla(query.to(device), batch.pool.to(device)[:, LAYER], padded, scale=0.2, value_dim=24, impl=impl)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(
        out[:2].double().cpu(), batch.exact(scale=0.2, value_dim=24), rtol=tolerance, atol=tolerance
    )
    assert not out[2].any()


def test_scores_far_from_zero_do_not_overflow(where: Where) -> None:
    impl, device, dtype = where
    pages = torch.tensor([[[-100.0] * 16, [100.0] * 16], [[100.0] * 8 + [50.0] * 8, [0.0] * 16]], device=device)
    query = torch.full((2, 2, 16), 10.0, device=device).to(dtype)
    plan = plan_tiles([1, 1], [1, 3], [[0], [0, 1]], page_size=2, heads=2, device=device)
    out = dense_mla(query, pages.to(dtype), plan, scale=1.0, value_dim=16, impl=impl)
    assert (out[0] == -100.0).all()
    assert (out[1] == 100.0).all()  # 16,000 against 12,000 and -16,000


def test_invalid_arguments_are_refused() -> None:
    batch = Batch([(2, 9)], heads=4, dim=16, page_size=4, dtype=torch.float32)
    plan, pages = batch.plan(torch.device("cpu")), batch.pool[:, LAYER]
    with pytest.raises(ValueError, match="are not pages of 4 rows for"):
        dense_mla(batch.query, pages[:, :2], plan, scale=1.0, value_dim=8)
    with pytest.raises(ValueError, match="are not pages of 4 rows for"):
        dense_mla(batch.query, pages.half(), plan, scale=1.0, value_dim=8)
    with pytest.raises(ValueError, match="query has 1 tokens, the plan 2"):
        dense_mla(batch.query[:1], pages, plan, scale=1.0, value_dim=8)
    with pytest.raises(ValueError, match="value_dim must be between 1 and the row's 16, got 17"):
        dense_mla(batch.query, pages, plan, scale=1.0, value_dim=17)
    with pytest.raises(ValueError, match="does not support this: it needs a GPU of compute capability 9"):
        dense_mla(batch.query, pages, plan, scale=1.0, value_dim=8, impl="cuda")


def test_launch_fits_the_declaration_of_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.kernels.mla.dense_mla_cuda.load_kernel", cuda_sources.load_kernel)
    batch = Batch([(1, 200)], heads=16, dim=576, page_size=64, dtype=torch.bfloat16)
    plan = batch.plan(torch.device("cpu"), 1)
    partial, log_sum = torch.empty(4, 16, 512), torch.empty(4, 16)
    out = torch.empty(1, 16, 512, dtype=torch.bfloat16)
    with cuda_sources.compiling():
        launch_dense_mla_cuda(batch.query, batch.pool[:, LAYER], plan, out, partial, log_sum, scale=0.1)


@pytest.fixture
def hopper() -> torch.device:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
@pytest.mark.parametrize(
    ("lengths", "page_size"),
    [
        pytest.param([(1, 1)], 64, id="one-row"),
        pytest.param([(1, 64), (1, 65), (1, 5000)], 16, id="decode"),
        pytest.param([(1, 9000)], 1, id="one-long-sequence"),
        pytest.param([(70, 70), (1, 333), (33, 2000), (5, 129)], 64, id="chunks-beside-decode"),
    ],
)
def test_cuda_kernel_equals_float64(
    lengths: list[tuple[int, int]], heads: int, page_size: int, dtype: torch.dtype, hopper: torch.device
) -> None:
    batch = Batch(lengths, heads=heads, dim=576, page_size=page_size, dtype=dtype)
    expected = batch.exact(scale=0.1, value_dim=512)
    tolerance = 2**-6 if dtype == torch.bfloat16 else 2**-9
    for at_once in (None, 1, 7):
        out = batch.run("cuda", hopper, scale=0.1, value_dim=512, at_once=at_once)
        torch.testing.assert_close(out.double().cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 512}, "rows have 512 elements and 512 values, not 576 and 512"),
        ({"dtype": torch.float32}, "float32 is neither bfloat16 nor float16"),
        ({"scale": -1.0}, "scale -1.0 is not positive"),
    ],
)
def test_triton_computes_what_the_cuda_kernel_does_not_support(
    change: dict[str, Any], message: str, hopper: torch.device
) -> None:
    case: dict[str, Any] = {"dim": 576, "dtype": torch.bfloat16, "scale": 0.1, **change}
    batch = Batch([(3, 200), (1, 700)], heads=64, dim=case["dim"], page_size=64, dtype=case["dtype"])
    with pytest.raises(ValueError, match=message):
        batch.run("cuda", hopper, scale=case["scale"], value_dim=512, at_once=None)
    out = batch.run("auto", hopper, scale=case["scale"], value_dim=512, at_once=None)
    expected = batch.exact(scale=case["scale"], value_dim=512)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("impl", ["triton", "cuda"])
def test_rows_at_the_end_of_a_large_pool_are_read(heads: int, impl: DenseMlaImpl, hopper: torch.device) -> None:
    """A pool of more than 2^31 elements."""
    pool = torch.empty(1000, 61, 64, 576, dtype=torch.bfloat16, device=hopper)
    pages = pool[:, 60]
    pages.normal_()
    query = torch.randn(3, heads, 576, device=hopper).to(torch.bfloat16)
    ids = [list(range(999, 599, -1)), list(range(100)), [999]]
    plan = plan_tiles([1, 1, 1], [25600, 6400, 40], ids, page_size=64, heads=heads, device=hopper)
    with poisoned("auto"):
        out = dense_mla(query, pages, plan, scale=576**-0.5, value_dim=512, impl=impl)
    expected = dense_mla(query, pages, plan, scale=576**-0.5, value_dim=512, impl="reference")
    error = (out.float() - expected.float()).norm() / expected.float().norm()
    assert error < 6e-3  # rounding the result alone is 1.7e-3
