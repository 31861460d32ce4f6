"""Swap-in on one GPU: plan and copy of one sparse layer, compared with SGLang's kernel and the PCIe limit.

    python benchmarks/swap_in.py [--row-bytes 1152 656] [--hot-rows 4096] [--context 32768] [--json results.json]

Each step selects 2,048 tokens per request, of which the given share is new and not in the hot buffer. A step is timed
with events around one `swap_in`, while earlier work keeps the GPU busy, as in a serving step: launch times from Python
do not count. `gather` is the time of a plain Triton gather of as many random rows into adjacent ones, without planning;
`scatter` is the same into random rows of the hot pool, as swap-in has to write them. Before timing, every selected row
of several steps is compared with host memory, read by that gather.

All times but the bulk copy depend on what the host's cores did last: a gather took 10 to 20 % longer after two idle
seconds, and 60 % longer after they had filled half a gigabyte. So the CPU compares nothing, and three rounds over the
whole table show the variation.
"""

import argparse
import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import triton
import triton.language as tl

from pdserve.kernels.hisparse.slot_tables import SlotTables, buffer_pages
from pdserve.kernels.hisparse.swap_in import swap_in
from pdserve.kernels.hisparse.swap_plan import SwapPlan

DEVICE = torch.device("cuda", 0)
TOP_K, PAGE_SIZE = 2048, 64
WARM_UP_STEPS, STEPS, ROUNDS = 6, 20, 3
SLACK_TOKENS = 2 * (WARM_UP_STEPS + STEPS)  # a request's context grows by one per step

# Its kernel of August 2026 on this machine's kind of GPU (H200), rows of 1152 B, better of blocks of 960 and 1024; us.
SGLANG_US = {
    (1, 0): 28, (1, 2): 33, (1, 10): 50, (1, 25): 80,
    (8, 0): 27, (8, 2): 34, (8, 10): 69, (8, 25): 123,
    (32, 0): 45, (32, 2): 57, (32, 10): 171, (32, 25): 398,
    (64, 0): 27, (64, 2): 87, (64, 10): 325, (64, 25): 792,
}  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def gather_rows(host, sources, hot, targets, WORDS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0)
    word = tl.arange(0, BLOCK)
    source, target = tl.load(sources + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    tl.store(hot + target * WORDS + word, tl.load(host + source * WORDS + word, mask=word < WORDS), mask=word < WORDS)


def timed_us(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """GPU time of the work that `run` enqueues, with launches hidden behind other work."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]  # half a millisecond
    before()
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


@dataclasses.dataclass(frozen=True)
class Pools:
    """Rows of 64 requests in pinned memory, contents random, and room for their hot buffers."""

    host: torch.Tensor
    host_pages: torch.Tensor
    hot: torch.Tensor
    hot_rows: int  # of a request
    context: int

    @classmethod
    def allocate(cls, requests: int, row_bytes: int, hot_rows: int, context: int) -> "Pools":
        pages = requests * context // PAGE_SIZE
        host = torch.empty(pages, PAGE_SIZE, row_bytes, dtype=torch.uint8, pin_memory=True)
        for part in torch.split(host, 4096):
            part.copy_(torch.randint(256, part.shape, dtype=torch.uint8, device=DEVICE))
        order = torch.randperm(pages, device=DEVICE, dtype=torch.int32)
        hot_pages = requests * buffer_pages(hot_rows, PAGE_SIZE)
        hot = torch.empty(hot_pages, PAGE_SIZE, row_bytes, dtype=torch.uint8, device=DEVICE)
        return cls(host, order.view(requests, -1), hot, hot_rows, context)


class Trace:
    """Steps of a batch whose selections slide over a random order of the context: `share` percent new in each."""

    def __init__(self, pools: Pools, batch: int, share: int) -> None:
        self.pools, self.batch = pools, batch
        self.misses = TOP_K * share // 100
        self.tables = SlotTables.allocate(
            groups=1,
            requests=batch,
            hot_rows=pools.hot_rows,
            max_context=pools.context,
            page_size=PAGE_SIZE,
            device=DEVICE,
        ).group(0)
        self.plan = SwapPlan.allocate(batch, TOP_K, DEVICE)
        self.requests = torch.randperm(batch, device=DEVICE, dtype=torch.int32)
        self.pages = pools.host_pages[:batch]
        hot_pages = torch.randperm(len(pools.hot)).view(-1, buffer_pages(pools.hot_rows, PAGE_SIZE)).tolist()
        for request in range(batch):
            self.tables.admit(request, resident=False)
            self.tables.set_pages(request, hot_pages[request], capacity=pools.hot_rows)
        first_length = pools.context - SLACK_TOKENS
        steps = WARM_UP_STEPS + STEPS
        orders = torch.rand(batch, first_length, device=DEVICE).argsort(dim=1).int()
        window = torch.arange(steps, device=DEVICE)[:, None] * self.misses + torch.arange(TOP_K, device=DEVICE)
        selections = orders[:, window % first_length].transpose(0, 1)  # [steps, batch, TOP_K]
        self.selections = selections.sort(dim=2).values  # like the output of index_topk
        self.lengths = (first_length + 1 + torch.arange(steps, device=DEVICE, dtype=torch.int32))[:, None].repeat(
            1, batch
        )
        self.selected, self.seq_lens = self.selections[0].clone(), self.lengths[0].clone()
        self.step = 0

    def select(self) -> None:
        """Like the top-k kernel before swap-in, put the selection into the GPU's cache."""
        self.selected.copy_(self.selections[self.step])
        self.seq_lens.copy_(self.lengths[self.step])
        self.step += 1

    def swap_in(self) -> None:
        swap_in(
            self.plan,
            self.selected,
            self.requests,
            self.seq_lens,
            self.tables,
            self.pages,
            self.pools.host,
            self.pools.hot,
        )

    def check(self) -> None:
        """Check that every selected row of the last step equals host memory, and that the misses are the new tokens."""
        counts = self.plan.miss_counts.tolist()
        expected = TOP_K if self.step == 1 else self.misses
        assert counts == [expected] * self.batch, counts
        tokens = self.selected.long()
        pages = self.pages.gather(1, tokens // PAGE_SIZE)
        expected_rows = torch.empty(TOP_K, self.pools.hot.shape[2], dtype=torch.uint8, device=DEVICE)
        for row in range(self.batch):
            gather(self.pools, (pages[row] * PAGE_SIZE + tokens[row] % PAGE_SIZE).int(), expected_rows)
            held = self.pools.hot.view(-1, self.pools.hot.shape[2])[self.plan.rows[row].long()]
            assert held.equal(expected_rows)


def gather(pools: Pools, sources: torch.Tensor, out: torch.Tensor, targets: torch.Tensor | None = None) -> None:
    """Copy host rows [n] to these rows of `out`, by default the first n."""
    words = pools.host.shape[2] // 4
    if targets is None:
        targets = torch.arange(len(sources), device=DEVICE, dtype=torch.int32)
    host, target = (memory.view(-1).view(torch.int32) for memory in (pools.host, out))
    gather_rows[(len(sources),)](host, sources, target, targets, words, triton.next_power_of_2(words), num_warps=1)


def gather_us(pools: Pools, rows: int, *, scatter: bool) -> float:
    times = []
    for _ in range(8):
        sources = torch.randint(pools.host.shape[0] * PAGE_SIZE, (rows,), device=DEVICE, dtype=torch.int32)
        order = torch.randperm if scatter else torch.arange
        targets = order(pools.hot.shape[0] * PAGE_SIZE, device=DEVICE)[:rows].int()
        times.append(timed_us(lambda: gather(pools, sources, pools.hot, targets)))  # noqa: B023
    return statistics.median(times[2:])


def verify(pools: Pools) -> None:
    """Compare several steps with host memory, row by row."""
    for batch, share in ((1, 25), (len(pools.host_pages), 10)):
        trace = Trace(pools, batch, share)
        for _ in range(WARM_UP_STEPS):
            trace.select()
            trace.swap_in()
            trace.check()


def measure(pools: Pools, batch: int, share: int) -> dict[str, float]:
    """One round: a fresh trace, and the gathers right after it."""
    trace = Trace(pools, batch, share)
    for _ in range(WARM_UP_STEPS):
        trace.select()
        trace.swap_in()
    swap_us = statistics.median(timed_us(trace.swap_in, before=trace.select) for _ in range(STEPS))
    rows = trace.misses * batch
    gathers = {
        name: gather_us(pools, rows, scatter=name == "scatter_us") if rows else 0.0
        for name in ("gather_us", "scatter_us")
    }
    return {"swap_us": swap_us, **gathers}


def bulk_rate(pools: Pools) -> float:
    """GB/s of one copy of the hot pool's size from pinned memory."""
    source = pools.host.view(-1)[: pools.hot.numel()]
    times = [timed_us(lambda: pools.hot.view(-1).copy_(source, non_blocking=True)) for _ in range(5)]
    return pools.hot.numel() / statistics.median(times) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[1152, 656])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--shares", type=int, nargs="+", default=[0, 2, 10, 25], help="percent of top-k that is new")
    parser.add_argument("--hot-rows", type=int, default=4096, help="rows of a request's hot buffer")
    parser.add_argument("--context", type=int, default=32768, help="tokens of a request, a multiple of the page size")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    results = []
    print(f"{torch.cuda.get_device_name()}; top-k {TOP_K}, hot rows {args.hot_rows}, context {args.context}")
    for row_bytes in args.row_bytes:
        pools = Pools.allocate(max(args.batches), row_bytes, args.hot_rows, args.context)
        verify(pools)
        rate = bulk_rate(pools)
        cases = [(batch, share) for batch in args.batches for share in args.shares]
        rounds = [[measure(pools, *case) for case in cases] for _ in range(ROUNDS)]
        print(
            f"\nrows of {row_bytes} B; bulk copy from pinned memory {rate:.1f} GB/s; median (lowest) of {ROUNDS} rounds"
        )
        print("batch  new       swap-in us  SGLang us   PCIe us       gather us  of gather  of scatter   GB/s      MB")
        for (batch, share), *measured in zip(cases, *rounds, strict=True):
            times = {key: [one[key] for one in measured] for key in measured[0]}
            swap_us, gather = times["swap_us"], times["gather_us"]
            megabytes = batch * (TOP_K * share // 100) * row_bytes / 1e6
            swap_median = statistics.median(swap_us)
            sglang = SGLANG_US.get((batch, share), "-") if row_bytes == 1152 else "-"
            print(
                f"{batch:5d} {share:3d}% {swap_median:8.1f} ({min(swap_us):6.1f}) {sglang:>9} "
                f"{megabytes * 1e3 / rate:9.1f} {statistics.median(gather):7.1f} ({min(gather):5.1f}) "
                f"{statistics.median(gather) / swap_median:9.2f} "
                f"{statistics.median(times['scatter_us']) / swap_median:10.2f} "
                f"{megabytes * 1e3 / swap_median:6.1f} {megabytes:7.2f}"
            )
            results.append({"row_bytes": row_bytes, "batch": batch, "share": share, **times})
        del pools
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
