"""Speed of block-scaled fp8 linear layers and experts on one GPU: one rank of eight of DeepSeek-V3.2.

    python -m benchmarks.fp8_linear [--rows 1,8,32,64,2048,8192] [--by-row] [--json results.json]

Times are GPU time per call in a CUDA graph over several layers, more than the caches hold, with quantizing, routing and
the weighted sum included. The lower bound of a call is the weights that it must read over the copy rate, or its
products over the rate of the largest fp8 product of torch, whichever is longer; both rates are measured in the same
run. Activations are not part of it: with TP8 and many tokens, writing and reading the results of experts before their
sum takes about half the time of the products. For linear layers every method that takes the number of rows is timed;
* marks the chosen one. With --by-row, weights have a scale per row, as those of compressed-tensors and fbgemm.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.gpu_timing import DEVICE, copy_rate, gpu_ms
from pdserve.common.arithmetic import ceil_div
from pdserve.kernels.linear.fp8_format import BLOCK, FP8, Fp8Matrix
from pdserve.kernels.linear.fp8_linear import (
    FEW_ROWS,
    Method,
    choose_method,
    fp8_gated_linear,
    fp8_linear,
)
from pdserve.kernels.moe.experts import grouped_experts

HIDDEN, EXPERTS, PER_TOKEN = 7168, 256, 8
LINEARS: dict[str, tuple[int, int, bool]] = {
    "compress": (1536 + 576 + 128, HIDDEN, False),
    "expand": (24576 // 8 + 64 * 128, 1536, False),
    "o_proj": (HIDDEN, 16384 // 8, False),
    "dense gate_up": (2 * 18432 // 8, HIDDEN, True),
    "dense down": (HIDDEN, 18432 // 8, False),
    "shared gate_up": (2 * 2048 // 8, HIDDEN, True),
    "shared down": (HIDDEN, 2048 // 8, False),
}
"""Outputs, inputs, and whether a gate follows."""
SHARES: dict[str, tuple[int, int]] = {"experts TP8": (EXPERTS, 2048 // 8), "experts EP8": (EXPERTS // 8, 2048)}
"""Experts of a rank, and the width that it has of each."""
ROWS = (1, 8, 32, 64, 2048, 8192)
READ_BYTES = 256 << 20
"""Minimum bytes of weights that one graph reads: several times the L2 cache."""


@dataclasses.dataclass(frozen=True)
class Rates:
    copy: float  # bytes read and written per second
    product: float  # fp8 operations per second


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    rows: int
    method: str
    time_us: float
    read_us: float
    product_us: float

    @property
    def share(self) -> float:
        """Share of the copy rate or of the fp8 rate, whichever limits."""
        return max(self.read_us, self.product_us) / self.time_us

    def __str__(self) -> str:
        return (
            f"{self.name:>15} {self.rows:6} {self.method:>9} {self.time_us:10.1f} {self.read_us:9.1f} "
            f"{self.product_us:12.1f} {self.share:8.0%}"
        )


def draw_weight(*shape: int, row_group: int | None = BLOCK) -> Fp8Matrix:
    """Random weights, with one scale: values do not change the time. Without `row_group`, scales are per row."""
    if row_group is None:
        weight = Fp8Matrix.allocate_by_row(*shape, device=DEVICE)
    else:
        weight = Fp8Matrix.allocate(*shape, row_group=row_group, device=DEVICE)
    weight.scales.fill_(shape[-1] ** -0.5 / 64)
    rows = weight.values.view(-1, shape[-1])
    for first in range(0, len(rows), 1 << 16):
        part = rows[first : first + (1 << 16)]
        part.copy_(torch.randn(part.shape, device=DEVICE).mul_(64).clamp_(-448, 448).to(FP8))
    return weight


def fp8_rate() -> float:
    """Operations per second of a large fp8 product with one scale per matrix: the largest rate that torch reaches."""
    size = 8192
    left, right = (torch.randn(size, size, device=DEVICE).to(FP8) for _ in range(2))
    one = torch.ones((), dtype=torch.float32, device=DEVICE)

    def product() -> None:
        torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    gpu_ms(product, 10)
    return 2 * size**3 / (gpu_ms(product, 20) / 1e3)


def time_us(calls: Sequence[Callable[[], object]]) -> float:
    """GPU time of one of the calls, in a graph of all of them."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for call in calls[:2]:  # compiles, which is forbidden during capture
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        gpu_ms(graph.replay, 2)
        return gpu_ms(graph.replay, 8) * 1e3 / len(calls)


def measure_linear(name: str, rows: int, rates: Rates, *, by_row: bool = False) -> Iterator[Row]:
    out_size, in_size, gated = LINEARS[name]
    few = rows <= FEW_ROWS
    copies = ceil_div(READ_BYTES, out_size * in_size) if few else 2
    # compress has parts of 1536 and 576 rows: its scales are those of 64 rows
    row_group = None if by_row else 64 if out_size % BLOCK else BLOCK
    weights = [draw_weight(out_size, in_size, row_group=row_group) for _ in range(copies)]
    x = torch.randn(rows, in_size, device=DEVICE, dtype=torch.bfloat16)
    compute = fp8_gated_linear if gated else fp8_linear
    methods: list[Method] = ["exact", "triton"] if few else ["triton"]
    if by_row:
        methods.append("rowwise")
    if row_group == BLOCK:
        methods.append("cublas")
    for method in methods:
        taken = time_us([lambda w=weight, m=method: compute(x, w, method=m) for weight in weights])  # type: ignore[misc]
        yield Row(
            name,
            rows,
            method + ("*" if method == choose_method(rows, weights[0]) else ""),
            taken,
            weights[0].nbytes / rates.copy * 1e6,
            2 * rows * out_size * in_size / rates.product * 1e6,
        )


def measure_experts(name: str, gate_up: Fp8Matrix, down: Fp8Matrix, rows: int, rates: Rates) -> Row:
    calls, touched, products = [], 0, 0
    repeats = 8 if rows <= FEW_ROWS else 2
    x = torch.randn(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    weights = torch.rand(rows, PER_TOKEN, device=DEVICE)
    for repeat in range(repeats):
        scores = torch.rand(rows, EXPERTS, device=DEVICE)
        chosen = scores.topk(PER_TOKEN, dim=1).indices
        first = repeat * len(gate_up) % EXPERTS
        here = chosen[(chosen >= first) & (chosen < first + len(gate_up))]
        touched += len(set(here.tolist()))
        products += int(here.numel())
        calls.append(
            lambda c=chosen, f=first: grouped_experts(x, weights, c, gate_up, down, first=f, num_experts=EXPERTS)
        )
    per_expert = (gate_up.nbytes + down.nbytes) / len(gate_up)
    elements = (gate_up.values.numel() + down.values.numel()) / len(gate_up)
    return Row(
        name,
        rows,
        "grouped",
        time_us(calls),
        touched / repeats * per_expert / rates.copy * 1e6,
        2 * products / repeats * elements / rates.product * 1e6,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of tokens")
    parser.add_argument("--by-row", action="store_true", help="a scale per row instead of per block")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    counts = [int(part) for part in options.rows.split(",")]
    rates = Rates(copy_rate(), fp8_rate())
    print(f"copy rate {rates.copy / 1e12:.2f} TB/s, fp8 products {rates.product / 1e12:.0f} TFLOP/s")
    print(f"{'layer':>15} {'rows':>6} {'method':>9} {'us':>10} {'read us':>9} {'products us':>12} {'of limit':>8}")
    found = []
    for name in LINEARS:
        for rows in counts:
            for row in measure_linear(name, rows, rates, by_row=options.by_row):
                print(row, flush=True)
                found.append(row)
    for name, (experts, size) in SHARES.items():
        row_group = None if options.by_row else BLOCK
        gate_up, down = (
            draw_weight(*shape, row_group=row_group) for shape in ((experts, 2 * size, HIDDEN), (experts, HIDDEN, size))
        )
        for rows in counts:
            row = measure_experts(name, gate_up, down, rows, rates)
            print(row, flush=True)
            found.append(row)
        del gate_up, down
    if options.json is not None:
        lines = [dataclasses.asdict(row) | {"share": row.share} for row in found]
        options.json.write_text(json.dumps({"rates": dataclasses.asdict(rates), "rows": lines}, indent=1))


if __name__ == "__main__":
    main()
