"""One HTML page for a run: tables and plots in a single file that asks for nothing else."""

from __future__ import annotations

from html import escape

from tbe.bench.plots import floor_plot, run_length_plot, speedup_plots
from tbe.bench.queries import RunView
from tbe.bench.tables import Section, heading, sections

_CSS = """
:root { color-scheme: light dark; --edge: #8884; --soft: #8881; }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
p.note { margin: .2rem 0 .6rem; opacity: .8; max-width: 60rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { padding: .22rem .6rem; text-align: left; border-bottom: 1px solid var(--edge); vertical-align: top; }
th { border-bottom: 2px solid var(--edge); } tbody tr:nth-child(even) { background: var(--soft); }
th.n, td.n { text-align: right; white-space: nowrap; }
figure { margin: 1rem 0; padding: .8rem; background: #fff; border: 1px solid var(--edge); }
figure svg { width: 100%; height: auto; display: block; }
"""

_RUN_LENGTHS = (
    "Run length: how often a batch looks a row up. Bars are the share of all lookups; the shaded band is 32 "
    "to 255 lookups a row, between rows that one program can own whole and rows that must be split."
)
_FLOORS = (
    "The gather floor is every lookup's bytes from DRAM at the measured copy speed; rows that repeat come "
    "from caches, so hot workloads can be left of 1."
)


def render(view: RunView) -> str:
    """The whole page. Raises ``PlotError`` when matplotlib is missing."""
    plots = [_figure(title, "", svg) for title, svg in speedup_plots(view)]
    plots += [_figure("Time against the gather floor", _FLOORS, floor_plot(view))]
    plots += [_figure("Run lengths", _RUN_LENGTHS, run_length_plot(view))]
    lines = "<br>".join(escape(line) for line in heading(view))
    first, *rest = [_table(section) for section in sections(view)] or [""]
    title = f"Table-batched embeddings: run {view.id}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_CSS}</style></head>\n"
        f"<body><h1>{escape(title)}</h1><p>{lines}</p>\n{first}{''.join(plots)}{''.join(rest)}</body></html>\n"
    )


def _figure(title: str, note: str, svg: str | None) -> str:
    if svg is None:
        return ""
    return f"<h2>{escape(title)}</h2>{_note(note)}<figure>{svg}</figure>\n"


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>' if note else ""


def _table(section: Section) -> str:
    head = "".join(_cell("th", name, number, section) for number, name in enumerate(section.head))
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, number, section) for number, cell in enumerate(row)) + "</tr>"
        for row in section.rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<h2>{escape(section.title)}</h2>{_note(section.note)}<div class="wide">{table}</div>\n'


def _cell(tag: str, text: str, number: int, section: Section) -> str:
    kind = ' class="n"' if number >= section.numeric else ""
    return f"<{tag}{kind}>{escape(text)}</{tag}>"
