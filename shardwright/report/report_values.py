"""The values that a page of a report lays out.

Stat, Grid, Section    a key figure; a table; a heading's text, tables and pictures
Branch, Leaf, Tensor   modules, equal layers once; an operator; a tensor of it
Place                  parameters that lie alike
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.table import Table

from .format import size_text, time_text
from .report_pictures import SlicePicture

__all__ = ["Branch", "Grid", "Leaf", "Place", "Section", "Stat", "Tensor"]


@dataclass(frozen=True)
class Stat:
    """A key figure: its name, its text, and a sentence about it."""

    name: str
    text: str
    about: str = ""


@dataclass(frozen=True)
class Grid:
    """A table.

    Attributes:
        columns: the heads.
        rows: texts.
        right: the numbers of the columns with figures.
        title: a heading; "": none.
        about: a sentence below.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    right: tuple[int, ...] = ()
    title: str = ""
    about: str = ""

    @classmethod
    def of(cls, made: Table, title: str = "", about: str = "") -> Grid:
        """The same table as one of a terminal."""
        columns = tuple(str(column.header) for column in made.columns)
        rows = tuple(zip(*(tuple(map(str, column.cells)) for column in made.columns)))
        right = tuple(i for i, column in enumerate(made.columns) if column.justify == "right")
        return cls(columns, rows, right, title, about)


@dataclass(frozen=True)
class Tensor:
    """A tensor of an operator, with the picture of its slices; None: a scalar, or one without a layout of dims."""

    side: str
    name: str
    shape: str
    layout: str
    local: str
    slices: SlicePicture | None


@dataclass(frozen=True)
class Leaf:
    """An operator, or the operators of equal layers.

    Attributes:
        title: the last part of its path, with its kind.
        path: its whole path, equal layers folded: ``layers.{0-3}.up (linear)``.
        names: the operators' names in the plan.
        words: its cuts in the field's words.
        strategy: its in_strategy.
        seconds: of all these operators in a step.
        part: of the step, in [0, 1].
        sent: bytes that a rank sends for one of them.
        cause: the cause of its strategy.
        why: sentences about its alternatives, or the reason why none are priced.
        priced: True where `why` and `alternatives` were computed.
    """

    title: str
    path: str
    names: tuple[str, ...]
    words: str
    strategy: str
    source: str
    stages: str
    seconds: float
    part: float
    sent: int
    cause: str
    why: tuple[str, ...]
    priced: bool
    alternatives: Grid | None
    shares: Grid
    sends: Grid | None
    tensors: tuple[Tensor, ...]
    notes: tuple[str, ...]

    @property
    def cost(self) -> str:
        """Seconds as text."""
        each = f" ({len(self.names)} x {time_text(self.seconds / len(self.names))})" if len(self.names) > 1 else ""
        return time_text(self.seconds) + each

    @property
    def sent_text(self) -> str:
        """Bytes that a rank sends for one operator, as text."""
        return f"sends {size_text(self.sent)}" if self.sent else "sends nothing"


@dataclass
class Branch:
    """A module, or equal modules: branches and leaves in the order of the program."""

    title: str
    times: int = 1
    inside: list[Branch | Leaf] = field(default_factory=list)

    def leaves(self) -> Iterator[Leaf]:
        """Yield the operators inside."""
        for one in self.inside:
            if isinstance(one, Leaf):
                yield one
            else:
                yield from one.leaves()

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(leaf.seconds for leaf in self.leaves())

    @property
    def part(self) -> float:
        """The share of the step, in [0, 1]."""
        return sum(leaf.part for leaf in self.leaves())

    @property
    def cost(self) -> str:
        """Seconds as text."""
        return time_text(self.seconds)

    @property
    def count(self) -> int:
        """The number of operators."""
        return sum(len(leaf.names) for leaf in self.leaves())


@dataclass(frozen=True)
class Place:
    """Parameters that lie alike: their folded names, their number of elements, and bytes on a device."""

    text: str
    names: tuple[str, ...]
    count: int
    elements: str
    stored: str
    slices: SlicePicture | None


@dataclass(frozen=True)
class Section:
    """A part of a page. Pictures are SVG with a sentence each; `missing` says why a part is not there."""

    lines: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    drawn: tuple[tuple[str, str], ...] = ()
    missing: str = ""
