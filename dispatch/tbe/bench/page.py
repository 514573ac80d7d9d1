"""One HTML page for a run: tables and plots in a single file that asks for nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from tbe.bench.bars import MISSED, NOT_JUDGED, NOT_MEASURED, PARTIAL, REACHED
from tbe.bench.plots import floor_plot, run_length_plot, speedup_plots
from tbe.bench.queries import RunView
from tbe.bench.tables import BARS, SUMMARY, Section, heading, sections

_CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2024; --dim: #5b6570; --line: #d9dee3;
  --soft: #f4f6f8; --good: #00704f; --bad: #b3261e; --mark-1: #0072b2; --mark-2: #d55e00; --mark-3: #009e73;
  --mark-4: #b5468a; --mark-5: #8a6d00; --mark-6: #4a5a6a; --band: #e69f00; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171a; --ink: #e6e9ec; --dim: #9aa5b1; --line: #343b42;
  --soft: #1c2126; --good: #4fd1a5; --bad: #ff8a80; --mark-1: #56b4e9; --mark-2: #ff8c42; --mark-3: #3ecf9a;
  --mark-4: #e38ac0; --mark-5: #f0e442; --mark-6: #a9b7c6; } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1240px; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; margin-bottom: .4rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
p.run { color: var(--dim); margin: 0; font-size: .9rem; }
p.note { margin: .2rem 0 .6rem; color: var(--dim); max-width: 60rem; }
nav { margin: 1rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .9rem; }
a { color: var(--mark-1); text-decoration: none; } a:hover { text-decoration: underline; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .86rem; }
th, td { padding: .22rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { border-bottom: 0; font-weight: 600; color: var(--dim); vertical-align: bottom; }
thead tr:last-child th { border-bottom: 2px solid var(--line); }
tr.over th { text-align: center; padding-bottom: 0; color: var(--ink); }
th.first, td.first { border-left: 1px solid var(--line); }
tbody tr:nth-child(even) { background: var(--soft); }
th.n, td.n { text-align: right; white-space: nowrap; }
td.good { color: var(--good); font-weight: 600; white-space: nowrap; }
td.bad { color: var(--bad); font-weight: 600; white-space: nowrap; }
td.other { color: var(--dim); white-space: nowrap; }
td.slow { color: var(--bad); }
figure { margin: .6rem 0; padding: .6rem; border: 1px solid var(--line); border-radius: 4px; }
figure svg { width: 100%; height: auto; display: block; }
"""

_RUN_LENGTHS = (
    "Run length: how often a batch looks a row up. Bars are the share of all lookups; the shaded band is 32 "
    "to 255 lookups a row, between rows that one program can own whole and rows that must be split."
)
_FLOORS = (
    "The gather floor is every lookup's bytes from DRAM at the measured copy speed; rows that repeat come "
    "from caches, so hot workloads can be right of 1."
)


_CLASSES = {REACHED: "good", MISSED: "bad", PARTIAL: "other", NOT_MEASURED: "other", NOT_JUDGED: "other"}
_BELOW_ONE = re.compile(r"0\.\d+x")


def render(view: RunView) -> str:
    """The whole page. Raises ``PlotError`` when matplotlib is missing."""
    plots = [_figure(title, "", svg) for title, svg in speedup_plots(view)]
    plots += [_figure("Time against the floor, by workload", _FLOORS, floor_plot(view))]
    plots += [_figure("Run lengths", _RUN_LENGTHS, run_length_plot(view))]
    found = sections(view)
    leading = [section for section in found if section.title in (BARS, SUMMARY)]
    rest = [section for section in found if section.title not in (BARS, SUMMARY)]
    parts = [*map(_table, leading), *plots, *map(_table, rest)]
    lines = "<br>".join(escape(line) for line in heading(view))
    title = f"Table-batched embeddings: run {view.id}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_CSS}</style></head>\n"
        f'<body><h1>{escape(title)}</h1><p class="run">{lines}</p>\n'
        f"{_contents(parts)}{''.join(parts)}</body></html>\n"
    )


def _contents(parts: Iterable[str]) -> str:
    """Links to every headed part, by the headings themselves."""
    found = [match for part in parts for match in re.findall(r'<h2 id="([^"]*)">(.*?)</h2>', part)]
    links = "".join(f'<a href="#{anchor}">{title}</a>' for anchor, title in found)
    return f"<nav>{links}</nav>\n" if found else ""


def _heading(title: str) -> str:
    anchor = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    return f'<h2 id="{anchor}">{escape(title)}</h2>'


def _figure(title: str, note: str, svg: str | None) -> str:
    if svg is None:
        return ""
    return f"{_heading(title)}{_note(note)}<figure>{svg}</figure>\n"


def _note(note: str) -> str:
    return f'<p class="note">{escape(note)}</p>' if note else ""


def _table(section: Section) -> str:
    starts = _group_starts(section)
    over = "".join(
        f'<th colspan="{span}"{_class("first" if number else "")}>{escape(label)}</th>'
        for number, (label, span) in enumerate(section.groups)
    )
    head = "".join(_cell("th", name, number, section, starts) for number, name in enumerate(section.head))
    body = "".join(
        "<tr>" + "".join(_cell("td", cell, number, section, starts) for number, cell in enumerate(row)) + "</tr>"
        for row in section.rows
    )
    heads = (f'<tr class="over">{over}</tr>' if over else "") + f"<tr>{head}</tr>"
    table = f"<table><thead>{heads}</thead><tbody>{body}</tbody></table>"
    return f'{_heading(section.title)}{_note(section.note)}<div class="wide">{table}</div>\n'


def _group_starts(section: Section) -> set[int]:
    """Columns that begin a group, without the first: a line separates them."""
    position, starts = 0, set()
    for _, span in section.groups:
        starts.add(position)
        position += span
    return starts - {0}


def _cell(tag: str, text: str, number: int, section: Section, starts: set[int]) -> str:
    names = ["n"] if number in section.numeric else []
    names += ["first"] if number in starts else []
    if tag == "td":
        names += [_CLASSES[text]] if text in _CLASSES else []
        names += ["slow"] if _BELOW_ONE.fullmatch(text) and section.title != BARS else []
    return f"<{tag}{_class(' '.join(names))}>{escape(text)}</{tag}>"


def _class(names: str) -> str:
    return f' class="{names}"' if names else ""
