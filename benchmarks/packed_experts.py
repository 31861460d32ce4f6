"""Speed of experts with 4-bit weights on one GPU, with bfloat16 beside them: all experts of a layer on one rank.

    python -m benchmarks.packed_experts [--models qwen3-30b-a3b,mixtral-8x7b,gpt-oss-20b] [--rows 1,8,64,512,4096]
        [--json results.json]

Times are GPU time per call, including routing and the weighted sum, in a CUDA graph of calls that all have different
tokens. The lower bound of a call is the packed weights of the experts that have tokens over the copy rate, or its
products over the rate of large bfloat16 products, whichever is longer; the copy rate is measured in the same run. `x
bf16` is how many times as fast as bfloat16 it is. `dequantized us` is kernels/moe/expanded_experts.py, for at least 16
rows per expert on average: rows are sorted already, so routing and the weighted sum are not included. Few tokens are
checked against the dequantized weights.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8_linear import time_us
from benchmarks.gpu_timing import DEVICE, PRODUCT_RATE, copy_rate
from pdserve.kernels.linear.fp8_format import Weight
from pdserve.kernels.moe.expanded_experts import expanded_results
from pdserve.kernels.moe.experts import experts_reference, grouped_experts
from pdserve.kernels.moe.router.routing import route_tokens
from pdserve.kernels.packed4.group_format import MXFP4_BIAS, GroupScaled

ROWS = (1, 8, 64, 512, 4096)
CHECKED_ROWS = 64
REPEATS = 8
"""Calls of a graph, each with other experts."""


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The experts of a layer."""

    hidden: int
    size: int
    experts: int
    per_token: int
    mxfp4: bool = False  # with biases and the clamped gate of gpt-oss


MIXTURES = {
    "qwen3-30b-a3b": Mixture(2048, 768, 128, 8),
    "mixtral-8x7b": Mixture(4096, 14336, 8, 2),
    "gpt-oss-20b": Mixture(2880, 2880, 32, 4, mxfp4=True),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    rows: int
    time_us: float
    read_us: float
    product_us: float
    bfloat16_us: float
    expanded_us: float | None

    def __str__(self) -> str:
        limit = max(self.read_us, self.product_us) / self.time_us
        expanded = "-" if self.expanded_us is None else f"{self.expanded_us:.1f}"
        return (
            f"{self.name:>14} {self.rows:6} {self.time_us:9.1f} {self.read_us:8.1f} {self.product_us:12.1f} "
            f"{limit:8.0%} {self.bfloat16_us:9.1f} {self.bfloat16_us / self.time_us:7.2f} "
            f"{expanded:>14}"
        )


def draw_weight(experts: int, rows: int, columns: int, *, mxfp4: bool) -> GroupScaled:
    """Random weights, with one scale: their values do not change the time."""
    if mxfp4:
        weight = GroupScaled.allocate_mxfp4(experts, rows, columns, device=DEVICE)
        weight.scales.fill_(MXFP4_BIAS - (columns.bit_length() + 2) // 2)
    else:
        weight = GroupScaled.allocate(experts, rows, columns, dtype=torch.bfloat16, device=DEVICE)
        weight.scales.fill_(columns**-0.5 / 5)
        assert weight.zeros is not None
        weight.zeros.fill_(8)
    weight.packed.random_()
    return weight


class Layer:
    """The experts of a model, in 4 bits and in bfloat16."""

    def __init__(self, name: str, rate: float) -> None:
        self.name, self.rate, self.mixture = name, rate, MIXTURES[name]
        shape = self.mixture
        self.gate_up = draw_weight(shape.experts, 2 * shape.size, shape.hidden, mxfp4=shape.mxfp4)
        self.down = draw_weight(shape.experts, shape.hidden, shape.size, mxfp4=shape.mxfp4)
        self._plain = [
            torch.randn(weight.shape, dtype=torch.bfloat16, device=DEVICE) for weight in (self.gate_up, self.down)
        ]
        self._biases: dict[str, Any] = {}
        if shape.mxfp4:
            self._biases = {
                "gate_up_bias": torch.randn(shape.experts, 2 * shape.size, dtype=torch.bfloat16, device=DEVICE),
                "down_bias": torch.randn(shape.experts, shape.hidden, dtype=torch.bfloat16, device=DEVICE),
                "limit": 7.0,
            }

    def measure(self, rows: int) -> Row:
        shape = self.mixture
        x = torch.randn(rows, shape.hidden, dtype=torch.bfloat16, device=DEVICE)
        weights = torch.rand(rows, shape.per_token, device=DEVICE)
        chosen = [
            torch.rand(rows, shape.experts, device=DEVICE).topk(shape.per_token, dim=1).indices for _ in range(REPEATS)
        ]
        touched = sum(len(set(each.flatten().tolist())) for each in chosen) / REPEATS

        def timed(gate_up: Weight, down: Weight) -> float:
            return time_us(
                [lambda c=each: grouped_experts(x, weights, c, gate_up, down, **self._biases) for each in chosen]  # type: ignore[misc]
            )

        if rows <= CHECKED_ROWS:
            found = grouped_experts(x, weights, chosen[0], self.gate_up, self.down, **self._biases)
            expected = experts_reference(
                x, weights, chosen[0], self.gate_up, self.down, first=0, exact=True, **self._biases
            )
            error = float((found.float() - expected.float()).norm() / expected.float().norm())
            assert error < 0.01, f"{self.name}, {rows} rows: relative error {error}"
        elements = 3 * shape.hidden * shape.size
        return Row(
            self.name,
            rows,
            timed(self.gate_up, self.down),
            touched * (self.gate_up.nbytes + self.down.nbytes) / shape.experts / self.rate * 1e6,
            2 * rows * shape.per_token * elements / PRODUCT_RATE * 1e6,
            timed(*self._plain),
            self._expanded_us(x, chosen) if rows * shape.per_token >= 16 * shape.experts else None,
        )

    def _expanded_us(self, x: torch.Tensor, chosen: list[torch.Tensor]) -> float:
        calls = []
        for each in chosen:
            routing = route_tokens(each, 0, self.mixture.experts, 64)
            rows = x[routing.order // self.mixture.per_token]
            calls.append(lambda r=rows, e=routing.ends: expanded_results(r, e, self.gate_up, self.down, **self._biases))
        return time_us(calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MIXTURES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of tokens")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}: copy rate {rate / 1e12:.2f} TB/s")
    print(
        f"{'model':>14} {'rows':>6} {'us':>9} {'read us':>8} {'products us':>12} {'of limit':>8} {'bf16 us':>9} "
        f"{'x bf16':>7} {'dequantized us':>14}"
    )
    found = []
    for name in options.models.split(","):
        layer = Layer(name, rate)
        for rows in map(int, options.rows.split(",")):
            found.append(layer.measure(rows))
            print(found[-1], flush=True)
        del layer
    if options.json is not None:
        options.json.write_text(json.dumps({"copy_rate": rate, "rows": [dataclasses.asdict(row) for row in found]}))


if __name__ == "__main__":
    main()
