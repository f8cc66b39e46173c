"""Halos: the elements beside a rank's slice that the windows of a convolution or a pooling read.

1. Windows (`Window`). An operator has `count` windows over a dim of `size` elements:

       window o reads the elements         o·stride - padding + (0 … extent-1)

   Elements below 0, and from `size` on, are the operator's own padding: they hold `fill`.

2. Parts (`Halo`). A cut into P parts gives part q a slice of the dim, and the windows of as many outputs:

       part q has the elements             q·c + (0 … c-1), below size              c = ⌈size / P⌉
       part q reads the elements           q·step - padding + (0 … length-1)        b = ⌈count / P⌉
                                           step = b·stride,  length = (b-1)·stride + extent

   Each part reads the same number of elements, so the operator is one call of one shape on all ranks. Part r sends to
   part q the elements that r has and q reads, and nothing else; most often q is a neighbour, and for long windows or
   short slices it may lie further off. The transpose sends the gradients of these elements back, where they are added.

3. Several dims are exchanged one after the other (`before`): the second exchange takes the first one's halos along,
   and so the corners. It leaves out the elements outside of the tensor, which both sides can fill themselves.

Example: a kernel of 3 with stride 1 and padding 1 over 8 rows in 4 parts. Part 1 has the rows 2 and 3, reads the rows 1
to 4, and sends row 2 to part 0 and row 3 to part 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from ..layout import Digits, digits_size

__all__ = ["Halo", "Window"]


@dataclass(frozen=True)
class Window:
    """The windows of an operator over one dim of an input.

    Attributes:
        count: the number of windows.
        size: of the dim.
        stride: the distance of two windows.
        padding: the elements before the dim at which the first window begins; negative where it begins within the dim.
        extent: the number of elements from a window's first to its last.
        fill: the value of the elements outside of the dim.
    """

    count: int
    size: int
    stride: int
    padding: int
    extent: int
    fill: float = 0

    def cut(self, dim: int, digits: Digits) -> Halo:
        """The halo of a cut by `digits`, for windows over `dim`."""
        each = -(-self.count // digits_size(digits))
        return Halo(
            dim, digits, self.size, each * self.stride, self.padding, (each - 1) * self.stride + self.extent, self.fill
        )


class _Amounts(NamedTuple):
    """The most elements, over the parts: sent, received, and read within the dim; and the most parts sent to."""

    sent: int
    received: int
    read: int
    partners: int


@dataclass(frozen=True)
class Halo:
    """The elements of a cut dim that each part has and reads.

    Attributes:
        dim: the dim of the tensor.
        digits: those that cut it, most major first; their value is the number of the part.
        size: of the dim.
        step, padding, length: part q reads the elements ``q * step - padding + (0 … length - 1)``.
        fill: the value of the elements outside of the dim.
        before: the halos of other dims that have been exchanged already.
    """

    dim: int
    digits: Digits
    size: int
    step: int
    padding: int
    length: int
    fill: float = 0
    before: tuple[Halo, ...] = ()

    @property
    def parts(self) -> int:
        """The number of parts."""
        return digits_size(self.digits)

    @property
    def part_size(self) -> int:
        """The number of elements that a part has; the last parts may have fewer within the dim."""
        return -(-self.size // self.parts)

    def begins(self, part: int) -> int:
        """The first element that a part reads, possibly below 0."""
        return part * self.step - self.padding

    def has(self, part: int) -> range:
        """The elements of the dim that a part has."""
        return range(min(part * self.part_size, self.size), min((part + 1) * self.part_size, self.size))

    def reads(self, part: int) -> range:
        """The elements of the dim that a part reads."""
        begin = self.begins(part)
        start = min(max(begin, 0), self.size)
        return range(start, max(start, min(begin + self.length, self.size)))

    def shared(self, part: int, reader: int) -> range:
        """The elements that `part` has and `reader` reads."""
        has, reads = self.has(part), self.reads(reader)
        start = max(has.start, reads.start)
        return range(start, max(start, min(has.stop, reads.stop)))

    def sources(self, reader: int) -> Iterator[tuple[int, range]]:
        """Yield the parts that have elements which `reader` reads, ascending, each with these elements; `reader` is
        among them."""
        reads = self.reads(reader)
        if reads:
            for part in range(reads.start // self.part_size, (reads.stop - 1) // self.part_size + 1):
                yield part, self.shared(part, reader)

    @property
    def sent(self) -> int:
        """The most elements of the dim that a part sends."""
        return self._amounts.sent

    @property
    def received(self) -> int:
        """The most elements of the dim that a part receives."""
        return self._amounts.received

    @property
    def partners(self) -> int:
        """The most parts to which a part sends."""
        return self._amounts.partners

    @property
    def beside(self) -> Fraction:
        """The elements of a row of the halo that travel, relative to the row of a slice: more by the halos exchanged
        before, as far as these lie within the tensor."""
        out = Fraction(1)
        for halo in self.before:
            out *= Fraction(halo._amounts.read, halo.part_size)
        return out

    @property
    def grown(self) -> Fraction:
        """The size of a slice with the halos exchanged before, relative to the plain slice."""
        out = Fraction(1)
        for halo in self.before:
            out *= Fraction(halo.length, halo.part_size)
        return out

    @property
    def _amounts(self) -> _Amounts:
        return _amounts(self)

    def __str__(self) -> str:
        over = "·".join(map(repr, self.digits))
        return (
            f"{over}, dim {self.dim}: {self.length} of {self.part_size} from {self.step}q-{self.padding}, {self.fill}"
        )


@lru_cache(maxsize=1 << 12)
def _amounts(halo: Halo) -> _Amounts:
    sent, to, received, read = [0] * halo.parts, [0] * halo.parts, 0, 0
    for reader in range(halo.parts):
        came = {part: len(shared) for part, shared in halo.sources(reader) if part != reader}
        for part, number in came.items():
            sent[part] += number
            to[part] += 1
        received, read = max(received, sum(came.values())), max(read, len(halo.reads(reader)))
    return _Amounts(max(sent), received, read, max(to))
