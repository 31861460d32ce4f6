"""Figures of benchmarks, as benchmarks/results/*.json keep them. Writes RESULTS.md and the plot from them:

python -m benchmarks.results            # with --check, only say whether they are up to date
"""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "RESULTS.md"

INTRODUCTION = """\
# Results

Written by `python -m benchmarks.results` from `benchmarks/results/*.json`, where each figure has its machine as well.
**Floor**: the time to read the necessary bytes once, or to do the necessary products, at measured rates. **Anchor**:
what others measure on the same thing. A figure in **bold** misses its target. On a GPU host without the packages, a
command runs with `PYTHONPATH=.gpu/py:.dev:.`. What was tried and not taken stands in
[kernels/README.md](../kernels/README.md).

![Decode steps and first tokens](results/headline.svg)
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
    """Put the figures into the file. Each replaces the one of the same name."""
    results = read_results(path) if path.exists() else Results(title, [])
    rows = {row.figure: row for row in results.rows} | {figure.figure: figure for figure in figures}
    path.write_bytes(
        msgspec.json.format(msgspec.json.encode(Results(results.title, list(rows.values()))), indent=1) + b"\n"
    )


def figure_of_this_run(figure: str, value: float, unit: str, **known: Any) -> Figure:
    """The figure with the command, commit, date and machine of this process."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return Figure(
        figure=figure,
        value=float(f"{value:.4g}"),
        unit=unit,
        command=shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]),
        commit=commit.stdout.strip() or os.environ.get("PDSERVE_COMMIT", "unknown"),
        date=datetime.date.today().isoformat(),
        machine=_machine(),
        **known,
    )


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


def _row(row: Figure) -> str:
    found = f"{row.value:g} {row.unit}".strip()
    anchor = "" if row.anchor is None else f"{row.anchor.value:g} ({row.anchor.of})"
    command = row.command.removeprefix("PYTHONPATH=.gpu/py:.dev:. python3 -m ").removeprefix("python -m ")
    cells = (
        row.figure,
        f"**{found}**" if row.misses else found,
        "" if row.floor is None else f"{row.floor:g}",
        anchor,
        "" if row.target is None else f"{row.target:g}",
        f"{row.date}, {row.commit}",
        f"`{command}`",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def draw(path: Path) -> None:
    """Draw the figures that vLLM has, too, as parts of vLLM's time."""
    import matplotlib  # here: the check does not need it

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "pdserve", "font.size": 8, "svg.fonttype": "none"}
    from matplotlib import pyplot

    rows = [row for file in sorted(RESULTS.glob("*.json")) for row in read_results(file).rows]
    times = {
        f"{row.figure}: {row.value:g} {row.unit} (vLLM: {row.anchor.value:g})": (
            row.anchor.value / row.value if row.better == "higher" else row.value / row.anchor.value
        )
        for row in rows
        if row.anchor is not None and row.anchor.of.startswith("vLLM")
    }
    figure, axes = pyplot.subplots(figsize=(9, 0.24 * len(times) + 0.8), layout="constrained")
    axes.barh(list(times), list(times.values()), color="#3b6ea8")
    axes.axvline(1, color="black", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel("time / time of vLLM on the same GPU: shorter is better")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    written = page()
    if "--check" in sys.argv[1:]:
        if PAGE.read_text(encoding="utf-8") == written:
            return 0
        print("RESULTS.md is not what benchmarks/results says; run: make format", file=sys.stderr)
        return 1
    PAGE.write_text(written, encoding="utf-8")
    draw(RESULTS / "headline.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
