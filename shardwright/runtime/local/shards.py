"""All ranks' local tensors in one process, and redistributions as plain tensor arithmetic, in two forms.

1. A list of shards.

    shards[r] is the local tensor of rank r;    convert_shards(redistribution(a, b), scatter(x, a)) == scatter(x, b)

With every rank in one process, an exchange among ranks is one permutation of ``[rank digits..., local dims...]``:
stack, view, permute, copy, unbind, a handful of calls for all ranks together. Results may be views, and ranks with
the same slice may share one tensor object, which is copied before a write in place. Sums are in ascending order of
the ranks, so all replicas have the same bits.

2. One tensor, with the digits of the rank as leading axes (`Axes`).

    x[r_0, …, r_n, ...]   the shard of the rank with those digits, most major first
    size 1                along that digit all ranks have the same shard, stored once
    no such axes at all   all ranks have the same

A layout without an open reduction is then the whole tensor under another view. A redistribution is a sum over axes, a
view, a permutation and, where dims join that are not neighbours in memory, one copy. Operators broadcast along axes
of size 1, so work that is the same on all ranks is done once. Example: rows of an (8, 4) matrix cut over 2 ranks are
a (2, 4, 4) tensor, a view; columns cut over 2 ranks are a (2, 8, 2) tensor, a permuted view.

`distributed.collectives` has the same redistributions for one rank of a process group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ...layout import Digits, Layout, complement, digits_size, group_of, groups, overlap
from ...redistribution import (
    CollectiveKind,
    Geometry,
    Redistribution,
    RedistributionStep,
    digits_value,
    redistribution as find_redistribution,
)
from ..redistribution_functions import exchange_halos

__all__ = [
    "Axes",
    "RankShape",
    "ReplicasDiffer",
    "assemble",
    "check_replicas",
    "convert_shards",
    "converting",
    "reduce_terms",
    "scatter",
    "union",
]

# From this many bytes a rank on, copying twice (stack, then permute) costs more than a call per rank (measured:
# benchmarks/README.md).
STACK_BYTES = 64 << 10

Shards = list[Tensor]
_Chunk = Callable[[Tensor, int, int], Sequence[Tensor]]
_Place = tuple[tuple[int, int, int], ...]


class ReplicasDiffer(AssertionError):
    """Ranks that must have the same slice do not: an error of this package, never of the user."""


def convert_shards(redistribution: Redistribution, shards: Shards, stepwise: bool = False) -> Shards:
    """Every rank's local tensor in the target's layout; no autograd.

    Args:
        redistribution: a redistribution from the layout of `shards`.
        shards: one local tensor a rank, all of one shape; never written to.
        stepwise: take every step as processes do, also where the same result costs less in one memory.

    Raises:
        LayoutError: a dim that its cut does not divide.
    """
    for run in _program(redistribution, tuple(shards[0].shape), stepwise):
        shards = run(shards)
    return shards


@lru_cache(maxsize=1 << 12)
def _program(
    redistribution: Redistribution, shape: tuple[int, ...], stepwise: bool
) -> tuple[Callable[[Shards], Shards], ...]:
    """The steps on shards of one shape, each as one function.

    Where nothing is reduced, a group's tensors are joined once, and every rank takes its slice: the same bits by a
    handful of calls, provided that the digits in motion are the minor ones of their dims.
    """
    parts = (not stepwise and _gathered_and_cut(redistribution)) or (redistribution,)
    out = []
    for part in parts:
        shapes = part.local_shapes(shape)
        out += [
            EXECUTORS[step.pattern](step, step.geometry(before), part.source.devices, before)
            for step, before in zip(part.steps, shapes)
        ]
        shape = shapes[-1]
    return tuple(out)


_GATHERED_AND_CUT = CollectiveKind.ALL_GATHER, CollectiveKind.SLICE


def _gathered_and_cut(redistribution: Redistribution) -> tuple[Redistribution, Redistribution] | None:
    """The redistribution as one all-gather over all digits in motion and one slice; None where that is not the same."""
    steps = redistribution.steps
    if redistribution.source.partial or all(s.kind in _GATHERED_AND_CUT or s.halo for s in steps):
        return None
    moving = tuple(d for step in redistribution.collectives for d in step.digits)
    source = redistribution.source
    middle = Layout.of(source.devices, [_without(digits, moving) for digits in source.tensor_dims])
    first, second = find_redistribution(source, middle), find_redistribution(middle, redistribution.target)
    gather, cut = _GATHERED_AND_CUT
    if [step.kind for step in first.steps] != [gather] or {step.kind for step in second.steps} != {cut}:
        return None
    return first, second


def _without(digits: Digits, moving: Digits) -> Digits:
    """The digits of a dim that precede the first digit in motion."""
    still = []
    for digit in digits:
        if overlap((digit,), moving):
            break
        still.append(digit)
    return tuple(still)


def reduce_terms(terms: Sequence[Tensor], reduction: str) -> Tensor:
    """The sum, max or min of tensors of one shape, taken in their order; a fresh tensor where there are several."""
    out = terms[0]
    if reduction == "sum":
        for k, term in enumerate(terms[1:]):
            out = out.add_(term) if k else out + term
        return out
    combine = torch.maximum if reduction == "max" else torch.minimum
    for term in terms[1:]:
        out = combine(out, term)
    return out


def _slice(
    step: RedistributionStep, geometry: Geometry, devices: int, shape: tuple[int, ...]
) -> Callable[[Shards], Shards]:
    if geometry.cuts is not None:
        runs = _runs(geometry.cuts, devices)
        return lambda shards: _cut(shards, runs)
    indices, view, after = [], geometry.pre_view, geometry.after
    for rank in range(devices):
        chosen = {axis: digit.value(rank) for axis, digit in geometry.select}
        indices.append(tuple(chosen.get(axis, slice(None)) for axis in range(len(view))))
    return lambda shards: [x.reshape(view)[index].reshape(after) for x, index in zip(shards, indices)]


def _runs(cuts: Sequence[tuple[int, int, Digits]], devices: int) -> tuple[tuple[int, int, int, tuple[int, ...]], ...]:
    """Per dim: (dim, length of a part, parts, the number of the part on every rank)."""
    return tuple(
        (dim, length, digits_size(digits), tuple(digits_value(digits, rank) for rank in range(devices)))
        for dim, length, digits in cuts
    )


def _cut(shards: Shards, runs: Sequence[tuple[int, int, int, Sequence[int]]], chunk: _Chunk = Tensor.chunk) -> Shards:
    """Every rank's part of its tensor, dim after dim; `runs` as returned by `_runs`."""
    for dim, length, parts, numbers in runs:
        distinct = set(shards)
        if len(distinct) * parts <= 2 * len(shards):  # all parts in one call: a third of the time of a narrow each
            pieces = {x: chunk(x, parts, dim) for x in distinct}
            shards = [pieces[x][number] for x, number in zip(shards, numbers)]
        else:
            shards = [x.narrow(dim, number * length, length) for x, number in zip(shards, numbers)]
    return shards


def _shared(step: RedistributionStep, devices: int) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """The step's groups, and per rank the number of its group."""
    members = groups(devices, step.digits)
    index = [0] * devices
    for number, ranks in enumerate(members):
        for rank in ranks:
            index[rank] = number
    return members, index


def _all_reduce(
    step: RedistributionStep, geometry: Geometry, devices: int, shape: tuple[int, ...]
) -> Callable[[Shards], Shards]:
    members, index = _shared(step, devices)

    def run(shards: Shards) -> Shards:
        results = [reduce_terms([shards[r] for r in ranks], step.reduction) for ranks in members]
        return [results[i] for i in index]

    return run


def _reduce_scatter(
    step: RedistributionStep, geometry: Geometry, devices: int, shape: tuple[int, ...]
) -> Callable[[Shards], Shards]:
    reduce = _all_reduce(step, geometry, devices, shape)
    if geometry.cuts is not None:
        runs = _runs(geometry.cuts, devices)
        return lambda shards: _cut(reduce(shards), runs, Tensor.unsafe_chunk)  # the sums are fresh, see `_rows`
    numbers = [step.position(rank) for rank in range(devices)]

    def run(shards: Shards) -> Shards:
        sums = reduce(shards)
        pieces = {x: _rearrange(x, geometry.pre_view, geometry.pre_perm, geometry.pre_shape).unbind(0) for x in sums}
        return [pieces[x][number] for x, number in zip(sums, numbers)]

    return run


def _rearrange(x: Tensor, view: tuple[int, ...], perm: tuple[int, ...] | None, shape: tuple[int, ...] | None) -> Tensor:
    if perm is not None:
        x = x.reshape(view).permute(perm)
    return x if shape is None else x.reshape(shape)


def _all_gather(
    step: RedistributionStep, geometry: Geometry, devices: int, shape: tuple[int, ...]
) -> Callable[[Shards], Shards]:
    members, index = _shared(step, devices)
    if geometry.joins is not None:
        ways = [_joining(geometry.joins, ranks[0]) for ranks in members]

        def run(shards: Shards) -> Shards:
            results = [_join([shards[r] for r in order], joins) for order, joins in ways]
            return [results[i] for i in index]
    else:
        view, perm = _permutation(step, devices, shape)
        rows = _rows(len(members), geometry.after)

        def run(shards: Shards) -> Shards:
            results = torch.stack(shards).view(view).permute(perm).reshape(rows).unsafe_chunk(len(members))
            return [results[i] for i in index]

    return run


def _joining(ranges: Sequence[tuple[int, int, Digits]], first: int) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """The way in which pieces join along several dims: (the ranks in the order of the pieces, (dim, pieces) innermost
    first)."""
    by_pieces = sorted(ranges, key=lambda r: -digits_size(r[2]))  # most pieces first: the fewest calls
    order = [first]
    for _, _, digits in by_pieces:
        offsets = [0]
        for digit in reversed(digits):
            offsets = [value * digit.stride + o for value in range(digit.size) for o in offsets]
        order = [offset + rank for offset in offsets for rank in order]
    return order, tuple((dim, digits_size(digits)) for dim, _, digits in by_pieces)


def _join(parts: Shards, joins: Sequence[tuple[int, int]]) -> Tensor:
    for dim, count in joins:
        parts = [torch.cat(parts[k : k + count], dim) for k in range(0, len(parts), count)]
    return parts[0]


def _all_to_all(
    step: RedistributionStep, geometry: Geometry, devices: int, shape: tuple[int, ...]
) -> Callable[[Shards], Shards]:
    view, perm = _permutation(step, devices, shape)
    rows = _rows(devices, geometry.after)
    result = tuple(view[k] for k in perm)
    inverse = tuple(sorted(range(len(perm)), key=perm.__getitem__))
    digits = len(_rank_digits(step, devices))
    coordinates = tuple(product(*map(range, view[:digits])))

    def run(shards: Shards) -> Shards:
        x = shards[0]
        if x.numel() * x.element_size() <= STACK_BYTES:
            return list(torch.stack(shards).view(view).permute(perm).reshape(rows).unsafe_chunk(devices))
        out = x.new_empty(result)
        slots = out.permute(inverse)
        for coordinate, shard in zip(coordinates, shards):
            slots[coordinate].copy_(shard.reshape(view[digits:]))
        return list(out.view(rows).unsafe_chunk(devices))

    return run


#: A step of each kind on all ranks' shards: (step, its geometry, number of ranks, local shape) -> function of shards.
EXECUTORS: dict[CollectiveKind, Callable[..., Callable[[Shards], Shards]]] = {
    CollectiveKind.SLICE: _slice,
    CollectiveKind.ALL_REDUCE: _all_reduce,
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_TO_ALL: _all_to_all,
    CollectiveKind.PERMUTE: _all_to_all,
    **dict.fromkeys((CollectiveKind.HALO_EXCHANGE, CollectiveKind.HALO_REDUCE), exchange_halos),
}


def _rows(count: int, after: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of `count` results one after the other along dim 0.

    The results are views by ``unsafe_chunk`` of a fresh buffer. Autograd does not treat these as views of one
    another, so an operator may write into its own in place.
    """
    return (count * after[0], *after[1:])


def _rank_digits(step: RedistributionStep, devices: int) -> Digits:
    return tuple(sorted(step.moved + complement(devices, step.moved), key=lambda d: -d.stride))


def _permutation(
    step: RedistributionStep, devices: int, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(view, perm) of all ranks' stacked tensors. After a gather, a group has one result instead of many."""
    digits = _rank_digits(step, devices)
    axis = [digits.index(d) for d in step.moved]
    view = [d.size for d in digits]
    of_dims: list[int] = []  # the axes of the result's dims
    carried = {axis[j]: axis[i] for i, j in step.permuted}  # axis of a digit in the result <- axis in `view`
    for size, atoms in zip(shape, step.dims):
        for atom in atoms:
            position = axis[atom.gathered] if atom.gathered is not None else len(view)
            if atom.gathered is None:
                view.append(atom.size)
                size //= atom.size
            if atom.scattered is not None:
                carried[axis[atom.scattered]] = position
            else:
                of_dims.append(position)
        of_dims.append(len(view))
        view.append(size)
    ranks = [carried.get(k, k) for k in range(len(digits)) if k in carried or k not in axis]
    return tuple(view), tuple(ranks + of_dims)


# -- the border: whole tensors -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 12)
def _scattering(layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, int, int, tuple[int, ...]], ...]:
    local = layout.local_shape(shape)
    return _runs([(dim, local[dim], digits) for dim, digits in enumerate(layout.tensor_dims) if digits], layout.devices)


def scatter(whole: Tensor, layout: Layout) -> Shards:
    """Every rank's slice of a whole tensor, as views; replicas share one object.

    With partial digits the ranks get terms. For a sum, the first rank gets the value and the others zeros; for a
    maximum or minimum, every rank gets the value.

    Raises:
        LayoutError: a dim that its cut does not divide.
    """
    shards = _cut([whole] * layout.devices, _scattering(layout, tuple(whole.shape)))
    if layout.partial and layout.reduction == "sum":
        zero = torch.zeros_like(shards[0])
        shards = [zero if digits_value(layout.partial, rank) else x for rank, x in enumerate(shards)]
    return shards


@lru_cache(maxsize=1 << 12)
def _assembly(layout: Layout) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    """(the ranks that hold the terms of each slice, the way in which slices join)."""
    order, joins = _joining([(dim, 0, digits) for dim, digits in enumerate(layout.tensor_dims) if digits], 0)
    return tuple(group_of(rank, layout.partial) for rank in order), joins


def assemble(shards: Shards, layout: Layout, check: bool = False, tolerance: float | None = None) -> Tensor:
    """The whole tensor from every rank's slice; terms of an open reduction are reduced.

    Args:
        shards: one local tensor a rank.
        layout: of the shards.
        check: True to compare replicas.
        tolerance: the allowed difference of replicas, relative to the largest value of a slice; None: the square root
            of the dtype's precision. NaN equals NaN, and infinities their like.

    Raises:
        ReplicasDiffer: replicas that do not agree, with their ranks.
    """
    if check:
        check_replicas(shards, layout, tolerance)
    terms, joins = _assembly(layout)
    if layout.partial and layout.reduction == "sum":
        return _sum_into_place(shards, layout)
    if layout.partial:
        return _join([reduce_terms([shards[r] for r in ranks], layout.reduction) for ranks in terms], joins)
    return _join([shards[r] for (r,) in terms], joins)


@lru_cache(maxsize=1 << 12)
def _replicas(layout: Layout) -> tuple[tuple[int, int], ...]:
    """Pairs of ranks that must have the same slice: the first of each group with each of the others."""
    return tuple((ranks[0], other) for ranks in groups(layout.devices, layout.replicas) for other in ranks[1:])


def _sum_into_place(shards: Shards, layout: Layout) -> Tensor:
    """The whole tensor of sums of terms; each sum is written to its place, so no slice is copied twice."""
    first = shards[0]
    shape, places = _places(layout, tuple(first.shape))
    whole = first.new_empty(shape)
    for place, ranks in places:
        out = whole
        for dim, start, length in place:
            out = out.narrow(dim, start, length)
        torch.add(shards[ranks[0]], shards[ranks[1]], out=out)
        for rank in ranks[2:]:
            out.add_(shards[rank])
    return whole


@lru_cache(maxsize=1 << 12)
def _places(layout: Layout, local: tuple[int, ...]) -> tuple[tuple[int, ...], list[tuple[_Place, tuple[int, ...]]]]:
    """The whole's shape, and for each slice its place, (dim, start, length) of the dims that are cut, with its
    ranks."""
    shape = tuple(size * cut for size, cut in zip(local, layout.cuts))
    places = []
    for ranks in _assembly(layout)[0]:
        index = layout.slice(shape, ranks[0])
        cut = (d for d, digits in enumerate(layout.tensor_dims) if digits)
        places.append((tuple((d, index[d].start, index[d].stop - index[d].start) for d in cut), ranks))
    return shape, places


def check_replicas(shards: Shards, layout: Layout, tolerance: float | None = None) -> None:
    for rank, other in _replicas(layout):
        one, two = shards[rank], shards[other]
        if one is two or torch.equal(one, two):
            continue
        one, two = one.detach(), two.detach()
        difference = scale = allowed = math.nan
        if one.shape == two.shape:
            if not one.is_floating_point() and not one.is_complex():
                one, two, allowed = one.double(), two.double(), 0.0
            else:
                allowed = torch.finfo(one.dtype).eps ** 0.5 if tolerance is None else tolerance
            scale = one.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
            if torch.allclose(one, two, rtol=0.0, atol=allowed * scale, equal_nan=True):
                continue
            difference = (one - two).abs().max().item()
        raise ReplicasDiffer(
            f"ranks {rank} and {other} must hold the same slice of {layout}, but hold "
            f"{tuple(one.shape)} and {tuple(two.shape)} that differ by {difference}, "
            f"more than {allowed} of {scale}"
        )


# -- one tensor for all ranks

#: The sizes of the leading axes of one value: each 1 or the axis's own; () in place of 1 everywhere.
RankShape = tuple[int, ...]


class Axes(NamedTuple):
    """The rank in digits, most major first, such that every digit of a program is made of some of them."""

    sizes: tuple[int, ...]

    @classmethod
    def of_layouts(cls, devices: int, layouts: Iterable[Layout]) -> Axes:
        """The fewest axes; one axis of all ranks where digits of the layouts overlap without one dividing the other."""
        used = {d for layout in layouts for d in (*layout.carried, *layout.partial)}
        bounds = sorted({1, devices, *(d.stride for d in used), *(d.span for d in used)})
        if any(b % a for a, b in zip(bounds, bounds[1:])):
            return cls((devices,))
        return cls(tuple(b // a for a, b in zip(bounds, bounds[1:]))[::-1])

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def numbers(self, digits: Digits) -> tuple[int, ...] | None:
        """The axes that `digits` are made of, in order; None where a digit is not made of axes."""
        out = []
        strides = [math.prod(self.sizes[k + 1 :]) for k in range(len(self.sizes))]
        axes = list(enumerate(zip(self.sizes, strides)))
        for digit in digits:
            found = [k for k, (size, stride) in axes if digit.stride <= stride and stride * size <= digit.span]
            if math.prod(self.sizes[k] for k in found) != digit.size:
                return None
            out += found
        return tuple(out)

    def of_each(self, several: Iterable[Digits]) -> list[tuple[int, ...]] | None:
        """The axes of each of several digits; None where `numbers` has none of one."""
        found = [self.numbers(digits) for digits in several]
        return None if None in found else [numbers for numbers in found if numbers is not None]

    def along(self, digits: Digits) -> RankShape:
        """The leading axes of a value that differs along `digits`; all axes where the digits are not made of axes."""
        numbers = self.numbers(digits)
        return (
            self.sizes if numbers is None else union(size if k in numbers else 1 for k, size in enumerate(self.sizes))
        )

    def places(self, rank_shape: RankShape) -> list[int]:
        """For each rank, the number of its shard among the stored ones."""
        return _digit_places(self.sizes, rank_shape)

    def unbind(self, x: Tensor, rank_shape: RankShape) -> list[Tensor]:
        """The stored shards of a value, as views; differentiable."""
        local = x.shape[len(rank_shape) :]
        sizes = [size for size in rank_shape if size > 1]
        if not sizes:
            return [x.view(local)]
        x = x.view((*sizes, *local))
        strides = x.stride()
        if all(strides[k] == strides[k + 1] * sizes[k + 1] for k in range(len(sizes) - 1)):
            return list(x.view((math.prod(sizes), *local)).unbind(0) if len(sizes) > 1 else x.unbind(0))
        parts = [x]
        for _ in sizes:
            parts = [piece for part in parts for piece in part.unbind(0)]
        return parts

    def shards(self, x: Tensor, rank_shape: RankShape) -> list[Tensor]:
        """Every rank's shard; ranks along axes of size 1 share one object."""
        parts = self.unbind(x, rank_shape)
        return [parts[k] for k in self.places(rank_shape)]

    def stack(self, shards: Sequence[Tensor], rank_shape: RankShape) -> Tensor:
        """A value from every rank's shard; a shard that is stored once is the first rank's."""
        places = self.places(rank_shape)
        chosen = [shards[places.index(k)] for k in range(math.prod(rank_shape))]
        return self.joined(chosen, rank_shape)

    def joined(self, parts: Sequence[Tensor], rank_shape: RankShape) -> Tensor:
        """A value from its stored shards."""
        made = torch.stack(tuple(parts)) if len(parts) > 1 else parts[0]
        return made.view((*rank_shape, *parts[0].shape))


def union(*shapes: Iterable[int]) -> RankShape:
    """The leading axes of a value that differs wherever one of several values does."""
    return _union(tuple(s for s in map(tuple, shapes) if s))


@lru_cache(maxsize=1 << 12)
def _union(shapes: tuple[RankShape, ...]) -> RankShape:
    sizes = tuple(map(max, *shapes)) if len(shapes) > 1 else (*shapes, ())[0]
    return sizes if any(size > 1 for size in sizes) else ()


@lru_cache(maxsize=1 << 12)
def _digit_places(sizes: tuple[int, ...], rank_shape: RankShape) -> list[int]:
    out = []
    for rank in range(math.prod(sizes)):
        place, scale = 0, 1
        for size, has in zip(sizes[::-1], rank_shape[::-1]):
            rank, value = divmod(rank, size)
            if has > 1:
                place, scale = place + value * scale, scale * has
        out.append(place)
    return out


@lru_cache(maxsize=1 << 12)
def converting(
    axes: Axes,
    source: Layout,
    target: Layout,
    before: RankShape,
    wanted: RankShape,
    local: tuple[int, ...],
    summed: bool = False,
    alike: Digits = (),
) -> Callable[[Tensor], Tensor] | None:
    """A function that brings a value from one layout to another; differentiable.

    Args:
        axes: of the program.
        source, target: the layouts.
        before: the leading axes of the value before.
        wanted: the leading axes to be stored in full afterwards.
        local: the shape of a shard before.
        summed: True where open sums have been taken along axes of size 1; False where every rank there has the same
            term.
        alike: digits along which all ranks have the same shard, although stored in full.

    Returns:
        None where axes cannot express it: replicas that need not be equal, or digits that are not made of axes.
    """
    carried, after = axes.of_each(source.tensor_dims), axes.of_each(target.tensor_dims)
    partials = axes.of_each((source.partial, target.partial, alike))
    if carried is None or after is None or partials is None:
        return None
    open_, partial_after, same = partials
    rank_shape = before or (1,) * len(axes.sizes)
    narrowed = [k for k in same if rank_shape[k] > 1]
    shape = [1 if k in narrowed else size for k, size in enumerate(rank_shape)]
    cut = {k for axes_ in carried for k in axes_}
    if any(size > 1 and k not in cut and k not in open_ for k, size in enumerate(shape)):
        return None
    narrow = tuple(shape)
    for k in (*cut, *(() if summed else open_)):
        shape[k] = axes.sizes[k]
    expanded = None if tuple(shape) == narrow else (*shape, *local)
    sums = [k for k in open_ if k not in partial_after and shape[k] > 1]
    for k in sums:
        shape[k] = 1
    moved = _moved(axes, shape, local, carried, after, partial_after)
    if moved is None:
        return None
    turned, made, result = moved
    final = union(made, wanted)
    whole, spread = torch.Size((*union(made), *result)), (*final, *result) if final != union(made) else None
    reductions: dict[str, Callable[..., Tensor]] = {"sum": _sum, "max": torch.amax, "min": torch.amin}
    reduce = reductions[source.reduction]

    def run(x: Tensor) -> Tensor:
        for k in narrowed:
            x = x.narrow(k, 0, 1)
        if expanded is not None:
            x = x.expand(expanded)
        if sums:
            x = reduce(x, sums, True)
        if turned is not None:
            x = x.view(turned[0]).permute(turned[1])
        if x.shape != whole:
            x = x.reshape(whole)
        return x if spread is None else x.expand(spread)

    return run


def _sum(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return torch.sum(x, dims, keepdim, dtype=x.dtype)


def _moved(
    axes: Axes,
    before: list[int],
    local: tuple[int, ...],
    carried: list[tuple[int, ...]],
    after: list[tuple[int, ...]],
    partial: tuple[int, ...],
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]] | None, list[int], list[int]] | None:
    """((view, order), axes, shard): ``x.view(view).permute(order).reshape(axes + shard)``; the pair None where nothing
    is permuted. None where two factorings of a dim have no common refinement."""
    n = len(axes.sizes)
    pieces: dict[int, list[int]] = {k: [size] for k, size in enumerate(before)}  # axis, or n + dim -> its parts
    parts: dict[int, list[tuple[int, int]]] = {}  # axis of the result -> (axis, part)
    result, shard = [1] * n, []
    for k in partial:
        parts[k], result[k] = [(k, 0)], before[k]
    for dim, (old_axes, new_axes, size) in enumerate(zip(carried, after, local)):
        whole = size * math.prod(axes.sizes[k] for k in old_axes)
        rest = whole // math.prod(axes.sizes[k] for k in new_axes)
        old = [*(axes.sizes[k] for k in old_axes), size]
        new = [*(axes.sizes[k] for k in new_axes), rest]
        refined = _refined(old, new)
        if refined is None:
            return None
        sources = []
        for k, split in zip((*old_axes, n + dim), _taken(refined, old)):
            pieces[k] = split
            sources += [(k, i) for i in range(len(split))]
        for k, split in zip((*new_axes, n + dim), _taken(refined, new)):
            parts[k], sources = sources[: len(split)], sources[len(split) :]
        for k in new_axes:
            result[k] = axes.sizes[k]
        shard.append(rest)
    flat = [(k, i) for k in range(n + len(local)) for i in range(len(pieces[k])) if pieces[k][i] > 1]
    order = [flat.index(part) for k in range(n + len(local)) for part in parts.get(k, ()) if part in flat]
    assert len(order) == len(flat)
    if order == sorted(order):
        return None, result, shard
    return (tuple(pieces[k][i] for k, i in flat), tuple(order)), result, shard


def _refined(old: list[int], new: list[int]) -> list[int] | None:
    """The coarsest factors, major first, such that each factor of `old` and of `new` is a product of neighbours."""
    bounds = {1}
    for factors in (old, new):
        for k in range(len(factors)):
            bounds.add(math.prod(factors[k:]))
    chain = sorted(bounds)
    if any(a == 0 or b % a for a, b in zip(chain, chain[1:])):
        return None
    return [b // a for a, b in zip(chain, chain[1:])][::-1]


def _taken(refined: list[int], factors: list[int]) -> list[list[int]]:
    """The refined factors of each factor."""
    out, at = [], 0
    for factor in factors:
        mine: list[int] = []
        while math.prod(mine) != factor:
            mine.append(refined[at])
            at += 1
        out.append(mine)
    return out
