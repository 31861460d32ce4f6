"""The embedded model on this CPU: transformers' `generate`, our model runner alone, and the running pair over HTTP.

    python -m benchmarks.cpu_decode            # from the root of the checkout; about three minutes
    python -m benchmarks.cpu_decode --rounds 9 --threads 2

Everything decodes greedily in float32, with the same number of threads, from the same kind of random prompt. "Packed"
weights stay quantized as in the GGUF file, as they do in the pair; all others are float32. Rounds are
interleaved, so that load from other processes affects all alike; figures are medians over the rounds. CPU time counts
all threads and processes involved, and is meaningful on a shared machine, where wall time is not.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.serve import pair_on_free_ports
from pdserve.common.errors import PdserveError
from pdserve.configs.setting_types import CpuKernelsSetting
from pdserve.kernels.backends.dispatch import prepare_kernels
from pdserve.memory.pages import pages_for
from pdserve.models.layers.batch import SequenceSlice
from pdserve.models.loading.catalog import locate_model
from pdserve.models.runner import ModelRunner
from pdserve.server.bench.command import measure
from pdserve.server.bench.options import BenchOptions
from pdserve.server.bench.report import BenchResult
from pdserve.server.launch.up import RunningPair, running_pair
from tests.checkpoints import load_smollm2_reference

CPU = torch.device("cpu")
PAGE_SIZE = 16
STREAMS = 8
LONG_PROMPT = 1000
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Samples:
    """Figures of one contestant: tokens per second in the whole call and after the first token, CPU time per token."""

    whole: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def add(self, streams: int, new_tokens: int, seconds: float, decode_s: float, cpu_s: float) -> None:
        self.whole.append(streams * new_tokens / seconds)
        self.decode.append(streams * (new_tokens - 1) / decode_s)
        self.cpu_ms.append(1000 * cpu_s / (streams * new_tokens))


def load_runner(cpu_kernels: CpuKernelsSetting, *, packed: bool = False) -> ModelRunner:
    return ModelRunner.load(
        locate_model("smollm2"), device=CPU, dtype=torch.float32, cpu_kernels=cpu_kernels, keep_blocks=packed
    )


class Contest:
    """The contestants and what they run: `prompt_len` random tokens, then exactly `new_tokens`."""

    def __init__(self, pair: RunningPair, ask: "Ask", options: argparse.Namespace) -> None:
        self._pair = pair
        self._ask = ask
        self._prompt_len: int = options.prompt_len
        self._new_tokens: int = options.new_tokens
        self._random = random.Random(0)
        self._reference = load_smollm2_reference()
        self._packed_runner = load_runner("auto", packed=True)
        self._runner = load_runner("auto")
        self._torch_runner = load_runner("torch")

    def contestants(self) -> dict[str, Callable[[Samples], None]]:
        return {
            "transformers, 1 sequence": lambda samples: self._run_transformers(samples, 1),
            f"transformers, batch of {STREAMS}": lambda samples: self._run_transformers(samples, STREAMS),
            "our runner, packed, 1 sequence": lambda samples: self._run_runner(samples, 1, self._packed_runner),
            f"our runner, packed, batch of {STREAMS}": lambda samples: self._run_runner(
                samples, STREAMS, self._packed_runner
            ),
            "our runner, 1 sequence": lambda samples: self._run_runner(samples, 1, self._runner),
            f"our runner, batch of {STREAMS}": lambda samples: self._run_runner(samples, STREAMS, self._runner),
            "our runner without Numba, 1 sequence": lambda samples: self._run_runner(samples, 1, self._torch_runner),
            f"our runner without Numba, batch of {STREAMS}": lambda samples: self._run_runner(
                samples, STREAMS, self._torch_runner
            ),
            "the pair, 1 stream": lambda samples: self._run_pair(samples, 1),
            f"the pair, {STREAMS} streams": lambda samples: self._run_pair(samples, STREAMS),
        }

    def _prompt(self) -> list[int]:
        return self._random.choices(range(100, self._runner.config.vocab_size), k=self._prompt_len)

    def _run_transformers(self, samples: Samples, streams: int) -> None:
        stamps: list[float] = []

        def stamp(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            """A stopping criterion that never stops: called once per step."""
            stamps.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

        prompts = torch.tensor([self._prompt() for _ in range(streams)])
        started, cpu_started_s = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            self._reference.generate(
                prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=False,
                min_new_tokens=self._new_tokens,
                max_new_tokens=self._new_tokens,
                pad_token_id=0,
                stopping_criteria=[stamp],
            )
        cpu_s = time.process_time() - cpu_started_s
        assert len(stamps) == self._new_tokens
        samples.add(streams, self._new_tokens, stamps[-1] - started, stamps[-1] - stamps[0], cpu_s)

    def _run_runner(self, samples: Samples, streams: int, runner: ModelRunner) -> None:
        prepare_kernels(CPU, torch.float32, "torch" if runner is self._torch_runner else "auto")
        pages_each = pages_for(self._prompt_len + self._new_tokens, PAGE_SIZE)
        cache = runner.make_cache(streams * pages_each, PAGE_SIZE)
        pages = [range(index * pages_each, (index + 1) * pages_each) for index in range(streams)]
        prompts = [self._prompt() for _ in range(streams)]
        started, cpu_started_s = time.perf_counter(), time.process_time()
        logits = runner.forward(
            cache, [SequenceSlice(prompt, 0, own) for prompt, own in zip(prompts, pages, strict=True)]
        )
        first_at = time.perf_counter()
        for position in range(self._prompt_len, self._prompt_len + self._new_tokens - 1):
            assert logits is not None
            tokens = logits.argmax(dim=-1).tolist()
            steps = [SequenceSlice([token], position, own) for token, own in zip(tokens, pages, strict=True)]
            logits = runner.forward(cache, steps)
        assert logits is not None
        logits.argmax(dim=-1).tolist()
        ended = time.perf_counter()
        samples.add(streams, self._new_tokens, ended - started, ended - first_at, time.process_time() - cpu_started_s)

    def _run_pair(self, samples: Samples, streams: int) -> None:
        cpu_started_s = process_tree_cpu_s(os.getpid())
        result = self._ask(
            BenchOptions(
                url=self._pair.url,
                requests=streams,
                concurrency=streams,
                warmup=0,
                input_len=self._prompt_len,
                output_len=self._new_tokens,
                seed=self._random.getrandbits(32),
            )
        )
        cpu_s = process_tree_cpu_s(os.getpid()) - cpu_started_s
        first_s = max(record.started_s + record.arrivals[0][0] for record in result.records)
        last_s = min(record.started_s + record.arrivals[-1][0] for record in result.records)
        # the time in which all streams decode; before that, some wait for prefill
        together = sum(
            sum(first_s <= record.started_s + at_s <= last_s for at_s, _ in record.arrivals)
            for record in result.records
        )
        decode_s = (last_s - first_s) * streams * (self._new_tokens - 1) / max(1, together - streams)
        samples.add(streams, self._new_tokens, result.summary.duration_s, decode_s, cpu_s)


Ask = Callable[[BenchOptions], BenchResult]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="threads of each model: here, in prefill and in decode")
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    screen = Console(stderr=True, highlight=False)
    try:
        with running_pair(pair_on_free_ports({"threads": str(options.threads)}), screen) as pair, _asker(screen) as ask:
            pair.wait_ready()
            contestants = Contest(pair, ask, options).contestants()
            for run in contestants.values():
                run(Samples())
            samples = {name: Samples() for name in contestants}
            for number in range(options.rounds):
                screen.print(f"round {number + 1} of {options.rounds}, load average {os.getloadavg()[0]:.1f}")
                for name, run in contestants.items():
                    run(samples[name])
            transfer_shares, prefix_ratios = _first_tokens(pair, ask, options.rounds)
    except KeyboardInterrupt:
        return 130
    except PdserveError as error:
        screen.print(f"error: {error}", style="red", markup=False)
        return 1
    out = Console(highlight=False)
    out.print(_speed_table(samples, options))
    out.print(_targets_table(samples, transfer_shares, prefix_ratios))
    return 0


@contextmanager
def _asker(screen: Console) -> Iterator[Ask]:
    """A function that runs one load against the pair and raises if a request fails."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:

        def ask(bench: BenchOptions) -> BenchResult:
            result = runner.run(measure(bench, screen))
            if result.summary.ok != bench.requests:
                raise PdserveError(f"requests failed: {result.summary.failures}")
            return result

        yield ask


def _first_tokens(pair: RunningPair, ask: Ask, rounds: int) -> tuple[list[float], list[float]]:
    """Per round, for a long prompt: transfer's share of TTFT, and the TTFT of a second prompt with the same prefix."""
    shares, ratios = [], []
    for seed in range(rounds):
        result = ask(
            BenchOptions(
                url=pair.url,
                requests=2,
                concurrency=1,
                warmup=0,
                prefix_len=LONG_PROMPT,
                input_len=8,
                output_len=2,
                seed=seed + 1,
            )
        )
        first, second = result.records
        assert first.ttft_s is not None
        assert second.ttft_s is not None
        shares.append(first.timeline["transfer"] / first.ttft_s)
        ratios.append(second.ttft_s / first.ttft_s)
    return shares, ratios


def _speed_table(samples: dict[str, Samples], options: argparse.Namespace) -> Table:
    table = Table(
        title=f"SmolLM2-135M, {options.threads} threads, {options.prompt_len} prompt tokens, "
        f"{options.new_tokens} new tokens: tokens/s, median of {options.rounds}",
        caption=f"torch {torch.__version__}; 'whole' includes the prompt; load average {os.getloadavg()[0]:.1f}",
    )
    for column in ("", "whole", "vs transformers", "after the 1st token", "vs transformers", "CPU ms/token"):
        table.add_column(column, justify="right" if column else "left")
    base = next(iter(samples.values()))
    for name, one in samples.items():
        table.add_row(
            name,
            f"{statistics.median(one.whole):.1f}",
            f"{_ratio(one.whole, base.whole):.2f}x",
            f"{statistics.median(one.decode):.1f}",
            f"{_ratio(one.decode, base.decode):.2f}x",
            f"{statistics.median(one.cpu_ms):.1f}",
        )
    return table


def _targets_table(
    samples: dict[str, Samples], transfer_shares: Sequence[float], prefix_ratios: Sequence[float]
) -> Table:
    base = samples["transformers, 1 sequence"]
    single = _ratio(samples["the pair, 1 stream"].whole, base.whole)
    eight = _ratio(samples[f"the pair, {STREAMS} streams"].whole, base.whole)
    share, prefix = statistics.median(transfer_shares), statistics.median(prefix_ratios)
    rows = (
        ("the pair, 1 stream, vs transformers", f"{single:.2f}x", ">= 1.3x", single >= 1.3),
        (f"the pair, {STREAMS} streams, vs transformers with 1", f"{eight:.2f}x", ">= 3x", eight >= 3),
        (f"transfer, of the TTFT of {LONG_PROMPT} tokens", f"{share:.1%}", "< 10%", share < 0.1),
        (f"TTFT with the same first {LONG_PROMPT} tokens, vs the first", f"{prefix:.2f}x", "<= 0.25x", prefix <= 0.25),
    )
    table = Table(title="targets")
    for column in ("what", "measured", "target", ""):
        table.add_column(column, justify="left" if column == "what" else "right")
    for what, measured, target, met in rows:
        table.add_row(what, measured, target, "met" if met else "[red]missed[/red]")
    return table


def _ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """Median of the ratios of each round, in which variations of the machine cancel."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def process_tree_cpu_s(pid: int) -> float:
    """CPU seconds of a process and all its live descendants (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own_s = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS_PER_S
    children = [
        int(child)
        for tasks in Path(f"/proc/{pid}/task").iterdir()
        for child in (tasks / "children").read_text().split()
    ]
    return own_s + sum(process_tree_cpu_s(child) for child in children)


if __name__ == "__main__":
    sys.exit(main())
