"""Tables and sentences in a terminal, as wide as it is, in which no word is broken.

1. `table` makes a table, `show` prints it. Where its natural width is too large, its columns give way: the
   columns of `wraps` first, then all but those of numbers; a column is at least as wide as its longest word. A path
   may go on in the next line behind a dot.
2. Where that leaves too little room, or a row would have more than `TALL` lines, each row is a paragraph: its first
   cell, and below it the others, each behind its heading.
3. `saying` prints sentences.

Example: in 80 columns a table of operators with a path of 60 characters breaks the path behind a dot; in 20 columns
each operator is a paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from rich import box
from rich.cells import cell_len
from rich.console import Console, JustifyMethod, OverflowMethod, RenderableType
from rich.containers import Lines
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

__all__ = ["UNLIMITED", "console_of", "saying", "show", "table", "wrapped"]


#: A width, in characters, in which every table fits; tables are measured in it. The width without a terminal.
UNLIMITED, WIDTH = 10_000, 100

#: The most lines of a row of a table; where a row would have more, rows are paragraphs.
TALL = 4

#: A word: without a space, or a short tuple or layout such as ``(64, 1, 1),``.
WORD = re.compile(r"[(\[]*[(\[][^()\[\]\n]{0,22}[)\]]\S*|\S+")

#: The places at which a word may go on in the next line: behind a dot or a comma, before a name.
WITHIN = re.compile(r"(?<=[.,])(?=[A-Za-z_{])")


def console_of(file: IO[str] | None, width: int | None = None) -> Console:
    """A console that is as wide as the terminal, or `WIDTH` where there is none.

    Args:
        file: the file to print to; None: standard output.
        width: a width in its place.
    """
    console = Console(file=file, width=width, highlight=False)
    if width is None and not console.is_terminal:
        console = Console(file=file, width=WIDTH, highlight=False)
    return console


def saying(console: Console, width: int | None = None) -> Callable[[str], None]:
    """A function that prints sentences: wrapped to a terminal or to `width`, otherwise a line each."""
    soft = width is None and not console.is_terminal

    def say(text: str) -> None:
        for line in text.split("\n"):
            if soft or cell_len(line) <= console.width:
                console.print(Text(line), soft_wrap=soft)
                continue
            before = line[: len(line) - len(line.lstrip())]
            for part in wrapped(line, console.width - len(before)):
                console.print(Text(before + part))

    return say


def wrapped(text: str, width: int) -> list[str]:
    """A text as lines of at most `width` characters, cut between words, or at a dot of a path; a word that is longer
    yet is cut anywhere. A short tuple, such as ``(64, 1, 1)``, is a word."""
    lines: list[str] = []
    for paragraph in text.split("\n"):
        line = ""
        for word in WORD.findall(paragraph):
            if cell_len(f"{line} {word}" if line else word) <= width:
                line = f"{line} {word}" if line else word
                continue
            if line:
                lines.append(line)
            line = ""
            for part in _pieces(word) if cell_len(word) > width else (word,):
                if cell_len(line + part) > width and line:
                    lines.append(line)
                    line = ""
                line += part
            while cell_len(line) > width:
                lines.append(line[:width])
                line = line[width:]
        lines.append(line)
    return lines


def _pieces(word: str) -> list[str]:
    """The parts of a word between which it may be cut."""
    cuts = [0, *(found.start() for found in WITHIN.finditer(word)), len(word)]
    return [word[start:stop] for start, stop in zip(cuts, cuts[1:])]


class _Cell(Text):
    """The text of a cell, wrapped between words (`wrapped`)."""

    def wrap(
        self,
        console: Console,
        width: int,
        *,
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        tab_size: int = 8,
        no_wrap: bool | None = None,
    ) -> Lines:
        """Lines of at most `width` characters."""
        lines = [self.plain] if no_wrap else wrapped(self.plain, width)
        made = Text("\n".join(lines), style=self.style)
        return made.wrap(console, width, justify=justify, overflow=overflow, tab_size=tab_size, no_wrap=no_wrap)


class _Table(Table):
    """A table whose cells are `_Cell`s.

    Attributes:
        wraps: the columns that give way first.
        drawn: False where a row may have any number of lines.
    """

    wraps: tuple[str, ...] = ()
    drawn = True

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row."""
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        made = [_Cell(t.plain, style=t.style) if isinstance(t, Text) else t for t in texts]
        super().add_row(*made, style=style, end_section=end_section)

    def texts(self) -> list[list[str]]:
        """The text of each cell, by column, the headings first."""
        return [[str(column.header), *map(str, column.cells)] for column in self.columns]


def table(*columns: str, right: tuple[str, ...] = (), lines: bool = False, wraps: tuple[str, ...] = ()) -> Table:
    """An empty table.

    Args:
        columns: the columns.
        right: those that are aligned on the right, of numbers: only their headings are wrapped.
        lines: True for a line between rows, which may have any number of lines.
        wraps: the columns that give way first where the table is too wide; empty: all.
    """
    made = _Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", show_lines=lines)
    made.wraps, made.drawn = wraps, not lines
    for name in columns:
        made.add_column(_Cell(name), justify="right" if name in right else "left", overflow="fold")
    return made


def show(console: Console, made: Table) -> None:
    """Print a table; each row as a paragraph where it has no room."""
    natural = console.measure(made, options=console.options.update(max_width=UNLIMITED)).maximum
    if natural > console.width and isinstance(made, _Table):
        found = _widths(made, console.width - (natural - sum(map(_natural, made.texts()))))
        if found is None:
            _paragraphs(console, made)
            return
        for column, width in zip(made.columns, found, strict=True):
            column.width = width
    console.print(made)


def _natural(texts: Sequence[str]) -> int:
    return max(cell_len(line) for text in texts for line in text.split("\n"))


def _widths(made: _Table, room: int) -> list[int] | None:
    """The width of each column, `room` together; None where that would break a word, or make a row too tall."""
    texts = made.texts()
    least = []
    for column, (heading, *cells) in zip(made.columns, texts, strict=True):
        whole = (
            cells
            if column.justify == "right"
            else [p for text in cells for w in WORD.findall(text) for p in _pieces(w)]
        )
        least.append(_natural([*heading.split(), *whole, ""]))
    widths = [_natural(each) for each in texts]
    first = [i for i, (heading, *_) in enumerate(texts) if heading in made.wraps]
    for group in (first, range(len(widths))):
        while sum(widths) > room:
            wide = max((i for i in group if widths[i] > least[i]), key=lambda i: widths[i], default=None)
            if wide is None:
                break
            widths[wide] -= 1
    if sum(widths) > room:
        return None
    heights = (max(len(wrapped(text, w)) for text, w in zip(row, widths)) for row in zip(*(t[1:] for t in texts)))
    return None if made.drawn and max(heights, default=0) > TALL else widths


def _paragraphs(console: Console, made: _Table) -> None:
    """Print each row of a table as a paragraph: its first cell, and below it the others behind their headings."""
    headings = [" ".join(heading.split()) for heading, *_ in made.texts()]
    console.print(Text(f"\n {headings[0]}", style=made.header_style))
    console.print(Text(f" {'─' * (console.width - 2)}"))
    for row, cells in zip(made.rows, zip(*(texts[1:] for texts in made.texts()))):
        flat = [" ".join(cell.split()) for cell in cells]
        title, *rest = flat
        lines = [f" {line}" for line in wrapped(title, console.width - 1)]
        items = [f"{name}: {cell}" if name else cell for name, cell in zip(headings[1:], rest) if cell]
        lines += [f"    {line}" for line in _packed(items, console.width - 4)]
        console.print(Text("\n".join(lines), style=row.style or ""))
    console.print()


def _packed(items: Sequence[str], width: int) -> Iterator[str]:
    """Items as lines, several on one where they fit."""
    line = ""
    for number, item in enumerate(items):
        item += ";" * (number + 1 < len(items))
        if line and cell_len(f"{line} {item}") <= width:
            line = f"{line} {item}"
            continue
        if line:
            yield line
        *before, line = wrapped(item, width)
        yield from before
    if line:
        yield line
