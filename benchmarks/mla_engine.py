"""Speed of decode steps with dense latent attention on one GPU, with random weights at DeepSeek-R1's geometry.

    python -m benchmarks.mla_engine [--attention] [--json results.json]

The model has R1's first layers, three with an MLP and then one with 256 experts, and a small vocabulary, so that layers
dominate the time. `graph` is the GPU time of a step (inputs, replay), `step` the wall time of a serving step without a
scheduler. Both are compared with the lower bound: the weights (of experts, the expected number of distinct ones) and
the latent rows of all tokens, over the copy rate measured in the same run. Before timing, steps in graphs are compared
with the same steps without. `--kernels` lists the kernels of a step.

`--attention` times the attention of one layer alone, with both kernels, and prints the time to read its rows and the
time of its products beside them. `--least-piece`, `--piece-cost` and `--rounds` replace the constants of
kernels/mla/tile_plan.py; several values of each are swept.
"""

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.dsa_engine import EagerEngine, check_graphs, deepseek_v32, fill_pool, list_step_kernels, time_step
from benchmarks.dsa_kernels import graph_us
from benchmarks.engine import expected_share, scattered_pages, step_weight_bytes
from benchmarks.gpu_timing import DEVICE, PRODUCT_RATE, copy_rate
from pdserve.kernels.mla import tile_plan
from pdserve.kernels.mla.dense_mla import DenseMlaImpl, dense_mla
from pdserve.memory.pages import pages_for
from pdserve.models.config.mla import MlaConfig
from pdserve.models.config.model import ModelConfig
from pdserve.models.decoders.latent_parameters import LatentParameters
from pdserve.models.decoders.mla import MlaDecoder
from pdserve.models.graphs.capture import DecodeGraphs
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.runner import ModelRunner

TARGET = 1.5
"""The time of a step, as a multiple of its lower bound, that must not be exceeded."""

IMPLEMENTATIONS: tuple[DenseMlaImpl, ...] = ("cuda", "triton")


def deepseek_r1(layers: int, mixed_layers: int, *, mlp: int, max_context: int) -> ModelConfig:
    """DeepSeek-V3.2 without its indexer."""
    config = deepseek_v32(layers, mixed_layers, mlp=mlp, max_context=max_context)
    assert config.mla is not None
    sizes = {field.name: getattr(config.mla, field.name) for field in dataclasses.fields(MlaConfig)}
    return dataclasses.replace(config, architecture="deepseek_v3", mla=MlaConfig(**sizes))


class Engine(EagerEngine):
    """A random model and a cache of randomly scattered pages for `sequences` sequences."""

    def __init__(self, config: ModelConfig, *, sequences: int, page_size: int) -> None:
        assert config.moe is not None
        self.config, self.moe = config, config.moe
        self.parameters = LatentParameters.allocate(config, device=DEVICE, dtype=torch.bfloat16)
        fill_with_noise(self.parameters.slots())
        self.decoder = MlaDecoder(self.parameters)
        super().__init__(
            self.decoder.make_cache(sequences * pages_for(config.context_length, page_size), page_size),
            range(config.vocab_size),
        )
        for pool in self.cache.pools:
            fill_pool(pool)
        self.runner = ModelRunner(self.decoder, device=DEVICE, dtype=torch.bfloat16)

    def eager(self, slices: list[SequenceSlice]) -> torch.Tensor:
        logits = self.runner.forward(self.cache, slices)
        assert logits is not None
        return logits

    def floor_bytes(self, batch: int, context: int) -> float:
        weights = step_weight_bytes(self.parameters.slots(), expected_share(self.moe, batch))
        return weights + batch * context * self.decoder.kv_token_bytes


class AttentionRow(NamedTuple):
    """Attention of one layer."""

    impl: str
    batch: int
    context: int
    us: float
    read_us: float
    multiply_us: float

    def __str__(self) -> str:
        return (
            f"{self.impl:>6}  {self.batch:5}  {self.context:7}  {self.us:9.1f}  {self.read_us:8.1f}  "
            f"{self.multiply_us:11.1f}  {self.us / self.read_us:5.2f}"
        )


def time_attention(engine: Engine, batch: int, context: int, impl: DenseMlaImpl, rate: float) -> AttentionRow:
    """Time all layers in turn, so that the rows of a call are not in the L2 cache."""
    heads, dim, value_dim = engine.decoder.num_heads, engine.config.head_dim, engine.config.head_dim - 64
    (pool,) = engine.cache.pools
    plan = tile_plan.plan_tiles(
        [1] * batch,
        [context] * batch,
        scattered_pages(random.Random(3), [context] * batch, engine.cache),
        page_size=engine.cache.page_size,
        heads=heads,
        device=DEVICE,
    )
    query = torch.randn(batch, heads, dim, dtype=torch.bfloat16, device=DEVICE)

    def attend(layer: int) -> torch.Tensor:
        pages = pool.layer(layer)[0].squeeze(1)
        return dense_mla(query, pages, plan, scale=dim**-0.5, value_dim=value_dim, impl=impl)

    calls = [lambda layer=layer: attend(layer) for layer in range(pool.num_layers)]
    read_us = batch * context * dim * 2 / rate * 1e6
    multiply_us = 2 * batch * context * heads * (dim + value_dim) / PRODUCT_RATE * 1e6
    return AttentionRow(impl, batch, context, graph_us(calls), read_us, multiply_us)


def sweep(options: argparse.Namespace) -> Iterator[dict[str, int]]:
    """Set the constants of the plan to each requested combination in turn, and yield it."""
    names = ("LEAST_PIECE_KEYS", "PIECE_COST_KEYS", "MOST_ROUNDS")
    values = (options.least_piece, options.piece_cost, options.rounds)
    own = [[getattr(tile_plan, name)] if given is None else given for name, given in zip(names, values, strict=True)]
    for chosen in itertools.product(*own):
        for name, value in zip(names, chosen, strict=True):
            setattr(tile_plan, name, value)
        yield dict(zip(names, chosen, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mixed-layers", type=int, default=1, help="layers with experts, 22 GB each (default: 1)")
    parser.add_argument("--mlp", type=int, default=18432, help="MLP width of the other layers (default: 18432)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[32768])
    parser.add_argument("--attention", action="store_true", help="also time the attention of one layer alone")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step")
    parser.add_argument("--least-piece", type=int, nargs="+", help="least keys of a piece")
    parser.add_argument("--piece-cost", type=int, nargs="+", help="cost of a piece, in keys")
    parser.add_argument("--rounds", type=int, nargs="+", help="maximum rounds of pieces")
    options = parser.parse_args()
    max_batch, max_context = max(options.batch), max(options.context)

    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rate / 1e12:.2f} TB/s")
    config = deepseek_r1(options.layers, options.mixed_layers, mlp=options.mlp, max_context=max_context)
    engine = Engine(config, sequences=max_batch, page_size=options.page_size)
    results: list[dict[str, Any]] = []
    for constants in sweep(options):
        print(f"\n{options.layers} layers, {options.mixed_layers} of them with experts; {constants}")
        graphs = DecodeGraphs(engine.decoder, engine.cache, max_batch=max_batch, max_context=max_context)
        check_graphs(engine, graphs, sorted({1, max_batch}), max_context)
        print("graphs: equal to eager steps")
        print(f"batch  context  graph ms  step ms  floor ms  ratio (at most {TARGET})")
        for context, batch in itertools.product(options.context, options.batch):
            row = time_step(engine, graphs, batch, context, rate)
            print(str(row).rsplit(maxsplit=1)[0], "" if row.ratio <= TARGET else "  MISSED", flush=True)
            results.append({**constants, **dataclasses.asdict(row), "ratio": row.ratio})
        if options.kernels:
            for batch in sorted({min(options.batch), max_batch}):
                list_step_kernels(engine, graphs, batch, max_context)
        del graphs
        if options.attention:
            print("  impl  batch  context         us   read us  multiply us  ratio")
            for context, batch, impl in itertools.product(options.context, options.batch, IMPLEMENTATIONS):
                found = time_attention(engine, batch, context, impl, rate)
                print(found, flush=True)
                results.append({**constants, **found._asdict()})
    if options.json is not None:
        document = {"copy_rate": rate, "layers": options.layers, "mixed_layers": options.mixed_layers, "rows": results}
        options.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
