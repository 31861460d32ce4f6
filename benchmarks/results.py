"""Figures of benchmarks, as benchmarks/results/*.json keep them. Writes RESULTS.md, the plot and the README's figures:

python -m benchmarks.results            # with --check, only say whether they are up to date
"""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"
README = ROOT / "README.md"
BEGIN = "<!-- figures: written by benchmarks/results.py -->\n"
END = "<!-- end of figures -->"
FIRST, LOAD = "first_token", "load"
IN_README = {
    "First token of a prompt of 1,024 tokens, Qwen3-8B": (FIRST, "1,024 tokens, pair with defaults (decode computes)"),
    "HiSparse: throughput with it / without, 32 clients with contexts of 32,768 tokens, 1 GiB for KV": (
        *("hisparse", "32 clients: with HiSparse / without"),
    ),
}
"""What the README says of a figure: the file and the figure."""
PLOTTED = {
    "first token, 16 tokens": (FIRST, "16 tokens, pair with defaults"),
    "first token, 1,024 tokens": (FIRST, "1,024 tokens, pair with defaults (decode computes)"),
    "first token, 8,192 tokens": (FIRST, "8,192 tokens, computed by prefill"),
    "decode step, batch 1": ("steps", "step, batch 1, context 1,024"),
    "decode step, batch 32": ("steps", "step, batch 32"),
    "decode step, batch 128": ("steps", "step, batch 128"),
    "20 requests a second, first token, p50": (LOAD, "20 requests a second: first token p50"),
    "20 requests a second, first token, p99": (LOAD, "20 requests a second: first token p99"),
    "throughput, 64 clients": (LOAD, "64 clients, 1,024 in, 256 out"),
    "throughput, 256 clients": (LOAD, "256 clients, 512 in, 256 out"),
}
"""The bars of the plot: figures that vLLM has, too."""


INTRODUCTION = """\
# Results

Written by `python -m benchmarks.results` from `benchmarks/results/*.json`, where each figure has its machine as well.
**Floor**: the time to read the necessary bytes once, or to do the necessary products, at measured rates. **Anchor**:
what others measure on the same thing. A figure in **bold** misses its target. On a GPU host without the packages, a
command runs with `PYTHONPATH=.gpu/py:.dev:.`. What was tried and not taken stands in
[kernels/README.md](../kernels/README.md).

![Time as a part of vLLM's](results/headline.svg)
"""


class Anchor(msgspec.Struct, frozen=True):
    """The same figure of something else."""

    of: str
    value: float


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One measured claim."""

    figure: str
    """What was measured; one file has each text once."""
    value: float
    unit: str
    command: str
    commit: str
    date: str
    machine: str
    target: float | None = None
    anchor: Anchor | None = None
    floor: float | None = None
    better: Literal["lower", "higher"] = "lower"
    converted: bool = False
    """Taken from the page that was written by hand; the commit is that of its line."""

    @property
    def misses(self) -> bool:
        if self.target is None:
            return False
        return self.value < self.target if self.better == "higher" else self.value > self.target


class Results(msgspec.Struct, forbid_unknown_fields=True):
    """A file of benchmarks/results."""

    title: str
    rows: list[Figure]


def read_results(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def record(path: Path, title: str, figures: Sequence[Figure]) -> None:
    """Put the figures into the file. Each replaces the one of the same name; without an anchor, it keeps that one's."""
    results = read_results(path) if path.exists() else Results(title, [])
    rows = {row.figure: row for row in results.rows}
    for figure in figures:
        before = rows.get(figure.figure, figure)
        rows[figure.figure] = msgspec.structs.replace(figure, anchor=figure.anchor or before.anchor)
    path.write_bytes(
        msgspec.json.format(msgspec.json.encode(Results(results.title, list(rows.values()))), indent=1) + b"\n"
    )


def renew(path: Path, values: Mapping[str, float]) -> None:
    """Put new values into the rows with these figures, which keep their target, floor and anchor. Prints the figures
    that have no row: a row is a claim, so somebody has to write it first.
    """
    rows = {row.figure: row for row in read_results(path).rows}
    new = [figure_of_this_run(figure, value, rows[figure].unit) for figure, value in values.items() if figure in rows]
    kept = ("target", "anchor", "floor", "better")
    record(path, "", [replace(row, **{name: getattr(rows[row.figure], name) for name in kept}) for row in new])
    print(
        f"{path}: {len(new)} figures renewed; without a row: {'; '.join(sorted(values.keys() - rows.keys())) or 'none'}"
    )


def figure_of_this_run(figure: str, value: float, unit: str, **known: Any) -> Figure:
    """The figure with the command, commit, date and machine of this process."""
    return Figure(
        figure=figure,
        value=float(f"{value:.4g}"),
        unit=unit,
        command=shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        commit=commit_of(ROOT),
        date=datetime.date.today().isoformat(),
        machine=_machine(),
        **known,
    )


def commit_of(checkout: Path) -> str:
    """The commit of a checkout; PDSERVE_COMMIT where that is not known."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return commit.stdout.strip() or os.environ.get("PDSERVE_COMMIT", "unknown")


def _machine() -> str:
    import torch  # here: the page is written without it

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{len(os.sched_getaffinity(0))} cores {platform.machine()}, torch {torch.__version__}"


def page() -> str:
    lines = [INTRODUCTION]
    for path in sorted(RESULTS.glob("*.json")):
        results = read_results(path)
        lines += [f"## {results.title}", "", "| figure | found | floor | anchor | target | measured | command |"]
        lines += ["|---|---|---|---|---|---|---|", *map(_row, results.rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def readme() -> str:
    """The README with the present figures."""
    lines = ["| on one H200 | found | others | reproduce |", "|---|---|---|---|"]
    for said, place in IN_README.items():
        row = _found(*place)
        anchor = "" if row.anchor is None else f"{row.anchor.value:g} {row.unit} ({row.anchor.of})"
        lines.append(f"| {said} | **{row.value:g} {row.unit}** | {anchor} | `python -m {_module(row)}` |")
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2]


def _found(file: str, figure: str) -> Figure:
    (row,) = (row for row in read_results(RESULTS / f"{file}.json").rows if row.figure == figure)
    return row


def _module(row: Figure) -> str:
    """The command without the interpreter."""
    return row.command.removeprefix("PYTHONPATH=.gpu/py:.dev:. ").removeprefix("python3 -m ").removeprefix("python -m ")


def _row(row: Figure) -> str:
    found = f"{row.value:g} {row.unit}".strip()
    anchor = "" if row.anchor is None else f"{row.anchor.value:g} ({row.anchor.of})"
    cells = (
        row.figure,
        f"**{found}**" if row.misses else found,
        "" if row.floor is None else f"{row.floor:g}",
        anchor,
        "" if row.target is None else f"{row.target:g}",
        f"{row.date}, {row.commit}",
        f"`{_module(row)}`",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def draw(path: Path) -> None:
    """Draw the PLOTTED figures as parts of vLLM's."""
    import matplotlib  # here: the check does not need it

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "pdserve", "font.size": 8, "svg.fonttype": "none"}
    from matplotlib import pyplot

    times = {}
    for said, place in PLOTTED.items():
        row = _found(*place)
        assert row.anchor is not None, f"{row.figure} has no figure of vLLM"
        ratio = row.value / row.anchor.value
        label = f"{said}: {row.value:g} {row.unit} (vLLM: {row.anchor.value:g})"
        times[label] = 1 / ratio if row.better == "higher" else ratio
    figure, axes = pyplot.subplots(figsize=(9, 0.24 * len(times) + 0.8), layout="constrained")
    axes.barh(list(times), list(times.values()), color="#3b6ea8")
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("Qwen3-8B on one H200: time / time of vLLM, shorter is better")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    written = {PAGE: page(), README: readme()}
    if "--check" in sys.argv[1:]:
        other = [path.name for path, text in written.items() if path.read_text(encoding="utf-8") != text]
        if other:
            print(f"{', '.join(other)}: not what benchmarks/results says; run: make format", file=sys.stderr)
        return int(bool(other))
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
    draw(RESULTS / "headline.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
