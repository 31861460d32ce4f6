"""Speed of the sparse-attention kernels on one GPU, at DeepSeek-V3.2's geometry: the indexer's top-k and sparse MLA.

    python -m benchmarks.dsa_kernels [--json results.json]

Results are first compared with the references. Times are GPU time per call in a CUDA graph over the layers of a
page-major pool with scattered pages, more layers than the caches hold. The lower bound of a call is what it must read
over the copy rate, or what it must multiply over the rate of a large matrix product, whichever is longer; both rates
are measured in the same run.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_timing import DEVICE, copy_rate, gpu_ms
from pdserve.configs.arithmetic import ceil_div
from pdserve.kernels.mla.index_plan import IndexPlan
from pdserve.kernels.mla.index_topk import index_topk
from pdserve.kernels.mla.sparse_mla import sparse_mla

DTYPE = torch.bfloat16
PAGE_SIZE = 64
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
HEADS, LATENT_DIM, VALUE_DIM = 128, 576, 512
SCALE = 192**-0.5
READ_BYTES = 256 << 20
"""Minimum bytes that the layers of one graph read together: several times the L2 cache."""


@dataclasses.dataclass(frozen=True)
class Rates:
    copy: float  # bytes read and written per second
    product: float  # bfloat16 operations per second


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
            f"{self.kernel:>10} {self.queries:8} {self.context:8} {self.time_us:10.1f} {self.read_us:9.1f} "
            f"{self.product_us:12.1f} {self.ratio:7.2f}"
        )


HEADER = f"{'kernel':>10} {'queries':>8} {'context':>8} {'time us':>10} {'read us':>9} {'multiply us':>12} {'ratio':>7}"


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
    gpu_ms(lambda: left @ right, 20)
    return Rates(copy_rate(), 2 * 8192**3 / (gpu_ms(lambda: left @ right, 20) / 1e3))


def num_layers(read_bytes: int) -> int:
    return min(max(ceil_div(READ_BYTES, read_bytes), 2), 64)


def random_pool(num_tokens: int, layers: int, dim: int) -> torch.Tensor:
    """[pages, layers, page_size, dim]"""
    pool = torch.empty(num_tokens // PAGE_SIZE, layers, PAGE_SIZE, dim, dtype=DTYPE, device=DEVICE)
    return pool.normal_()


def make_plan(query_lens: list[int], context: int) -> IndexPlan:
    """Sequences of `context` tokens in pages scattered over the pool."""
    per_sequence = context // PAGE_SIZE
    order = torch.randperm(len(query_lens) * per_sequence).tolist()
    pages = [order[i * per_sequence : (i + 1) * per_sequence] for i in range(len(query_lens))]
    return IndexPlan.build(query_lens, [context] * len(query_lens), pages, page_size=PAGE_SIZE, device=DEVICE)


def check_index_topk() -> None:
    """Small integers have exact scores: the choice must be the reference's, ties included."""
    pool = torch.randint(-2, 3, (4 * 4096 // PAGE_SIZE, 2, PAGE_SIZE, INDEX_DIM), device=DEVICE).to(DTYPE)
    for query_lens in ([1] * 4, [40, 1, 7, 64]):
        plan = make_plan(query_lens, 4096)
        query = torch.randint(-2, 3, (plan.tokens, INDEX_HEADS, INDEX_DIM), device=DEVICE).to(DTYPE)
        weights = torch.randint(-32, 33, (plan.tokens, INDEX_HEADS), device=DEVICE) / 64
        found, expected = (
            index_topk(query, weights, pool[:, 1:2], plan, TOP_K, impl=impl) for impl in ("triton", "reference")
        )
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


def random_rows(tokens: int, num_rows: int) -> torch.Tensor:
    """TOP_K distinct rows for each token, ascending."""
    return torch.stack([torch.randperm(num_rows, device=DEVICE)[:TOP_K].sort().values for _ in range(tokens)]).int()


def time_index_topk(query_lens: list[int], context: int, rates: Rates) -> Row:
    plan = make_plan(query_lens, context)
    read_bytes = len(query_lens) * context * INDEX_DIM * DTYPE.itemsize
    layers = num_layers(read_bytes)
    pool = random_pool(len(query_lens) * context, layers, INDEX_DIM)
    query = torch.randn(plan.tokens, INDEX_HEADS, INDEX_DIM, device=DEVICE).to(DTYPE)
    weights = torch.randn(plan.tokens, INDEX_HEADS, device=DEVICE)
    calls = [
        lambda layer=layer: index_topk(query, weights, pool[:, layer : layer + 1], plan, TOP_K)
        for layer in range(layers)
    ]
    operations = 2 * INDEX_HEADS * INDEX_DIM * int(plan.visible.sum())
    read_us, product_us = read_bytes / rates.copy * 1e6, operations / rates.product * 1e6
    return Row("index_topk", plan.tokens, context, graph_us(calls), read_us, product_us)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()

    check_index_topk()
    print("index_topk: equal to its reference")
    check_sparse_mla()
    rates = measure_rates()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rates.copy / 1e12:.2f} TB/s, "
        f"matrix products at {rates.product / 1e12:.0f} TFLOP/s"
    )
    print(HEADER)
    results: list[Row] = []

    def add(row: Row) -> None:
        results.append(row)
        print(row, flush=True)

    for context in (8192, 32768, 131072):
        for batch in (1, 8, 32, 64):
            add(time_index_topk([1] * batch, context, rates))
    for queries, context in ((512, 8192), (2048, 32768)):
        add(time_index_topk([queries], context, rates))
    for batch in (1, 8, 32, 64):
        add(time_sparse_mla(batch, 32768, rates))
    add(time_sparse_mla(512, 8192, rates, sequences=1))
    if options.json is not None:
        rows = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in results]
        options.json.write_text(json.dumps({"rates": dataclasses.asdict(rates), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
