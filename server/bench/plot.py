"""Plots a run: the distribution of the latencies, and the time of each stage. Needs matplotlib."""

import importlib.util
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import StartupError
from ...common.words import counted
from ..observability.stages import AFTER_FIRST_TOKEN
from .client import RequestRecord
from .options import BenchOptions
from .report import BenchResult
from .search import Probe, verdict_of
from .summary import LENGTH_CLASSES, length_class

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
SLOWEST_SHARE = 0.1
_COLORS = ("#56b4e9", "#0072b2", "#e69f00", "#d55e00", "#cc79a7", "#f0e442", "#000000", "#009e73", "#999999", "#7f4f24")
"""The colours of Okabe and Ito, which colour-blind people can distinguish, and two more."""
_MARKED_SHARES = (0.5, 0.95, 0.99)
_LONG_MS = 10_000.0
"""Time axes that reach further show seconds instead of milliseconds."""
_TAIL = 2.0
"""A distribution is drawn up to this multiple of its p99. Otherwise a single late value would flatten the rest."""


def check_plot(path: Path) -> None:
    """Raise StartupError, before a long run, when the plot could not be drawn at its end."""
    if path.suffix.lower() not in FORMATS:
        raise StartupError(f"--plot {path}: must end in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib: pip install matplotlib")


def draw(result: BenchResult, path: Path) -> None:
    """Write the plot to `path`, in the format of its suffix."""
    picture(result).savefig(path, dpi=120)


def picture(result: BenchResult) -> "Figure":
    """Returns the plot, which shows successful requests only."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ok = [record for record in result.records if record.ok]
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=(3, 2))[:, 0]
    cdfs = upper.subplots(1, 3)
    _draw_first_tokens(cdfs[0], ok)
    _draw_cdf(cdfs[1], "inter-token latency", [gap for record in ok for gap in record.itl_s])
    _draw_cdf(cdfs[2], "end to end", [record.e2e_s for record in ok])
    cdfs[0].set_ylabel("share of requests")
    cdfs[1].set_ylabel("share of tokens")
    to_first_token, whole = lower.subplots(1, 2)
    colors = {stage: _COLORS[index % len(_COLORS)] for index, stage in enumerate(result.summary.stages_s)}
    before = {stage: color for stage, color in colors.items() if stage not in AFTER_FIRST_TOKEN}
    _draw_stages(to_first_token, "until the first token, mean", before, ok)
    _draw_stages(whole, "the whole request, mean", colors, ok)
    handles, labels = whole.get_legend_handles_labels()
    if handles:
        lower.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(title_of(result))
    return figure


def draw_search(probes: Sequence[Probe], options: BenchOptions, path: Path) -> None:
    """Write the plot of a search to `path`: share inside the limits, and latencies, by rate."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    FigureCanvasAgg(figure)
    shares, ttft, itl = figure.subplots(1, 3)
    ordered = sorted(probes, key=lambda probe: probe.rate_per_s)
    rates = [probe.rate_per_s for probe in ordered]
    shares.plot(rates, [probe.share for probe in ordered], marker="o", color=_COLORS[1])
    shares.axhline(options.keep, color="#999999", linewidth=0.6, linestyle=":")
    shares.set_ylim(0, 1.02)
    shares.set_title("share of requests inside the limits")
    by_rate = (
        (ttft, "time to first token, ms", [probe.result.summary.ttft_s for probe in ordered], options.slo_ttft_ms),
        (itl, "inter-token latency, ms", [probe.result.summary.itl_s for probe in ordered], options.slo_itl_ms),
    )
    for axes, title, found, limit in by_rate:
        for color, name in zip(_COLORS[1:], ("p50", "p90", "p99"), strict=False):
            values = [math.nan if one is None else 1000 * getattr(one, name) for one in found]
            axes.plot(rates, values, marker="o", color=color, label=name)
        if limit is not None:
            axes.axhline(limit, color="#999999", linewidth=0.6, linestyle=":")
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        axes.legend(frameon=False)
    for axes in (shares, ttft, itl):
        axes.set_xlabel("requests/s")
        axes.grid(alpha=0.3)
    model = ordered[0].result.model_info.get("served_model_name", "unknown model")
    figure.suptitle(f"{model}: {options.lengths}\n{verdict_of(probes)}")
    figure.savefig(path, dpi=120)


def title_of(result: BenchResult) -> str:
    """Load and result, in two lines."""
    summary, options = result.summary, result.options
    return (
        f"{result.model_info.get('served_model_name', 'unknown model')}: {options.lengths}, {options.load}\n"
        f"{counted(summary.ok, 'request')} ok, {summary.failed} failed: "
        f"{summary.requests_per_s:.2f} requests/s, {summary.output_tokens_per_s:.1f} output tokens/s"
    )


def _draw_first_tokens(axes: "Axes", ok: Sequence[RequestRecord]) -> None:
    """All requests, and each class of prompt lengths if there are several."""
    given = [(length_class(record.prompt_tokens), record.ttft_s) for record in ok if record.ttft_s is not None]
    _draw_cdf(axes, "time to first token", [ttft_s for _, ttft_s in given])
    classes = sorted({number for number, _ in given})
    if len(classes) < 2:
        return
    for number in classes:
        milliseconds = [1000 * ttft_s for of, ttft_s in given if of == number]
        axes.ecdf(milliseconds, color=_COLORS[2 + number], linewidth=0.8, label=LENGTH_CLASSES[number])
    axes.legend(title="prompt tokens", fontsize="x-small", title_fontsize="x-small", loc="lower right")


def _draw_cdf(axes: "Axes", title: str, seconds: Sequence[float]) -> None:
    axes.set_title(title)
    axes.grid(alpha=0.3)
    for share in _MARKED_SHARES:
        axes.axhline(share, color="#999999", linewidth=0.6, linestyle=":")
        label = f"p{share * 100:.0f}"
        axes.annotate(label, (1.01, share), xycoords="axes fraction", fontsize="x-small", ha="left", va="center")
    axes.set_ylim(0, 1)
    if not seconds:
        return
    milliseconds = np.array(seconds) * 1000
    axes.ecdf(milliseconds, color=_COLORS[1])
    axes.set_xlim(left=0)
    right, most = _TAIL * float(np.percentile(milliseconds, 99)), float(milliseconds.max())
    if 0 < right < most:
        axes.set_xlim(right=right)
        note = f"longest: {most:.0f} ms" if most < _LONG_MS else f"longest: {most / 1000:.1f} s"
        axes.annotate(note, (0.98, 0.03), xycoords="axes fraction", fontsize="small", ha="right", color="#666666")
    _label_time(axes)


def _label_time(axes: "Axes") -> None:
    """Milliseconds, or seconds where they would have too many digits."""
    from matplotlib.ticker import FuncFormatter

    axes.set_xlabel("ms")
    if axes.get_xlim()[1] > _LONG_MS:
        axes.set_xlabel("s")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}"))


def _draw_stages(axes: "Axes", title: str, colors: Mapping[str, str], ok: Sequence[RequestRecord]) -> None:
    """One bar over all requests, one over the slowest to their first token."""
    axes.set_title(title)
    by_ttft = sorted((record for record in ok if record.ttft_s is not None), key=lambda record: -(record.ttft_s or 0.0))
    slowest = by_ttft[: max(1, round(SLOWEST_SHARE * len(by_ttft)))]
    groups = ((f"slowest\n{len(slowest)} by TTFT", slowest), (f"all {len(ok)}", ok))
    left = [0.0 for _ in groups]
    for stage, color in colors.items():
        widths = [_mean_ms(stage, members) for _, members in groups]
        axes.barh([name for name, _ in groups], widths, left=left, label=stage.replace("_", " "), color=color)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.set_xlim(0, 1.03 * max(left) or None)
    _label_time(axes)


def _mean_ms(stage: str, records: Sequence[RequestRecord]) -> float:
    return 1000 * sum(record.timeline.get(stage, 0.0) for record in records) / len(records) if records else 0.0
