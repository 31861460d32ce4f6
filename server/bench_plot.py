"""A run as a picture: how latencies are distributed, and which stages they are made of. Needs matplotlib."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..configs.errors import StartupError
from .bench_client import RequestRecord
from .bench_report import BenchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")
SLOWEST_SHARE = 0.1
_COLORS = ("#4e79a7", "#a0cbe8", "#f28e2b", "#e15759", "#b07aa1", "#76b7b2", "#59a14f")


def check_plot(path: Path) -> None:
    """Raise StartupError, before a long run, when the picture could not be drawn at its end."""
    if path.suffix.lower() not in FORMATS:
        raise StartupError(f"--plot {path}: must end in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib: pip install 'pdserve[bench]'")


def draw(result: BenchResult, path: Path) -> None:
    """Write the picture to `path`; the format is that of its suffix. Successful requests only."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ok = [record for record in result.records if record.ok]
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 2))[:, 0]
    cdfs = upper.subplots(1, 3)
    _draw_cdf(cdfs[0], "time to first token", [record.ttft_s for record in ok if record.ttft_s is not None])
    _draw_cdf(cdfs[1], "inter-token latency", [gap for record in ok for gap in record.itl_s])
    _draw_cdf(cdfs[2], "end to end", [record.e2e_s for record in ok])
    cdfs[0].set_ylabel("share of requests")
    cdfs[1].set_ylabel("share of tokens")
    to_first_token, whole = lower.subplots(1, 2)
    stages = list(result.summary.stages_s)
    before = [stage for stage in stages if stage != "decode"]
    _draw_stages(to_first_token, "until the first token, mean", before, ok)
    _draw_stages(whole, "the whole request, mean", stages, ok)
    handles, labels = whole.get_legend_handles_labels()
    if handles:
        lower.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    summary = result.summary
    figure.suptitle(
        f"{summary.ok} requests ok, {summary.failed} failed, {result.options.load}: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s"
    )
    figure.savefig(path, dpi=120)


def _draw_cdf(axes: "Axes", title: str, seconds: Sequence[float]) -> None:
    axes.set_title(title)
    axes.set_xlabel("ms")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    if not seconds:
        return
    ordered = [second * 1000 for second in sorted(seconds)]
    # from (smallest, 0): a step at each value
    axes.step([ordered[0], *ordered], [index / len(ordered) for index in range(len(ordered) + 1)], where="post")
    for share in (0.5, 0.95, 0.99):
        axes.axhline(share, color="#999999", linewidth=0.6, linestyle=":")
    axes.set_xlim(left=0)


def _draw_stages(axes: "Axes", title: str, stages: Sequence[str], ok: Sequence[RequestRecord]) -> None:
    """One bar over all requests, one over the slowest to their first token."""
    axes.set_title(title)
    axes.set_xlabel("ms")
    by_ttft = sorted((record for record in ok if record.ttft_s is not None), key=lambda record: -(record.ttft_s or 0.0))
    slowest = by_ttft[: max(1, round(SLOWEST_SHARE * len(by_ttft)))]
    groups = ((f"slowest\n{len(slowest)} by TTFT", slowest), (f"all {len(ok)}", ok))
    left = [0.0 for _ in groups]
    for index, stage in enumerate(stages):
        widths = [_mean_ms(stage, members) for _, members in groups]
        label = stage.replace("_", " ")
        axes.barh([name for name, _ in groups], widths, left=left, label=label, color=_COLORS[index % len(_COLORS)])
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.grid(axis="x", alpha=0.3)


def _mean_ms(stage: str, records: Sequence[RequestRecord]) -> float:
    return 1000 * sum(record.timeline.get(stage, 0.0) for record in records) / len(records) if records else 0.0
