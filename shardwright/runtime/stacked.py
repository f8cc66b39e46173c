"""All ranks' shards as one tensor: the digits of the rank are its leading axes.

    x[r_0, …, r_n, ...]   the shard of the rank of those digits, most major first
    size 1                along that digit all ranks have the same shard: it is there once
    no such axes at all   all ranks have the same

A layout without an open reduction is then the whole tensor under another view, and a conversion is a sum over axes, a
view, a permutation and, where dims join that do not lie beside one another, one copy. Operators broadcast along axes of
size 1, so what ranks do alike is done once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..layout import Digits, Layout

__all__ = ["Axes", "RankShape", "converting", "union"]

#: The sizes of the leading axes of one value: each 1 or the axis's own; () rather than 1 everywhere.
RankShape = tuple[int, ...]


class Axes(NamedTuple):
    """The rank in digits, most major first, such that every digit of a program is some of them."""

    sizes: tuple[int, ...]

    @classmethod
    def of_layouts(cls, devices: int, layouts: Iterable[Layout]) -> Axes:
        """The fewest axes; all ranks along one where digits of the layouts overlap without one dividing the other."""
        used = {d for layout in layouts for d in (*layout.carried, *layout.partial)}
        bounds = sorted({1, devices, *(d.stride for d in used), *(d.span for d in used)})
        if any(b % a for a, b in zip(bounds, bounds[1:])):
            return cls((devices,))
        return cls(tuple(b // a for a, b in zip(bounds, bounds[1:]))[::-1])

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)

    def numbers(self, digits: Digits) -> tuple[int, ...] | None:
        """The axes that make up digits, in their order; None where a digit is not made of axes."""
        out = []
        strides = [math.prod(self.sizes[k + 1:]) for k in range(len(self.sizes))]
        for digit in digits:
            found = [k for k, (size, stride) in enumerate(zip(self.sizes, strides))
                     if digit.stride <= stride and stride * size <= digit.span]
            if math.prod(self.sizes[k] for k in found) != digit.size:
                return None
            out += found
        return tuple(out)

    def along(self, digits: Digits) -> RankShape:
        """Of a value that differs along digits; along all axes where they are not made of axes."""
        numbers = self.numbers(digits)
        return self.sizes if numbers is None else \
            union(size if k in numbers else 1 for k, size in enumerate(self.sizes))

    def places(self, held: RankShape) -> list[int]:
        """For each rank the number of its shard among those that a value holds."""
        return _places(self.sizes, held)

    def unbind(self, x: Tensor, held: RankShape) -> list[Tensor]:
        """The shards that a value holds, as views; differentiable."""
        local = x.shape[len(held):]
        sizes = [size for size in held if size > 1]
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

    def shards(self, x: Tensor, held: RankShape) -> list[Tensor]:
        """Every rank's shard; ranks along axes of size 1 share one object."""
        parts = self.unbind(x, held)
        return [parts[k] for k in self.places(held)]

    def stack(self, shards: Sequence[Tensor], held: RankShape) -> Tensor:
        """A value from every rank's shard: of those that are to be there once, that of the first rank."""
        places = self.places(held)
        chosen = [shards[places.index(k)] for k in range(math.prod(held))]
        return self.joined(chosen, held)

    def joined(self, parts: Sequence[Tensor], held: RankShape) -> Tensor:
        """A value from the shards that it holds."""
        made = torch.stack(parts) if len(parts) > 1 else parts[0]
        return made.view((*held, *parts[0].shape))


def union(*shapes: Iterable[int]) -> RankShape:
    """Of a value that differs wherever one of several does."""
    return _union(tuple(s for s in map(tuple, shapes) if s))


@lru_cache(maxsize=1 << 12)
def _union(shapes: tuple[RankShape, ...]) -> RankShape:
    sizes = tuple(map(max, *shapes)) if len(shapes) > 1 else (*shapes, ())[0]
    return sizes if any(size > 1 for size in sizes) else ()


@lru_cache(maxsize=1 << 12)
def _places(sizes: tuple[int, ...], held: RankShape) -> list[int]:
    out = []
    for rank in range(math.prod(sizes)):
        place, scale = 0, 1
        for size, has in zip(sizes[::-1], held[::-1]):
            rank, value = divmod(rank, size)
            if has > 1:
                place, scale = place + value * scale, scale * has
        out.append(place)
    return out


@lru_cache(maxsize=1 << 12)
def converting(axes: Axes, source: Layout, target: Layout, held: RankShape, wanted: RankShape, local: tuple[int, ...],
               summed: bool = False, alike: Digits = ()) -> Callable[[Tensor], Tensor] | None:
    """What brings a value from one layout to another; differentiable.

    Args:
        held, wanted: along which axes the value differs before, and is to be there in full afterwards.
        local: the shape of a shard before.
        summed: open sums have been taken along axes of size 1; else every rank there has the same term.
        alike: digits that hold the same on every rank, though there in full.

    Returns:
        None where axes do not show it: ranks that should hold the same thing need not, or digits are not made of axes.
    """
    numbers = axes.numbers
    carried, after = [numbers(d) for d in source.dims], [numbers(d) for d in target.dims]
    open_, left, same = numbers(source.partial), numbers(target.partial), numbers(alike)
    if None in carried or None in after or None in (open_, left, same):
        return None
    had = held or (1,) * len(axes.sizes)
    narrowed = [k for k in same if had[k] > 1]
    shape = [1 if k in narrowed else size for k, size in enumerate(had)]
    cut = {k for axes_ in carried for k in axes_}
    if any(size > 1 and k not in cut and k not in open_ for k, size in enumerate(shape)):
        return None
    kept = tuple(shape)
    for k in (*cut, *(() if summed else open_)):
        shape[k] = axes.sizes[k]
    expanded = None if tuple(shape) == kept else (*shape, *local)
    sums = [k for k in open_ if k not in left and shape[k] > 1]
    for k in sums:
        shape[k] = 1
    moved = _moved(axes, shape, local, carried, after, left)
    if moved is None:
        return None
    view, order, made, result = moved
    final = union(made, wanted)
    shape, spread = torch.Size((*union(made), *result)), (*final, *result) if final != union(made) else None
    reduce = {"sum": _sum, "max": torch.amax, "min": torch.amin}[source.reduction]

    def run(x: Tensor) -> Tensor:
        for k in narrowed:
            x = x.narrow(k, 0, 1)
        if expanded is not None:
            x = x.expand(expanded)
        if sums:
            x = reduce(x, sums, True)
        if order is not None:
            x = x.view(view).permute(order)
        if x.shape != shape:
            x = x.reshape(shape)
        return x if spread is None else x.expand(spread)

    return run


def _sum(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    return torch.sum(x, dims, keepdim, dtype=x.dtype)


def _moved(axes: Axes, before: list[int], local: tuple[int, ...], carried: list[tuple[int, ...]],
           after: list[tuple[int, ...]], left: tuple[int, ...]) -> tuple | None:
    """(view, order, axes, shard): ``x.view(view).permute(order).reshape(axes + shard)``; view and order None where there
    is nothing to permute. None for two factorings of a dim that have no common one."""
    n = len(axes.sizes)
    pieces: dict[int, list[int]] = {k: [size] for k, size in enumerate(before)}   # axis, dims after -> its parts
    parts: dict[int, list[tuple[int, int]]] = {}                                  # of the result -> (axis, part)
    result, shard = [1] * n, []
    for k in left:
        parts[k], result[k] = [(k, 0)], before[k]
    for dim, (here, there, size) in enumerate(zip(carried, after, local)):
        whole = size * math.prod(axes.sizes[k] for k in here)
        rest = whole // math.prod(axes.sizes[k] for k in there)
        old = [*(axes.sizes[k] for k in here), size]
        new = [*(axes.sizes[k] for k in there), rest]
        refined = _refined(old, new)
        if refined is None:
            return None
        sources = []
        for k, split in zip((*here, n + dim), _taken(refined, old)):
            pieces[k] = split
            sources += [(k, i) for i in range(len(split))]
        for k, split in zip((*there, n + dim), _taken(refined, new)):
            parts[k], sources = sources[:len(split)], sources[len(split):]
        for k in there:
            result[k] = axes.sizes[k]
        shard.append(rest)
    flat = [(k, i) for k in range(n + len(local)) for i in range(len(pieces[k])) if pieces[k][i] > 1]
    order = [flat.index(part) for k in range(n + len(local)) for part in parts.get(k, ()) if part in flat]
    assert len(order) == len(flat)
    if order == sorted(order):
        return None, None, result, shard
    return tuple(pieces[k][i] for k, i in flat), tuple(order), result, shard


def _refined(old: list[int], new: list[int]) -> list[int] | None:
    """The coarsest factors, major first, of which both are products of neighbours."""
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
