"""Speed of the model loop on one GPU: decode steps and prefill, with random weights at a published geometry.

    python -m benchmarks.engine [--model qwen3-8b] [--weights int4|nvfp4] [--json results.json]

Decode steps are timed in three ways: `graph` is the GPU time of a replay; `step` the wall time of a decode server's
step, by the same executor (fill the inputs, replay, sample, read back), with overlap scheduling: each starts before
the tokens of the last one are read; `alone` the same without overlap. All are compared with the roofline: the weights
(of experts, those that the step's tokens choose) and the KV that a step must read, over the copy rate measured in the
same run; prefill with the products at their rate. Before timing, logits of a prompt and of decode steps in graphs are
compared with those of transformers with the same weights.

`--model` is a name that `pdserve plan` knows. With another one than qwen3-8b, or with `--weights` (4-bit
matrices of layers, of integers in groups of 128 columns or in NVFP4), logits are not compared.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch

from benchmarks.gpu_timing import DEVICE, PRODUCT_RATE, copy_rate, gpu_ms, list_kernels
from benchmarks.results import renew
from pdserve.common.sampling import SamplingParams
from pdserve.kernels.moe.router.norm_route_cuda import add_norm_route
from pdserve.memory.kv_pool import KvCache
from pdserve.memory.pages import pages_for
from pdserve.models.config.model import ModelConfig
from pdserve.models.config.moe import MoeConfig
from pdserve.models.decoders.dense import Decoder
from pdserve.models.decoders.dense_parameters import DecoderParameters
from pdserve.models.graphs.capture import DecodeGraphs
from pdserve.models.layers import moe
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_geometry
from pdserve.models.loading.dummy_weights import fill_with_noise
from pdserve.models.loading.weights import usual_format
from pdserve.models.runner import ModelRunner
from pdserve.models.weights.schemes import Nvfp4Scheme, Packed4Scheme
from pdserve.models.weights.slots import Slot
from pdserve.scheduler.messages.step import Draw, StepRow
from pdserve.scheduler.ranks.executor import Executor

LONGEST = 65536
"""The longest context that is timed."""


def published(name: str) -> ModelConfig:
    """A geometry that `pdserve plan` knows, for contexts of up to `LONGEST`."""
    return dataclasses.replace(locate_geometry(name).config, context_length=LONGEST)


QWEN3_8B = published("qwen3-8b")

SCHEMES = {"bfloat16": None, "int4": Packed4Scheme("awq", 128), "nvfp4": Nvfp4Scheme("modelopt")}
LABELS = {"bfloat16": "", "int4": "4-bit weights: ", "nvfp4": "NVFP4 weights: "}

EXPERTS = ".mlp.experts."
"""In the names of weights of experts."""

# vLLM 0.22.1 on the same GPU with the same geometry and random weights (ms)
VLLM_DECODE_MS = {1: 5.20, 8: 5.76, 32: 6.87, 128: 12.58}
VLLM_PREFILL_8192_MS = 213.0


class Engine:
    """A random model and a pool of randomly scattered pages."""

    def __init__(self, config: ModelConfig, *, kv_tokens: int, page_size: int) -> None:
        self.config = config
        stored = usual_format(config)
        self.parameters = DecoderParameters.allocate(config, device=DEVICE, dtype=torch.bfloat16, stored=stored)
        fill_with_noise(self.parameters.slots(), stored)
        self.decoder = Decoder(self.parameters)
        self.cache = self.decoder.make_cache(pages_for(kv_tokens, page_size), page_size)
        (self.pool,) = self.cache.pools
        self.pool.data.normal_()
        self.runner = ModelRunner(self.decoder, device=DEVICE, dtype=torch.bfloat16)
        self._eager = ModelRunner(self.decoder, device=DEVICE, dtype=torch.bfloat16)
        self._random = random.Random(2)

    def pages(self, lengths: list[int]) -> list[list[int]]:
        """Pages for sequences of these lengths, scattered over the pool."""
        return scattered_pages(self._random, lengths, self.cache)

    def tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self.config.vocab_size), k=count)

    def eager(self, slices: list[SequenceSlice]) -> torch.Tensor:
        """Logits without graphs."""
        logits = self._eager.forward(self.cache, slices)
        assert logits is not None
        return logits

    def chosen_share(self, slices: list[SequenceSlice]) -> float:
        """Share of the experts that the tokens of a step choose, over all layers; 1 without experts."""
        if self.config.moe is None:
            return 1.0
        counts: list[int] = []

        def counting(select: Callable[..., tuple[Any, ...]], place: int) -> Callable[..., tuple[Any, ...]]:
            """`select`, which also counts the experts that it chooses; they are at this place of its results."""

            def select_and_count(*args: Any) -> tuple[Any, ...]:
                results = select(*args)
                counts.append(torch.unique(results[place]).numel())
                return results

            return select_and_count

        with (
            mock.patch.object(moe, "route", counting(moe.route, 1)),
            mock.patch.object(moe, "add_norm_route", counting(add_norm_route, 3)),
        ):
            self.eager(slices)
        return statistics.mean(counts) / self.config.moe.num_experts

    @property
    def kv_token_bytes(self) -> int:
        return self.decoder.kv_token_bytes

    def prompt_floor_ms(self, tokens: int, cached: int, rate: float) -> float:
        """The least time for `tokens` tokens after `cached` ones: weights read once at `rate`, or all products (of
        weights, of causal attention), whichever is longer.
        """
        experts = self.config.moe
        active = 1.0 if experts is None else experts.experts_per_token / experts.num_experts
        products = tokens * sum(
            slot.size.numel() * (active if EXPERTS in name else 1.0)
            for name, slot in self.parameters.slots().items()
            if len(slot.size) >= 2 and "embed" not in name and "lm_head" not in name
        )
        config, pairs = self.config, sum(range(cached + 1, cached + tokens + 1))
        products += config.num_layers * pairs * 2 * config.num_heads * config.head_dim
        weights = step_weight_bytes(self.parameters.slots(), 1.0)
        return max(weights / rate, 2 * products / PRODUCT_RATE) * 1e3


def step_weight_bytes(slots: Mapping[str, Slot], chosen: float) -> float:
    """Weights that a step reads: all except the embedding table, of which it reads a few rows, and of experts the
    share `chosen` by its tokens.
    """
    return sum(
        slot.nbytes * (chosen if EXPERTS in name else 1.0)
        for name, slot in slots.items()
        if name != "model.embed_tokens.weight" or "lm_head.weight" not in slots  # tied: the embedding is the head
    )


def expected_share(moe: MoeConfig, tokens: int) -> float:
    """Share of the experts that `tokens` tokens choose, if every expert is as likely."""
    return 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens


def scattered_pages(source: random.Random, lengths: Sequence[int], cache: KvCache) -> list[list[int]]:
    """Random pages of `cache` for sequences of these lengths."""
    needed = [pages_for(length, cache.page_size) for length in lengths]
    free = iter(source.sample(range(cache.num_pages), sum(needed)))
    return [[next(free) for _ in range(count)] for count in needed]


def check_logits(engine: Engine, graphs: DecodeGraphs) -> dict[str, float]:
    """Relative errors of our logits against transformers', of a prompt and of decode steps in graphs and without.

    Both compute in bfloat16, so the bound is the rounding error of 36 layers: the two attention implementations of
    transformers, reported beside, differ as much.
    """
    import transformers

    config = engine.config
    hf_config = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.context_length,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        reference = transformers.Qwen3ForCausalLM(hf_config)
    reference.load_state_dict({name: slot.target for name, slot in engine.parameters.slots().items()}, assign=True)
    with DEVICE:  # its frequencies are no part of the state
        reference.model.rotary_emb = type(reference.model.rotary_emb)(hf_config)

    prompt, steps, copies = engine.tokens(1000), 20, 3
    ids = torch.tensor([prompt], device=DEVICE)
    with torch.inference_mode():
        expected = reference(ids).logits[0].float()
        reference.set_attn_implementation("eager")
        other = reference(ids).logits[0].float()

    def error(found: torch.Tensor, positions: slice) -> float:
        return float((found - expected[positions]).norm() / expected[positions].norm())

    start = len(prompt) - steps
    pages = engine.pages([len(prompt)] * copies)
    # 3 copies in the graph of 4 and in chunks of 300: padding, pieces and chunks all count
    for first in range(0, start, 300):
        chunk = prompt[first : min(first + 300, start)]
        last = engine.eager([SequenceSlice(chunk, first, where) for where in pages])
    found = {"prefill": error(last[0], slice(start - 1, start))}
    in_graph, without = [], []
    for position in range(start, len(prompt)):
        step = [SequenceSlice([prompt[position]], position, where) for where in pages]
        without.append(engine.eager(step))
        logits = graphs.run(step)
        assert logits is not None
        in_graph.append(logits.clone())
    found["decode"] = error(torch.stack(without)[:, 1], slice(start, None))
    found["decode in graphs"] = error(torch.stack(in_graph)[:, 1], slice(start, None))
    found["graphs against none"] = (
        (torch.stack(in_graph) - torch.stack(without)).norm() / torch.stack(without).norm()
    ).item()
    found["transformers against itself"] = ((other - expected).norm() / expected.norm()).item()
    return found


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    batch: int
    context: int
    graph_ms: float
    step_ms: float
    alone_ms: float
    roofline_ms: float

    @property
    def ratio(self) -> float:
        return self.graph_ms / self.roofline_ms


def time_decode(
    engine: Engine, executor: Executor, graphs: DecodeGraphs, batch: int, context: int, rate: float
) -> DecodeResult:
    """A step of `batch` sequences of `context` tokens each, the one being computed included."""
    greedy = (Draw(SamplingParams(temperature=0.0), 0),)
    tokens, pages = engine.tokens(batch), engine.pages([context] * batch)
    first = [StepRow([token], context - 1, where, greedy) for token, where in zip(tokens, pages, strict=True)]
    slices = [SequenceSlice([token], context - 1, where) for token, where in zip(tokens, pages, strict=True)]
    following = [msgspec.structs.replace(row, token_ids=(), follows=index) for index, row in enumerate(first)]
    alone_ms = wall_ms(lambda: executor.start(first).finish())
    pending = executor.start(first)

    def step() -> None:
        nonlocal pending
        before, pending = pending, executor.start(following)
        before.finish()

    step_ms = wall_ms(step)
    pending.finish()
    graphs.run(slices)
    graph_ms = gpu_ms(lambda: graphs.replay(batch), 30)
    weights = step_weight_bytes(engine.parameters.slots(), engine.chosen_share(slices))
    needed = weights + batch * context * engine.kv_token_bytes
    return DecodeResult(batch, context, graph_ms, step_ms, alone_ms, needed / rate * 1e3)


def wall_ms(step: Callable[[], object], *, repeats: int = 40) -> float:
    """Median time between the ends of two steps."""
    for _ in range(5):
        step()
    ends = [time.perf_counter()]
    for _ in range(repeats):
        step()
        ends.append(time.perf_counter())
    return statistics.median(after - before for before, after in itertools.pairwise(ends)) * 1e3


def time_prefill(engine: Engine, tokens: int, chunk: int) -> float:
    """Wall time in ms of a whole prompt in chunks, from token ids on the host to the last logits on the device."""
    prompt, (pages,) = engine.tokens(tokens), engine.pages([tokens])
    walls = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for first in range(0, tokens, chunk):
            engine.eager([SequenceSlice(prompt[first : first + chunk], first, pages)])
        torch.cuda.synchronize()
        walls.append((time.perf_counter() - begun) * 1e3)
    return statistics.median(walls[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--record", type=Path, help="renew the rows of this file of results (results/steps.json)")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--model", default="qwen3-8b", help="geometry to time (default: qwen3-8b)")
    parser.add_argument("--layers", type=int, help="number of layers; fewer for a quick look")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument(
        "--kernels", type=int, nargs="*", default=[], help="list kernels of these batches and of prefill"
    )
    parser.add_argument("--weights", choices=SCHEMES, default="bfloat16")
    parser.add_argument("--no-check", action="store_true", help="do not compare logits with transformers'")
    options = parser.parse_args()

    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {rate / 1e12:.2f} TB/s")
    config = published(options.model)
    if options.layers is not None:
        config = dataclasses.replace(config, num_layers=options.layers, mixed=config.mixed[: options.layers])
    has_reference = config == QWEN3_8B and options.weights == "bfloat16"
    config = dataclasses.replace(config, scheme=SCHEMES[options.weights])
    engine = Engine(config, kv_tokens=300_000, page_size=options.page_size)
    begun = time.perf_counter()
    graphs = engine.runner.capture_graphs(engine.cache, max_batch=max(options.batch), max_context=LONGEST)
    assert graphs is not None
    executor = Executor(engine.runner, engine.cache, (), overlap=True)
    capture_s = time.perf_counter() - begun
    print(f"captured decode graphs up to batch {max(options.batch)} in {capture_s:.1f} s")
    results: dict[str, Any] = {"copy_rate": rate, "capture_s": capture_s, "page_size": options.page_size}
    results |= {"model": options.model, "weights": options.weights}

    if has_reference and not options.no_check:
        results["logit_errors"] = check_logits(engine, graphs)
        print("relative error of logits:", ", ".join(f"{k} {v:.4f}" for k, v in results["logit_errors"].items()))
        engine.pool.data.normal_()

    print("\nbatch  context  graph ms  step ms  alone ms  roofline ms  graph/roofline  step/roofline  vLLM ms")
    results["decode"] = []
    for batch, context in [*((batch, 1024) for batch in options.batch), (1, LONGEST)]:
        result = time_decode(engine, executor, graphs, batch, context, rate)
        results["decode"].append({**dataclasses.asdict(result), "ratio": result.ratio})
        anchor = VLLM_DECODE_MS.get(batch) if context == 1024 and has_reference else None
        print(
            f"{batch:5}  {context:7}  {result.graph_ms:8.2f}  {result.step_ms:7.2f}  {result.alone_ms:8.2f}  "
            f"{result.roofline_ms:11.2f}  {result.ratio:14.2f}  {result.step_ms / result.roofline_ms:13.2f}  "
            f"{anchor or '':>7}"
        )
        if batch in options.kernels and context == 1024:  # `replay` repeats the last step
            list_kernels(f"a step of {batch}", functools.partial(graphs.replay, batch))

    floor_ms = engine.prompt_floor_ms(8192, 0, rate)
    anchor_text = f", vLLM {VLLM_PREFILL_8192_MS} ms" if has_reference else ""
    print(f"\nprefill of 8,192 tokens: floor {floor_ms:.1f} ms{anchor_text}")
    results["prefill_8192"] = {"floor_ms": floor_ms}
    for chunk in (8192, 2048):
        results["prefill_8192"][chunk] = found = time_prefill(engine, 8192, chunk)
        print(f"  in chunks of {chunk}: {found:.1f} ms, {floor_ms / found:.0%} of the peak")
    if options.kernels:
        prompt, (pages,) = engine.tokens(8192), engine.pages([8192])
        list_kernels("8,192 tokens", lambda: engine.eager([SequenceSlice(prompt, 0, pages)]))
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.record is not None:
        renew(options.record, figures_of(results))


def figures_of(results: Mapping[str, Any]) -> dict[str, float]:
    """The figures of rows in the results."""
    model = {"qwen3-8b": "", "qwen3-30b-a3b": "Qwen3-30B-A3B: "}.get(results["model"], f"{results['model']}: ")
    model += LABELS[results["weights"]]
    figures = {}
    for row in results["decode"]:
        context = f", context {row['context']:,}" if row["batch"] == 1 and not model else ""
        figures[f"{model}step, batch {row['batch']}{context}"] = row["step_ms"]
    at_once = "prompt of 8,192 tokens" if results["weights"] != "bfloat16" else "prefill of 8,192 tokens at once"
    return figures | {f"{model}{at_once}": results["prefill_8192"][8192]}


if __name__ == "__main__":
    main()
