"""The report's figures, drawn by matplotlib (extra ``bench``) as SVG text without any outside reference."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from tbe.bench.errors import PlotError
from tbe.bench.queries import COMPARED, RunView

# Colours are placeholders that _inline turns into the page's CSS variables, so that a plot follows the page
# into a dark scheme. The page's marks are close to Okabe and Ito's palette: told apart with every common form
# of colour blindness. Shapes repeat the distinction.
_INK, _GRID, _PAPER, _BAND_COLOUR = "#010101", "#010102", "#010103", "#010104"
_COLOURS = tuple(f"#01020{number}" for number in range(1, 7))
_VARIABLES = {_INK: "ink", _GRID: "line", _PAPER: "paper", _BAND_COLOUR: "band"} | {
    colour: f"mark-{number}" for number, colour in enumerate(_COLOURS, 1)
}
_MARKERS = ("o", "s", "^", "D", "v", "P")
_BAND = (32, 255)  # run lengths between what one program owns whole and what is split

_STYLE = {
    "svg.fonttype": "none",  # text stays text: selectable, and drawn in the reader's own font
    "svg.hashsalt": "tbe",  # the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.facecolor": "none",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "figure.facecolor": "none",
}


def speedup_plots(view: RunView) -> list[tuple[str, str]]:
    """(title, SVG) for each of ours against each peer: one row a workload, one mark a pass, log scale."""
    pairs: dict[tuple[str, str], list[Any]] = {}
    for row in view.comparisons():
        pairs.setdefault((row["ours"], row["peer"]), []).append(row)
    out = []
    for (ours, peer), rows in pairs.items():
        out.append((f"Speed-up of {ours} over {peer}", _drawn(_speedups, rows)))
    return out


def floor_plot(view: RunView) -> str | None:
    """Gather floor over time, forward and backward side by side; None without figures."""
    rows = view.floors()
    return _drawn(_floors, rows) if rows else None


def run_length_plot(view: RunView) -> str | None:
    """Share of lookups by run length, a small panel a workload, the band marked; None without figures."""
    rows = view.run_lengths()
    return _drawn(_run_lengths, rows) if rows else None


def _drawn(draw: Callable[[Any, Sequence[Any]], Any], rows: Sequence[Any]) -> str:
    """The figure that ``draw(pyplot, rows)`` returns, as an ``<svg>`` element."""
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError(
            f"the page's plots need matplotlib: pip install 'portable-tbe[bench]' ({error})"
        ) from None
    matplotlib.use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    with matplotlib.rc_context(_STYLE):
        figure = draw(plt, rows)
        text = io.StringIO()
        figure.savefig(text, format="svg", bbox_inches="tight", metadata={"Date": None})
        plt.close(figure)
    return _inline(text.getvalue())


def _inline(svg: str) -> str:
    """Only the element, in the page's colours: the prologue and the metadata name outside addresses, and a
    fixed size cannot shrink."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    for colour, name in _VARIABLES.items():
        svg = svg.replace(colour, f"var(--{name})")
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return re.sub(r'(<svg[^>]*?) width="([^"]*)"', r'\1 style="max-width: \2"', svg, count=1)


def _names(rows: Sequence[Any]) -> list[str]:
    """Workloads in order of appearance; drawn from the top."""
    return list(dict.fromkeys(row["workload"] for row in rows))


def _speedups(plt: Any, rows: Sequence[Any]) -> Any:
    names = _names(rows)
    figure, axes = plt.subplots(figsize=(12, 1.4 + 0.34 * len(names)))
    axes.axvline(1.0, color=_INK, linewidth=1)
    for number, metric in enumerate(COMPARED):
        chosen = [row for row in rows if row["metric"] == metric]
        heights = [names.index(row["workload"]) + 0.18 * (number - 1.5) for row in chosen]
        _marks(axes, [row["speedup"] for row in chosen], heights, number, metric)
    _ratio_axis(axes, [row["speedup"] for row in rows], "peer's time / our time (right of 1: ours is faster)")
    _workload_axis(axes, names)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(COMPARED), frameon=False)
    return figure


def _floors(plt: Any, rows: Sequence[Any]) -> Any:
    names = _names(rows)
    makers = list(dict.fromkeys(row["implementation"] for row in rows))
    metrics = ("forward", "backward")
    figure, panels = plt.subplots(1, 2, figsize=(12, 1.4 + 0.34 * len(names)), sharey=True)
    for axes, metric in zip(panels, metrics, strict=True):
        axes.axvline(1.0, color=_INK, linewidth=1)
        shown = [row for row in rows if row["metric"] == metric]
        for number, maker in enumerate(makers):
            chosen = [row for row in shown if row["implementation"] == maker]
            heights = [names.index(row["workload"]) for row in chosen]
            _marks(axes, [row["ratio"] for row in chosen], heights, number, maker)
        _ratio_axis(axes, [row["ratio"] for row in shown], f"{metric}: floor / time (right is faster)")
        _workload_axis(axes, names)
    panels[0].legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(makers), frameon=False)
    figure.tight_layout()
    return figure


def _run_lengths(plt: Any, rows: Sequence[Any]) -> Any:
    names, columns = _names(rows), 4
    lines = -(-len(names) // columns)
    figure, grid = plt.subplots(
        lines, columns, figsize=(12, 0.6 + 1.9 * lines), sharex=True, sharey=True, squeeze=False
    )
    panels = list(grid.flat)
    for axes, name in zip(panels, names, strict=False):
        chosen = [row for row in rows if row["workload"] == name]
        axes.axvspan(_BAND[0], _BAND[1] + 1, color=_BAND_COLOUR, alpha=0.25, linewidth=0)
        lows, widths = [row["low"] for row in chosen], [row["high"] + 1 - row["low"] for row in chosen]
        shares = [100 * row["share"] for row in chosen]
        axes.bar(lows, shares, widths, align="edge", color=_COLOURS[0], edgecolor=_PAPER, linewidth=0.5)
        axes.set_xscale("log", base=2)
        axes.set_xticks([8**power for power in range(6)])
        axes.xaxis.set_major_formatter(lambda value, position: _short(value))
        axes.set_ylim(0, 100)
        axes.set_title(name, fontsize=9, loc="left")
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    # The last panel of a column is not always in the last line: label what is shown.
    for axes in panels[max(0, len(names) - columns) : len(names)]:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("run length", fontsize=9)
    for line in range(lines):
        grid[line][0].set_ylabel("% of lookups", fontsize=9)
    figure.tight_layout()
    return figure


def _short(value: float) -> str:
    """A run length that fits under a small panel: 512, 4k."""
    return f"{value / 1024:.0f}k" if value >= 1024 else f"{value:.0f}"


def _separate(axes: Any, names: Sequence[str]) -> None:
    """A line where both parts of BASE.VARIANT change: between groups, and between bases among variants."""
    parts = [name.partition(".") for name in names]
    for number in range(1, len(names)):
        (base, _, kind), (last_base, _, last_kind) = parts[number], parts[number - 1]
        if base != last_base and kind != last_kind:
            axes.axhline(number - 0.5, color=_INK, linewidth=0.6, alpha=0.4)


def _marks(axes: Any, values: Sequence[float], heights: Sequence[float], number: int, label: str) -> None:
    style = {"color": _COLOURS[number % len(_COLOURS)], "marker": _MARKERS[number % len(_MARKERS)]}
    axes.plot(values, heights, linestyle="none", markersize=6, label=label, **style)


def _ratio_axis(axes: Any, values: Sequence[float], label: str) -> None:
    """A log axis that shows 1 and every value, with plain numbers at round values."""
    ticker = importlib.import_module("matplotlib.ticker")
    low, high = min([1.0, *values]), max([1.0, *values])
    axes.set_xscale("log")
    axes.set_xlim(low / 1.15, high * 1.15)
    marks = (1.0, 2.0, 5.0) if high / low > 10 else (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
    axes.xaxis.set_major_locator(ticker.LogLocator(base=10, subs=marks, numticks=50))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, position: f"{value:g}"))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xlabel(label)


def _workload_axis(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    _separate(axes, names)
