"""The elements of a plan in HTML: the values that a page lays out, a table, and pictures.

1. Values.

    Stat, Grid, Section    a key figure; a table; a heading's text, tables and pictures
    Branch, Leaf, Tensor   modules, equal layers once; an operator; a tensor of it
    Place                  parameters that lie alike

   `joined`, `gathered` and `unfolded` shorten a tree of modules for its reader.

2. `html_table`: a title, rows, and lines below, for a notebook; all texts are escaped.

3. `SlicePictures`: for each layout, a tensor in coloured slices, and the devices, each in the colour of its slice. Each
   picture is stored once, as a ``<symbol>`` that its uses name.

4. `memory`: bytes over the seconds of a step, a band for each kind.

All pictures are SVG without scripts. Plotly, written into a page, has 4 MB; these pictures together have some tens of
kB.

Example: the layout [2@1, -] on 4 devices paints the upper half of the tensor in one colour, the lower half in
another, and the devices 0 to 3 in the two colours by turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import product
from typing import NamedTuple

from rich.table import Table

from ..cluster import Cluster
from ..layout import Layout, digits_size, number_of
from .format import layout_text, size_text, time_text

__all__ = [
    "KIND_COLOURS",
    "Branch",
    "Grid",
    "Leaf",
    "Place",
    "Section",
    "SlicePicture",
    "SlicePictures",
    "Stat",
    "Tensor",
    "gathered",
    "html_table",
    "joined",
    "memory",
    "slice_svg",
    "unfolded",
]

# -- values


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
    shown = [one for one in inside if isinstance(one, Branch) or one.names not in names]
    rest = Branch("operators that cost next to nothing", inside=list(small), small=True)
    return replace(branch, inside=[*shown, rest])


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


# -- a table


_LEFT = 'style="text-align:left;vertical-align:top;padding:2px 12px 2px 0"'


class Drawn(str):
    """An SVG, which is not escaped."""


def html_table(
    title: str, head: Sequence[str], rows: Iterable[Sequence[str]], below: Iterable[str] = (), beside: str = ""
) -> str:
    """A title, a table without its empty columns, and lines below.

    Args:
        title: a line in bold.
        head: the heads of the columns.
        rows: texts, or `Drawn` pictures.
        below: lines.
        beside: an SVG between the title and the table.
    """
    listed = [tuple(row) for row in rows]
    columns = [i for i in range(len(head)) if any(row[i] for row in listed)]

    def line(cells: Sequence[str], tag: str) -> str:
        shown = (cells[i] if isinstance(cells[i], Drawn) else escape(cells[i]) for i in columns)
        return "<tr>" + "".join(f"<{tag} {_LEFT}>{cell}</{tag}>" for cell in shown) + "</tr>"

    table = f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in listed)}</table>" if columns else ""
    lines = "".join(f"<br>{escape(text)}" for text in below)
    picture = f'<div style="margin:6px 0">{beside}</div>' if beside else ""
    return f"<div><b>{escape(title)}</b>{picture}{table}{lines.removeprefix('<br>') if table else lines}</div>"


# -- pictures


#: Colours of a few slices: those of Okabe and Ito, made for the colour-blind too.
FEW = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#0072b2", "#d55e00", "#f0e442", "#8c8c8c")

#: The colour of a tensor that is whole, and of kinds of memory.
WHOLE = "#7f9db9"
KIND_COLOURS = {
    "parameters": "#0072b2",
    "constants": "#4d4d4d",
    "gradients": "#56b4e9",
    "optimizer": "#009e73",
    "inputs": "#8c8c8c",
    "activations": "#e69f00",
    "recomputed": "#f0e442",
    "gathered": "#cc79a7",
    "backward": "#d55e00",
    "under way": "#8a6fb0",
}

#: The most devices and bands that a picture shows, the hosts in one line, and the steps of hue and of lightness.
DEVICES, BANDS, HOSTS, HUES, LIGHTS = 1024, 48, 32, 48, 6

#: The most slices of which each has a colour of its own; of more, neighbours share one, so that a page stays small.
EXACT = 64

#: Pixels: a tensor's side, and the least and the largest side of a device.
SIDE, LEAST, LARGEST = 64, 6, 18


class SlicePicture(NamedTuple):
    """A use of a picture.

    Attributes:
        symbol: the id of its symbol.
        width, height: pixels.
        text: the picture in words.
        mesh: places of devices: devices of a strip, strips in a line, pixels of a device, devices that are drawn.
        dims: for each dim its size (0: several) and its digits, as ``16:2@4.4@1``, with "," between dims.
    """

    symbol: str
    width: int
    height: int
    text: str
    mesh: str
    dims: str


class SlicePictures:
    """The pictures of a page, each once."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[str, int, int, str]] = {}

    def of(self, layout: Layout, shape: Sequence[int] | None, cluster: Cluster) -> SlicePicture:
        """The picture of a tensor.

        Args:
            layout: of the tensor, with dims.
            shape: of the whole tensor; None: tensors of several shapes lie so.
            cluster: of the devices; its innermost level gives the strips of the mesh.
        """
        mesh = _Mesh.of(layout.devices, cluster)
        key = (layout.dims, mesh)
        if key not in self._known:
            drawn, width, height = _drawn(layout, mesh)
            symbol = f"s{len(self._known)}"
            self._known[key] = (symbol, width, height, drawn)
        symbol, width, height, _ = self._known[key]
        dims = layout.dims or ()
        cuts = (f"{size}:{'.'.join(map(repr, digits))}" for size, digits in zip(shape or (0,) * len(dims), dims))
        place = f"{mesh.strip},{mesh.line},{mesh.side},{mesh.shown}"
        return SlicePicture(symbol, width, height, _picture_text(layout, mesh), place, ",".join(cuts))

    def symbols(self) -> str:
        """All pictures, as symbols of an SVG."""
        return "\n".join(
            f'<symbol id="{symbol}" viewBox="0 0 {width} {height}">{drawn}</symbol>'
            for symbol, width, height, drawn in self._known.values()
        )


def slice_svg(layout: Layout, cluster: Cluster, scale: float = 1.0) -> str:
    """The picture of a tensor's slices alone, for a notebook: a pointer on a device shows its rank and its slice.

    Args:
        layout: of the tensor, with dims.
        cluster: of the devices.
        scale: of the picture; devices have their numbers where they are large enough.
    """
    mesh = _Mesh.of(layout.devices, cluster)
    drawn, width, height = _drawn(layout, mesh)
    parts = [(dim, digits) for dim, digits in enumerate(layout.dims or ()) if digits]
    over = []
    for rank in range(mesh.shown):
        x, y = mesh.place(rank)
        parts_of_rank = ", ".join(
            f"part {number_of(digits, rank)} of {digits_size(digits)} of dim {dim}" for dim, digits in parts
        )
        box = f'x="{x + SIDE + 12}" y="{y}" width="{mesh.side}" height="{mesh.side}"'
        over.append(
            f'<rect {box} fill="transparent"><title>rank {rank}: {parts_of_rank or "the whole tensor"}</title></rect>'
        )
        if scale == 1 and mesh.side >= 16 and mesh.devices <= 100:
            at = f'x="{x + SIDE + 12 + mesh.side / 2:g}" y="{y + mesh.side / 2 + 3:g}"'
            over.append(f'<text {at} font-size="9" text-anchor="middle" pointer-events="none">{rank}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width * scale:g}" height="{height * scale:g}" '
        f'viewBox="0 0 {width} {height}" aria-label="{escape(_picture_text(layout, mesh), quote=True)}">'
        f"{drawn}{''.join(over)}</svg>"
    )


class _Mesh(NamedTuple):
    """The places of devices: strips of neighbours, side by side in lines."""

    devices: int
    strip: int
    line: int
    side: int

    @classmethod
    def of(cls, devices: int, cluster: Cluster) -> _Mesh:
        strip = min(cluster.levels[0].size, devices)
        if devices % strip or strip > HOSTS:
            strip = 8 if devices % 8 == 0 else 1
        if strip == devices:  # one host lies flat
            strip = 1
        line = min(HOSTS, devices // strip)
        return cls(devices, strip, line, max(LEAST, min(LARGEST, 240 // line)))

    @property
    def shown(self) -> int:
        """The number of devices that are drawn."""
        return min(self.devices, DEVICES)

    def place(self, rank: int) -> tuple[int, int]:
        """The corner of a device, in pixels."""
        strip, inside = divmod(rank, self.strip)
        line, column = divmod(strip, self.line)
        return column * (self.side + 1), line * (self.strip * self.side + 6) + inside * self.side

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels."""
        lines = math.ceil(self.shown / (self.strip * self.line))
        return self.line * (self.side + 1), lines * (self.strip * self.side + 6) - 6


def _picture_text(layout: Layout, mesh: _Mesh) -> str:
    """A picture in words."""
    parts = [digits_size(digits) for digits in layout.dims or ()]
    cut = [f"dim {dim} in {count} parts" for dim, count in enumerate(parts) if count > 1]
    copies = digits_size(layout.replicas)
    copies_text = f"each part on {copies} devices" if cut and copies > 1 else ""
    text = "; ".join(filter(None, (", ".join(cut) or f"whole on each of {layout.devices} devices", copies_text)))
    if layout.partial:
        text += f"; partial {layout.reduction} over {digits_size(layout.partial)}"
    more = f"; the first {mesh.shown} of {mesh.devices} devices are drawn" if mesh.shown < mesh.devices else ""
    shared = "; neighbouring parts share a colour" if math.prod(parts) > EXACT else ""
    return f"{layout_text(layout)}: {text}{more}{shared}"


def _drawn(layout: Layout, mesh: _Mesh) -> tuple[str, int, int]:
    """The elements of a picture, its width and its height."""
    cut = [(dim, digits) for dim, digits in enumerate(layout.dims or ()) if digits]
    counts = [digits_size(digits) for _, digits in cut]
    # The first cut dim has the hue, all further ones together the lightness.
    first, rest = (counts[0], math.prod(counts[1:])) if counts else (1, 1)

    def colour(numbers: Sequence[int]) -> str:
        other = 0
        for number, count in zip(numbers[1:], counts[1:]):
            other = other * count + number
        return _colour(numbers[0] if numbers else 0, first, other, rest)

    parts = list(_tensor(len(layout.dims or ()), [dim for dim, _ in cut], counts, colour))
    paths: dict[str, list[str]] = {}
    for rank in range(mesh.shown):
        x, y = mesh.place(rank)
        each = colour([number_of(digits, rank) for _, digits in cut])
        paths.setdefault(each, []).append(f"M{x + SIDE + 12} {y}h{mesh.side}v{mesh.side}h-{mesh.side}z")
    parts += [f'<path fill="{each}" d="{"".join(path)}"/>' for each, path in paths.items()]
    width, height = mesh.size
    return "".join(parts), SIDE + 12 + width, max(SIDE, height)


def _tensor(
    dims: int, cut: Sequence[int], counts: Sequence[int], colour: Callable[[Sequence[int]], str]
) -> Iterator[str]:
    """The slices of a tensor: its first cut dim runs down where a later dim is cut too or follows, else across."""
    if not cut:
        yield f'<path fill="{WHOLE}" d="M0 0h{SIDE}v{SIDE}h-{SIDE}z"/>'
        return
    down = counts[0] if len(cut) > 1 or cut[0] < dims - 1 or dims == 1 else 1
    across = math.prod(counts[1:]) if down == counts[0] else counts[0]
    rows, columns = min(down, BANDS), min(across, BANDS if down == 1 else 24)
    paths: dict[str, list[str]] = {}
    for i, j in product(range(rows), range(columns)):
        row, column = i * down // rows, j * across // columns
        numbers = [column] if down == 1 and len(cut) == 1 else [row, *_split(column, counts[1:])]
        left, right, top, bottom = (
            round(SIDE * part, 1) for part in (j / columns, (j + 1) / columns, i / rows, (i + 1) / rows)
        )
        path = f"M{left:g} {top:g}H{right:g}V{bottom:g}H{left:g}z"
        paths.setdefault(colour(numbers), []).append(path)
    edge = ' stroke="#fff" stroke-width=".8"' if max(rows, columns) <= 16 else ""
    for each, drawn in paths.items():
        yield f'<path fill="{each}"{edge} d="{"".join(drawn)}"/>'


def _split(number: int, counts: Sequence[int]) -> list[int]:
    """The digits of a number in mixed radix, major first."""
    out = []
    for count in reversed(counts):
        number, digit = divmod(number, count)
        out.append(digit)
    return out[::-1]


def _colour(row: int, rows: int, column: int, columns: int) -> str:
    """The colour of slice (row, column) of rows x columns: hue and lightness, each of its own up to `EXACT` slices."""
    if rows * columns == 1:
        return WHOLE
    if columns == 1 and rows <= len(FEW):
        return FEW[row]
    if rows * columns > EXACT:
        row, rows = row * min(rows, HUES) // rows, min(rows, HUES)
        column, columns = column * min(columns, LIGHTS) // columns, min(columns, LIGHTS)
    hue = row * 330 / rows
    if columns == 1:
        return f"hsl({hue:.1f} 62% 52%)"
    return f"hsl({hue:.1f} 58% {36 + 40 * column / (columns - 1):.1f}%)"


# -- memory over a step ------------------------------------------------------------------------------------------------

#: Pixels of the picture of memory, and its most columns.
WIDTH, HEIGHT, LEFT, TOP, COLUMNS = 720, 220, 116, 32, 360


def memory(seconds: Sequence[float], kinds: Mapping[str, Sequence[float]], forward: int, limit: float | None) -> str:
    """The memory of a device over a step: a band for each kind, the peak, the begin of the backward.

    Args:
        seconds: of each moment.
        kinds: kind -> bytes at each moment.
        forward: the number of moments of the forward.
        limit: bytes of a device; drawn where it lies in the picture.
    """
    count = len(seconds)
    totals = [sum(band[i] for band in kinds.values()) for i in range(count)]
    most, whole = max(totals, default=0.0), sum(seconds)
    if not most:
        return ""
    weights = list(seconds) if whole else [1.0] * count
    whole = whole or float(count)
    starts, done = [], 0.0
    for weight in weights:
        starts.append(done)
        done += weight
    top = most if limit is None or limit > 1.6 * most else max(most, limit)
    x = lambda second: LEFT + (WIDTH - LEFT) * second / whole
    y = lambda nbytes: TOP + HEIGHT * (1 - nbytes / top)
    # A column stands for the moments that begin in it, by the one that holds most.
    columns: dict[int, int] = {}
    for i, start in enumerate(starts):
        column = min(COLUMNS - 1, int(COLUMNS * start / whole))
        if column not in columns or totals[i] > totals[columns[column]]:
            columns[column] = i
    at = sorted(columns.items())
    out = [
        f'<svg class="memory" role="img" font-size="13" viewBox="0 0 {WIDTH} {HEIGHT + TOP + 58}" '
        f'aria-label="memory over the step; the peak is {escape(size_text(most))}">'
    ]
    below = [0.0] * count
    for kind, band in kinds.items():
        if not any(band):
            continue
        above = [low + more for low, more in zip(below, band)]
        edges = [LEFT + (WIDTH - LEFT) * column / COLUMNS for column, _ in at] + [float(WIDTH)]
        path = f"M{LEFT} {y(below[at[0][1]]):.1f}"
        path += "".join(f"V{y(above[i]):.1f}H{edges[n + 1]:.1f}" for n, (_, i) in enumerate(at))
        path += "".join(f"V{y(below[i]):.1f}H{edges[n]:.1f}" for n, (_, i) in reversed(list(enumerate(at)))) + "z"
        caption = escape(f"{kind}: {size_text(max(band))} at most")
        out.append(f'<path fill="{KIND_COLOURS.get(kind, "#8c8c8c")}" d="{path}"><title>{caption}</title></path>')
        below = above
    peak = totals.index(most)
    out.append(f'<path class="mark" d="M{x(starts[peak]):.1f} {TOP}V{TOP + HEIGHT}"/>')
    anchor = "end" if starts[peak] > whole / 2 else "start"
    shift = -4 if anchor == "end" else 4
    out.append(
        f'<text x="{x(starts[peak]) + shift:.1f}" y="{TOP - 8}" text-anchor="{anchor}">peak '
        f"{escape(size_text(most))}</text>"
    )
    if 0 < forward < count:
        out.append(f'<path class="half" d="M{x(starts[forward]):.1f} {TOP}V{TOP + HEIGHT}"/>')
    if limit is not None and limit <= top:
        out.append(f'<path class="limit" d="M{LEFT} {y(limit):.1f}H{WIDTH}"/>')
        at_limit = f'x="{LEFT + 6}" y="{y(limit) + 5:.1f}" dominant-baseline="hanging"'
        out.append(f"<text {at_limit}>a device has {escape(size_text(limit))}</text>")
    for part in (0.0, 0.5, 1.0):
        out.append(
            f'<text x="{LEFT - 6}" y="{y(top * part) + 4:.1f}" text-anchor="end">{escape(size_text(top * part))}</text>'
        )
    below_axis = TOP + HEIGHT + 24
    out.append(f'<text x="{LEFT}" y="{below_axis}">forward</text>')
    if 0 < forward < count:
        out.append(f'<text x="{x(starts[forward]) + 4:.1f}" y="{below_axis}">backward</text>')
    out.append(f'<text x="{WIDTH}" y="{below_axis + 26}" text-anchor="end">{escape(time_text(whole))}</text></svg>')
    return "".join(out)
