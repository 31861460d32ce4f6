"""Four prefill ranks write the KV of a prompt to one decode rank, in four ways, with Mooncake between two processes.

    python -m benchmarks.staging [--device cpu|cuda] [--transport tcp|nvlink] [--tokens 4096]
    python -m benchmarks.staging --device cuda --kernels

token slices  rows of a token-major pool, one write per token, layer and plane: what SGLang does without staging
page slices   page-major pools, one write per page, layer and plane: what pdserve does without staging
staged        gather, one write per part into the ring, scatter; with the protocol of scheduler/prefill/staging.py
equal TP      the same bytes to four decode ranks sharded alike, one write per page: needs no staging, the bound

The time runs from the KV in the source pages to decode's confirmation that it is in its pages. Grants are requested
before, as a server does before its forward pass. Every arm first runs into a poisoned destination and is compared
bitwise; then the arms are timed in turn. Many small writes use Mooncake's batch call, 1,024 at a time, few large ones
submit and poll: each arm uses the faster of the two, and every arm has a connection pool.

`--kernels` measures gather and scatter alone, against copies of the same size.
"""

import argparse
import dataclasses
import json
import multiprocessing
import statistics
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.staging_kernels import kernel_rates, kernels_table
from benchmarks.staging_pair import Prefill, Run, Shape, decode_process

ARMS = ("token slices", "page slices", "staged", "equal TP")


def compare_arms(shape: Shape, repeats: int, screen: Console) -> dict[str, list[Run]]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=decode_process, args=(shape, theirs), daemon=True)
    process.start()
    theirs.close()
    results: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    with screen.status("starting") as status:
        prefill = Prefill(shape, ours)
        plans = {arm: prefill.plan(arm) for arm in ARMS if arm != "staged"}

        def run(arm: str) -> Run:
            prefill.fill_rows(shape.slice_tokens) if arm == "token slices" else prefill.fill_pages(shape.tokens)
            return prefill.staged() if arm == "staged" else prefill.direct(arm, plans[arm])

        for arm in ARMS:
            status.update(f"checking {arm}")
            ours.send("poison")
            assert ours.recv() == "poisoned"
            first = run(arm)
            ours.send(("check", arm, first.tokens))
            if not ours.recv():
                raise RuntimeError(f"{arm}: decode's pages differ from prefill's")
            screen.print(f"{arm}: contents verified, {first.copies:,} copies, {first.requests:,} Mooncake requests")
        for repeat in range(repeats):
            for arm in ARMS:
                status.update(f"run {repeat + 1} of {repeats}: {arm}")
                results[arm].append(run(arm))
    ours.send("end")
    process.join()
    return results


def arms_table(shape: Shape, results: dict[str, list[Run]]) -> tuple[Table, list[dict[str, Any]]]:
    table = Table(
        title=f"{shape.total_bytes / 2**20:,.0f} MiB of KV ({shape.tokens:,} tokens) from TP{shape.ranks} to TP1, "
        f"{shape.device}, {shape.transport}"
    )
    for column in (
        "arm",
        "tokens",
        "copies",
        "Mooncake requests",
        "MiB",
        "ms",
        "GB/s (min to max)",
        "x slices",
        "of equal TP",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    rates = {arm: [run.bytes_written / run.seconds / 1e9 for run in runs] for arm, runs in results.items()}
    slices, bound = (statistics.median(rates[arm]) for arm in ("token slices", "equal TP"))
    rows = []
    for arm, runs in results.items():
        run, rate = runs[0], statistics.median(rates[arm])
        seconds = statistics.median(one.seconds for one in runs)
        row = {
            "arm": arm,
            "tokens": run.tokens,
            "copies": run.copies,
            "requests": run.requests,
            "bytes": run.bytes_written,
            "seconds": [one.seconds for one in runs],
            "gb_per_s": rate,
            "times_token_slices": rate / slices,
            "of_equal_tp": rate / bound,
        }
        rows.append(row)
        table.add_row(
            arm,
            f"{run.tokens:,}",
            f"{run.copies:,}",
            f"{run.requests:,}",
            f"{run.bytes_written / 2**20:,.0f}",
            f"{seconds * 1e3:,.2f}",
            f"{rate:,.3f} ({min(rates[arm]):,.3f} to {max(rates[arm]):,.3f})",
            f"{rate / slices:,.1f}",
            f"{rate / bound:.1%}",
        )
    return table, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--transport", choices=["tcp", "nvlink"], default="tcp")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument(
        "--slice-tokens", type=int, help="tokens of the token-slice arm (default: 512 over TCP, else all)"
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--ranks", type=int, default=4, help="tensor-parallel ranks of prefill")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--decode-page-size", type=int, help="page size of decode (default: --page-size)")
    parser.add_argument("--part-mib", type=int, default=32, help="largest write into the ring (default: 32)")
    parser.add_argument("--ring-mib", type=int, default=256)
    parser.add_argument("--write-mib", type=int, help="largest Mooncake request (default: 4 over TCP, else 64)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernels", action="store_true", help="time gather and scatter alone")
    parser.add_argument("--sizes-mib", default="1,4,16,64,128,256,512")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    tcp = options.transport == "tcp"
    shape = Shape(
        device=options.device,
        transport=options.transport,
        tokens=options.tokens,
        slice_tokens=min(options.slice_tokens or (512 if tcp else options.tokens), options.tokens),
        layers=options.layers,
        heads=options.heads,
        head_dim=options.head_dim,
        ranks=options.ranks,
        page_size=options.page_size,
        decode_page_size=options.decode_page_size or options.page_size,
        part_bytes=options.part_mib << 20,
        ring_bytes=options.ring_mib << 20,
        write_bytes=(options.write_mib or (4 if tcp else 64)) << 20,
    )
    screen = Console(stderr=True, highlight=False)
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.kernels:
        rows = []
        with screen.status("measuring"):
            for size_mib in options.sizes_mib.split(","):
                rows.append(kernel_rates(shape, int(size_mib)))
                screen.print(f"{size_mib} MiB done")
        table = kernels_table(shape, rows)
    else:
        table, rows = arms_table(shape, compare_arms(shape, options.repeats, screen))
    Console(width=140).print(table)
    if options.json:
        options.json.write_text(json.dumps({"shape": dataclasses.asdict(shape), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
