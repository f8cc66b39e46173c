"""Strategies and layouts as JSON, in the words in which users write them.

A tuple of cuts where that is the same strategy: ``[[2, 4], [4, 1]]``. Else a `Layout` spelled out: a device matrix, the
names of its axes, and one entry a dim:

    "device_matrix": [2, 2, 2], "alias_name": ["a", "b", "c"], "in_strategy": [["c", ["a", "b"]], [["a", "b"], "None"]]

The axes are the ranks' digits, cut where some digit of the strategy begins or ends.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import LayoutError, ShardwrightError, StrategyError
from ..layout import Digit, Digits, Layout, beside, merge
from ..rules import Assignment, Bound, assignment_of

__all__ = ["read_assignment", "read_digits", "read_layout", "spell_assignment", "spell_digits", "spell_layout"]

#: What stands in an entry for a dim that is whole.
WHOLE = "None"


class _Axes:
    """A named device matrix in which given digits are products of whole axes."""

    def __init__(self, devices: int, digits: Iterable[Digit]) -> None:
        edges = sorted({1, devices} | {edge for d in digits for edge in (d.stride, d.span)}, reverse=True)
        self.axes = [Digit(above // below, below) for above, below in zip(edges, edges[1:])] or [Digit(1, 1)]
        self.names = [string.ascii_lowercase[i] if len(self.axes) <= 26 else f"a{i}" for i in range(len(self.axes))]

    @property
    def words(self) -> dict[str, list]:
        return {"device_matrix": [axis.size for axis in self.axes], "alias_name": self.names}

    def entry(self, digits: Digits) -> str | list[str]:
        """A dim's digits by the names of their axes, major first."""
        names = [name for digit in digits for axis, name in zip(self.axes, self.names)
                 if digit.stride <= axis.stride < digit.span]
        return WHOLE if not names else names[0] if len(names) == 1 else names


def spell_assignment(bound: Bound, assignment: Assignment) -> dict[str, Any]:
    """An operator's strategy as the fields of its line: ``in_strategy``, and where that does not say it in cuts, the
    named device matrix; ``leaves``, the layouts of the outputs, where inputs alone do not say which digits cut what."""
    cuts = bound.in_strategy(assignment)
    try:
        if assignment_of(bound, cuts, assignment.devices) == assignment:
            return {"in_strategy": [list(entry) for entry in cuts]}
    except ShardwrightError:
        pass  # in cuts it cannot be said
    axes = _Axes(assignment.devices, assignment.used)

    def written(sides: Sequence[Sequence[tuple[int, ...]]]) -> list[list]:
        return [[axes.entry(bound.dim_digits(dim, assignment) or ()) for dim in dims] for dims in sides]
    words = axes.words | {"in_strategy": written(bound.inputs)}
    seen = {factor for dims in bound.inputs for dim in dims for factor in dim}
    if any(digits and i not in seen for i, digits in enumerate(assignment.digits)):
        words["leaves"] = written(bound.outputs)
    return words


def read_assignment(bound: Bound, words: Mapping[str, Any], devices: int) -> Assignment:
    """The assignment that the fields of a line say.

    Raises:
        StrategyError, LayoutError: what the operator cannot follow, with what would be legal.
    """
    given = words.get("in_strategy")
    if not isinstance(given, list):
        raise StrategyError(f"its in_strategy is {given!r}", legal="a list with one entry per tensor input")
    matrix = _matrix(words)
    assignment = assignment_of(bound, tuple(_entry(matrix, entry) for entry in given), devices)
    if "leaves" not in words:
        return assignment
    leaves = words["leaves"]
    if matrix is None or not isinstance(leaves, list) or len(leaves) != len(bound.outputs):
        raise StrategyError(f"leaves={leaves!r}", legal=f"with a device_matrix, one entry for each of the outputs "
                                                         f"{list(bound.out_shapes)}")
    layouts = {i: _entry(matrix, entry) for i, entry in enumerate(leaves)}
    for i, layout in layouts.items():
        if not isinstance(layout, Layout) or len(layout.dims or ()) != len(bound.out_shapes[i]):
            raise StrategyError(f"leaves={leaves!r}", legal=f"an axis or {WHOLE!r} for each dim of "
                                                            f"{bound.out_shapes[i]}")
    left = bound.follow(layouts, of_outputs=True)
    if left is None:
        raise StrategyError(f"the outputs {list(bound.out_shapes)} cannot be cut so", strategy=leaves,
                            legal=f"cuts that divide, of dims that may be split: {_splittable(bound)}")
    merged = bound.cut_by(devices, {i: a or b for i, (a, b) in enumerate(zip(assignment.digits, left.digits))})
    if any(a and b and a != b for a, b in zip(assignment.digits, left.digits)) or \
            not beside(devices, merged.used) or not bound.is_consistent(merged):
        raise StrategyError("in_strategy and leaves do not agree", strategy=dict(words),
                            legal="the same axes for dims that are cut alike, each axis once")
    return merged


def _splittable(bound: Bound) -> str:
    return ", ".join(f"{f.name} ({f.size})" for f in bound.factors if f.splittable and f.size > 1) or "none"


def _matrix(words: Mapping[str, Any]) -> Layout | None:
    """The named device matrix of a line, None where it has none.

    Raises:
        LayoutError: sizes or names that make no device matrix.
    """
    if "device_matrix" not in words and "alias_name" not in words:
        return None
    try:
        return Layout(words.get("device_matrix"), words.get("alias_name"))  # type: ignore[arg-type]
    except LayoutError as error:
        raise LayoutError(error.message, legal=error.legal) from None  # the line is the file's, not the reader's


def _entry(matrix: Layout | None, entry: Any) -> Any:
    """What one tensor's entry says: cuts as a tuple, a `Layout` where it names axes."""
    if not isinstance(entry, list) or not any(isinstance(part, (str, list)) for part in entry):
        return tuple(entry) if isinstance(entry, list) else entry
    if matrix is None:
        raise LayoutError(f"{entry!r} names axes, and the line has no device_matrix",
                          legal='"device_matrix": [2, 4], "alias_name": ["a", "b"], or cuts')
    try:
        return matrix(*(tuple(part) if isinstance(part, list) else part for part in entry))
    except LayoutError as error:
        raise LayoutError(error.message, strategy=entry, legal=error.legal) from None


def spell_layout(layout: Layout) -> Any:
    """A layout without open sums: a list of cuts, or ``{"device_matrix": ..., "alias_name": ..., "layout": [...]}``."""
    cuts = layout.cuts
    if Layout.from_cuts(layout.devices, cuts) == layout:
        return list(cuts)
    axes = _Axes(layout.devices, layout.carried)
    return axes.words | {"layout": [axes.entry(digits) for digits in layout.dims or ()]}


def read_layout(words: Any, devices: int, shape: Sequence[int], padded: bool = False) -> Layout:
    """The layout of a tensor of `shape`.

    Args:
        padded: dims need not divide.

    Raises:
        LayoutError: what is no layout, of so many dims or devices; cuts that do not divide.
    """
    layout = words
    if isinstance(words, Mapping):
        matrix, entry = _matrix(words), words.get("layout")
        if matrix is not None and isinstance(entry, list):
            layout = _entry(matrix, entry) if entry else Layout.replicated(devices, 0)
    if isinstance(layout, list):
        layout = Layout.from_cuts(devices, tuple(layout))
    if not isinstance(layout, Layout) or layout.dims is None:
        raise LayoutError(f"{words!r} is no layout", legal=f"cuts, one for each dim of {tuple(shape)}")
    if layout.devices != devices:
        raise LayoutError(f"the device matrix {words['device_matrix']} is of {layout.devices} devices, there are "
                          f"{devices}", legal=f"a product of {devices}")
    layout.local_shape(layout.padded(shape) if padded and len(layout.dims) == len(shape) else shape)
    return layout


def spell_digits(devices: int, digits: Digits) -> Any:
    """Digits by themselves, as those of a sum that an operator lets through: a named device matrix, and their names."""
    if not digits:
        return []
    axes = _Axes(devices, digits)
    named = axes.entry(digits)
    return axes.words | {"axes": [named] if isinstance(named, str) else named}


def read_digits(words: Any, devices: int) -> Digits:
    """The digits that `spell_digits` wrote.

    Raises:
        LayoutError: they are none of these devices.
    """
    if words == []:
        return ()
    matrix = _matrix(words) if isinstance(words, Mapping) else None
    names = words.get("axes") if isinstance(words, Mapping) else None
    if matrix is None or matrix.devices != devices or not isinstance(names, list) or not names:
        raise LayoutError(f"{words!r} names no axes of {devices} devices",
                          legal='{"device_matrix": [2, 4], "alias_name": ["a", "b"], "axes": ["b"]}, or []')
    layout = _entry(matrix, [names])
    return merge(sorted(layout.carried, key=lambda d: -d.stride))
