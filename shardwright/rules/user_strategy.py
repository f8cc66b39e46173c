"""Strategies given by a user, tuples of cuts or Layouts: each becomes an assignment, or an error with the reason.

Worked example: a matmul ``m k, k n -> m n`` on 8 devices with the in_strategy ``((2, 2), (2, 2))``: m, k and n are cut
twice each, by the digits (2, stride 4), (2, stride 2) and (2, stride 1), row-major in the order of the factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

from ..errors import LayoutError, StrategyError
from ..layout import Digit, Digits, Layout, allocate, beside, complement, digits_size, merge, overlap
from .notation import Assignment, Bound

__all__ = ["assignment_of", "in_order", "output_layouts_of", "ungathered_layouts"]


def _nearest(bound: Bound, strategy: Sequence[object], devices: int) -> str:
    """The text of a legal tuple strategy close to the given one.

    A cut that does not divide its dim becomes the nearest one that does and that fits the devices beside the others;
    else the cuts are reduced until they divide and agree, the last ones first. A strategy that is
    the cuts of one tensor counts as the entry of the first input.
    """
    if strategy and not any(isinstance(entry, (tuple, list, Layout)) for entry in strategy):
        strategy = (strategy,)
    cuts: dict[int, int] = {}
    useful: dict[int, list[int]] = {}  # of factors that the given cuts do not divide
    for dims, entry in zip(bound.inputs, strategy):
        if isinstance(entry, Layout):
            entry = entry.cuts if entry.dims is not None else ()
        if not isinstance(entry, (tuple, list)):
            continue
        for dim, cut in zip(dims, entry):
            if not isinstance(cut, int) or cut < 1:
                continue
            for index in dim:
                factor = bound.factors[index]
                share = math.gcd(factor.size, cut) if factor.splittable else 1
                if len(dim) == 1 and share < cut and factor.splittable:
                    useful.setdefault(index, _useful(factor.size, cut, devices))
                cuts.setdefault(index, share)
                cut //= share
                if share < factor.size:
                    cut = 1
    for some in product(*useful.values()):
        fits = _fitting(bound, {**cuts, **dict(zip(useful, some))}, devices)
        if fits is not None:
            return fits
    while True:
        fits = _fitting(bound, cuts, devices)
        if fits is not None:
            return fits
        last = max(i for i, c in cuts.items() if c > 1)
        cuts[last] //= next(p for p in range(2, cuts[last] + 1) if cuts[last] % p == 0)


def _fitting(bound: Bound, cuts: dict[int, int], devices: int) -> str | None:
    """The text of the strategy with these cuts; None where it is not legal."""
    try:
        assignment = _place(bound, cuts, {}, devices)
    except LayoutError:
        return None
    return repr(bound.in_strategy(assignment)) if bound.is_consistent(assignment) else None


def _useful(size: int, cut: int, devices: int) -> list[int]:
    """The cuts of a dim that divide its size and the devices, the nearest to another cut first: 4 and 2 instead of 3
    for a dim of 32 on 8 devices."""
    cuts = [c for c in range(2, devices + 1) if size % c == 0 and devices % c == 0]
    return sorted(cuts, key=lambda c: (abs(c - cut), -c))


def _gathers(bound: Bound, strategy: Sequence[Any]) -> tuple[int, int] | None:
    """The cuts (a, b) of a product's strategy ((a, b), (a, b)) that cuts the contracted dim differently in its two
    operands; None for other strategies and operators."""
    if min(len(strategy), len(bound.inputs)) < 2 or any(not isinstance(entry, (tuple, list)) for entry in strategy[:2]):
        return None
    first, second = (tuple(entry) for entry in strategy[:2])
    if first != second or len(first) != 2 or first[0] == first[1] or any(type(cut) is not int for cut in first):
        return None
    (rows, contracted), (other, columns) = (dims if len(dims) == 2 else ((), ()) for dims in bound.inputs[:2])
    if len(rows) != 1 or len(contracted) != 1 or contracted != other or len(bound.outputs) != 1:
        return None
    return first if bound.outputs[0] == (rows, columns) and rows != columns else None


def in_order(bound: Bound, strategy: object, order: Sequence[int]) -> Any:
    """An in_strategy in the order of the operator's inputs.

    Args:
        strategy: as the user gave it, one entry per tensor in the order of the user's call.
        order: for each of these tensors, the number of the operator's input.
    """
    if isinstance(strategy, (tuple, list)) and len(strategy) <= len(order):
        placed = dict(zip(order, strategy))
        last = max(placed, default=-1) + 1
        if set(range(last)) - placed.keys() <= bound.notation.optional:
            return tuple(map(placed.get, range(last)))
    return strategy


def ungathered_layouts(bound: Bound, strategy: object, devices: int) -> tuple[Layout, Layout] | None:
    """The layouts of the two operands of a product that gathers the contracted dim of both, before they are gathered.

    Args:
        strategy: a checked in_strategy, in the order of the operands.

    Returns:
        Both are [a, b] on the device matrix (a, b); None for every other strategy.
    """
    cuts = _gathers(bound, strategy) if isinstance(strategy, (tuple, list)) else None
    return None if cuts is None else (Layout.from_cuts(devices, cuts),) * 2


def assignment_of(bound: Bound, strategy: object, devices: int) -> Assignment:
    """Check an ``in_strategy`` against one operator call and put it into normal form.

    Args:
        bound: the notation of the call, bound to its shapes.
        strategy: one entry per tensor input: a tuple of cuts per dim, or a Layout; None, or no entry at the end, for an
            input that the notation marks as optional. Or an Assignment of this operator.
        devices: the number of devices (of the stage).

    Raises:
        StrategyError: a wrong number of inputs or dims, cuts that do not divide, differ on a shared factor, split an
            unsplittable factor, or need more devices than there are.
        LayoutError: a Layout of another device count.
    """

    def wrong(message: str, legal: str | None = "nearest") -> StrategyError:
        if legal == "nearest":
            entries = strategy if isinstance(strategy, (tuple, list)) else (strategy,)
            legal = _nearest(bound, entries, devices)
        return StrategyError(message, strategy=strategy, legal=legal)

    if isinstance(strategy, Assignment):
        if (
            strategy.devices != devices
            or len(strategy.digits) != len(bound.factors)
            or not bound.is_consistent(strategy)
        ):
            raise wrong(f"{strategy} does not fit an operator of shapes {list(bound.in_shapes)} on {devices} devices")
        return strategy
    if not isinstance(strategy, (tuple, list)):
        raise wrong("an in_strategy is a tuple with one entry per tensor input, even for one input")
    entries, gathers = tuple(strategy), _gathers(bound, strategy)
    if gathers is not None:
        for i, shape in enumerate(bound.in_shapes[:2]):
            for d, (cut, size) in enumerate(zip(gathers, shape)):
                if cut > 0 and size % cut:
                    raise wrong(f"input {i}, dim {d} has size {size}, which does not divide by {cut}")
        entries = ((gathers[0], 1), (1, gathers[1]), *strategy[2:])
    entry_count, needed = len(entries), len(bound.inputs)
    missing = {i for i in range(needed) if i >= entry_count or (entries[i] is None and i in bound.notation.optional)}
    if entry_count > needed or not missing <= bound.notation.optional:
        raise wrong(
            f"{entry_count} entries for an operator with {needed} tensor inputs of shapes {list(bound.in_shapes)}"
        )

    cuts: dict[int, tuple[int, int]] = {}  # factor -> (cut, the input that gave it)
    known: dict[int, tuple[Digits, int]] = {}  # factor -> (digits, the input that gave them), from Layouts

    def over(i: int, factor: int) -> str:
        """The dim of input i that carries a factor, with the axes that its Layout names."""
        d = next(d for d, dim in enumerate(bound.inputs[i]) if factor in dim)
        return f"dim {d} of input {i} over {entries[i].named(d)}"

    for i, entry in enumerate(entries):
        if i in missing:
            continue
        shape, dims = bound.in_shapes[i], bound.inputs[i]
        if isinstance(entry, Layout):
            _check_layout(entry, f"input {i}", devices, strategy)
            per_dim: Sequence[Any] = entry.cuts
        elif isinstance(entry, (tuple, list)):
            per_dim = tuple(entry)
        else:
            raise wrong(f"the entry of input {i} is {entry!r}", legal="a tuple of cuts or a Layout per input")
        if len(per_dim) != len(shape):
            raise wrong(f"input {i} has shape {shape}, {len(shape)} dims; its entry {entry} has {len(per_dim)}")
        for d, (dim, cut, size) in enumerate(zip(dims, per_dim, shape)):
            if not isinstance(cut, int) or isinstance(cut, bool) or cut < 1:
                raise wrong(f"input {i}, dim {d}: a cut must be a whole number of at least 1, not {cut!r}")
            if size % cut and not (len(dim) == 1 and bound.factors[dim[0]].pads):
                raise wrong(
                    f"input {i}, dim {d} has size {size}, which does not divide by {cut}"
                    + (", and this operator does not leave padding out" if bound.uneven else "")
                )
            window = bound.factors[dim[0]].window if dim else None
            if window is not None and bound.factors[dim[0]].size % cut and not bound.factors[dim[0]].pads:
                raise wrong(
                    f"input {i}, dim {d} has size {size} and this operator {window.count} windows over it: {cut} does "
                    "not divide both"
                )
            shares = {f: 1 for f in dim} if cut == 1 and not isinstance(entry, Layout) else _spread_cut(bound, dim, cut)
            if shares is None:
                raise wrong(f"input {i}, dim {d} of size {size} cannot be split {cut} ways")
            for factor, share in shares.items():
                f = bound.factors[factor]
                if share > 1 and not f.splittable:
                    raise wrong(f"input {i}, dim {d} (size {size}) may not be split by this operator, asked for {cut}")
                before, first_input = cuts.setdefault(factor, (share, i))
                if before != share:
                    axes = [over(k, factor) for k in (first_input, i) if isinstance(entries[k], Layout)]
                    raise wrong(
                        f"input {first_input} splits the shared factor {f.name!r} (size {f.size}) {before} ways, "
                        f"input {i} splits it {share} ways" + (f": {', '.join(axes)}" if axes else "")
                    )
            if isinstance(entry, Layout):
                assert entry.dims is not None
                spread = bound.spread(dim, entry.dims[d])
                if spread is None:
                    raise wrong(f"input {i}, dim {d} of size {size} cannot be split by {entry.dims[d]}")
                for factor in dim:
                    digits = spread.get(factor, ())
                    before_digits, first_input = known.setdefault(factor, (digits, i))
                    if before_digits != digits:
                        raise wrong(
                            f"inputs {first_input} and {i} split the shared factor {bound.factors[factor].name!r} over "
                            f"different devices: {over(first_input, factor)}, {over(i, factor)}",
                            legal="the same axes in the same order on both",
                        )
    try:
        assignment = _place(bound, {f: c for f, (c, _) in cuts.items()}, {f: d for f, (d, _) in known.items()}, devices)
    except LayoutError as error:
        raise wrong(error.message) from None
    for (a, (_, i)), (b, (_, j)) in combinations(known.items(), 2):
        if not beside(devices, assignment.digits[a] + assignment.digits[b]):
            raise wrong(
                f"the factors {bound.factors[a].name!r} (input {i}) and {bound.factors[b].name!r} (input {j}) "
                f"are split over the same devices: {over(i, a)}, {over(j, b)}",
                legal="axes for each of them that the other does not use",
            )
    for i in range(needed):
        if bound.input_layout(i, assignment) is None:
            raise wrong(f"input {i} of shape {bound.in_shapes[i]} would be cut in the minor part of a dim only")
    for i in range(len(bound.outputs)):
        if bound.output_layout(i, assignment) is None:
            raise wrong(f"the output {bound.out_shapes[i]} would be cut in the minor part of a dim only")
    return assignment


def _check_layout(layout: Layout, of: str, devices: int, strategy: object) -> None:
    """Check that a Layout in a strategy is of as many devices as there are, and names dims.

    Args:
        of: the input or output, such as "input 0".

    Raises:
        LayoutError: another number of devices.
        StrategyError: no dims.
    """
    if layout.devices != devices:
        raise LayoutError(
            f"the Layout of {of} has a device matrix of {layout.devices} devices {layout.device_matrix or ''}, there "
            f"are {devices}",
            strategy=strategy,
            legal=f"a device matrix whose product is {devices}",
        )
    if layout.dims is None:
        raise StrategyError(f"the Layout of {of} names no dims", strategy=strategy, legal="layout('dp', 'None')")


def _spread_cut(bound: Bound, dim: tuple[int, ...], cut: int) -> dict[int, int] | None:
    """The cut of a dim, distributed over its factors, major first; None where it does not fit."""
    if len(dim) == 1 and bound.factors[dim[0]].pads:
        return {dim[0]: cut}
    out = {}
    for factor in dim:
        share = math.gcd(cut, bound.factors[factor].size)
        out[factor] = share
        cut //= share
        if share < bound.factors[factor].size and cut > 1:
            return None
    return out if cut == 1 else None


def _place(bound: Bound, cuts: dict[int, int], known: dict[int, Digits], devices: int) -> Assignment:
    """Digits for factors: the digits of Layouts, then row-major digits in the order of the factors."""
    if not known:
        order: list[int | None] = list(range(len(bound.factors)))
        sizes = [cuts.get(i, 1) for i in range(len(bound.factors))]
        rest = bound.notation.rest
        if rest is not None and rest < len(sizes) and sizes[rest] > 1 and devices % math.prod(sizes) == 0:
            order.insert(rest, None)
            sizes.insert(rest, devices // math.prod(sizes))
        placed = dict(zip(order, allocate(devices, sizes)))
        return bound.cut_by(devices, {i: digits for i, digits in placed.items() if i is not None})
    # Layouts give digits to some factors; cuts of other factors, given by tuples, take from the free digits.
    digits = dict(known)
    for i in range(len(bound.factors)):
        if i in digits or cuts.get(i, 1) == 1:
            continue
        free = complement(devices, tuple(d for ds in digits.values() for d in ds))
        digits[i] = _taken(free, cuts[i])
        if digits_size(digits[i]) != cuts[i]:
            raise LayoutError(
                f"no axis is left that cuts the factor {bound.factors[i].name!r} {cuts[i]} ways; free: {list(free)}"
            )
    return bound.cut_by(devices, digits)


def _taken(free: Digits, cut: int) -> Digits:
    """Free digits that cut `cut` ways: one digit if it suffices, else several, major first; fewer ways at need."""
    for digit in free:
        if digit.size % cut == 0:
            return (Digit(cut, digit.stride * (digit.size // cut)),)
    taken: list[Digit] = []
    for digit in free:
        share = digit.size if cut % digit.size == 0 else cut if digit.size % cut == 0 else 1
        taken.append(Digit(share, digit.stride * (digit.size // share)))
        cut //= share
    return merge(taken)


def _free(devices: int, used: Digits, first: Digits) -> Digits:
    """The digits of a rank that are not used, those within `first` before all others."""
    edges = sorted({edge for digit in first for edge in (digit.stride, digit.span)})
    out = []
    for digit in complement(devices, used):
        stride = digit.stride
        for edge in edges:
            if stride < edge < digit.span and edge % stride == 0 and digit.span % edge == 0:
                out.append(Digit(edge // stride, stride))
                stride = edge
        out.append(Digit(digit.span // stride, stride))
    return tuple(sorted(out, key=lambda digit: (not overlap([digit], first), -digit.stride)))


def _on_own_matrix(natural: Layout, cuts: tuple[int, ...]) -> Layout | None:
    """Cuts of an output on the device matrix that the operator's inputs build.

    Example: matmul ((2, 2), (2, 2)) on 8 devices has the matrix (2, 2, 2) of rows, contracted columns and columns, and
    its output is cut by the first and the last axis. The cuts (2, 2) mean these axes, and (4, 2) mean the first two
    for the rows: each sum is completed by a reduce-scatter.

    Args:
        natural: the output's layout by the inputs, with its partial sums.

    Returns:
        The layout; None where the axes of the matrix have no such cuts.
    """
    assert natural.dims is not None
    dims: list[Digits] = []
    for digits, cut in zip(natural.dims, cuts):
        has = digits_size(digits)
        if cut % has and has % cut:
            return None
        dims.append(digits if cut % has == 0 else _taken(digits, cut))
        if digits_size(dims[-1]) not in (has, cut):
            return None
    for d, cut in enumerate(cuts):
        further = cut // digits_size(dims[d])
        if further == 1:
            continue
        used = tuple(digit for digits in dims for digit in digits)
        taken = _taken(_free(natural.devices, used, natural.partial), further)
        if digits_size(taken) != further:
            return None
        dims[d] = merge((*dims[d], *taken))
    return Layout.of(natural.devices, dims)


def output_layouts_of(
    bound: Bound, strategy: object, devices: int, assignment: Assignment | None = None
) -> tuple[Layout, ...]:
    """Check an ``out_strategy``: one entry per output, a tuple of cuts or a Layout.

    Args:
        assignment: of the mark's in_strategy, on whose device matrix tuple cuts are read. None, or a matrix without
            such cuts: tuple cuts get digits as for a single tensor, row-major with replicas on the right.

    Raises:
        StrategyError, LayoutError: as `assignment_of`.
    """
    simple = repr(
        tuple(
            tuple(math.gcd(devices, size) if d == 0 else 1 for d, size in enumerate(shape))
            for shape in bound.out_shapes
        )
    )
    if not isinstance(strategy, (tuple, list)) or len(strategy) != len(bound.outputs):
        raise StrategyError(
            f"an out_strategy is a tuple with one entry per output, here {len(bound.outputs)} of shapes "
            f"{list(bound.out_shapes)}",
            strategy=strategy,
            legal=simple,
        )
    out = []
    for i, (entry, shape) in enumerate(zip(strategy, bound.out_shapes)):
        if isinstance(entry, Layout):
            _check_layout(entry, f"output {i}", devices, strategy)
            layout = entry
        elif isinstance(entry, (tuple, list)):
            try:
                layout = Layout.from_cuts(devices, tuple(entry))
                natural = None if assignment is None else bound.output_layout(i, assignment)
                if natural is not None and natural.dims is not None and len(natural.dims) == len(entry):
                    layout = _on_own_matrix(natural, tuple(entry)) or layout
            except LayoutError as error:
                raise LayoutError(error.message, strategy=strategy, legal=simple) from None
        else:
            raise StrategyError(f"the entry of output {i} is {entry!r}", strategy=strategy, legal=simple)
        assert layout.dims is not None
        if len(layout.dims) != len(shape):
            raise StrategyError(
                f"output {i} has shape {shape}, {len(shape)} dims; its entry has {len(layout.dims)}",
                strategy=strategy,
                legal=simple,
            )
        try:
            layout.local_shape(layout.padded(shape) if bound.uneven else shape)
        except LayoutError as error:
            raise LayoutError(f"output {i}: {error.message}", strategy=strategy, legal=simple) from None
        out.append(layout)
    return tuple(out)
