"""Redistribution: the cheapest sequence of collectives and local slices from one layout to another, and its transpose.

1. A redistribution (`redistribution`):

    redistribution(source, target).steps      the steps that run, that the cost model prices, and that the dump prints
    sent = max over ranks of the amount it must send, as a fraction of the whole tensor

The gradient of a value has the value's layout with partial sums completed. The transpose of a redistribution is
therefore the redistribution of the gradient from the target's layout back to the source's. `redistribution_search`
finds the sequence. All computations are arithmetic on digits: nothing depends on a tensor's shape, and nothing lists
ranks.

2. One step (`RedistributionStep`): a local slice or one collective, with the geometry that makes executors generic.
   Every step splits a local tensor into pieces, moves pieces between the ranks of a group, and joins the received
   pieces:

    x.reshape(pre_view).permute(pre_perm).reshape(pre_shape)          pieces first: [pieces, *piece]
      -> the collective ->                                             received:    [pieces, *piece]
    y.reshape(post_view).permute(post_perm).reshape(post_shape)

A local dim is the mixed-radix number of its local atoms, major first, then the rest. The split is a view with one
axis for each atom that some digit is going to carry, and these axes are brought to the front in the order of the
ranks.

Example: a tensor [8, 6] cut as 2@1 along dim 0 goes to 2@1 along dim 1 in one all_to_all: each rank views its [4, 6]
as [4, 2, 3], permutes to [2, 4, 3], exchanges the 2 pieces, and joins them to [8, 3].

3. Halos (`halo_exchange`, `halo_reduce`). The exchange for the windows of a convolution changes no layout: it lies
   between a value and the same value with the elements of other slices that the windows read. One step for each dim
   that is cut, with the numbers of `halos.Halo` in place of atoms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import mul
from typing import TypeAlias

from ..errors import LayoutError
from ..identity_tables import IdentityMap
from ..layout import Digit, Digits, Layout, digits_size, merge
from .collective_kinds import CollectiveKind
from .halos import Halo
from .redistribution_search import PARTIAL, REPLICA, Refinement, SearchMove, intermediates, refine, search

__all__ = [
    "Atom",
    "Geometry",
    "Redistribution",
    "RedistributionStep",
    "composed",
    "digits_value",
    "halo_exchange",
    "halo_reduce",
    "make_step",
    "redistribution",
    "strided",
    "through",
    "transpose",
]


# -- one step


def digits_value(digits: Digits, rank: int) -> int:
    """The mixed-radix number that `digits`, most major first, form on a rank."""
    out = 0
    for digit in digits:
        out = out * digit.size + digit.value(rank)
    return out


@dataclass(frozen=True)
class Atom:
    """A part of a tensor dim that is local before a step, after it, or both (an atom that is neither is left out).

    Attributes:
        size: its number of values.
        gathered: the digit that carried it before, as an index into the step's `moved`; None: it was local.
        scattered: the digit that carries it afterwards, likewise; None: it will be local.
    """

    size: int
    gathered: int | None = None
    scattered: int | None = None


Ranges = tuple[tuple[int, int, Digits], ...]

#: An axis of a local tensor: (size, dim, atom); the rest after a dim's atoms is an axis with atom None.
_Axis: TypeAlias = tuple[int, int, Atom | None]


@dataclass(frozen=True)
class Geometry:
    """A step on local tensors of one shape, as plain ints. A perm or shape of None: nothing to do; its view is empty.

    Attributes:
        pre_view, pre_perm, pre_shape: from the local tensor to the pieces to send.
        pieces: the number of pieces: the group's size except where an all-to-all permutes.
        post_view, post_perm, post_shape: from the received pieces to the result.
        after: the shape of the result.
        cuts: the pieces to send as nested ranges: per dim (dim, length, digits: together the number of the range,
            major first); None where a dim's local atoms are cut behind others. For a slice this is complete.
        joins: the received pieces likewise: per dim (dim, length of a piece, digits).
        select: for a slice: (axis of ``x.reshape(pre_view)``, the digit whose value is its index), last axis first.
    """

    pre_view: tuple[int, ...]
    pre_perm: tuple[int, ...] | None
    pre_shape: tuple[int, ...] | None
    pieces: int
    post_view: tuple[int, ...]
    post_perm: tuple[int, ...] | None
    post_shape: tuple[int, ...] | None
    after: tuple[int, ...]
    cuts: Ranges | None = None
    joins: Ranges | None = None
    select: tuple[tuple[int, Digit], ...] = ()

    def rows(self, kind: CollectiveKind, ranks: int) -> tuple[int, ...] | None:
        """The shape of a local tensor that an all-gather or a reduce-scatter of `ranks` takes and returns as it is: its
        pieces, and those received, are rows of the first dim, one after the other in memory. None: there is none."""
        if self.pre_perm is not None or self.post_perm is not None or not self.after:
            return None
        first, *rest = self.after
        if kind is CollectiveKind.REDUCE_SCATTER:
            return (first * ranks, *rest)
        return (first // ranks, *rest) if kind is CollectiveKind.ALL_GATHER and first % ranks == 0 else None


def strided(view: tuple[int, ...], perm: tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and strides of a contiguous tensor that is viewed as `view` and permuted; None without a permutation."""
    if perm is None:
        return None
    strides = [math.prod(view[k + 1 :]) for k in range(len(view))]
    return tuple(view[k] for k in perm), tuple(strides[k] for k in perm)


def composed(
    view: tuple[int, ...], perm: tuple[int, ...], second: tuple[int, ...], order: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Two arrangements as one: (view, perm). None where they divide the axes between them in ways that do not nest."""
    permuted = tuple(view[k] for k in perm)
    ends = sorted({*accumulate(permuted, mul), *accumulate(second, mul)})
    sizes = [end // start for start, end in zip([1, *ends], ends)]
    if any(end % start for start, end in zip([1, *ends], ends)):
        return None
    parts, wholes = _runs(sizes, permuted), _runs(sizes, second)
    fine = [part for k in sorted(range(len(perm)), key=perm.__getitem__) for part in parts[k]]
    place = {part: k for k, part in enumerate(fine)}
    return tuple(sizes[part] for part in fine), tuple(place[part] for k in order for part in wholes[k])


def _runs(sizes: Sequence[int], shape: Sequence[int]) -> list[list[int]]:
    """For each size of `shape`, the indices of the consecutive `sizes` whose product it is."""
    out, at = [], 0
    for size in shape:
        run: list[int] = []
        while math.prod(sizes[k] for k in run) < size:
            run.append(at)
            at += 1
        out.append(run)
    return out


@dataclass(frozen=True)
class RedistributionStep:
    """One step of a redistribution, for any shape of the tensor.

    Attributes:
        kind: SLICE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, HALO_EXCHANGE or HALO_REDUCE.
        digits: the group: ranks that differ in these digits alone take part together; most major first, merged.
        reduction: "sum", "max" or "min", for the steps that reduce.
        moved: the same digits unmerged: each carries at most one atom before and one after.
        dims: per tensor dim its atoms that take part, major first.
        permuted: for an all-to-all that permutes: pairs (i, j): the value of moved[i] on the sender equals that of
            moved[j] on the receiver.
        halo: for an exchange of halos and its transpose, the elements that each part has and reads.
    """

    kind: CollectiveKind
    digits: Digits
    reduction: str
    moved: Digits
    dims: tuple[tuple[Atom, ...], ...]
    permuted: tuple[tuple[int, int], ...] = ()
    halo: Halo | None = None

    @property
    def size(self) -> int:
        """The number of ranks in a group."""
        return math.prod(d.size for d in self.moved)

    @property
    def pattern(self) -> CollectiveKind:
        """The kind by which the step is priced and run: PERMUTE for an all-to-all that permutes, else `kind`."""
        return CollectiveKind.PERMUTE if self.permuted else self.kind

    @property
    def reduces(self) -> bool:
        """True where the step completes a reduction."""
        return self.kind.reduces

    @property
    def communicates(self) -> bool:
        """True where the step sends anything."""
        return self.kind.communicates and (self.halo is None or self.halo.sent > 0)

    def local_shape_after(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """The local shape after the step.

        Raises:
            LayoutError: a dim that does not divide.
        """
        return self.geometry(tuple(local_shape)).after

    def sent(self, numel: int) -> int:
        """Elements that a rank must send (the maximum over ranks), with `numel` local elements before the step."""
        if self.halo is not None:
            before = self.halo.grown
            if self.kind is CollectiveKind.HALO_REDUCE:
                before *= Fraction(self.halo.length, self.halo.part_size)
            return self.pattern.sent(self.size, math.ceil(numel * self.share / before))
        return self.pattern.sent(self.size, numel)

    @property
    def share(self) -> Fraction:
        """For an exchange of halos: the elements that a rank must send, relative to its slice without any halos."""
        halo = self.halo
        assert halo is not None
        most = halo.sent if self.kind is CollectiveKind.HALO_EXCHANGE else halo.received
        return Fraction(most, halo.part_size) * halo.beside

    def geometry(self, local_shape: tuple[int, ...]) -> Geometry:
        """The step on local tensors of this shape.

        Raises:
            LayoutError: another number of dims, or a dim that does not divide.
        """
        return _geometry(self, local_shape)

    def position(self, rank: int) -> int:
        """The rank's position in its group, ascending."""
        return digits_value(self.moved, rank)

    def _scattered(self) -> tuple[int, ...]:
        """The moved digits whose values choose a piece, as indices into `moved`, most major first."""
        return tuple(sorted(a.scattered for dim in self.dims for a in dim if a.scattered is not None))

    def _gathered(self) -> tuple[int, ...]:
        """The moved digits whose values number the received pieces, likewise."""
        return tuple(sorted(a.gathered for dim in self.dims for a in dim if a.gathered is not None))

    def partners(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """For an all-to-all: the group positions to which the rank sends pieces, and those that send pieces to it.

        Both ascend, in the order of the pieces.
        """
        mine = [d.value(rank) for d in self.moved]
        to = self._reached({j: mine[i] for i, j in self.permuted}, self._scattered())
        return to, self._reached({i: mine[j] for i, j in self.permuted}, self._gathered())

    def _reached(self, fixed: dict[int, int], free: tuple[int, ...]) -> tuple[int, ...]:
        weights = [math.prod(d.size for d in self.moved[k + 1 :]) for k in range(len(self.moved))]
        out = [sum(value * weights[i] for i, value in fixed.items())]
        for i in free:
            out = [base + value * weights[i] for base in out for value in range(self.moved[i].size)]
        return tuple(out)

    def __str__(self) -> str:
        over = "·".join(map(repr, self.digits)) if self.halo is None else str(self.halo)
        return (
            f"{self.kind}({over})"
            if self.reduction == "sum" or not self.reduces
            else f"{self.kind}_{self.reduction}({over})"
        )


def make_step(refinement: Refinement, move: SearchMove, reduction: str) -> RedistributionStep:
    """The step of a move.

    Args:
        refinement: the two layouts in common atoms.
        move: a move of the search.
        reduction: the reduction of the source's partial digits.
    """
    changed = [i for i, (a, b) in enumerate(zip(move.before, move.after)) if a != b]
    moved = tuple(refinement.digits[i] for i in changed)
    before = {move.before[i]: k for k, i in enumerate(changed) if move.before[i] >= 0}
    after = {move.after[i]: k for k, i in enumerate(changed) if move.after[i] >= 0}
    unchanged = {p for i, p in enumerate(move.before) if i not in changed}
    dims = []
    for numbers in refinement.dims:
        atoms: list[Atom] = []
        for number in numbers:
            if number in unchanged or (number in before and number in after):
                continue
            atom = Atom(refinement.sizes[number], before.get(number), after.get(number))
            if atoms and _stays(atoms[-1]) and _stays(atom):
                atom = Atom(atoms.pop().size * atom.size)
            atoms.append(atom)
        if atoms and _stays(atoms[-1]):
            atoms.pop()  # part of the rest that follows the atoms
        dims.append(tuple(atoms))
    permuted = [(before[number], k) for number, k in after.items() if number in before]
    if move.kind.source is move.kind.target:  # a digit that becomes a replica takes the place of one that was a replica
        entering = [k for k, i in enumerate(changed) if move.after[i] == REPLICA]
        for k, i in enumerate(changed):
            if move.before[i] == REPLICA:
                entrant = next(e for e in entering if moved[e].size == moved[k].size)
                entering.remove(entrant)
                permuted.append((k, entrant))
        assert not entering and PARTIAL not in (move.before[i] for i in changed)
    return RedistributionStep(
        CollectiveKind.ALL_TO_ALL if permuted else move.kind,
        merge(moved),
        reduction if move.kind.reduces else "sum",
        moved,
        tuple(dims),
        tuple(sorted(permuted)),
    )


def _stays(atom: Atom) -> bool:
    return atom.gathered is None and atom.scattered is None


@lru_cache(maxsize=1 << 14)
def _geometry(step: RedistributionStep, shape: tuple[int, ...]) -> Geometry:
    if len(shape) != len(step.dims):
        raise LayoutError(f"the redistribution is of {len(step.dims)} dims, the local tensor {shape} has {len(shape)}")
    if step.halo is not None:
        return Geometry((), None, None, step.size, (), None, None, _with_halo(step, shape))
    before: list[_Axis] = []
    staying: list[_Axis] = []
    after: list[_Axis] = []
    piece: list[int] = []
    result: list[int] = []
    for dim, (size, atoms) in enumerate(zip(shape, step.dims)):
        local = math.prod(a.size for a in atoms if a.gathered is None)
        if size % local:
            raise LayoutError(f"dim {dim} of the local tensor {shape} has size {size}, not a multiple of {local}")
        axes: list[_Axis] = [(a.size, dim, a) for a in atoms] + [(size // local, dim, None)]
        before += [x for x in axes if x[2] is None or x[2].gathered is None]
        staying += [x for x in axes if x[2] is None or _stays(x[2])]
        after += [x for x in axes if x[2] is None or x[2].scattered is None]
        piece.append(math.prod(x[0] for x in axes if x[2] is None or _stays(x[2])))
        result.append(math.prod(x[0] for x in axes if x[2] is None or x[2].scattered is None))
    scattered = _numbered((x, x[2].scattered if x[2] else None) for x in before)
    gathered = _numbered((x, x[2].gathered if x[2] else None) for x in after)
    pieces = math.prod(x[0] for x in scattered or gathered)
    cuts = _ranges(step, piece, [(x, x[2].scattered if x[2] else None) for x in before])
    joins = _ranges(step, piece, [(x, x[2].gathered if x[2] else None) for x in after])
    if step.kind is CollectiveKind.SLICE:
        view = tuple(x[0] for x in before)
        select = tuple(
            (k, step.moved[digit])
            for k, (_, _, atom) in enumerate(before)
            if atom is not None and (digit := atom.scattered) is not None
        )
        return Geometry(view, None, None, pieces, (), None, tuple(result), tuple(result), cuts, select=select[::-1])
    pre = _rearranged(before, scattered + staying, shape, ((pieces,) if scattered else ()) + tuple(piece))
    post = _rearranged(gathered + staying, after, ((pieces,) if gathered else ()) + tuple(piece), tuple(result))
    return Geometry(pre[0], pre[1], pre[2], pieces, post[0], post[1], post[2], tuple(result), cuts, joins)


def _with_halo(step: RedistributionStep, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The local shape after an exchange of halos, or after its transpose.

    Raises:
        LayoutError: the dim has another size than that of a part.
    """
    halo = step.halo
    assert halo is not None
    old, new = (
        (halo.part_size, halo.length) if step.kind is CollectiveKind.HALO_EXCHANGE else (halo.length, halo.part_size)
    )
    if shape[halo.dim] != old:
        raise LayoutError(f"dim {halo.dim} of the local tensor {shape} has size {shape[halo.dim]}, not {old}")
    return (*shape[: halo.dim], new, *shape[halo.dim + 1 :])


def _numbered(axes: Iterable[tuple[_Axis, int | None]]) -> list[_Axis]:
    """The axes that have a number, in its order."""
    return [axis for axis, _ in sorted(((x, n) for x, n in axes if n is not None), key=lambda one: one[1])]


def _ranges(step: RedistributionStep, lengths: list[int], axes: list[tuple[_Axis, int | None]]) -> Ranges | None:
    """The numbering digits of `axes` (None: an axis stays) as ranges; None unless they come first in each dim."""
    out = []
    for dim, length in enumerate(lengths):
        digits = [digit for axis, digit in axes if axis[1] == dim]
        count = sum(d is not None for d in digits)
        first = [d for d in digits[:count] if d is not None]
        if len(first) < count:
            return None
        if count:
            out.append((dim, length, tuple(step.moved[d] for d in first)))
    return tuple(out)


def _rearranged(
    axes: list[_Axis], order: list[_Axis], shape: tuple[int, ...], out: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...] | None]:
    """(view, perm, shape) of ``x.reshape(view).permute(perm).reshape(shape)``; () and None for no-ops, as few axes
    as possible.

    Neighbours that stay neighbours form one axis, and axes of size 1 are dropped.
    """
    number = IdentityMap((x, k) for k, x in enumerate(axes))
    perm = [number[x] for x in order if x[0] != 1]
    runs: list[list[int]] = []
    for k in perm:
        between = range(runs[-1][-1] + 1, k) if runs else ()
        if runs and k > runs[-1][-1] and all(axes[j][0] == 1 for j in between):
            runs[-1].append(k)
        else:
            runs.append([k])
    ordered = sorted(runs)
    if runs == ordered:
        return (), None, (out if out != shape else None)
    view = tuple(math.prod(axes[k][0] for k in run) for run in ordered)
    places = tuple(ordered.index(run) for run in runs)
    permuted = tuple(view[k] for k in places)
    return view, places, (out if out != permuted else None)


@dataclass(frozen=True, eq=False)
class Redistribution:
    """A redistribution of a tensor from one layout to another.

    Attributes:
        source: the layout before; its `partial` digits are those of an incomplete reduction.
        target: the layout after; some of the source's partial digits may stay partial.
        steps: the slices and collectives, in order; none for an identity.
        sent: the amount that a rank must send (the maximum over ranks), as a fraction of the whole tensor.
    """

    source: Layout
    target: Layout
    steps: tuple[RedistributionStep, ...]
    sent: Fraction
    _hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.source, self.target)))  # executors look redistributions up often

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Redistribution):
            return NotImplemented
        return self is other or (self.source, self.target, self.steps) == (other.source, other.target, other.steps)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return Redistribution, (self.source, self.target, self.steps, self.sent)

    @property
    def is_identity(self) -> bool:
        """True where there is no step."""
        return not self.steps

    @cached_property
    def is_all_reduce(self) -> bool:
        """True where one all-reduce is the only step."""
        return [step.kind for step in self.steps] == [CollectiveKind.ALL_REDUCE]

    @cached_property
    def exchanges_halos(self) -> bool:
        """True for an exchange of halos and its transpose, which change no layout."""
        return any(step.halo is not None for step in self.steps)

    @cached_property
    def collectives(self) -> tuple[RedistributionStep, ...]:
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

    @cached_property
    def _text(self) -> str:
        return f"{self.source} -> {self.target}: {', '.join(map(str, self.steps)) or 'identity'}"

    def __str__(self) -> str:  # fingerprints of plans have it for each redistribution
        return self._text


@lru_cache(maxsize=1 << 16)
def redistribution(source: Layout, target: Layout) -> Redistribution:
    """The cheapest redistribution between two layouts of the same devices and number of dims.

    The cost is the amount a rank must send, then the number of collectives; digits that move alike share a collective.

    Raises:
        LayoutError: layouts of other devices or another number of dims, or a target with a partial digit that the
            source does not have.
    """
    if source.dims is None or target.dims is None:
        raise LayoutError(
            "a redistribution is between layouts of a tensor", legal="Layouts called with one entry per dim"
        )
    if source.devices != target.devices:
        raise LayoutError(f"the layouts are of {source.devices} and of {target.devices} devices")
    if len(source.dims) != len(target.dims):
        raise LayoutError(f"the layouts have {len(source.dims)} and {len(target.dims)} dims")
    if target.partial and target.reduction != source.reduction:
        raise LayoutError(f"a {source.reduction} over {source.partial} cannot become a {target.reduction}")
    for digit in target.partial:
        if not any(digit.stride % d.stride == 0 and d.span % digit.span == 0 for d in source.partial):
            raise LayoutError(
                f"{target} leaves {digit} open, which {source} does not",
                legal=f"a part of {source.partial or 'nothing'}",
            )
    if source == target:
        return Redistribution(source, target, (), Fraction(0))
    found = _direct(source, target) or min(_roundabout(source, target), key=lambda f: (f[0], f[1]))
    return Redistribution(source, target, found[2], Fraction(found[0], source.devices**2))


@lru_cache(maxsize=1 << 16)
def transpose(forward: Redistribution, partial: Digits = ()) -> Redistribution:
    """The backward of a redistribution: brings the gradient from the target's layout to the source's.

    Args:
        forward: the redistribution of the value.
        partial: digits that the target does not carry and over which the arriving gradient is a partial sum: those on
            which the consumer's work differed.

    Raises:
        LayoutError: digits that the target carries.
    """
    gradient = forward.target.without_partial().with_partial(partial)
    return redistribution(gradient, forward.source.without_partial())


@lru_cache(maxsize=1 << 12)
def halo_exchange(layout: Layout, halos: tuple[Halo, ...]) -> Redistribution:
    """The exchange of halos of a value.

    Args:
        layout: of the value, cut in each of the halos' dims by the halo's digits. A partial sum stays partial.
        halos: one for each dim, in the order of the exchange.
    """
    return _exchange(CollectiveKind.HALO_EXCHANGE, layout, halos)


@lru_cache(maxsize=1 << 12)
def halo_reduce(layout: Layout, halos: tuple[Halo, ...]) -> Redistribution:
    """The transpose of `halo_exchange`: gradients of halos are sent back and added.

    Args:
        layout: of the gradient; a partial sum stays partial.
        halos: those of the exchange.
    """
    return _exchange(CollectiveKind.HALO_REDUCE, layout, halos)


def _exchange(kind: CollectiveKind, layout: Layout, halos: tuple[Halo, ...]) -> Redistribution:
    steps = []
    for k, halo in enumerate(halos):
        digits = tuple(sorted(halo.digits, key=lambda d: -d.stride))
        dims = ((),) * len(layout.dims or ())
        halo = replace(halo, before=halos[:k])
        steps.append(RedistributionStep(kind, merge(digits), "sum", digits, dims, halo=halo))
    if kind is CollectiveKind.HALO_REDUCE:
        steps.reverse()
    sent = sum((step.share for step in steps), Fraction(0)) / digits_size(layout.carried)
    return Redistribution(layout, layout, tuple(steps), sent)


def through(source: Layout, middle: Layout, target: Layout) -> Redistribution:
    """A redistribution through an intermediate layout: from `source` to `middle`, then to `target`.

    Raises:
        LayoutError: as `redistribution`.
    """
    first, second = redistribution(source, middle), redistribution(middle, target)
    return Redistribution(source, target, first.steps + second.steps, first.sent + second.sent)


def _direct(source: Layout, target: Layout) -> tuple[int, int, tuple[RedistributionStep, ...]] | None:
    """(sent, collectives, steps) through common atoms; None where the layouts have none."""
    refinement = refine(source, target)
    if refinement is None:
        return None
    assert all(t != PARTIAL or s == PARTIAL for s, t in zip(refinement.source, refinement.target))
    sent, moves = search(refinement)
    steps = tuple(make_step(refinement, move, source.reduction) for move in moves)
    return sent, sum(s.communicates for s in steps), steps


def _roundabout(source: Layout, target: Layout) -> Iterator[tuple[int, int, tuple[RedistributionStep, ...]]]:
    """Yield the same through layouts that have common atoms with both; yields at least one."""
    for middle in dict.fromkeys(intermediates(source, target)):
        if middle in (source, target):
            continue
        first, second = _direct(source, middle), _direct(middle, target)
        if first is not None and second is not None:
            yield first[0] + second[0], first[1] + second[1], first[2] + second[2]
