"""A run on the terminal, and the same as one JSON object."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from tbe.bench.bars import judged, plain, standings
from tbe.bench.queries import Rows, RunView
from tbe.bench.tables import Section, bars, heading, reasons, sections, summary, times

_PIPED_WIDTH = 160  # rich assumes 80 columns where there is no terminal, and would fold the tables


def console() -> Console:
    """For results: stdout, wide enough for the tables when piped to a file."""
    out = Console(highlight=False)
    return out if out.is_terminal else Console(highlight=False, width=_PIPED_WIDTH)


def print_report(view: RunView, out: Console) -> None:
    """Everything, the speed-up summary first."""
    _print_heading(view, out)
    for section in sections(view):
        _print_section(section, out)


def print_short(view: RunView, out: Console) -> None:
    """What a run ends with: what failed, the times, the bars on their own device, and last the speed-up summary
    where there is a peer."""
    _print_heading(view, out)
    for section in (reasons(view), times(view), *([bars(view)] if judged(view) else []), summary(view)):
        if section.rows:
            _print_section(section, out)


def as_json(view: RunView) -> dict[str, object]:
    """The run as plain data. Errors that are not finite are given as text, which JSON has no number for."""
    return {
        "run": dict(view.header()),
        "implementations": _plain(view.implementations()),
        "workloads": _plain(view.workloads()),
        "figures": _plain(view.figures()),
        "comparisons": _plain(view.comparisons()),
        "bars": plain(standings(view)),
        "summary": _plain(view.summary()),
        "floors": _plain(view.floors()),
        "without_figures": _plain(view.voided()),
    }


def _plain(rows: Rows) -> list[dict[str, object]]:
    return [{key: _finite(row[key]) for key in row.keys()} for row in rows]  # noqa: SIM118 - Row is no dict


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and value in (float("inf"), float("-inf")) else value


def _print_heading(view: RunView, out: Console) -> None:
    _print_lines(heading(view), out)


def _print_lines(lines: Iterable[str], out: Console) -> None:
    for line in lines:
        out.print(line, markup=False)


def _print_section(section: Section, out: Console) -> None:
    table = Table(title=section.title, caption=section.note or None)
    table.title_justify = table.caption_justify = "left"
    over = [label for label, span in section.groups for _ in range(span)] or [""] * len(section.head)
    for number, (group, name) in enumerate(zip(over, section.head, strict=True)):
        right = number in section.numeric
        title = f"{group}\n{name}" if section.groups else name
        table.add_column(title, justify="right" if right else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    out.print()
    out.print(table)
