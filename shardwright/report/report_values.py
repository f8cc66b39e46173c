"""The values that a page of a report lays out.

Stat, Grid, Section    a key figure; a table; a heading's text, tables and pictures
Branch, Leaf, Tensor   modules, equal layers once; an operator; a tensor of it
Place                  parameters that lie alike

`joined`, `gathered` and `unfolded` shorten a tree of modules for its reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rich.table import Table

from .format import size_text, time_text
from .report_pictures import SlicePicture

__all__ = ["Branch", "Grid", "Leaf", "Place", "Section", "Stat", "Tensor", "gathered", "joined", "unfolded"]

#: Operators below this share of the step are gathered in one row where they are several.
SMALL = 0.001


@dataclass(frozen=True)
class Stat:
    """A key figure.

    Attributes:
        name: its name.
        text: the figure.
        about: a sentence about it.
        mood: "good", "bad" or "".
        part: the share of a whole that is drawn as a bar, in [0, 1]; None: no bar.
    """

    name: str
    text: str
    about: str = ""
    mood: str = ""
    part: float | None = None


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
        each: seconds of each of these operators in a step.
        part: of the step, of all of them together, in [0, 1].
        sent: bytes that a rank sends for each of them.
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
    each: tuple[float, ...]
    part: float
    sent: tuple[int, ...]
    cause: str
    why: tuple[str, ...]
    priced: bool
    alternatives: Grid | None
    shares: Grid
    sends: Grid | None
    tensors: tuple[Tensor, ...]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Seconds of all these operators in a step."""
        return sum(self.each)

    @property
    def cost(self) -> str:
        """Seconds as text: of all, and of each where there are several."""
        each = f" ({len(self.each)} x {_span(map(time_text, (min(self.each), max(self.each))))})"
        return time_text(self.seconds) + each * (len(self.each) > 1)

    @property
    def sent_text(self) -> str:
        """Bytes that a rank sends for one operator, as text."""
        least, most = min(self.sent), max(self.sent)
        return f"sends {_span(map(size_text, (least, most)))}" if most else "sends nothing"


def _span(ends: Iterable[str]) -> str:
    """Two texts, or one where they are equal: ``20 us to 24 us``."""
    return " to ".join(dict.fromkeys(ends))


@dataclass
class Branch:
    """A module, or equal modules: branches and leaves in the order of the program.

    Attributes:
        title: the last part of its path.
        times: the number of equal modules.
        inside: its modules and operators.
        open: True where a page shows it unfolded.
        small: True where it is no module, but operators of one that hardly cost anything.
    """

    title: str
    times: int = 1
    inside: list[Branch | Leaf] = field(default_factory=list)
    open: bool = False
    small: bool = False

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


def joined(branch: Branch) -> Branch:
    """A branch whose inner branches with one branch alone are joined with it: ``model.layers``."""
    inside: list[Branch | Leaf] = []
    for one in branch.inside:
        if isinstance(one, Branch):
            one = joined(one)
            while len(one.inside) == 1 and isinstance(only := one.inside[0], Branch):
                one = Branch(f"{one.title}.{only.title}", max(one.times, only.times), only.inside)
        inside.append(one)
    return replace(branch, inside=inside)


def gathered(branch: Branch) -> Branch:
    """A branch whose operators that hardly cost anything stand in one row, at its end."""
    inside = [gathered(one) if isinstance(one, Branch) else one for one in branch.inside]
    small = [one for one in inside if isinstance(one, Leaf) and one.part < SMALL and not any(one.sent)]
    if len(small) < 2 or len(small) == len(inside):
        return replace(branch, inside=inside)
    names = {one.names for one in small}
    others = [one for one in inside if isinstance(one, Branch) or one.names not in names]
    rest = Branch("operators that cost next to nothing", inside=list(small), small=True)
    return replace(branch, inside=[*others, rest])


def unfolded(branch: Branch) -> Branch:
    """A branch whose inner branches are open where they hold most of it, down to its layers."""
    whole = branch.seconds
    most = lambda one: isinstance(one, Branch) and one.times == 1 and 0 < 0.5 * whole < one.seconds
    inside = [
        replace(unfolded(one), open=True) if isinstance(one, Branch) and most(one) else one for one in branch.inside
    ]
    return replace(branch, inside=inside)


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
