"""Layouts: the slice of a tensor that each rank holds.

A *digit* is a pair (size, stride); its value on a rank is ``(rank // stride) % size``. A layout gives each dim of a
tensor a list of digits, major first; together they are the mixed-radix number of the dim's slice:

    slice(dim, rank) = Σ_i value_i(rank) · Π_{j>i} size_j

Digits that a layout does not name are replicas: ranks that differ in them alone hold the same slice. A digit may also
be *partial*: the ranks along it hold terms of a sum (or of a maximum, …) that is not yet completed. Neighbouring
digits of a dim are merged where possible, so two layouts that place the same slices on the same ranks are equal,
however they were written.

Example: on 8 ranks, ``[2@4, 4@1]`` cuts dim 0 by the rank's digit of stride 4 and dim 1 by the rank modulo 4. Rank 6
has values 1 and 2: it holds rows 4:8 and columns 4:6 of an 8 × 8 tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from itertools import product
from typing import Any, NoReturn

from .errors import PACKAGE_FOLDER, LayoutError, place_text

__all__ = [
    "Digit",
    "Digits",
    "Layout",
    "allocate",
    "beside",
    "complement",
    "digits_of",
    "digits_size",
    "group_of",
    "groups",
    "merge",
    "number_of",
    "overlap",
]

RESERVED_NAME = "interleaved_parallel"

#: Names of axes in the texts of errors.
_NAMES = ("dp", "mp", "sp", "ep")
REDUCTIONS = ("sum", "max", "min")


@dataclass(frozen=True, order=True)
class Digit:
    """One digit of a rank: ``(rank // stride) % size``.

    Args:
        size: the number of its values.
        stride: the distance of two ranks whose values differ by one.

    Example:
        >>> digit = sw.Digit(4, 2)
        >>> digit, digit.span
        (4@2, 8)
    """

    size: int
    stride: int

    def value(self, rank: int) -> int:
        """The digit's value on `rank`, in [0, size)."""
        return rank // self.stride % self.size

    @property
    def span(self) -> int:
        """``size * stride``: the stride at which the next more major digit begins."""
        return self.size * self.stride

    def __repr__(self) -> str:
        return f"{self.size}@{self.stride}"


Digits = tuple[Digit, ...]


def digits_size(digits: Iterable[Digit]) -> int:
    """The number of values that `digits` take together."""
    size = 1
    for digit in digits:
        size *= digit.size
    return size


def number_of(digits: Iterable[Digit], rank: int) -> int:
    """The number that digits, major first, have on a rank."""
    number = 0
    for digit in digits:
        number = number * digit.size + digit.value(rank)
    return number


def merge(digits: Iterable[Digit]) -> Digits:
    """Major-first digits in canonical form: no digit of size 1, neighbours joined where they form one digit."""
    out: list[Digit] = []
    for digit in digits:
        if digit.size == 1:
            continue
        if out and out[-1].stride == digit.span:
            digit = Digit(out.pop().size * digit.size, digit.stride)
        out.append(digit)
    return tuple(out)


@cache
def complement(devices: int, digits: Digits) -> Digits:
    """The digits of a rank in [0, devices) that are not in `digits`, most major first."""
    out, upper = [], devices
    for digit in sorted(digits, key=lambda d: -d.stride):
        if digit.size == 1:
            continue
        if upper % digit.span:
            raise LayoutError(f"the digits {list(digits)} overlap or do not fit {devices} devices")
        out.append(Digit(upper // digit.span, digit.span))
        upper = digit.stride
    out.append(Digit(upper, 1))
    return merge(out)


def allocate(devices: int, cuts: Sequence[int]) -> tuple[Digits, ...]:
    """Digits for consecutive factors of a device matrix: row-major, the remaining devices repeated on the right.

    Args:
        devices: the number of devices.
        cuts: the number of parts of each factor, most major first.

    Raises:
        LayoutError: the product of the cuts does not divide the number of devices.
    """
    for cut in cuts:
        if not isinstance(cut, int) or isinstance(cut, bool) or cut < 1:
            raise LayoutError(f"a cut must be a whole number of at least 1, not {cut!r}")
    stride = devices
    total = math.prod(cuts)
    if total > devices:
        raise LayoutError(
            f"the cuts {tuple(cuts)} need {total} devices, there are {devices}",
            legal=f"cuts whose product divides {devices}",
        )
    if devices % total:
        raise LayoutError(
            f"the cuts {tuple(cuts)} make {total} parts, which does not divide {devices} devices",
            legal=f"a product among {[d for d in range(1, devices + 1) if devices % d == 0]}",
        )
    out = []
    for cut in cuts:
        stride //= cut
        out.append(merge((Digit(cut, stride),)))
    return tuple(out)


def beside(devices: int, digits: Iterable[Digit]) -> bool:
    """True where digits can be digits of one rank number: 2@1 and 2@3 cannot on 6 devices, though they do not
    overlap."""
    try:
        complement(devices, tuple(digits))
    except LayoutError:
        return False
    return True


def overlap(some: Iterable[Digit], more: Iterable[Digit]) -> bool:
    """True where two sets of digits share a part of the rank."""
    more = tuple(more)
    return any(a.stride < b.span and b.stride < a.span for a in some for b in more if a.size > 1 and b.size > 1)


def group_of(rank: int, digits: Iterable[Digit]) -> tuple[int, ...]:
    """The ranks that differ from `rank` in `digits` only, ascending, including `rank`."""
    digits = sorted(digits, key=lambda d: -d.stride)
    base = rank - sum(d.value(rank) * d.stride for d in digits)
    offsets = (range(0, d.span, d.stride) for d in digits)
    return tuple(base + sum(combination) for combination in product(*offsets))


def groups(devices: int, digits: Iterable[Digit]) -> tuple[tuple[int, ...], ...]:
    """All groups of ranks that differ in `digits` only: a partition of the ranks."""
    digits = tuple(digits)
    further = complement(devices, digits)
    bases = (sum(c) for c in product(*(range(0, d.span, d.stride) for d in further)))
    return tuple(group_of(base, digits) for base in bases)


def _users(message: str, *, strategy: object = None, legal: str | None = None) -> LayoutError:
    """An error in the user's code, with its line: the nearest caller outside of this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE_FOLDER):
        frame = frame.f_back
    source = place_text(frame.f_code.co_filename, frame.f_lineno)
    return LayoutError(message, source=source, strategy=strategy, legal=legal)


def digits_of(ranks: Sequence[int]) -> Digits | None:
    """The digits, major first, whose numbers in ascending order the ranks have: from 0, by steps of mixed radices.

    Example: (0, 2, 1, 3) are the numbers of 2@1 and 2@2: position 1 is rank 2, position 2 is rank 1.

    Returns:
        None where no digits give these ranks.
    """
    digits: list[Digit] = []  # minor first
    done = 1
    while ranks[0] == 0 and done < len(ranks):
        stride, run = ranks[done], 2
        while done * run < len(ranks) and ranks[done * run] == run * stride:
            run += 1
        if stride < 1 or len(ranks) % (done * run):
            return None
        digits.append(Digit(run, stride))
        done *= run
    made = merge(reversed(digits))
    numbers = [sum(v * d.stride for v, d in zip(values, made)) for values in product(*(range(d.size) for d in made))]
    return made if numbers == list(ranks) else None


def _axes_of(matrix: tuple[int, ...], rank_list: object) -> tuple[Digits, ...]:
    """The digits of each axis of a device matrix, where `rank_list` has the ranks in the order of its positions.

    Along an axis the ranks are those of a mixed-radix number: on the axis of size 4 of (0, 2, 1, 3) the minor digit is
    2@2, since position 1 is rank 2, and the major digit is 2@1, since position 2 is rank 1.

    Raises:
        LayoutError: not each rank once, or an order that no digits have.
    """
    devices = math.prod(matrix)
    ranks = list(rank_list) if isinstance(rank_list, (tuple, list, range)) else None
    if ranks is None or any(type(rank) is not int for rank in ranks) or sorted(ranks) != list(range(devices)):
        raise _users(
            f"rank_list={rank_list!r} is not the order of the {devices} devices of the matrix {matrix}",
            legal=f"each rank from 0 to {devices - 1} once; in a stage of a pipeline the ranks count from 0 too",
        )
    steps = [math.prod(matrix[i + 1 :]) for i in range(len(matrix))]
    axes = [digits_of([ranks[k * step] for k in range(size)]) or () for size, step in zip(matrix, steps)]
    every = [digit for axis in axes for digit in axis]
    if digits_size(every) != devices or any(number_of(every, rank) != i for i, rank in enumerate(ranks)):
        turned = tuple(sum(pair) for pair in product(range(matrix[-1]), range(0, devices, matrix[-1])))
        raise _users(
            f"rank_list={tuple(ranks)} is an order that digits of the rank cannot give the matrix {matrix}: along an "
            "axis, or along a factor of its size, every step must add one number to the rank, from rank 0 on",
            legal=f"{turned}, for example" if devices <= 16 else "an order of the axes, with rank 0 first",
        )
    return tuple(axes)


@lru_cache(maxsize=1 << 16)
def _of_digits(devices: int, dims: tuple[Digits, ...], partial: Digits, reduction: str) -> Layout:
    """See `Layout.of`. Returns the same object for the same digits: searches compare the same few layouts all the
    time."""
    dims = tuple(merge(d) for d in dims)
    partial = merge(sorted(partial, key=lambda d: -d.stride))
    complement(devices, tuple(d for ds in dims for d in ds) + partial)  # raises where digits overlap
    made = object.__new__(Layout)
    made._fill(devices, dims, partial, reduction if partial else "sum", None, None, None)
    return made


class Layout:
    """A device matrix with named axes, and for each dim of a tensor the axes that cut it.

    ``Layout((2, 2, 2), ("dp", "sp", "mp"))`` names the axes of a device matrix; ranks number it row-major. A call
    lays out a tensor, one entry a dim: a name, a tuple of names (the first is the major one) or ``"None"``; unused
    names are replicas::

        layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
        layout("mp", ("sp", "dp"))

    A `rank_list` gives the rank at each position of the device matrix, row-major. `Layout((2, 2), ("dp", "mp"),
    rank_list=(0, 2, 1, 3))` has the ranks 0 and 2 side by side along "mp": its axis "mp" is the digit ``2@2``.

    Layouts are equal when they place the same slices on the same ranks. They are immutable.

    Args:
        device_matrix: the sizes of the axes, most major first.
        alias_name: one unique name per axis.
        rank_list: the ranks, from 0, in the order of the positions of the matrix; None: in ascending order.
        name: another word for `alias_name`.

    Raises:
        LayoutError: names that repeat, are reserved or do not match the matrix; sizes below 1; a `rank_list` that does
            not hold each rank once, or whose axes are no digits of the rank.

    Example:
        >>> layout = sw.Layout((2, 4), ("dp", "mp"))
        >>> cut = layout("dp", "mp")
        >>> cut.slice((8, 8), 5)
        (slice(4, 8, None), slice(2, 4, None))
    """

    __slots__ = ("devices", "dims", "partial", "reduction", "device_matrix", "alias_name", "_entries", "_axes", "_hash")

    devices: int
    dims: tuple[Digits, ...] | None
    partial: Digits
    reduction: str
    device_matrix: tuple[int, ...] | None
    alias_name: tuple[str, ...] | None
    _entries: tuple[str | tuple[str, ...], ...] | None
    _axes: tuple[Digits, ...] | None  # the digits of each axis, major first, where a rank_list was given
    _hash: int

    def __init__(
        self,
        device_matrix: Sequence[int],
        alias_name: Sequence[str] | None = None,
        rank_list: Sequence[int] | None = None,
        *,
        name: Sequence[str] | None = None,
    ) -> None:
        if alias_name is not None and name is not None:
            raise _users(
                f"alias_name={alias_name!r} and name={name!r} are two words for one thing", legal="one of them"
            )
        alias_name = name if alias_name is None else alias_name
        if not isinstance(alias_name, (tuple, list)) or not all(isinstance(n, str) for n in alias_name):
            raise _users(f"alias_name must be a tuple of names, not {alias_name!r}", legal='("dp", "mp")')
        if not isinstance(device_matrix, (tuple, list)):
            raise _users(f"a device matrix is a tuple of sizes, not {device_matrix!r}", legal="(2, 4)")
        matrix, names = tuple(device_matrix), tuple(alias_name)
        for size in matrix:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise _users(f"a device matrix holds whole numbers of at least 1, not {size!r}", legal="(2, 4)")
        if not matrix:
            raise _users("the device matrix () has no axis", legal="(2, 4)")
        if len(matrix) != len(names):
            raise _users(
                f"device matrix {matrix} has {len(matrix)} axes, alias_name {names} has {len(names)}",
                legal=f"{len(matrix)} names, such as {_NAMES[: len(matrix)]}"
                if len(matrix) <= len(_NAMES)
                else "one name per axis",
            )
        if len(set(names)) != len(names):
            raise _users(f"alias_name {names} repeats a name", legal="one unique name per axis")
        for axis, one in enumerate(names):
            if not one.strip():
                raise _users(
                    f"axis {axis} of size {matrix[axis]} has no name: alias_name={names}",
                    legal='a name for each axis, such as "dp"',
                )
            if one in (RESERVED_NAME, "None"):
                meaning = "a dim that is not cut" if one == "None" else "an axis that the planner makes itself"
                raise _users(f"the axis name {one!r} is reserved: it means {meaning}", legal="another name")
        axes = None if rank_list is None else _axes_of(matrix, rank_list)
        self._fill(math.prod(matrix), None, (), "sum", matrix, names, None, axes)

    def _fill(
        self,
        devices: int,
        dims: tuple[Digits, ...] | None,
        partial: Digits,
        reduction: str,
        matrix: tuple[int, ...] | None,
        names: tuple[str, ...] | None,
        entries: tuple[str | tuple[str, ...], ...] | None,
        axes: tuple[Digits, ...] | None = None,
    ) -> None:
        values = (devices, dims, partial, reduction, matrix, names, entries, axes)
        for slot, value in zip(self.__slots__, values):
            object.__setattr__(self, slot, value)
        key: tuple[object, ...] = (
            (devices, matrix, names, axes) if dims is None else (devices, dims, partial, reduction)
        )
        object.__setattr__(self, "_hash", hash(key))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("a Layout is immutable")

    @classmethod
    def of(
        cls, devices: int, dims: Iterable[Iterable[Digit]], partial: Iterable[Digit] = (), reduction: str = "sum"
    ) -> Layout:
        """The layout given by digits.

        Args:
            dims: the digits of each tensor dim, major first.
            partial: the digits of an incomplete reduction.
            reduction: the kind of that reduction.

        Raises:
            LayoutError: digits that overlap or do not fit the number of devices.
        """
        return _of_digits(devices, tuple(map(tuple, dims)), tuple(partial), reduction)

    @classmethod
    def from_cuts(cls, devices: int, cuts: Sequence[int]) -> Layout:
        """The layout of one tensor by a tuple strategy: row-major digits, the remaining devices repeated on the right.

        Args:
            cuts: the number of parts of each dim.

        Raises:
            LayoutError: a product that does not divide the number of devices.
        """
        return cls.of(devices, allocate(devices, cuts))

    @classmethod
    def replicated(cls, devices: int, rank_of_tensor: int) -> Layout:
        """The whole tensor, of `rank_of_tensor` dims, on each of `devices` devices."""
        return cls.of(devices, ((),) * rank_of_tensor)

    def __call__(self, *entries: str | tuple[str, ...] | None) -> Layout:
        """Lay out a tensor: one entry per dim: an axis name, a tuple of names, or ``"None"``. In a tuple ``"None"``
        says nothing.

        Raises:
            LayoutError: an unknown name, a name used twice, or a layout without named axes.
        """
        if self.alias_name is None:
            raise _users("this layout was made from digits; it has no named axes to call")
        used: set[str] = set()
        dims: list[Digits] = []
        named: list[str | tuple[str, ...]] = []
        for entry in entries:
            if not isinstance(entry, (str, tuple, list, type(None))):
                raise _users(
                    f"{entry!r} is no axis",
                    strategy=entries,
                    legal=f"one of {self.alias_name}, a tuple of them, or 'None'",
                )
            axes = (entry,) if entry is None or isinstance(entry, str) else tuple(entry)
            names = tuple(name for name in axes if name not in ("None", None))
            for name in names:
                if name not in self.alias_name:
                    raise _users(
                        f"unknown axis {name!r}",
                        strategy=entries,
                        legal=f"one of {self.alias_name}, a tuple of them, or 'None'",
                    )
                if name in used:
                    raise _users(
                        f"the axis {name!r} is used twice", strategy=entries, legal="each axis at most once in a call"
                    )
                used.add(name)
            dims.append(merge(digit for name in names for digit in self.digits(name)))
            named.append("None" if not names else names[0] if len(names) == 1 else names)
        out = object.__new__(type(self))
        out._fill(self.devices, tuple(dims), (), "sum", self.device_matrix, self.alias_name, tuple(named), self._axes)
        return out

    def digits(self, name: str) -> Digits:
        """The digits of a named axis, major first: one, unless a `rank_list` spreads the axis.

        Raises:
            LayoutError: there is no axis of that name.
        """
        if self.alias_name is None or self.device_matrix is None or name not in self.alias_name:
            raise LayoutError(f"unknown axis {name!r}", legal=f"one of {self.alias_name}")
        i = self.alias_name.index(name)
        if self._axes is not None:
            return self._axes[i]
        return (Digit(self.device_matrix[i], math.prod(self.device_matrix[i + 1 :])),)

    def axis(self, name: str) -> Digit:
        """The digit of a named axis.

        Raises:
            LayoutError: there is no axis of that name, or a `rank_list` spreads the axis over several digits.
        """
        digits = self.digits(name)
        if len(digits) != 1:
            raise LayoutError(f"the axis {name!r} is several digits: {digits}", legal=f"digits({name!r})")
        return digits[0]

    def named(self, dim: int) -> str:
        """The axes that cut a dim, as they were named: ``'mp'``, ``('sp', 'dp')``, ``no axis``; without names the
        digits."""
        digits = self.tensor_dims[dim]
        if not digits:
            return "no axis"
        return repr(self._entries[dim]) if self._entries is not None else "·".join(map(repr, digits))

    # -- placement ------------------------------------------------------------------------------------------------

    @property
    def tensor_dims(self) -> tuple[Digits, ...]:
        """The digits of each tensor dim, as `dims` has them.

        Raises:
            LayoutError: the layout names a device matrix only.
        """
        if self.dims is None:
            raise LayoutError("this Layout names a device matrix only", legal="call it with one entry per tensor dim")
        return self.dims

    @property
    def cuts(self) -> tuple[int, ...]:
        """The number of parts of each dim."""
        return tuple([digits_size(d) for d in self.tensor_dims])

    @property
    def carried(self) -> Digits:
        """All digits that cut some dim, dim after dim."""
        return tuple([d for digits in self.tensor_dims for d in digits])

    @property
    def replicas(self) -> Digits:
        """The digits along which ranks hold the same slice, most major first."""
        return complement(self.devices, self.carried + self.partial)

    @property
    def is_replicated(self) -> bool:
        """True where every rank holds the whole tensor without partial sums."""
        return not self.partial and not any(self.tensor_dims)

    def without_partial(self) -> Layout:
        """The same slices with every reduction completed: also the layout of the gradient."""
        return Layout.of(self.devices, self.tensor_dims) if self.partial else self

    def with_partial(self, digits: Iterable[Digit], reduction: str = "sum") -> Layout:
        """The same slices, as terms of a reduction over `digits`."""
        return Layout.of(self.devices, self.tensor_dims, digits, reduction)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of each rank's slice of a tensor of `shape`.

        Raises:
            LayoutError: another number of dims, or a dim that its cut does not divide.
        """
        return _local_shape(self, tuple(shape))

    def padded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """`shape` with every dim rounded up to a multiple of its cut."""
        return tuple(-(-size // cut) * cut for size, cut in zip(shape, self.cuts, strict=True))

    def position(self, dim: int, rank: int) -> int:
        """The index, from 0, of the dim's part on `rank`."""
        return number_of(self.tensor_dims[dim], rank)

    def slice(self, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
        """The part of a tensor of `shape` on `rank`, as an index: ``tensor[layout.slice(tensor.shape, rank)]``.

        Raises:
            LayoutError: as `local_shape`; or a rank outside the devices.
        """
        if not 0 <= rank < self.devices:
            raise LayoutError(f"rank {rank} is outside the {self.devices} devices")
        out = []
        for dim, size in enumerate(self.local_shape(shape)):
            start = self.position(dim, rank) * size
            out.append(slice(start, start + size))
        return tuple(out)

    def groups(self, names: str | Digit | Sequence[str | Digit]) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ only in the axes of `names` (or in its digits); they partition the ranks.

        Raises:
            LayoutError: an unknown name.
        """
        each = (names,) if isinstance(names, (str, Digit)) else tuple(names)
        return groups(self.devices, tuple(d for n in each for d in ((n,) if isinstance(n, Digit) else self.digits(n))))

    def table(self, shape: Sequence[int], limit: int = 64) -> str:
        """A text table of the slice of a tensor of `shape` at each device coordinate; at most `limit` ranks."""
        rows = [("rank", *(self.alias_name or ()), "slice")]
        for rank in range(min(self.devices, limit)):
            coordinate = [str(number_of(self.digits(n), rank)) for n in self.alias_name or ()]
            parts = ", ".join(f"{s.start}:{s.stop}" for s in self.slice(shape, rank))
            rows.append((str(rank), *coordinate, f"[{parts}]"))
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
        if self.devices > limit:
            lines.append(f"… {self.devices - limit} more ranks")
        return "\n".join(lines)

    # -- as a value -----------------------------------------------------------------------------------------------

    def _key(self) -> tuple[object, ...]:
        if self.dims is None:
            return (self.devices, self.device_matrix, self.alias_name, self._axes)
        return (self.devices, self.dims, self.partial, self.reduction)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (self._hash == other._hash and self._key() == other._key())

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Callable[..., Layout], tuple[object, ...]]:
        return _restore, (
            self.devices,
            self.dims,
            self.partial,
            self.reduction,
            self.device_matrix,
            self.alias_name,
            self._entries,
            self._axes,
        )

    def __iter__(self) -> NoReturn:
        raise TypeError("a Layout is not a sequence; put it into the in_strategy tuple as one entry")

    def __repr__(self) -> str:
        if self.alias_name is not None:
            order = "" if self._axes is None else f", rank_list={_shortened(self._ranks())}"
            base = f"Layout({self.device_matrix}, {self.alias_name}{order})"
            return base if self.dims is None else base + "(" + ", ".join(map(repr, self._entries or ())) + ")"
        return f"Layout({self})"

    def _repr_html_(self) -> str:
        # By name: pictures are a layer above layouts.
        html: str = import_module(".report.html_report", __package__).layout_html(self)
        return html

    def _ranks(self) -> tuple[int, ...]:
        """The rank at each position of the device matrix."""
        digits = [digit for axis in self._axes or () for digit in axis]
        return tuple(
            sum(value * digit.stride for value, digit in zip(values, digits))
            for values in product(*(range(digit.size) for digit in digits))
        )

    def __str__(self) -> str:
        """Digits as ``size@stride``: ``8: [2@4, -, 4@1] +sum 2@2``."""
        if self.dims is None:
            return repr(self)
        dims = ", ".join("·".join(map(repr, d)) or "-" for d in self.dims)
        open_ = f" +{self.reduction} {'·'.join(map(repr, self.partial))}" if self.partial else ""
        return f"{self.devices}: [{dims}]{open_}"


#: The ranks of a `rank_list` that a repr shows at either end, where there are more than twice as many.
SHOWN_RANKS = 64


def _shortened(ranks: tuple[int, ...]) -> str:
    """A rank list as text; of a long one its ends."""
    if len(ranks) <= 2 * SHOWN_RANKS:
        return str(ranks)
    ends = (", ".join(map(str, part)) for part in (ranks[:SHOWN_RANKS], ranks[-SHOWN_RANKS:]))
    return f"({', ..., '.join(ends)})"


@lru_cache(maxsize=1 << 14)
def _local_shape(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """See `Layout.local_shape`: equal layers of a model ask for equal shapes."""
    dims = layout.tensor_dims
    if len(dims) != len(shape):
        raise LayoutError(f"the layout has {len(dims)} dims, the tensor {shape} has {len(shape)}")
    out = []
    for dim, (size, digits) in enumerate(zip(shape, dims)):
        if not digits:
            out.append(size)
            continue
        cut = digits_size(digits)
        if size % cut:
            raise LayoutError(
                f"dim {dim} of {shape} has size {size}, which does not divide by {cut}",
                legal=f"a cut among {[c for c in range(1, size + 1) if size % c == 0]}" if size <= 4096 else None,
            )
        out.append(size // cut)
    return tuple(out)


def _restore(*values: Any) -> Layout:
    out = object.__new__(Layout)
    out._fill(*values)
    return out
