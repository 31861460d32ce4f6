"""One rank of eight of DeepSeek-V3.2 or Qwen3-235B-A22B at full size, with random weights, on one GPU.

    python -m benchmarks.rank_of_eight --layout tp8|dp8 [--geometry qwen3-235b-a22b] [--parts memory,decode,prefill]
        [--json results.json]

All layers at true geometry: the rank's share of the weights, in the type in which a server holds them. Collectives do
their local work only (one_rank.py); the output says so. `exchange` is what the rank must send to the others, and how
long that takes at 350 GB/s; neither steps nor floors have it. Batches and prompts are those of the rank: with dp8, all
ranks have eight times as many, and with tp8 all ranks have the same.

memory    weights, KV of a token, and requests that fit on the GPU (DeepSeek-V3.2: with HiSparse and without), by
          `pdserve plan`
decode    steps in CUDA graphs. DeepSeek-V3.2: at 32k context with HiSparse, of batches whose sequences are all fully
          resident (as a server has them while GPU memory is free; only batches that fit) and of batches whose
          sequences are all evicting. A sequence repeats one token, so that its selection drifts with the positions.
          Qwen3-235B-A22B: at 8k context, all KV on the GPU. Compared with the floor: weights (of experts, the expected
          number of distinct ones), KV of all tokens (with an indexer its keys, and the selected rows), over the copy
          rate measured in the same run. `fetched` are rows that come from host memory; the floor does not count them
prefill   prompts of 8k and 32k tokens in chunks, without CUDA graphs, in a pool on the GPU. The floor is the weights
          read once, or the products at the rates of large ones measured in the same run

Latent rows of 64 x 32k tokens take 78 GiB of host memory in fp8 and 137 GiB in bfloat16 (`--kv-dtype auto`): a batch
whose rows exceed the free memory is left out. `--tiny --layers 2` runs on a CPU, to test this program.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.dsa_engine import CachedSequences, list_step_kernels, time_step
from benchmarks.gpu_timing import DEVICE, copy_rate, list_kernels, product_rates
from benchmarks.one_rank import RANKS, Layout, Rank, exchanging
from benchmarks.rank_engines import HiSparseEngine, PagedEngine, RankEngine
from pdserve.configs.schema import DecodeConfig
from pdserve.memory.device import free_memory_bytes
from pdserve.memory.hisparse.hot_buffer_size import resolve_hot_rows
from pdserve.memory.pages import pages_for
from pdserve.memory.sizing import GIB
from pdserve.models.config.model import ModelConfig
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_geometry
from pdserve.server.plan.options import GPU_GIB, RESERVE_GIB
from pdserve.server.plan.sizes import Plan

GEOMETRIES = ("deepseek-v3.2", "qwen3-235b-a22b")
PARTS = ("memory", "decode", "prefill")
COLLECTIVES = {
    "tp8": "all-reduce: one pass over the tensor; gathering of logits: a copy of eight parts",
    "dp8": "gathering of rows: a copy of eight times the rows; returning results: a sum of eight parts",
}
HOST_SHARE = 0.85
"""Share of the free host memory that latent rows may take."""
DEVICE_SHARE = 0.95
"""Share of the free GPU memory that indexer keys and latent rows may take."""
LINK_RATE = 350e9
"""Bytes per second that a GPU sends to the others of its machine over NVLink, and receives at the same time."""
NOMINAL_RATE = 1e10
"""Without a GPU: floors mean nothing."""


def model_config(geometry: str, layers: int | None, *, tiny: bool) -> ModelConfig:
    """The geometry with the first `layers` layers (None: all), or a tiny model that eight ranks can divide."""
    config = locate_geometry(geometry).config
    layers = layers or config.num_layers
    dense = min(config.mixed.count(False), layers - 1)
    config = dataclasses.replace(config, num_layers=layers, mixed=(False,) * dense + (True,) * (layers - dense))
    if config.dsa is not None:
        config = dataclasses.replace(config, mla=dataclasses.replace(config.dsa, indexed=(True,) * layers))
    if not tiny:
        return config
    assert config.moe is not None
    shared_size = 64 if config.moe.shared_size else 0
    moe = dataclasses.replace(config.moe, num_experts=16, expert_size=64, shared_size=shared_size)
    sizes: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "scheme": None}
    if config.dsa is None:
        return dataclasses.replace(config, num_heads=16, head_dim=16, moe=moe, **sizes)
    small: dict[str, Any] = {"q_rank": 16, "kv_rank": 32, "nope_dim": 8, "rope_dim": 8, "value_dim": 8}
    small |= {"index_heads": 4, "index_dim": 16, "index_topk": 16}
    dsa = dataclasses.replace(config.dsa, **small)
    return dataclasses.replace(config, num_heads=8, head_dim=dsa.latent_dim, mla=dsa, moe=moe, **sizes)


class Benchmark:
    """All parts of one layout."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        self._config = DecodeConfig(
            model=options.geometry, page_size=options.page_size, kv_dtype=options.kv_dtype, local_prefill="never"
        )
        model = model_config(options.geometry, options.layers, tiny=options.tiny)
        self._layout = Layout.of(options.layout, model)
        self._outline = self._layout.outline(options.kv_dtype, device)
        on_gpu = device.type == "cuda"
        self._rate = copy_rate() if on_gpu else NOMINAL_RATE
        self._product_rates = product_rates() if on_gpu else {torch.bfloat16: NOMINAL_RATE}
        self.results: dict[str, Any] = {
            "geometry": options.geometry,
            "layout": options.layout,
            "layers": model.num_layers,
            "kv_dtype": options.kv_dtype,
            "collectives": COLLECTIVES[options.layout],
            "copy_rate": self._rate,
            "product_rates": {str(dtype): rate for dtype, rate in self._product_rates.items()},
            "link_rate": LINK_RATE,
        }
        self._step_bytes = int(RESERVE_GIB * GIB)
        """What the GPU holds beside weights and KV."""
        self._release()

    def run(self) -> None:
        options, device = self._options, self._device
        begun = time.perf_counter()
        rank = Rank(self._layout, options.kv_dtype, device)
        weights = rank.runner.held_weight_bytes
        print(
            f"rank 0 of {RANKS} of {options.geometry}, {options.layout}, {self.results['layers']} layers: "
            f"{weights / GIB:.2f} GiB of weights, drawn in {time.perf_counter() - begun:.0f} s\n"
            f"collectives do their local work only: {COLLECTIVES[options.layout]}",
            flush=True,
        )
        with torch.inference_mode(), exchanging(self._layout, device):
            if "prefill" in options.parts:
                self._prefill(rank)
                self._save()
                self._release()
            if "decode" in options.parts:
                self._decode(rank)
                self._save()
        if "memory" in options.parts:
            self._memory(weights)
            self._save()

    def _batches(self, token_bytes: int, free: float, memory: str) -> list[int]:
        """The batches of which so many bytes a token fit into `free` bytes of this memory."""
        most = int(free // (self._options.context * token_bytes))
        batches = [batch for batch in self._options.batch if batch <= most]
        if left_out := [batch for batch in self._options.batch if batch > most]:
            print(f"left out: batches of {left_out}, whose KV exceeds the {memory} memory ({most} sequences fit)")
        if not batches:
            raise SystemExit(f"the KV of no batch fits into {memory} memory: give a smaller --batch or --context")
        return batches

    def _resident_batches(self, batches: list[int]) -> list[int]:
        """The batches whose rows fit into GPU memory, beside the indexer keys of the largest batch."""
        latent, keys = self._outline.make_cache(1, 1).pools
        context = self._options.context
        free = DEVICE_SHARE * free_memory_bytes(self._device) - max(batches) * context * keys.size_bytes
        return [batch for batch in batches if batch * context * latent.size_bytes <= free]

    def _engine(self, rank: Rank) -> tuple[RankEngine, dict[str, list[int]]]:
        """The cache for the largest batch; and the batches to time, by what the hot buffers hold of their sequences, or
        of which everything is in GPU memory.
        """
        options, dsa = self._options, self._layout.config.dsa
        sizes: dict[str, int] = {"max_context": options.context, "page_size": options.page_size}
        if dsa is None:
            free = DEVICE_SHARE * free_memory_bytes(self._device) - RESERVE_GIB * GIB * (self._device.type == "cuda")
            batches = self._batches(rank.runner.kv_token_bytes, free, "GPU")
            return PagedEngine(rank, sequences=max(batches), **sizes), {"resident": batches}
        latent, _ = self._outline.make_cache(1, 1).pools
        free = HOST_SHARE * free_memory_bytes(torch.device("cpu"))
        batches = self._batches(latent.size_bytes, free, "host")
        residents = self._resident_batches(batches)
        hot_rows = resolve_hot_rows(self._config, dsa.index_topk)
        most = max(residents, default=0)
        engine = HiSparseEngine(rank, sequences=max(batches), residents=most, hot_rows=hot_rows, **sizes)
        return engine, {"resident": residents, "evicting": batches}

    def _decode(self, rank: Rank) -> None:
        options = self._options
        begun = time.perf_counter()
        engine, sequences = self._engine(rank)
        batches = sorted({batch for each in sequences.values() for batch in each})
        host_bytes = engine.cache.pools[0].size_bytes if isinstance(engine, HiSparseEngine) else 0
        print(
            f"\ncache for {max(batches)} x {options.context} tokens: {engine.cache.device_bytes / GIB:.2f} GiB on the "
            f"device, {host_bytes / GIB:.2f} GiB of host memory; made in {time.perf_counter() - begun:.0f} s"
        )
        begun = time.perf_counter()
        graphs = engine.graphs(batches)
        print(f"captured decode graphs of {batches} in {time.perf_counter() - begun:.1f} s")
        if self._device.type == "cuda":
            self._release()
            free, total = torch.cuda.mem_get_info(self._device)
            self._step_bytes = total - free - rank.runner.held_weight_bytes - engine.cache.device_bytes
            print(f"beside weights and KV: {self._step_bytes / GIB:.2f} GiB (CUDA context, kernels, graphs)")
        self.results["decode"] = []
        for name, sizes in sequences.items():
            engine.capacity = options.context if name == "resident" else None
            print(f"all sequences {name}")
            print(
                "batch  context  graph ms  step ms  floor ms  ratio  misses  fetched MB a step  exchange kB a layer, ms"
            )
            for batch in sizes:
                row = time_step(engine, graphs, batch, options.context, self._rate)
                selected = engine.selected_bytes(batch, options.context) if isinstance(engine, HiSparseEngine) else 0.0
                exchange, fetched = self._exchange(rank, batch), row.miss_share * selected
                figures = {"sequences": name, **dataclasses.asdict(row), "ratio": row.ratio, "fetched_bytes": fetched}
                self.results["decode"].append(figures | exchange)
                print(f"{row}  {fetched / 1e6:17.1f}  {_shown(exchange)}", flush=True)
            if options.kernels:
                for batch in sorted({min(sizes), max(sizes)} if sizes else ()):
                    list_step_kernels(engine, graphs, batch, options.context)

    def _exchange(self, rank: Rank, rows: int) -> dict[str, float]:
        """What the rank sends in a layer of a step of so many rows, and the time of all layers."""
        sent = self._layout.exchanged_bytes(rows, rank.runner.dtype)
        return {"exchange_layer_bytes": sent, "exchange_ms": self._layout.config.num_layers * sent / LINK_RATE * 1e3}

    def _prefill(self, rank: Rank) -> None:
        chunk, page_size = self._options.chunk_size, self._options.page_size
        longest = max(self._options.prompts)
        cache = rank.runner.make_cache(pages_for(longest, page_size), page_size)
        sequences = CachedSequences(cache, rank.token_ids)
        (pages,), prompt = sequences.pages([longest]), sequences.tokens(longest)
        print(f"\nprompts in chunks of {chunk}\ntokens        ms  floor ms  ratio  exchange kB a layer, ms")
        self.results["prefill"] = []

        def compute(start: int, tokens: int) -> None:
            part = prompt[start : min(start + chunk, tokens)]
            rank.runner.forward(cache, [SequenceSlice(part, start, pages)])

        for tokens in sorted(self._options.prompts):
            walls = []
            for _ in range(2):  # the first one compiles kernels
                self._wait()
                begun = time.perf_counter()
                for start in range(0, tokens, chunk):
                    compute(start, tokens)
                self._wait()
                walls.append((time.perf_counter() - begun) * 1e3)
            floor = rank.prompt_floor_ms(tokens, self._rate, self._product_rates)
            exchange = self._exchange(rank, tokens)
            self.results["prefill"].append({"tokens": tokens, "ms": walls[-1], "floor_ms": floor, **exchange})
            print(
                f"{tokens:6}  {walls[-1]:8.1f}  {floor:8.1f}  {walls[-1] / floor:5.2f}  {_shown(exchange)}", flush=True
            )
        if self._options.kernels:
            last = (longest - 1) // chunk * chunk
            list_kernels(f"the last chunk of {longest} tokens", lambda: compute(last, longest))

    def _memory(self, weights: int) -> None:
        """Requests that fit on this GPU; without one, on an H200."""
        total = int(GPU_GIB["H200"] * GIB)
        if self._device.type == "cuda":
            total = torch.cuda.get_device_properties(self._device).total_memory
        context = self._options.context
        self.results["memory"] = {"total_bytes": total, "step_bytes": self._step_bytes, "weight_bytes": weights}
        print(
            f"\nrequests of {context} tokens on {total / GIB:.1f} GiB, {self._step_bytes / GIB:.2f} GiB of it beside "
            "weights and KV, 0.9 of the rest for KV"
        )
        for hisparse in (False, True) if self._layout.config.dsa is not None else (False,):
            config = self._config.model_copy(update={"enable_hisparse": hisparse})
            found = Plan(config, [self._outline], context=context, device_bytes=total - self._step_bytes).sizes()
            self.results["memory"]["hisparse" if hisparse else "plain"] = dataclasses.asdict(found)
            on_all = found.requests * (RANKS if self._options.layout == "dp8" else 1)
            name = "with HiSparse" if hisparse else "without"
            print(
                f"{name:>14}: {found.requests} on the rank, {on_all} on all, limited by {found.limit}; KV of a token: "
                f"{found.device_token_bytes:,} B on the GPU, {found.host_token_bytes:,} B in host memory; a request: "
                f"{found.device_request_bytes / GIB:.2f} GiB of the GPU"
            )

    def _save(self) -> None:
        """Write the figures of the parts that are done."""
        if self._options.json is not None:
            self._options.json.write_text(json.dumps(self.results, indent=2) + "\n")

    def _release(self) -> None:
        """Return torch's cached memory to the driver."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _shown(exchange: dict[str, float]) -> str:
    return f"{exchange['exchange_layer_bytes'] / 1e3:19.1f}  {exchange['exchange_ms']:7.3f}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=GEOMETRIES, default=GEOMETRIES[0])
    parser.add_argument("--layout", choices=tuple(COLLECTIVES), default="tp8")
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=list(PARTS),
        help=f"what to measure (default: {','.join(PARTS)})",
    )
    parser.add_argument("--layers", type=int, help="the first layers only (default: all)")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, help="tokens of a sequence (default: 32768, qwen3-235b-a22b: 8192)")
    parser.add_argument("--prompts", type=int, nargs="+", help="tokens of prompts (default: 8192 32768)")
    parser.add_argument("--chunk-size", type=int, default=2048)
    parser.add_argument("--page-size", type=int)
    parser.add_argument("--kv-dtype", choices=("auto", "fp8_e4m3"), help="default: fp8_e4m3, qwen3-235b-a22b: auto")
    parser.add_argument("--kernels", action="store_true", help="list the kernels of a decode step and of a chunk")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to test this program on a CPU")
    parser.add_argument("--json", type=Path, help="write all figures to this file, after each part")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    sparse = locate_geometry(options.geometry).config.dsa is not None
    context, prompts, page_size = (160, [48, 96], 8) if options.tiny else (32768, [8192, 32768], 64)
    if not sparse and not options.tiny:
        context, page_size = 8192, 16
    options.kv_dtype = options.kv_dtype or ("fp8_e4m3" if sparse else "auto")
    options.context = options.context or context
    options.prompts = options.prompts or prompts
    options.page_size = options.page_size or page_size
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    device = DEVICE if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("without a GPU only a tiny model can run: give --tiny --layers 2")
    benchmark = Benchmark(options, device)
    benchmark.run()
    return benchmark.results


if __name__ == "__main__":
    main()
