"""Draws the pictures of docs/concepts.md: ``python docs/images/draw.py`` writes the SVG files beside this one."""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

INK, PALE = "#263238", "#eceff1"
COLOURS = ("#ffcc80", "#90caf9", "#a5d6a7", "#ce93d8", "#ef9a9a")
CELL = 40


class Picture:
    """An SVG in the making, in pixels from the top left."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            f'font-family="Helvetica, Arial, sans-serif" font-size="14" fill="{INK}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def text(
        self, x: float, y: float, text: str, anchor: str = "start", size: int = 14, bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}"{weight}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, w: float, h: float, fill: str, text: str = "") -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="{INK}" stroke-width="1"/>'
        )
        if text:
            self.text(x + w / 2, y + h / 2 + 5, text, "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, arrow: bool = False, dash: bool = False) -> None:
        style = ' stroke-dasharray="5 4"' if dash else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" stroke-width="1.5"{style}/>'
        )
        if arrow:  # downwards only
            self.parts.append(
                f'<path d="M{x2 - 5},{y2 - 8} L{x2 + 5},{y2 - 8} L{x2},{y2} Z" fill="{INK}" stroke="none"/>'
            )

    def brace(self, x1: float, x2: float, y: float, text: str) -> None:
        """A bracket open upwards from x1 to x2, with text below it."""
        self.parts.append(
            f'<path d="M{x1 + 2},{y} v7 H{x2 - 2} v-7" fill="none" stroke="{INK}" stroke-width="1.5"/>'
        )
        self.text((x1 + x2) / 2, y + 24, text, "middle", 13)

    def save(self, name: str) -> None:
        text = "\n".join([*self.parts, "</svg>\n"])
        (Path(__file__).parent / name).write_text(text, encoding="utf-8")


def jagged() -> None:
    """The README's lookup: two features, two bags each."""
    ids, offsets = (7, 7, 9999, 2, 5), (0, 2, 3, 3, 5)
    bags = ("ad, bag 0", "ad, bag 1", "geo, bag 0: empty", "geo, bag 1")
    picture = Picture(680, 330, "The jagged layout: indices and feature-major offsets")
    left, wide = 130, 90
    picture.text(20, 60, "indices", bold=True)
    for i, value in enumerate(ids):
        bag = next(b for b in range(4) if offsets[b] <= i < offsets[b + 1])
        picture.box(left + i * wide, 35, wide, CELL, COLOURS[bag], str(value))
        picture.text(left + i * wide + 4, 30, str(i), size=11)
    for bag, label in enumerate(bags):
        start, end = offsets[bag], offsets[bag + 1]
        if start < end:
            picture.brace(left + start * wide, left + end * wide, 80, label)
    edge = left + 3 * wide
    picture.line(edge, 80, edge, 118)
    picture.text(edge, 133, bags[2], "middle", 13)
    picture.text(20, 185, "offsets", bold=True)
    for i, value in enumerate(offsets):
        picture.box(left + i * wide, 160, wide, CELL, PALE, str(value))
    picture.brace(left, left + 2 * wide, 205, "where ad's bags begin")
    picture.brace(left + 2 * wide, left + 4 * wide, 205, "where geo's begin")
    picture.brace(left + 4 * wide, left + 5 * wide, 205, "N = 5")
    picture.text(20, 275, "output", bold=True)
    for row in range(2):
        picture.text(left - 8, 275 + row * 30, f"bag {row}", "end", 12)
        picture.box(left, 255 + row * 30, 300, 30, COLOURS[row], ("row 7 + row 7 of ad", "row 9999 of ad")[row])
        picture.box(
            left + 300, 255 + row * 30, 150, 30, COLOURS[2 + row], ("zeros", "rows 2 + 5 of geo")[row]
        )
    picture.text(left + 460, 275, "64 + 16", size=12)
    picture.text(left + 460, 292, "columns", size=12)
    picture.save("jagged.svg")


ROWS = (4, 1, 4, 0, 4, 1, 4, 3, 4, 4, 0, 4)
"""The rows that twelve lookups ask for, in the order of the batch."""


def runs() -> None:
    """Lookups sorted by row: each row's lookups adjoin."""
    picture = Picture(690, 290, "Lookups sorted by row: runs")
    left = 160
    ordered = sorted(range(len(ROWS)), key=ROWS.__getitem__)
    picture.text(20, 55, "as looked up", bold=True)
    for place, row in enumerate(ROWS):
        picture.box(left + place * CELL, 30, CELL, CELL, COLOURS[row], str(row))
    for place, lookup in enumerate(ordered):
        picture.line(left + lookup * CELL + 20, 72, left + place * CELL + 20, 125)
    picture.text(20, 152, "sorted by row", bold=True)
    for place, lookup in enumerate(ordered):
        picture.box(left + place * CELL, 127, CELL, CELL, COLOURS[ROWS[lookup]], str(ROWS[lookup]))
    place = 0
    for row in sorted(set(ROWS)):
        length = ROWS.count(row)
        what = f"run of {length}" if length > 1 else "of 1"
        picture.brace(left + place * CELL, left + (place + length) * CELL, 172, what)
        picture.box(left + (place + length / 2) * CELL - 18, 228, 36, 28, COLOURS[row], f"w{row}")
        picture.line(left + (place + length / 2) * CELL, 202, left + (place + length / 2) * CELL, 226, arrow=True)
        place += length
    picture.text(20, 247, "one step a row", bold=True)
    picture.text(left, 280, "Row 2 was not looked up: its bits stay.", size=13)
    picture.save("runs.svg")


def balanced() -> None:
    """Stretches of equal length over runs of any length, and what becomes of a run that crosses them."""
    picture = Picture(700, 330, "The balanced update: every program takes a stretch of equal length")
    left, cell = 160, 26
    lengths = (3, 2, 9, 1, 1, 4)
    picture.text(20, 32, "runs")
    picture.text(20, 58, "sorted lookups", bold=True)
    place = 0
    for run, length in enumerate(lengths):
        for i in range(length):
            picture.box(left + (place + i) * cell, 40, cell, 28, COLOURS[run % 5])
        picture.text(left + (place + length / 2) * cell, 32, "ABCDEF"[run], "middle", 12)
        place += length
    for program in range(5):
        start = left + program * 4 * cell
        picture.line(start, 36, start, 118, dash=True)
        picture.brace(start, start + 4 * cell, 76, f"program {program}")
    picture.line(left + 20 * cell, 36, left + 20 * cell, 118, dash=True)
    rows = (
        ("0", "sums and steps A; begins B, which is short, and walks on to finish it"),
        ("1", "skips the rest of B; begins C, leaves a partial sum"),
        ("2", "lies wholly inside C: leaves a partial sum"),
        ("3", "leaves the last partial sum of C; sums and steps D and E"),
        ("4", "sums and steps F"),
    )
    lines = [("program", "with stretches of four lookups"), *rows]
    for i, (head, what) in enumerate(lines):
        picture.text(20, 150 + i * 24, head, bold=i == 0, size=13)
        picture.text(left - 60, 150 + i * 24, what, bold=i == 0, size=13)
    picture.text(
        20, 306, "C, a long run: its partials are added in order, by the last program to arrive (fused)", size=13
    )
    picture.text(20, 323, "or by a second launch (split); then the row takes its one step.", size=13)
    picture.save("balanced.svg")


def call() -> None:
    """How a call of the module reaches a backend, and its backward the tables."""
    picture = Picture(880, 560, "How a call flows from the module to the backend and back")

    def node(x: float, y: float, w: float, *lines: str, fill: str = PALE) -> None:
        picture.box(x, y, w, 16 + 18 * len(lines), fill)
        for i, line in enumerate(lines):
            picture.text(x + w / 2, y + 21 + 18 * i, line, "middle", 13)

    node(240, 15, 400, "TableBatchedEmbeddingBags.forward", "shapes, dtypes, devices: no value is read")
    picture.line(440, 67, 440, 93, arrow=True)
    node(240, 95, 400, "torch.ops.tbe.check", "ids and offsets, as bounds_check says")
    picture.line(640, 41, 740, 41)
    picture.line(740, 41, 740, 208, arrow=True)
    picture.text(748, 193, "torch.export", size=12)
    for x, label in ((140, "eager"), (440, "torch.compile, fake tensors")):
        picture.line(440, 147, x, 172)
        picture.line(x, 172, x, 208, arrow=True)
        picture.text(x + 8, 193, label, size=12)
    node(20, 210, 240, "TrainingLookup,", "an autograd.Function", fill=COLOURS[1])
    node(320, 210, 240, "torch.ops.tbe.lookup,", "with schema and fake kernel", fill=COLOURS[1])
    node(620, 210, 240, "torch.ops.tbe.inference,", "the spec as text; checks inside", fill=COLOURS[1])
    for x in (140, 440, 740):
        picture.line(x, 262, 440, 290)
    picture.line(440, 288, 440, 308, arrow=True)
    node(
        190, 310, 500, "policy: the kept plan for this spec, device, dtypes and request",
        "the first time: probe, registry, choose",
    )  # fmt: skip
    picture.line(440, 362, 440, 388, arrow=True)
    node(
        190, 390, 500, "backend.forward: the output; in training also a carry,",
        "what it can prepare of the backward", fill=COLOURS[2],
    )  # fmt: skip
    picture.line(440, 442, 440, 488, arrow=True, dash=True)
    picture.text(452, 470, "autograd, with the carry", size=12)
    node(
        130, 490, 620, "the backend's per_sample_weight_grad, if required; then its",
        "backward_update: tables and state change in place", fill=COLOURS[0],
    )  # fmt: skip
    picture.save("call.svg")


if __name__ == "__main__":
    call()
    jagged()
    runs()
    balanced()
