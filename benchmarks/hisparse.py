"""The same decode server with and without HiSparse, under the same GPU memory budget for KV, at long contexts.

    python -m benchmarks.hisparse [--json results.json]

One prefill server and two decode servers share a GPU and take turns: "device" has all KV on the GPU, "hisparse" has it
in host memory. Layers have the attention of DeepSeek-V3.2 and a dense MLP as large as one of eight GPUs' part of its
experts, so that a step reads as many weights. The model has a few layers, with their share of the KV memory.

Weights are random, so the selections of different tokens have nothing in common: with random outputs, a step finds
almost no row that it needs in the hot buffer. Real models mostly select what they have selected before. So every
request is made to repeat one token: its index queries stay constant, and its selection drifts with the positions. The
server counts the misses, and the table shows them.

    fits       as many requests as the budget holds without HiSparse: all stream, none ends in the measured time
    exceeds    more clients than that, each sends its next request after a response, lengths mixed
    worst      the same with random outputs
    arrival    from the last prefill chunk to the second token, whose step reads the transferred KV; new prompts

Prompts of the first three share all but their last tokens, and prefill has the shared ones in its prefix cache: this
measures decode, not prefill. Decode has no prefix cache here, so the KV of every request is sent and stored in full.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.hisparse_model import DEEPSEEK_V32, GIB, PAGE, TINY, Sizes, longest_output
from benchmarks.results import renew
from benchmarks.servers import cpu_seconds, free_port, running, wait_ready, write_model
from pdserve.common.errors import PdserveError
from pdserve.configs.schema import DecodeConfig, PrefillConfig
from pdserve.server.bench.client import BenchClient, RequestRecord
from pdserve.server.launch.up import base_url

TAIL_TOKENS = 64
TARGET_FITS, TARGET_EXCEEDS = 0.98, 3.0
RAMP_TIMEOUT_S = 40.0
ARMS = ("device", "hisparse")


def server_configs(model: Path, options: argparse.Namespace, sizes: Sizes) -> dict[str, PrefillConfig | DecodeConfig]:
    shared: dict[str, Any] = {
        "model": str(model),
        "load_format": "dummy",
        "device": options.device,
        "index_dtype": options.index_dtype,
        "page_size": PAGE,
        "max_queued_requests": 1024,
    }
    prompts = (options.context + longest_output(options)) * (sizes.latent_token + sizes.index_token)
    prefill = PrefillConfig(
        **shared,
        port=free_port(),
        bootstrap_port=free_port(),
        chunk_size=options.chunk_size,
        kv_memory_gib=(3 + 2 * options.cold) * prompts / GIB,
    )
    decode: dict[str, Any] = {
        **shared,
        "prefill": (f"127.0.0.1:{prefill.bootstrap_port}",),
        "prefix_cache": False,
        "max_running_requests": sizes.hisparse_requests,
        "queue_timeout_s": 600.0,
        "growth_tokens": longest_output(options),  # admitted requests are not retracted
    }
    hisparse = {
        "enable_hisparse": True,
        "hot_rows": sizes.hot_rows,
        "kv_memory_gib": (sizes.budget - sizes.tables(sizes.hisparse_requests)) / GIB,
        # besides hot buffers, the budget holds keys of requests whose KV arrives while others run
        "host_memory_gib": (sizes.hisparse_requests + 2) * sizes.longest * sizes.latent_token / GIB,
    }
    return {
        "prefill": prefill,
        "device": DecodeConfig(**decode, local_prefill="never", port=free_port(), kv_memory_gib=sizes.budget / GIB),
        "hisparse": DecodeConfig(**decode, local_prefill="never", port=free_port(), **hisparse),
    }


@dataclasses.dataclass(frozen=True)
class Window:
    """Results of one server in the measured time."""

    arm: str
    clients: int
    repeat: bool  # each output repeats one token, or is random
    tokens_per_s: float
    batch: float  # requests in a step, on average
    miss_share: float  # share of misses among the rows selected by evicting requests
    misses: float  # per request, layer and step; of evicting requests
    swapped_gb_per_s: float
    resident: int
    retractions: int
    leader_cpu: float  # busy share of one core
    front_cpu: float

    @property
    def step_ms(self) -> float:
        return self.batch / self.tokens_per_s * 1e3


class Bench:
    """Loads the two decode servers."""

    def __init__(
        self, options: argparse.Namespace, sizes: Sizes, configs: dict[str, PrefillConfig | DecodeConfig], vocab: int
    ) -> None:
        self._options = options
        self._sizes = sizes
        self._configs = configs
        self._random = random.Random(1)
        self._vocab = vocab
        self._prefix = self._tokens(options.context - TAIL_TOKENS)
        self.failures: list[str] = []

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(self._vocab - 2), k=count)

    def _body(self, prompt: list[int], output: int, *, repeat: bool = True) -> bytes:
        sampling: dict[str, Any] = {"max_new_tokens": output, "ignore_eos": True, "temperature": float(not repeat)}
        if repeat:
            sampling["logit_bias"] = {str(prompt[-1]): 100.0}
        return msgspec.json.encode({"input_ids": prompt, "sampling_params": sampling, "stream": True})

    def fits(self, arm: str) -> int:
        return self._sizes.device_requests if arm == "device" else self._sizes.hisparse_requests

    def same_tokens(self) -> tuple[int, int]:
        """Length of the common prefix of both servers' greedy tokens for one prompt.

        Before that, prefill computes what all prompts share. The last page of the compared prompt is not full, so it
        is never cached, and prefill computes it in the same way for both.
        """
        tails = [self._tokens(TAIL_TOKENS), self._tokens(TAIL_TOKENS - 1)]
        outputs: list[list[int]] = []
        with httpx.Client(timeout=120.0, trust_env=False) as http:
            for arm, tail in ((ARMS[0], tails[0]), *((arm, tails[1]) for arm in ARMS)):
                sampling = {"max_new_tokens": 64, "temperature": 0, "ignore_eos": True}
                body = {"input_ids": self._prefix + tail, "sampling_params": sampling}
                answer = http.post(f"{base_url(self._configs[arm])}/generate", json=body).raise_for_status()
                outputs.append(answer.json()["output_ids"])
        outputs = outputs[1:]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*outputs, strict=True))
        return len(list(same)), len(outputs[0])

    async def window(self, arm: str, clients: int, seconds: float, *, repeat: bool = True) -> Window:
        """Start `clients`, wait until as many run as the server holds, count tokens for `seconds`, end them."""
        url, port = base_url(self._configs[arm]), self._configs[arm].port
        client = BenchClient(url, api_key=None, timeout_s=600.0)
        draw = random.Random(f"lengths {clients}")
        async with httpx.AsyncClient(timeout=10.0, trust_env=False) as http:
            tasks = [
                asyncio.create_task(self._client(client, self._lengths(clients, draw), repeat)) for _ in range(clients)
            ]
            wanted, began = min(clients, self.fits(arm)), time.perf_counter()
            while (await _info(http, url))["gauges"]["running_requests"] < wanted:
                if time.perf_counter() - began > RAMP_TIMEOUT_S or self.failures:
                    break
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            before, cpu_before = await _info(http, url), cpu_seconds(port)
            tokens, started = client.tokens, time.perf_counter()
            await asyncio.sleep(seconds)
            tokens, elapsed = client.tokens - tokens, time.perf_counter() - started
            after, cpu_after = await _info(http, url), cpu_seconds(port)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            client.close()
            while sum((await _info(http, url))["states"].values()):
                await asyncio.sleep(0.05)
        counted = {name: after["counters"][name] - before["counters"][name] for name in after["counters"]}
        steps, looked_up = counted["decode_steps"], counted["hot_hits"] + counted["hot_misses"]
        cpu = {name: (cpu_after[name] - cpu_before.get(name, 0.0)) / elapsed for name in cpu_after}
        return Window(
            arm=arm,
            clients=clients,
            repeat=repeat,
            tokens_per_s=tokens / elapsed,
            batch=counted["generation_tokens"] / max(steps, 1),
            miss_share=counted["hot_misses"] / max(looked_up, 1),
            misses=counted["hot_misses"] / max(looked_up, 1) * self._options.top_k,
            swapped_gb_per_s=counted["hot_bytes_swapped_in"] / elapsed / 1e9,
            resident=int(after["gauges"].get("hot_buffers_resident", 0)),
            retractions=int(counted["retractions"]),
            leader_cpu=cpu.get("leader_cpu_s", 0.0),
            front_cpu=cpu.get("front_cpu_s", 0.0),
        )

    def _lengths(self, clients: int, draw: random.Random) -> Iterator[int]:
        """Output lengths of one client: if all fit, none may end in the measured time; otherwise they are mixed."""
        most = longest_output(self._options)
        if clients <= self._sizes.device_requests:
            return itertools.repeat(most)
        return iter(lambda: draw.randint(self._options.output // 2, most), 0)

    async def _client(self, client: BenchClient, lengths: Iterator[int], repeat: bool) -> None:
        for length in lengths:
            body = self._body(self._prefix + self._tokens(TAIL_TOKENS), length, repeat=repeat)
            self._note(await client.generate(body, time.perf_counter(), expected_tokens=length))

    async def arrivals(self, arm: str) -> dict[str, float]:
        """Seconds of one uncached prompt: by stage, and from its last chunk to the second token."""
        client = BenchClient(base_url(self._configs[arm]), api_key=None, timeout_s=600.0)
        body = self._body(self._tokens(self._options.context), 8)
        record = await client.generate(body, time.perf_counter(), expected_tokens=8)
        client.close()
        self._note(record)
        stages = record.timeline
        first_step = record.arrivals[1][0] - record.arrivals[0][0] if len(record.arrivals) > 1 else 0.0
        after_prefill = stages.get("transfer", 0.0) + stages.get("control", 0.0)
        return {
            "ttft": record.ttft_s or 0.0,
            "prefill": stages.get("prefill", 0.0),
            "transfer": stages.get("transfer", 0.0),
            "control": stages.get("control", 0.0),
            "admit": stages.get("admit", 0.0),
            "first_step": first_step,
            "last_chunk_to_first_step": after_prefill + first_step,
        }

    def _note(self, record: RequestRecord) -> None:
        if record.failure is not None:
            self.failures.append(f"{record.failure}: {record.detail}")


async def _info(http: httpx.AsyncClient, url: str) -> dict[str, Any]:
    info: dict[str, Any] = (await http.get(f"{url}/server_info")).json()
    return info


def run(bench: Bench, options: argparse.Namespace, sizes: Sizes, screen: Console) -> dict[str, Any]:
    """All measurements, the arms in turn."""
    results: dict[str, Any] = {"windows": [], "arrivals": {arm: [] for arm in ARMS}}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        same, of = bench.same_tokens()
        results["same_tokens"] = [same, of]
        screen.print(f"the first {same} of {of} greedy tokens are the same on both servers")
        for number, arm in itertools.product(range(options.cold), ARMS):
            found = runner.run(bench.arrivals(arm))
            if number or options.cold == 1:  # the first may compile
                results["arrivals"][arm].append(found)
            screen.print(f"arrival {arm}: {_milliseconds(found)}", soft_wrap=True)
        for clients, repeat in [*((clients, True) for clients in options.clients), (options.worst_clients, False)]:
            all_fit = clients <= sizes.device_requests
            seconds = options.fit_seconds if all_fit else options.seconds
            for _, arm in itertools.product(range(options.rounds if all_fit else 1), ARMS):
                window = runner.run(bench.window(arm, clients, seconds, repeat=repeat))
                results["windows"].append({**dataclasses.asdict(window), "step_ms": window.step_ms})
                screen.print(json.dumps(results["windows"][-1]), soft_wrap=True)
                if bench.failures:
                    raise PdserveError(f"{len(bench.failures)} requests failed, the first: {bench.failures[0]}")
    return results


def main() -> int:
    options = _parse()
    screen = Console(stderr=True, highlight=False, width=160)
    model = {**(TINY if options.tiny else DEEPSEEK_V32), "num_hidden_layers": options.layers}
    model["first_k_dense_replace"] = options.layers
    model["intermediate_size"] = options.mlp or model["intermediate_size"]
    options.top_k = model["index_topk"]
    options.hot_rows = options.hot_rows or 3 * options.top_k // 2
    sizes = Sizes.of(options, model)
    model["max_position_embeddings"] = sizes.longest
    print(sizes, flush=True)
    if not 1 <= sizes.device_requests < sizes.hisparse_requests:
        screen.print("error: the budget has to hold a request without HiSparse, and more with it", style="red")
        return 2
    results: dict[str, Any] = {"command": sys.argv, "sizes": dataclasses.asdict(sizes)}
    try:
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), model)
            configs = server_configs(Path(directory), options, sizes)
            began = time.perf_counter()
            with running(configs, screen) as children:
                wait_ready(children, list(configs.values()), timeout_s=180)
                results["start_s"] = time.perf_counter() - began
                bench = Bench(options, sizes, configs, model["vocab_size"])
                results |= run(bench, options, sizes, screen)
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.record is not None:
        renew(options.record, figures_of(results, sizes))
    out = Console(highlight=False, width=130)
    out.print(throughput_table(results["windows"], sizes))
    out.print(arrival_table(results["arrivals"]))
    return 0


def figures_of(results: Mapping[str, Any], sizes: Sizes) -> dict[str, float]:
    """The figures of rows in the results."""
    figures = {}
    for clients, repeat in dict.fromkeys((window["clients"], window["repeat"]) for window in results["windows"]):
        device, hisparse = (
            statistics.fmean(
                window["tokens_per_s"]
                for window in results["windows"]
                if (window["arm"], window["clients"], window["repeat"]) == (arm, clients, repeat)
            )
            for arm in ARMS
        )
        what = "" if repeat else ", random text (worst)"
        what += ", all fit" if clients <= sizes.device_requests else ""
        figures[f"{clients} clients{what}: with HiSparse / without"] = hisparse / device
    arrivals = results["arrivals"][ARMS[1]]
    figures["first step of a new prompt"] = 1e3 * statistics.median(one["first_step"] for one in arrivals)
    last = 1e3 * statistics.median(one["last_chunk_to_first_step"] for one in arrivals)
    return figures | {"last chunk to first step": last}


def throughput_table(windows: list[dict[str, Any]], sizes: Sizes) -> Table:
    table = Table(title=f"output tokens/s under {sizes.budget / GIB:g} GiB of GPU memory for KV")
    for column in ("clients", *ARMS, "ratio", "target", "in a step", "step ms", "resident", "misses", "swap GB/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for clients, repeat in dict.fromkeys((window["clients"], window["repeat"]) for window in windows):
        means: dict[str, dict[str, float]] = {}
        for arm in ARMS:
            load = (arm, clients, repeat)
            found = [window for window in windows if (window["arm"], window["clients"], window["repeat"]) == load]
            names = [name for name, value in found[0].items() if isinstance(value, int | float)]
            means[arm] = {name: statistics.fmean(window[name] for window in found) for name in names}
        device, hisparse = (means[arm] for arm in ARMS)
        if clients <= sizes.device_requests:
            target = f">= {TARGET_FITS:g}"
        else:
            target = f">= {TARGET_EXCEEDS:g}" if clients >= sizes.hisparse_requests and repeat else ""
        table.add_row(
            str(clients) if repeat else f"{clients}, worst",
            *(f"{means[arm]['tokens_per_s']:.0f}" for arm in ARMS),
            f"{hisparse['tokens_per_s'] / device['tokens_per_s']:.3f}",
            target,
            f"{device['batch']:.1f} / {hisparse['batch']:.1f}",
            f"{device['step_ms']:.2f} / {hisparse['step_ms']:.2f}",
            f"{hisparse['resident']:.0f}",
            f"{hisparse['miss_share']:.1%}",
            f"{hisparse['swapped_gb_per_s']:.1f}",
        )
    return table


def arrival_table(arrivals: dict[str, list[dict[str, float]]]) -> Table:
    table = Table(title="a new prompt, medians in ms")
    names = list(next(iter(arrivals.values()))[0])
    for column in ("", *names):
        table.add_column(column, justify="right", no_wrap=True)
    for arm, found in arrivals.items():
        table.add_row(arm, *(f"{statistics.median(one[name] for one in found) * 1e3:.2f}" for name in names))
    return table


def _milliseconds(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value * 1e3:.2f}" for name, value in seconds.items()) + " ms"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--record", type=Path, help="renew the rows of this file of results (results/hisparse.json)")
    parser.add_argument("--layers", type=int, default=4, help="layers, of the model's 61 (default: 4)")
    parser.add_argument("--mlp", type=int, help="width of the MLP (default: 33 x 2048)")
    parser.add_argument("--kv-memory-gib", type=float, default=1.0, help="GPU memory for KV (default: 1)")
    parser.add_argument("--hot-rows", type=int, help="rows of a hot buffer (default: 1.5 x what a step reads)")
    parser.add_argument("--context", type=int, default=32768, help="prompt tokens (default: 32768)")
    parser.add_argument("--output", type=int, default=2048, help="mean output tokens (default: 2048)")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 32, 128])
    parser.add_argument("--seconds", type=float, default=8.0, help="measured time where not all fit (default: 8)")
    parser.add_argument("--fit-seconds", type=float, default=3.0, help="measured time where all fit (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds where all fit (default: 2)")
    parser.add_argument("--cold", type=int, default=4, help="new prompts per server (default: 4; drops the first)")
    parser.add_argument("--worst-clients", type=int, default=32, help="clients with random outputs (default: 32)")
    parser.add_argument("--chunk-size", type=int, default=2048, help="chunk size of prefill (default: 2048)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--index-dtype", choices=["model", "fp8_e4m3"], default="fp8_e4m3", help="type of indexer keys")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try this script on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
