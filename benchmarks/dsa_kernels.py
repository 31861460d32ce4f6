"""Speed of the sparse-attention kernels on one GPU, at DeepSeek-V3.2's geometry: the indexer's top-k and sparse MLA.

    python -m benchmarks.dsa_kernels [--kernel index_topk] [--json results.json]
    python -m benchmarks.dsa_kernels --shapes
    python -m benchmarks.dsa_kernels --tiles

The indexer runs with keys in bfloat16 and in fp8 (with scales, 132 bytes each). For chunks, the scores and the
selection are also timed alone. Results are first compared with the references. Times are GPU time per call in a CUDA
graph over the layers of a page-major pool with scattered pages, more layers than the caches hold. The lower bound of a
call is what it must read over the copy rate, or what it must multiply over the rate of a large matrix product in the
same type, whichever is longer; all rates are measured in the same run. `--shapes` times the scores of a chunk with
other shapes of their programs.

Attention over packed rows has 16 heads, as on a rank of eight. Three ways are timed: rows are unpacked for each query
into memory (`gathered`), in the registers of the attention kernel (`fused`; `--tiles` times other tiles), or, for
chunks, all pages of a sequence are unpacked at once (`shared`). The lower bound reads packed rows.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

import torch
import triton

from benchmarks.gpu_timing import DEVICE, copy_rate, gpu_ms
from pdserve.common.arithmetic import ceil_div
from pdserve.kernels.dsa.fp8_rows import FP8, quantize_rows_reference
from pdserve.kernels.dsa.index_plan import IndexPlan, IndexScales
from pdserve.kernels.dsa.index_topk import index_topk
from pdserve.kernels.dsa.packed_rows import pack_rows_reference, packed_bytes, sparse_mla_packed
from pdserve.kernels.dsa.sparse_mla import sparse_mla
from pdserve.memory.kv_pool import KvPool
from pdserve.models.layers.unpacked_pages import PackedFormat, UnpackedPages

DTYPE = torch.bfloat16
PAGE_SIZE = 64
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
HEADS, LATENT_DIM, VALUE_DIM = 128, 576, 512
RANK_HEADS = 16
PACKED_BYTES = packed_bytes(VALUE_DIM, LATENT_DIM - VALUE_DIM)
SCALE = 192**-0.5
READ_BYTES = 256 << 20
"""Minimum bytes that the layers of one graph read together: several times the L2 cache."""


@dataclasses.dataclass(frozen=True)
class Rates:
    copy: float  # bytes read and written per second
    product: float  # bfloat16 operations per second
    fp8_product: float


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    queries: int
    context: int
    time_us: float
    read_us: float
    product_us: float

    @property
    def ratio(self) -> float:
        return self.time_us / max(self.read_us, self.product_us)

    def __str__(self) -> str:
        return (
            f"{self.kernel:>15} {self.queries:8} {self.context:8} {self.time_us:10.1f} {self.read_us:9.1f} "
            f"{self.product_us:12.1f} {self.ratio:7.2f}"
        )


HEADER = f"{'kernel':>15} {'queries':>8} {'context':>8} {'time us':>10} {'read us':>9} {'multiply us':>12} {'ratio':>7}"


def graph_us(calls: Sequence[Callable[[], object]]) -> float:
    """Median GPU time of one of `calls`, which run one after another in a graph."""
    calls[0]()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    gpu_ms(graph.replay, 3)
    return 1e3 * gpu_ms(graph.replay, 20) / len(calls)


def measure_rates() -> Rates:
    left, right = (torch.randn(8192, 8192, device=DEVICE).to(DTYPE) for _ in range(2))
    small, one = (left.to(FP8), right.to(FP8).t()), torch.ones((), device=DEVICE)

    def rate(product: Callable[[], object]) -> float:
        gpu_ms(product, 20)
        return 2 * 8192**3 / (gpu_ms(product, 20) / 1e3)

    in_fp8 = rate(lambda: torch._scaled_mm(*small, scale_a=one, scale_b=one, out_dtype=DTYPE, use_fast_accum=True))
    return Rates(copy_rate(), rate(lambda: left @ right), in_fp8)


def num_layers(read_bytes: int) -> int:
    return min(max(ceil_div(READ_BYTES, read_bytes), 2), 64)


def random_pool(num_tokens: int, layers: int, dim: int) -> torch.Tensor:
    """[pages, layers, page_size, dim]"""
    pool = torch.empty(num_tokens // PAGE_SIZE, layers, PAGE_SIZE, dim, dtype=DTYPE, device=DEVICE)
    return pool.normal_()


class IndexArguments(TypedDict):
    """Arguments of index_topk, and of the launch of its scores."""

    query: torch.Tensor
    weights: torch.Tensor
    key_pages: torch.Tensor
    scales: IndexScales | None


def index_arguments(
    keys: torch.Tensor, query: torch.Tensor, weights: torch.Tensor, *, fp8: bool
) -> list[IndexArguments]:
    """Arguments for each layer, for keys [pages, layers, page_size, dim]."""
    layers = keys.shape[1]
    if not fp8:
        return [
            IndexArguments(query=query, weights=weights, key_pages=keys[:, layer : layer + 1], scales=None)
            for layer in range(layers)
        ]
    pool = KvPool(
        num_pages=len(keys),
        num_layers=layers,
        num_heads=1,
        page_size=PAGE_SIZE,
        head_dim=INDEX_DIM,
        dtype=FP8,
        device=DEVICE,
        planes=("indexer",),
        scale_plane="indexer_scale",
    )
    fp8_query, query_scales = quantize_rows_reference(query)
    arguments = []
    for layer in range(layers):
        rows, scales = pool.layer(layer)
        fp8_keys, key_scales = quantize_rows_reference(keys[:, layer])
        rows.squeeze(1).copy_(fp8_keys)
        scales[:, 0, :, 0] = key_scales
        arguments.append(
            IndexArguments(query=fp8_query, weights=weights, key_pages=rows, scales=IndexScales(query_scales, scales))
        )
    return arguments


def make_plan(query_lens: list[int], context: int) -> IndexPlan:
    """Sequences of `context` tokens in pages scattered over the pool."""
    per_sequence = context // PAGE_SIZE
    order = torch.randperm(len(query_lens) * per_sequence).tolist()
    pages = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(len(query_lens))]
    return IndexPlan.build(query_lens, [context] * len(query_lens), pages, page_size=PAGE_SIZE, device=DEVICE)


def check_index_topk() -> None:
    """Small integers have exact scores, so the selection must equal the reference's, ties included."""
    keys = torch.randint(-2, 3, (4 * 4096 // PAGE_SIZE, 2, PAGE_SIZE, INDEX_DIM), device=DEVICE).to(DTYPE)
    for fp8, query_lens in itertools.product((False, True), ([1] * 4, [40, 1, 7, 64])):
        plan = make_plan(query_lens, 4096)
        query = torch.randint(-2, 3, (plan.tokens, INDEX_HEADS, INDEX_DIM), device=DEVICE).to(DTYPE)
        weights = torch.randint(-32, 33, (plan.tokens, INDEX_HEADS), device=DEVICE) / 64
        own = index_arguments(keys, query, weights, fp8=fp8)[1]
        found = index_topk(**own, plan=plan, k=TOP_K, impl="triton")
        expected = index_topk(**own, plan=plan, k=TOP_K, impl="reference")
        if not found.equal(expected):
            raise SystemExit(f"index_topk differs from its reference in {int((found != expected).sum())} places")


def check_sparse_mla() -> None:
    pool = random_pool(8192, 2, LATENT_DIM)
    for tokens in (1, 8, 32, 200):
        query = torch.randn(tokens, HEADS, LATENT_DIM, device=DEVICE).to(DTYPE)
        rows = random_rows(tokens, 8192)
        found, expected = (
            sparse_mla(query, pool[:, 1], rows, scale=SCALE, value_dim=VALUE_DIM, impl=impl).float()
            for impl in ("auto", "reference")
        )
        error = float((found - expected).norm() / expected.norm())
        print(f"sparse_mla of {tokens} tokens: relative error {error:.4f}")
        if not error < 6e-3:
            raise SystemExit("sparse_mla differs from its reference by more than bfloat16 explains (0.006)")


def check_packed_mla() -> None:
    """Check fused attention, with every number of shares that decode steps use."""
    pages = packed_pool(8192, 2)[:, 1]
    for tokens in (1, 2, 8, 32, 64, 200):
        query = torch.randn(tokens, RANK_HEADS, LATENT_DIM, device=DEVICE).to(DTYPE)
        rows = random_rows(tokens, 8192)
        rows[-1, 1000:] = -1
        found = sparse_mla_packed(query, pages, rows, scale=SCALE, value_dim=VALUE_DIM, fused=True)
        expected = sparse_mla_packed(query, pages, rows, scale=SCALE, value_dim=VALUE_DIM, impl="reference")
        error = float((found.float() - expected.float()).norm() / expected.float().norm())
        print(f"fused attention of {tokens} tokens: relative error {error:.4f}")
        if not error < 6e-3:
            raise SystemExit("fused attention differs from its reference by more than bfloat16 explains (0.006)")


def packed_pool(num_tokens: int, layers: int) -> torch.Tensor:
    """[pages, layers, page_size, bytes]; all layers have the same content."""
    one = pack_rows_reference(torch.randn(num_tokens, LATENT_DIM, device=DEVICE), VALUE_DIM)
    return one.view(-1, 1, PAGE_SIZE, PACKED_BYTES).repeat(1, layers, 1, 1)


def random_rows(tokens: int, num_rows: int) -> torch.Tensor:
    """TOP_K distinct rows for each token, ascending."""
    return torch.stack([torch.randperm(num_rows, device=DEVICE)[:TOP_K].sort().values for _ in range(tokens)]).int()


def time_index_topk(query_lens: list[int], context: int, rates: Rates, *, fp8: bool) -> Iterator[Row]:
    """Time index_topk, and for chunks also the scores and the selection alone."""
    from pdserve.kernels.dsa.index_topk_triton import launch_scores, launch_select_top

    plan = make_plan(query_lens, context)
    key_bytes = INDEX_DIM + 4 if fp8 else INDEX_DIM * DTYPE.itemsize
    read_bytes = len(query_lens) * context * key_bytes
    layers = num_layers(read_bytes)
    query = torch.randn(plan.tokens, INDEX_HEADS, INDEX_DIM, device=DEVICE).to(DTYPE)
    weights = torch.randn(plan.tokens, INDEX_HEADS, device=DEVICE)
    keys = random_pool(len(query_lens) * context, layers, INDEX_DIM)
    arguments = index_arguments(keys, query, weights, fp8=fp8)
    operations = 2 * INDEX_HEADS * INDEX_DIM * int(plan.visible.sum())
    product_us = operations / (rates.fp8_product if fp8 else rates.product) * 1e6
    read_us = read_bytes / rates.copy * 1e6
    suffix = " fp8" if fp8 else ""

    whole = [lambda own=own: index_topk(**own, plan=plan, k=TOP_K) for own in arguments]
    yield Row(f"index_topk{suffix}", plan.tokens, context, graph_us(whole), read_us, product_us)
    if plan.tokens == len(query_lens):
        return
    scores = torch.empty(plan.tokens, context, device=DEVICE)
    parts = [lambda own=own: launch_scores(**own, plan=plan, scores=scores, k=TOP_K) for own in arguments]
    yield Row(f"scores{suffix}", plan.tokens, context, graph_us(parts), read_us, product_us)
    if not fp8:
        out = torch.empty(plan.tokens, TOP_K, dtype=torch.int32, device=DEVICE)
        scores_us = 4 * int(plan.visible.sum()) / rates.copy * 1e6
        select_us = graph_us([lambda: launch_select_top(scores, plan.visible, out)] * 2)
        yield Row("select_top", plan.tokens, context, select_us, scores_us, 0.0)


SHAPES = [(4, 64, 4, 3), (4, 64, 4, 5), (4, 128, 8, 3), (4, 128, 8, 5), (2, 128, 4, 3), (2, 64, 4, 5), (2, 128, 8, 3)]
"""Of programs of scores: tokens, keys, warps, stages. The shapes in use are among them."""


def compare_shapes(rates: Rates) -> None:
    """Time the scores of a chunk in all shapes, in bfloat16 and in fp8."""
    from pdserve.kernels.dsa import index_topk_triton

    for fp8, shape in itertools.product((False, True), SHAPES):
        index_topk_triton.CHUNK_SHAPES[1 if fp8 else 2] = index_topk_triton.ScoreShape(*shape)
        try:
            _, scores, *_ = time_index_topk([2048], 32768, rates, fp8=fp8)
        except triton.runtime.errors.OutOfResources as error:
            print(f"{shape}: {error}")
            continue
        print(scores, shape, flush=True)


def time_sparse_mla(tokens: int, context: int, rates: Rates, *, sequences: int | None = None) -> Row:
    """`tokens` queries over a pool of one sequence each, or of `sequences` in all."""
    read_bytes = tokens * TOP_K * LATENT_DIM * DTYPE.itemsize
    layers = num_layers(read_bytes)
    num_tokens = (sequences or tokens) * context
    pool = random_pool(num_tokens, layers, LATENT_DIM)
    query = torch.randn(tokens, HEADS, LATENT_DIM, device=DEVICE).to(DTYPE)
    rows = [random_rows(tokens, num_tokens) for _ in range(layers)]
    calls = [
        lambda layer=layer: sparse_mla(query, pool[:, layer], rows[layer], scale=SCALE, value_dim=VALUE_DIM)
        for layer in range(layers)
    ]
    operations = 2 * tokens * TOP_K * HEADS * (LATENT_DIM + VALUE_DIM)
    read_us, product_us = read_bytes / rates.copy * 1e6, operations / rates.product * 1e6
    return Row("sparse_mla", tokens, context, graph_us(calls), read_us, product_us)


def time_packed_steps(
    tokens: int, context: int, rates: Rates, *, ways: Sequence[bool] = (False, True)
) -> Iterator[Row]:
    """Time one query of each of `tokens` sequences: gathered, and fused."""
    read_bytes = tokens * TOP_K * PACKED_BYTES
    layers = num_layers(read_bytes)
    pool = packed_pool(tokens * context, layers)
    query = torch.randn(tokens, RANK_HEADS, LATENT_DIM, device=DEVICE).to(DTYPE)
    rows = [random_rows(tokens, tokens * context) for _ in range(layers)]
    read_us, product_us = read_bytes / rates.copy * 1e6, packed_operations(tokens) / rates.product * 1e6
    for fused in ways:
        calls = [
            lambda layer=layer, fused=fused: sparse_mla_packed(
                query, pool[:, layer], rows[layer], scale=SCALE, value_dim=VALUE_DIM, fused=fused
            )
            for layer in range(layers)
        ]
        name = "fused" if fused else "gathered"
        yield Row(f"packed {name}", tokens, context, graph_us(calls), read_us, product_us)


def time_packed_chunk(tokens: int, context: int, rates: Rates) -> Iterator[Row]:
    """Time a chunk of one sequence: gathered, shared, and the unpacking of shared pages alone."""
    layers = num_layers(context * PACKED_BYTES)
    pool = packed_pool(context, layers)
    query = torch.randn(tokens, RANK_HEADS, LATENT_DIM, device=DEVICE).to(DTYPE)
    plan, positions = make_plan([tokens], context), random_rows(tokens, context)
    unpacked = UnpackedPages(plan, plan.page_table, PackedFormat(VALUE_DIM, LATENT_DIM, DTYPE, TOP_K))
    in_pool, in_copies = plan.flat_rows(positions), unpacked.plan.flat_rows(positions)

    def gathered(layer: int) -> object:
        return sparse_mla_packed(query, pool[:, layer], in_pool, scale=SCALE, value_dim=VALUE_DIM, fused=False)

    def shared(layer: int) -> object:
        copies = unpacked.of_layer(pool[:, layer])
        return sparse_mla(query, copies, in_copies, scale=SCALE, value_dim=VALUE_DIM)

    def unpack(layer: int) -> object:
        return unpacked.of_layer(pool[:, layer])

    read_us, product_us = context * PACKED_BYTES / rates.copy * 1e6, packed_operations(tokens) / rates.product * 1e6
    ways = (("gathered", gathered, product_us), ("shared", shared, product_us), ("pages", unpack, 0.0))
    for name, call, multiply_us in ways:
        few = range(2 if name == "gathered" else layers)
        time_us = graph_us([functools.partial(call, layer) for layer in few])
        yield Row(f"packed {name}", tokens, context, time_us, read_us, multiply_us)


def packed_operations(tokens: int) -> int:
    return 2 * tokens * TOP_K * RANK_HEADS * (LATENT_DIM + VALUE_DIM)


FUSED_TILES = [(16, 4, 1), (32, 4, 1), (32, 8, 1), (64, 8, 1)]
GATHERED_TILES = [(64, 4, 3), (64, 8, 3), (32, 4, 3), (32, 8, 3), (32, 8, 4)]
"""Rows, warps and stages of a program for 16 heads. The tiles in use are among them."""


def compare_tiles(rates: Rates) -> None:
    """Time tiles of attention to packed rows: fused and gathered in decode steps, gathered in a chunk."""
    from pdserve.kernels.dsa import packed_rows_triton, sparse_mla_triton

    for tile in FUSED_TILES:
        packed_rows_triton.FUSED_TILE = sparse_mla_triton.Tile(RANK_HEADS, *tile)
        check_packed_mla()
        for tokens in (1, 8, 32, 64):
            for row in time_packed_steps(tokens, 8192, rates, ways=[True]):
                print(row, tile, flush=True)
    for tile in GATHERED_TILES:
        sparse_mla_triton.RANK_TILE = sparse_mla_triton.Tile(RANK_HEADS, *tile)
        for tokens in (1, 32):
            for row in time_packed_steps(tokens, 8192, rates, ways=[False]):
                print(row, tile, flush=True)
        for row in time_packed_chunk(2048, 8192, rates):
            print(row, tile, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--shapes", action="store_true", help="only compare program shapes of a chunk's scores")
    parser.add_argument("--tiles", action="store_true", help="only compare tiles of attention")
    parser.add_argument("--kernel", choices=["index_topk", "sparse_mla", "packed"], help="measure only this kernel")
    options = parser.parse_args()

    check_index_topk()
    print("index_topk: equal to its reference, in bfloat16 and in fp8")
    check_sparse_mla()
    check_packed_mla()
    rates = measure_rates()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rates.copy / 1e12:.2f} TB/s, "
        f"matrix products at {rates.product / 1e12:.0f} TFLOP/s, in fp8 at {rates.fp8_product / 1e12:.0f}"
    )
    print(HEADER)
    if options.shapes:
        compare_shapes(rates)
        return
    if options.tiles:
        compare_tiles(rates)
        return
    results: list[Row] = []

    def add(row: Row) -> None:
        results.append(row)
        print(row, flush=True)

    if options.kernel in (None, "index_topk"):
        steps = [([1] * batch, context) for context in (8192, 32768, 131072) for batch in (1, 8, 32, 64)]
        chunks = [([queries], context) for queries, context in ((512, 8192), (2048, 32768))]
        for query_lens, context in steps + chunks:
            for fp8 in (False, True):
                for row in time_index_topk(query_lens, context, rates, fp8=fp8):
                    add(row)
    if options.kernel in (None, "sparse_mla"):
        for batch in (1, 8, 32, 64):
            add(time_sparse_mla(batch, 32768, rates))
        add(time_sparse_mla(512, 8192, rates, sequences=1))
    if options.kernel in (None, "packed"):
        for batch in (1, 32):
            for row in time_packed_steps(batch, 8192, rates):
                add(row)
        for row in time_packed_chunk(2048, 8192, rates):
            add(row)
    if options.json is not None:
        rows = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in results]
        options.json.write_text(json.dumps({"rates": dataclasses.asdict(rates), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
