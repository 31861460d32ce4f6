"""Speed of linear layers with 4-bit weights on one GPU: the layers of Qwen3-8B, with bfloat16 beside them.

    python -m benchmarks.int4_linear [--weights int4|nvfp4] [--rows 1,32,256,8192] [--group 128] [--json results.json]
    python -m benchmarks.int4_linear --rows 1 --sweep [--outputs 16,32] [--stages 2,3] [--warps 4,8]

Times are GPU time per call in a CUDA graph over several layers, more than the caches hold. The lower bound of a call is
the packed weights that it must read over the copy rate, or its products over the rate of large bfloat16 products,
whichever is longer; the copy rate is measured in the same run. `of copy` is the share of the copy rate at which the
weights are read. Every method that takes the number of rows is timed; * marks the chosen one. `x bf16` is how many
times as fast as bfloat16 it is. With --sweep, the CUDA kernel is timed with all combinations of tiles, and the best
ten of each layer are printed (0: the launcher's own choice). The last lines add up the chosen methods of a layer.
"""

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.fp8_linear import time_us
from benchmarks.gpu_timing import DEVICE, PRODUCT_RATE, copy_rate
from pdserve.common.arithmetic import ceil_div
from pdserve.kernels.backends.few_rows_cuda import Tiles
from pdserve.kernels.linear.linear import gated_linear, linear
from pdserve.kernels.linear.swiglu import swiglu
from pdserve.kernels.nvfp4 import nvfp4
from pdserve.kernels.nvfp4.nvfp4 import Nvfp4Matrix, nvfp4_linear
from pdserve.kernels.packed4.group_format import GroupScaled
from pdserve.kernels.packed4.int4_linear import (
    SCRATCH_BYTES,
    Method,
    choose_method,
    int4_gated_linear,
    int4_linear,
)

LINEARS: dict[str, tuple[int, int, bool]] = {
    "qkv": (6144, 4096, False),
    "o_proj": (4096, 4096, False),
    "gate_up": (2 * 12288, 4096, True),
    "down": (4096, 12288, False),
}
"""Outputs, inputs, and whether a gate follows."""
ROWS = (1, 32, 256, 8192)
Packed = GroupScaled | Nvfp4Matrix
READ_BYTES = 256 << 20
"""Minimum bytes of weights that one graph reads: several times the L2 cache."""
METHODS: tuple[Method, ...] = ("cuda", "expand")
CUDA_ROWS = 512
"""The CUDA kernel is timed up to this many rows."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    rows: int
    method: str
    tiles: Tiles | None
    time_us: float
    read_us: float
    product_us: float
    bfloat16_us: float

    def __str__(self) -> str:
        limit = max(self.read_us, self.product_us) / self.time_us
        tiles = "" if self.tiles is None else f"  {_shown(self.tiles)}"
        return (
            f"{self.name:>8} {self.rows:6} {self.method:>8} {self.time_us:9.1f} {self.read_us:8.1f} "
            f"{self.product_us:12.1f} {limit:8.0%} {self.read_us / self.time_us:8.0%} {self.bfloat16_us:9.1f} "
            f"{self.bfloat16_us / self.time_us:7.2f}{tiles}"
        )


def _shown(tiles: Tiles) -> str:
    return " ".join(f"{name} {value}" for name, value in dataclasses.asdict(tiles).items() if value is not None)


def draw_weight(rows: int, columns: int, group: int | None) -> Packed:
    """Random weights, with one scale: their values do not change the time. NVFP4 if `group` is None."""
    if group is None:
        matrix = Nvfp4Matrix.allocate(rows, columns, device=DEVICE)
        matrix.packed.random_()
        matrix.scales.fill_(0xA8)  # 1
        matrix.factors.fill_(columns**-0.5 / 3)
        return matrix
    weight = GroupScaled.allocate(rows, columns, group=group, dtype=torch.bfloat16, device=DEVICE)
    weight.packed.random_()
    weight.scales.fill_(columns**-0.5 / 5)
    assert weight.zeros is not None
    weight.zeros.fill_(8)
    return weight


def multiply(
    x: torch.Tensor,
    weight: Packed,
    *,
    gated: bool,
    method: Method,
    tiles: Tiles | None,
    scratch_bytes: int = SCRATCH_BYTES,
) -> torch.Tensor:
    if isinstance(weight, Nvfp4Matrix):
        return nvfp4_linear(x, weight, gated=gated, method=method, tiles=tiles)
    if gated and method != "expand":
        return int4_gated_linear(x, weight, tiles=tiles)
    out = int4_linear(x, weight, method=method, tiles=tiles, scratch_bytes=scratch_bytes)
    return swiglu(out) if gated else out


def chosen_method(x: torch.Tensor, weight: Packed) -> Method:
    return nvfp4.choose_method(x, weight) if isinstance(weight, Nvfp4Matrix) else choose_method(x, weight)


class Layer:
    """The weights of one kind of layer, in 4 bits and in bfloat16."""

    def __init__(self, name: str, group: int | None, rate: float) -> None:
        self.name, self.rate = name, rate
        self.out_size, self.in_size, self.gated = LINEARS[name]
        elements = self.out_size * self.in_size
        self.packed = [
            draw_weight(self.out_size, self.in_size, group) for _ in range(ceil_div(READ_BYTES, elements // 2))
        ]
        self._plain = [
            torch.randn(self.out_size, self.in_size, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(ceil_div(READ_BYTES, 2 * elements))
        ]
        self._bfloat16_us: dict[int, float] = {}

    def measure(self, rows: int, method: Method, tiles: Tiles | None, scratch_bytes: int) -> Row:
        x = torch.randn(rows, self.in_size, dtype=torch.bfloat16, device=DEVICE)

        def compute(weight: Packed) -> torch.Tensor:
            return multiply(x, weight, gated=self.gated, method=method, tiles=tiles, scratch_bytes=scratch_bytes)

        taken = time_us(_calls(compute, self.packed if rows <= CUDA_ROWS else self.packed[:2]))
        chosen = "*" if method == chosen_method(x, self.packed[0]) else ""
        return Row(
            self.name,
            rows,
            method + chosen,
            tiles,
            taken,
            self.packed[0].nbytes / self.rate * 1e6,
            2 * rows * self.out_size * self.in_size / PRODUCT_RATE * 1e6,
            self._plain_us(x),
        )

    def _plain_us(self, x: torch.Tensor) -> float:
        if len(x) not in self._bfloat16_us:
            compute = gated_linear if self.gated else linear
            weights = self._plain if len(x) <= CUDA_ROWS else self._plain[:2]
            self._bfloat16_us[len(x)] = time_us([lambda w=weight: compute(x, w) for weight in weights])  # type: ignore[misc]
        return self._bfloat16_us[len(x)]


def _calls(compute: Callable[[Packed], object], weights: Sequence[Packed]) -> list[Callable[[], object]]:
    return [lambda w=weight: compute(w) for weight in weights]  # type: ignore[misc]


def check(layer: Layer, rows: int, tiles: Tiles | None) -> None:
    """Raise AssertionError unless both methods give the product of the expanded weights."""
    x = torch.randn(rows, layer.in_size, dtype=torch.bfloat16, device=DEVICE)
    weight = layer.packed[0]
    expected = x.float() @ weight.expanded().T
    for method in METHODS:
        found = multiply(x, weight, gated=False, method=method, tiles=tiles)
        error = float((found.float() - expected).norm() / expected.norm())
        assert error < 0.01, f"{layer.name}, {rows} rows, {method}: relative error {error}"


def sweep(layer: Layer, rows: int, options: argparse.Namespace) -> list[Row]:
    found = []
    for values in itertools.product(options.outputs, options.stages, options.warps):
        tiles = Tiles(*(value or None for value in values))
        try:
            found.append(layer.measure(rows, "cuda", tiles, options.scratch_mib << 20))
        except Exception as error:  # a combination that does not fit this GPU
            print(f"{layer.name:>8} {rows:6} {_shown(tiles)}: {type(error).__name__}", flush=True)
    return sorted(found, key=lambda row: row.time_us)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=_numbers, default=list(ROWS), help="numbers of tokens")
    parser.add_argument("--layers", default=",".join(LINEARS))
    parser.add_argument("--weights", choices=("int4", "nvfp4"), default="int4")
    parser.add_argument("--group", type=int, default=128, help="columns that share a scale of int4: 32, 64 or 128")
    parser.add_argument("--scratch-mib", type=int, default=SCRATCH_BYTES >> 20, help="memory for dequantized weights")
    parser.add_argument("--sweep", action="store_true", help="time all combinations of the three options below")
    parser.add_argument("--outputs", type=_numbers, default=[16, 32])
    parser.add_argument("--stages", type=_numbers, default=[2, 3, 5])
    parser.add_argument("--warps", type=_numbers, default=[4, 8, 16])
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copy rate {rate / 1e12:.2f} TB/s")
    print(
        f"{'layer':>8} {'rows':>6} {'method':>8} {'us':>9} {'read us':>8} {'products us':>12} {'of limit':>8} "
        f"{'of copy':>8} {'bf16 us':>9} {'x bf16':>7}"
    )
    found: list[Row] = []
    for name in options.layers.split(","):
        layer = Layer(name, options.group if options.weights == "int4" else None, rate)
        for rows in options.rows:
            check(layer, min(rows, 256), None)
            if options.sweep:
                rows_found = sweep(layer, rows, options)
                found += rows_found
                print(*rows_found[:10], sep="\n", flush=True)
                continue
            for method in METHODS if rows <= CUDA_ROWS else METHODS[-1:]:
                found.append(layer.measure(rows, method, None, options.scratch_mib << 20))
                print(found[-1], flush=True)
        del layer
    for rows in options.rows:
        best: dict[str, Row] = {}
        for row in found:
            if row.rows == rows and (options.sweep or row.method.endswith("*")):
                best.setdefault(row.name, row)
        total, plain = (sum(getattr(row, field) for row in best.values()) for field in ("time_us", "bfloat16_us"))
        print(f"a layer of {rows} rows: {total:.1f} us, bfloat16 {plain:.1f} us, {plain / total:.2f} times as fast")
    if options.json is not None:
        options.json.write_text(json.dumps({"copy_rate": rate, "rows": [dataclasses.asdict(row) for row in found]}))


if __name__ == "__main__":
    main()
