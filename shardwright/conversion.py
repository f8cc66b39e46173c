"""From one layout to another: the cheapest sequence of collectives and local slices, and its transpose.

    conversion(source, target).steps      what runs, what the cost model prices, what the dump prints
    sent = max over ranks of what it must send, as a fraction of the whole tensor

The gradient of a value lies as the value does, its open reductions completed; so the transpose of a conversion is the
conversion of that gradient from the target's layout back to the source's. `conversion_search` finds the sequence,
`conversion_steps` says what a step is. Everything is arithmetic on digits: nothing depends on a tensor's shape, and
nothing lists ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache

from .conversion_search import PARTIAL, intermediates, refine, search
from .conversion_steps import Geometry, Step, make_step
from .errors import LayoutError
from .layout import Digits, Layout

__all__ = ["Conversion", "Geometry", "Step", "conversion", "through", "transpose"]


@dataclass(frozen=True, eq=False)
class Conversion:
    """How a tensor goes from one layout to another.

    Attributes:
        source: the layout it has; its `partial` digits are those of a reduction still open.
        target: the layout it gets; of the source's partial digits it may leave some open.
        steps: the slices and collectives, in order; none for an identity.
        sent: what a rank must send (of the ranks, the one that sends most), as a fraction of the whole tensor.
    """

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    sent: Fraction
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.source, self.target)))  # executors look conversions up often

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Conversion):
            return NotImplemented
        return self is other or (self.source, self.target, self.steps) == (other.source, other.target, other.steps)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self):
        return Conversion, (self.source, self.target, self.steps, self.sent)

    @property
    def is_identity(self) -> bool:
        """Whether there is nothing to do."""
        return not self.steps

    @cached_property
    def collectives(self) -> tuple[Step, ...]:
        """The steps that communicate."""
        return tuple(s for s in self.steps if s.communicates)

    def local_shapes(self, local_shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The local shape before the first step and after each.

        Raises:
            LayoutError: a dim that does not divide.
        """
        out = [tuple(local_shape)]
        for step in self.steps:
            out.append(step.local_shape_after(out[-1]))
        return tuple(out)

    def __str__(self) -> str:
        return f"{self.source} -> {self.target}: {', '.join(map(str, self.steps)) or 'identity'}"


@lru_cache(maxsize=1 << 16)
def conversion(source: Layout, target: Layout) -> Conversion:
    """The cheapest conversion between two layouts of the same devices and number of dims.

    Least is what a rank must send, then the number of collectives; digits that move alike travel together.

    Raises:
        LayoutError: layouts of other devices or another number of dims, or a target that leaves open what the source
            does not.
    """
    if source.dims is None or target.dims is None:
        raise LayoutError("a conversion is between layouts of a tensor", legal="Layouts called with one entry per dim")
    if source.devices != target.devices:
        raise LayoutError(f"the layouts are of {source.devices} and of {target.devices} devices")
    if len(source.dims) != len(target.dims):
        raise LayoutError(f"the layouts have {len(source.dims)} and {len(target.dims)} dims")
    if target.partial and target.reduction != source.reduction:
        raise LayoutError(f"a {source.reduction} over {source.partial} cannot become a {target.reduction}")
    for digit in target.partial:
        if not any(digit.stride % d.stride == 0 and d.span % digit.span == 0 for d in source.partial):
            raise LayoutError(f"{target} leaves {digit} open, which {source} does not",
                              legal=f"a part of {source.partial or 'nothing'}")
    if source == target:
        return Conversion(source, target, (), Fraction(0))
    found = _direct(source, target) or min(_roundabout(source, target), key=lambda f: (f[0], f[1]))
    return Conversion(source, target, found[2], Fraction(found[0], source.devices ** 2))


@lru_cache(maxsize=1 << 16)
def transpose(forward: Conversion, partial: Digits = ()) -> Conversion:
    """The backward of a conversion: brings the gradient from the target's layout to the source's.

    Args:
        forward: the conversion of the value.
        partial: digits that the target does not carry and over which the arriving gradient is a partial sum: those
            on which the consumer's work differed.

    Raises:
        LayoutError: digits that the target carries.
    """
    gradient = forward.target.without_partial().with_partial(partial)
    return conversion(gradient, forward.source.without_partial())


def through(source: Layout, middle: Layout, target: Layout) -> Conversion:
    """One conversion that passes through a layout on its way: first to `middle`, then on to `target`.

    Raises:
        LayoutError: as `conversion`.
    """
    first, second = conversion(source, middle), conversion(middle, target)
    return Conversion(source, target, first.steps + second.steps, first.sent + second.sent)


def _direct(source: Layout, target: Layout) -> tuple[int, int, tuple[Step, ...]] | None:
    """(sent, collectives, steps) through common atoms; None where there are none."""
    refinement = refine(source, target)
    if refinement is None:
        return None
    assert all(t != PARTIAL or s == PARTIAL for s, t in zip(refinement.source, refinement.target))
    sent, moves = search(refinement)
    steps = tuple(make_step(refinement, move, source.reduction) for move in moves)
    return sent, sum(s.communicates for s in steps), steps


def _roundabout(source: Layout, target: Layout):
    """The same through a layout that has common atoms with both; at least one."""
    for middle in dict.fromkeys(intermediates(source, target)):
        if middle in (source, target):
            continue
        first, second = _direct(source, middle), _direct(middle, target)
        if first is not None and second is not None:
            yield first[0] + second[0], first[1] + second[1], first[2] + second[2]
