"""Speed of a sparse-attention model's decode steps on one GPU, with random weights at DeepSeek-V3.2's geometry.

    python -m benchmarks.dsa_engine [--json results.json]

A few of its layers with the dense MLP of its first ones, and a small vocabulary, so that layers are what is timed.
`graph` is the GPU's time of a replay, `step` the wall time of a serving step without a scheduler (fill the inputs,
replay, take the most likely tokens, read them back). Both stand beside the floor: the weights, the indexer keys of all
tokens and the selected rows, over the copy rate measured in the same run. Before anything is timed, steps in graphs
are compared with the same steps without. `--kernels` lists what the GPU does in a step.
"""

import argparse
import dataclasses
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_timing import DEVICE, copy_rate, gpu_ms
from pdserve.models.batch import SequenceSlice
from pdserve.models.config import ModelConfig, RopeConfig
from pdserve.models.dsa_config import DsaConfig, MoeConfig
from pdserve.models.dsa_decoder import DsaDecoder
from pdserve.models.dsa_parameters import DsaParameters
from pdserve.models.graphs import DecodeGraphs
from pdserve.models.runner import ModelRunner

BATCHES, CONTEXTS = (1, 8, 32), (8192, 32768)


def deepseek_v32(layers: int, mixed_layers: int) -> ModelConfig:
    """`layers` layers, the last `mixed_layers` of them with experts."""
    return ModelConfig(
        architecture="deepseek_v32",
        vocab_size=8192,
        hidden_size=7168,
        intermediate_size=18432,
        num_layers=layers,
        num_heads=128,
        num_kv_heads=1,
        head_dim=576,
        context_length=max(CONTEXTS),
        norm_eps=1e-6,
        rope=RopeConfig(theta=10000.0),
        tied_embeddings=False,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        dtype="bfloat16",
        eos_token_ids=(),
        dsa=DsaConfig(
            q_rank=1536,
            kv_rank=512,
            nope_dim=128,
            rope_dim=64,
            value_dim=128,
            index_heads=64,
            index_dim=128,
            index_topk=2048,
            index_interleaved=False,
            indexed=(True,) * layers,
            mixed=(False,) * (layers - mixed_layers) + (True,) * mixed_layers,
            moe=MoeConfig(
                num_experts=256,
                experts_per_token=8,
                expert_size=2048,
                shared_size=2048,
                num_groups=8,
                groups_per_token=4,
                normalised=True,
                scale=2.5,
            ),
            weight_block=None,
        ),
    )


def random_parameters(config: ModelConfig) -> DsaParameters:
    """Weights N(0, 1 / fan_in), embeddings N(0, 1), norms around 1: activations stay of order 1."""
    parameters = DsaParameters.allocate(config, device=DEVICE, dtype=torch.bfloat16)
    generator = torch.Generator(DEVICE).manual_seed(1)
    for name, slot in parameters.slots().items():
        tensor = slot.target
        if tensor.ndim == 1:
            tensor.normal_(1.0, 0.1, generator=generator)
        else:
            tensor.normal_(0.0, 1.0 if "embed" in name else tensor.shape[-1] ** -0.5, generator=generator)
    return parameters


class Engine:
    """A random model and a cache of randomly scattered pages."""

    def __init__(self, config: ModelConfig, *, kv_tokens: int, page_size: int) -> None:
        assert config.dsa is not None
        self.config, self.dsa = config, config.dsa
        self.parameters = random_parameters(config)
        self.decoder = DsaDecoder(self.parameters)
        self.cache = self.decoder.make_cache(-(-kv_tokens // page_size), page_size)
        for pool in self.cache.pools:
            pool.data.normal_()
        self._runner = ModelRunner(self.decoder, device=DEVICE, dtype=torch.bfloat16)
        self._random = random.Random(2)

    def step(self, batch: int, context: int) -> list[SequenceSlice]:
        """Single tokens of sequences of `context` tokens each, the new one included, in scattered pages."""
        needed = -(-context // self.cache.page_size)
        free = self._random.sample(range(self.cache.num_pages), batch * needed)
        tokens = self._random.choices(range(self.config.vocab_size), k=batch)
        return [
            SequenceSlice([token], context - 1, free[row * needed : (row + 1) * needed])
            for row, token in enumerate(tokens)
        ]

    def eager(self, slices: list[SequenceSlice]) -> torch.Tensor:
        logits = self._runner.forward(self.cache, slices)
        assert logits is not None
        return logits

    def floor_bytes(self, batch: int, context: int) -> float:
        """What a step must read: weights (of experts, the expected number of distinct ones), keys, selected rows."""
        moe, weights = self.dsa.moe, 0.0
        chosen = 1 - (1 - moe.experts_per_token / moe.num_experts) ** batch
        for name, slot in self.parameters.slots().items():
            if name != "model.embed_tokens.weight":
                weights += slot.target.nbytes * (chosen if ".mlp.experts." in name else 1.0)
        rows = context * self.dsa.index_dim + min(context, self.dsa.index_topk) * self.dsa.latent_dim
        return weights + self.config.num_layers * batch * rows * torch.bfloat16.itemsize


def check_graphs(engine: Engine, graphs: DecodeGraphs) -> None:
    """As many rows as a graph has: the same kernels on the same shapes, so the same logits."""
    for batch in (1, 8):
        slices = engine.step(batch, 5000)
        expected = engine.eager(slices)
        if not expected.isfinite().all() or not graphs.run(slices).equal(expected):
            raise SystemExit(f"a step of {batch} in a graph differs from the same step without")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    batch: int
    context: int
    graph_ms: float
    step_ms: float
    floor_ms: float

    @property
    def ratio(self) -> float:
        return self.graph_ms / self.floor_ms

    def __str__(self) -> str:
        return (
            f"{self.batch:5}  {self.context:7}  {self.graph_ms:8.3f}  {self.step_ms:7.3f}  {self.floor_ms:8.3f}  "
            f"{self.ratio:5.2f}"
        )


def time_step(engine: Engine, graphs: DecodeGraphs, batch: int, context: int, rate: float) -> Row:
    slices = engine.step(batch, context)

    def step() -> list[int]:
        tokens: list[int] = graphs.run(slices).argmax(dim=-1).tolist()
        return tokens

    for _ in range(5):
        step()
    walls = []
    for _ in range(30):
        begun = time.perf_counter()
        step()
        walls.append((time.perf_counter() - begun) * 1e3)
    graph_ms = gpu_ms(lambda: graphs.replay(batch), 30)
    return Row(batch, context, graph_ms, statistics.median(walls), engine.floor_bytes(batch, context) / rate * 1e3)


def list_kernels(engine: Engine, graphs: DecodeGraphs, batch: int, context: int) -> None:
    """The kernels of one step, by the time they take together; overlapping ones count twice."""
    graphs.run(engine.step(batch, context))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graphs.replay(batch)
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    print(f"\nkernels of a step of {batch} x {context}: {sum(event.count for event in kernels)} launches")
    for event in kernels[:30]:
        print(f"{event.self_device_time_total:9.1f} us {event.count:4}  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mixed-layers", type=int, default=0, help="how many of them have experts, 22 GB each")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a step")
    options = parser.parse_args()

    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rate / 1e12:.2f} TB/s")
    config = deepseek_v32(options.layers, options.mixed_layers)
    engine = Engine(config, kv_tokens=max(BATCHES) * max(CONTEXTS), page_size=options.page_size)
    begun = time.perf_counter()
    graphs = DecodeGraphs(engine.decoder, engine.cache, max_batch=max(BATCHES), max_context=max(CONTEXTS))
    capture_s = time.perf_counter() - begun
    print(f"captured decode graphs up to batch {max(BATCHES)} in {capture_s:.1f} s")
    check_graphs(engine, graphs)
    print("graphs: equal to eager steps")

    print(f"\n{options.layers} layers, {options.mixed_layers} of them with experts")
    print("batch  context  graph ms  step ms  floor ms  ratio")
    rows = []
    for context in CONTEXTS:
        for batch in BATCHES:
            rows.append(time_step(engine, graphs, batch, context, rate))
            print(rows[-1], flush=True)
    if options.kernels:
        for batch in (min(BATCHES), max(BATCHES)):
            list_kernels(engine, graphs, batch, max(CONTEXTS))
    if options.json is not None:
        results: dict[str, Any] = {
            "copy_rate": rate,
            "capture_s": capture_s,
            "layers": options.layers,
            "mixed_layers": options.mixed_layers,
            "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
        }
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
