"""index_topk against a loop over tokens and keys. Values are small integers, so that scores are exact and tie often.

Scales of fp8 are powers of two, of very different size, so that scores stay exact.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.kernels.backends.dispatch import Impl
from pdserve.kernels.dsa.fp8_rows import FP8
from pdserve.kernels.dsa.index_plan import IndexPlan, IndexScales, select_top_reference
from pdserve.kernels.dsa.index_topk import index_topk
from tests.kernels.dsa.padded_plan import padded_plan
from tests.kernels.places import each_of
from tests.kernels.poison import poisoned

LAYERS, LAYER = 3, 1
CPU = torch.device("cpu")
Where = tuple[Impl, torch.device, torch.dtype]

# Triton 3.6's interpreter converts an array of one element for a loop whose bound it loaded
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

where = each_of(
    ("auto", "cpu", torch.float32),
    ("auto", "cpu", torch.bfloat16),
    ("auto", "cpu", FP8),
    ("triton", "cpu", torch.float32),
    ("triton", "cpu", FP8),
    ("reference", "cuda", torch.bfloat16),
    ("triton", "cuda", torch.float32),
    ("triton", "cuda", torch.bfloat16),
    ("triton", "cuda", FP8),
)


class Case:
    """Random sequences in a page-major pool that is NaN outside their tokens."""

    def __init__(
        self,
        query_lens: list[int],
        kv_lens: list[int],
        *,
        page_size: int,
        heads: int = 5,
        dim: int = 16,
        where: Where = ("auto", CPU, torch.float32),
    ) -> None:
        self.impl, device, dtype = where
        generator = torch.Generator().manual_seed(sum(kv_lens) + page_size)

        def small(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float()

        needed = [-(-kv_len // page_size) for kv_len in kv_lens]
        ids = iter((torch.randperm(sum(needed) + 3, generator=generator)).tolist())
        self.pages = [[next(ids) for _ in range(count)] for count in needed]
        self.query_lens, self.kv_lens, self.page_size = query_lens, kv_lens, page_size
        self.keys = [small(kv_len, dim) for kv_len in kv_lens]
        self.query = small(sum(query_lens), heads, dim)
        self.weights = torch.randint(-4, 5, (sum(query_lens), heads), generator=generator) / 4
        pool = torch.full((sum(needed) + 3, LAYERS, page_size, dim), torch.nan)
        for pages, keys in zip(self.pages, self.keys, strict=True):
            for position, key in enumerate(keys):
                pool[pages[position // page_size], LAYER, position % page_size] = key
        self.pool = pool.to(device, dtype)
        self.query_scales, self.key_scales = torch.ones(len(self.query), heads), torch.full(pool.shape[:3], torch.nan)
        if dtype == FP8:
            self.query_scales = 2.0 ** torch.randint(-3, 4, self.query_scales.shape, generator=generator)
        for pages, keys in zip(self.pages, self.keys, strict=True):
            for position, key in enumerate(keys):
                scale = 2.0 ** int(torch.randint(-3, 4, (), generator=generator)) if dtype == FP8 else 1.0
                self.key_scales[pages[position // page_size], LAYER, position % page_size] = scale
                key *= scale
        self.device, self.dtype = device, dtype
        self.plan = IndexPlan.build(query_lens, kv_lens, self.pages, page_size=page_size, device=device)

    def result(self, k: int, plan: IndexPlan | None = None) -> list[list[int]]:
        scales = None
        if self.dtype == FP8:
            padded = torch.nn.functional.pad(self.query_scales, (0, 0, 0, len(self.query) - len(self.query_scales)))
            scales = IndexScales(
                padded.to(self.device), self.key_scales[:, LAYER : LAYER + 1].unsqueeze(-1).to(self.device)
            )
        with poisoned(self.impl):
            out = index_topk(
                self.query.to(self.device, self.dtype),
                self.weights.to(self.device),
                self.pool[:, LAYER : LAYER + 1],
                plan or self.plan,
                k,
                scales=scales,
                impl=self.impl,
            )
        assert out.dtype == torch.int32
        rows: list[list[int]] = out.tolist()
        return rows

    def expected(self, k: int) -> list[list[int]]:
        rows = []
        token = 0
        for query_len, kv_len, keys in zip(self.query_lens, self.kv_lens, self.keys, strict=True):
            for position in range(kv_len - query_len, kv_len):
                query = self.query[token].double() * self.query_scales[token].double().unsqueeze(1)
                products = (keys[: position + 1].double() @ query.T).tolist()
                weights = self.weights[token].tolist()
                scores = [sum(w * max(p, 0.0) for w, p in zip(weights, of_key, strict=True)) for of_key in products]
                best = sorted(range(position + 1), key=lambda s: (-scores[s], s))[:k]
                rows.append(sorted(best) + [-1] * (k - len(best)))
                token += 1
        return rows


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "k"),
    [
        pytest.param([1, 1, 1], [150, 7, 131], 20, id="decode"),
        pytest.param([5, 1, 3], [5, 300, 140], 17, id="chunks-and-decode"),
        pytest.param([4], [66], 64, id="around-k"),
        pytest.param([2, 1], [9, 40], 200, id="all-seen"),
        pytest.param([3], [129], 1, id="one"),
    ],
)
def test_best_positions_of_every_token_are_selected(
    query_lens: list[int], kv_lens: list[int], k: int, page_size: int, where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(query_lens, kv_lens, page_size=page_size, where=where)
    assert case.result(k) == case.expected(k)
    if where[0] == "triton":
        monkeypatch.setattr("pdserve.kernels.dsa.index_topk_triton._FEW_TOKENS", 0)  # uses the kernel for many tokens
        assert case.result(k) == case.expected(k)


def test_odd_numbers_of_heads_and_dimensions_are_supported(where: Where) -> None:
    case = Case([2, 1], [90, 33], page_size=7, heads=17, dim=24, where=where)
    assert case.result(9) == case.expected(9)


def test_lower_position_wins_ties_and_zeros_are_equal(where: Where) -> None:
    case = Case([1], [140], page_size=16, where=where)
    case.query.fill_(1.0)
    case.weights = torch.tensor([[-1.0, -1.0, 1.0, -1.0, -1.0]])  # 0 from relu, times -1, is -0
    case.pool.fill_(-1.0)
    case.pool[case.pages[0][6], LAYER, 3] = -2.0  # also gives 0
    assert case.result(10) == [list(range(10))]
    case.pool[case.pages[0][6], LAYER, 3] = 1.0  # the sum of the weights is negative: the lowest score
    case.pool[case.pages[0][0], LAYER, 4] = 1.0
    assert case.result(10) == [[0, 1, 2, 3, 5, 6, 7, 8, 9, 10]]
    assert case.result(139) == [[*range(99), *range(100, 140)]]


def test_padded_plan_is_filled_in_place(where: Where) -> None:
    case = Case([1, 1, 1], [70, 3, 41], page_size=16, where=where)
    plan = padded_plan(5, max_pages=9, page_size=16, device=case.device)
    case.query = torch.cat((case.query, torch.full((2, 5, 16), torch.nan)))
    case.weights = torch.cat((case.weights, torch.full((2, 5), torch.nan)))
    assert case.result(8, plan) == [[-1] * 8] * 5
    plan.page_table[:3, : case.plan.page_table.shape[1]] = case.plan.page_table
    plan.visible[:3] = case.plan.visible
    assert case.result(8, plan) == case.expected(8) + [[-1] * 8] * 2


def test_many_queries_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch, where: Where) -> None:
    if where[0] == "triton":
        from pdserve.kernels.dsa import index_topk_triton

        monkeypatch.setattr(index_topk_triton, "_BUFFER_BYTES", 4 * 256 * 3)  # three of nine rows at a time
    else:
        monkeypatch.setattr("pdserve.kernels.dsa.index_topk._REFERENCE_PRODUCTS", 5 * 200 * 3)
    case = Case([8, 1], [200, 60], page_size=16, where=where)
    assert case.result(12) == case.expected(12)


@given(
    st.lists(st.lists(st.sampled_from([-2.0, -0.0, 0.0, 0.5, 3.0]), min_size=7, max_size=7), min_size=1, max_size=4),
    st.lists(st.integers(0, 7), min_size=4, max_size=4),
    st.integers(1, 9),
)
def test_selection_is_a_stable_sort(rows: list[list[float]], seen: list[int], k: int) -> None:
    visible = torch.tensor(seen[: len(rows)], dtype=torch.int32)
    found = select_top_reference(torch.tensor(rows), visible, k).tolist()
    for row, n, positions in zip(rows, visible.tolist(), found, strict=True):
        best = sorted(sorted(range(n), key=lambda s: -row[s])[:k])
        assert positions == best + [-1] * (k - len(best))


def test_positions_are_mapped_to_flat_rows() -> None:
    plan = IndexPlan.build([2, 1], [9, 5], [[8, 0, 3], [7, 5]], page_size=4, device=CPU)
    positions = torch.tensor([[0, 3, 4, 7], [8, 1, -1, -1], [4, -1, 0, 2]], dtype=torch.int32)
    rows = plan.flat_rows(positions)
    assert rows.dtype == torch.int32
    assert rows.tolist() == [[32, 35, 0, 3], [12, 33, -1, -1], [20, -1, 28, 30]]
    assert plan.part(slice(1, 3)).flat_rows(positions[1:]).equal(rows[1:])


def test_invalid_arguments_are_refused() -> None:
    plan = IndexPlan.build([1], [3], [[1]], page_size=4, device=CPU)
    query, weights, keys = torch.zeros(1, 2, 8), torch.zeros(1, 2), torch.zeros(2, 1, 4, 8)
    with pytest.raises(ValueError, match="do not fit a plan of 1 tokens"):
        index_topk(torch.zeros(2, 2, 8), torch.zeros(2, 2), keys, plan, 1)
    with pytest.raises(ValueError, match="one float32 per token and head"):
        index_topk(query, weights.double(), keys, plan, 1)
    with pytest.raises(ValueError, match="do not hold one"):
        index_topk(query, weights, keys.half(), plan, 1)
    with pytest.raises(ValueError, match="in pages of 4"):
        index_topk(query, weights, torch.zeros(2, 1, 5, 8), plan, 1)
    with pytest.raises(ValueError, match=r"got torch\.float8_e4m3fn without scales"):
        index_topk(query.to(FP8), weights, keys.to(FP8), plan, 1)
    scales = IndexScales(weights, torch.ones(2, 1, 4, 1))
    with pytest.raises(ValueError, match=r"others have none; got torch\.float32 with scales"):
        index_topk(query, weights, keys, plan, 1, scales=scales)
    with pytest.raises(ValueError, match=r"\[1, 1\] and \[2, 1, 4, 1\] are not one per query \[1, 2\]"):
        index_topk(query.to(FP8), weights, keys.to(FP8), plan, 1, scales=scales._replace(query=weights[:, :1]))
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        index_topk(query, weights, keys, plan, 0)
    two = IndexPlan.build([2], [3], [[1]], page_size=4, device=CPU)
    with pytest.raises(ValueError, match="rows of a plan of 2 tokens do not fit 1"):
        index_topk(query, weights, keys, plan, 1, rows_of=two)
    with pytest.raises(ValueError, match="does not fit 1 pages of 4"):
        IndexPlan.build([1], [5], [[1]], page_size=4, device=CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 2, 4])
@pytest.mark.parametrize("copies", [1, 24])
@pytest.mark.parametrize("values", ["random", "few", "equal"])
@pytest.mark.parametrize("k", [1, 2048])
def test_gpu_selection_equals_the_reference(
    k: int, values: str, copies: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 rows, which run at the same time, and 168, which do not."""
    from pdserve.kernels.dsa import index_topk_triton

    monkeypatch.setattr(index_topk_triton, "blocks_per_row", lambda *_: blocks)
    seen = [0, 1, k, k + 1, 16384, 40001, 131072]
    visible = torch.tensor(seen * copies, dtype=torch.int32, device="cuda")
    scores = torch.randn(len(visible), max(seen), device="cuda") * torch.logspace(-9, 9, max(seen), device="cuda")
    if values == "few":
        scores = scores.sign() * torch.randint(3, scores.shape, device="cuda")
    elif values == "equal":
        scores.fill_(-0.5)
    out = torch.full((len(visible), k), -77, dtype=torch.int32, device="cuda")
    index_topk_triton.launch_select_top(scores, visible, out)
    positions = select_top_reference(scores, visible, k)
    assert out.equal(positions)
    table = torch.stack([torch.randperm(5000, device="cuda") for _ in range(3)]).int()
    sequence = torch.randint(3, visible.shape, dtype=torch.int32, device="cuda")
    plan = IndexPlan(48, table, sequence, visible)
    index_topk_triton.launch_select_top(scores, visible, out, plan)
    assert out.equal(plan.flat_rows(positions))


@pytest.mark.gpu
def test_graph_of_the_real_geometry_uses_the_current_plan() -> None:
    """64 heads of 128, k = 2048."""
    device, k, page_size, pages_each = torch.device("cuda"), 2048, 64, 150
    pool = torch.randint(-2, 3, (700, 4, page_size, 128), device=device).to(torch.bfloat16)
    keys = pool[:, 2:3]
    query = torch.randint(-2, 3, (6, 64, 128), device=device).to(torch.bfloat16)
    weights = torch.randint(-32, 33, (6, 64), device=device) / 64
    plan = padded_plan(6, max_pages=pages_each, page_size=page_size, device=device)

    def fill(lens: list[int]) -> IndexPlan:
        """Fill the padded plan with `lens`, and return a new plan for the same."""
        order = torch.randperm(700).tolist()
        pages = [order[i * 110 : i * 110 + -(-n // page_size)] for i, n in enumerate(lens)]
        plan.visible.zero_()
        plan.visible[: len(lens)] = torch.tensor(lens)
        for row, ids in zip(plan.page_table, pages, strict=False):
            row[: len(ids)] = torch.tensor(ids)
        return IndexPlan.build([1] * len(lens), lens, pages, page_size=page_size, device=device)

    fill([2500])
    index_topk(query, weights, keys, plan, k)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions = index_topk(query, weights, keys, plan, k)
        rows = index_topk(query, weights, keys, plan, k, rows_of=plan)
    for lens in ([7000, 2049, 2048, 100, 4096], [3001, 6999]):
        exact = fill(lens)
        positions.fill_(-77)
        rows.fill_(-77)
        graph.replay()
        expected = index_topk(query[: len(lens)], weights[: len(lens)], keys, exact, k, impl="reference")
        assert positions[: len(lens)].equal(expected)
        assert rows[: len(lens)].equal(exact.flat_rows(expected))
        assert (positions[len(lens) :] == -1).all()
        assert (rows[len(lens) :] == -1).all()


@pytest.mark.gpu
def test_chunk_of_a_long_prompt_equals_the_reference() -> None:
    device, k, page_size = torch.device("cuda"), 512, 64
    pool = torch.randint(-2, 3, (80, 2, page_size, 128), device=device).to(torch.bfloat16)
    query = torch.randint(-2, 3, (300, 64, 128), device=device).to(torch.bfloat16)
    weights = torch.randint(-32, 33, (300, 64), device=device) / 64
    plan = IndexPlan.build([299, 1], [4000, 700], [range(10, 73), range(11)], page_size=page_size, device=device)
    expected = index_topk(query, weights, pool[:, :1], plan, k, impl="reference")
    assert index_topk(query, weights, pool[:, :1], plan, k).equal(expected)
