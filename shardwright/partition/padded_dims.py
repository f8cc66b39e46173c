"""Dims that their cuts do not divide: padded for the operators, trimmed for consumers of the true shape.

    50257 cut 8 ways: 8 parts of ⌈50257 / 8⌉ = 6283, together 50264; the last part has 7 padding elements

A value is padded and trimmed on ranks that hold the dim whole, by ordinary operators; the redistributions between
them are unaware of padding. A padded value stays padded from operator to operator.

Padding elements are undefined. An operator *meets* a padded dim where one of its operands lacks the dim: the operator
sums over the dim, in the forward or in the backward. Masks keep padding out of these sums:

    1. An input is masked in a dim that its consumer meets: with zero, or with the neutral element of a maximum.
    2. An output is masked in a dim that its producer meets, for consumers that do not meet the dim: no gradient flows
       out of padding.

A linear operator produces zeros from zeros in the backward too; the mask is therefore delayed to the first consumer
that is not linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import StrategyError
from ..graph import Op, Value, map_values
from ..layout import Layout, digits_size
from ..redistribution import redistribution
from ..rules import Assignment, Bound, Builder, Rule
from ..rules.dims import count, filling, unpadded
from ..rules.registry import local_call
from .local_program import Decision

__all__ = ["Padded", "Piece", "amounts", "is_stored_padded", "pad", "true_slice"]

aten = torch.ops.aten

Piece = tuple[Decision, Op, Rule, Bound, Assignment]


@dataclass(frozen=True)
class Padded:
    """The work on padded values.

    Attributes:
        work: the operators, including those that pad, trim and mask.
        outer_values: name of an operator's output -> the value that replaces it after an out_strategy, where another
            one does.
        parameters: name -> the padded value, for each parameter that is stored padded.
        wanted: the values that end in their true shape, in the order of the request.
        notes: notes for the plan.
    """

    work: list[Piece]
    outer_values: dict[str, Value]
    parameters: dict[str, Value]
    wanted: list[Value]
    notes: list[str]


def true_slice(layout: Layout, shape: Sequence[int], rank: int) -> tuple[slice, ...]:
    """The part of a tensor of `shape` on `rank`: parts have one length, and the last one is cut short at the end
    of the dim."""
    index = layout.slice(layout.padded(shape), rank)
    return tuple(slice(min(s.start, size), min(s.stop, size)) for s, size in zip(index, shape))


def amounts(shape: Sequence[int], wide: Sequence[int]) -> list[int]:
    """The padding at the end of each dim in torch's order: last dim first, and 0 at each beginning."""
    return [x for a, b in zip(reversed(shape), reversed(wide), strict=True) for x in (0, b - a)]


def is_stored_padded(layout: Layout, shape: Sequence[int]) -> bool:
    """True where the slices of a parameter are equal parts, the last ones possibly not full.

    Each uneven dim is then cut by one digit. Such slices are also the shards that torch expects of a dim that does
    not divide.
    """
    return all(size % cut == 0 or len(digits) == 1 for size, cut, digits in zip(shape, layout.cuts, layout.dims or ()))


def pad(
    work: Sequence[Piece],
    sources: Mapping[str, Layout],
    parameters: Iterable[tuple[Value, Layout]],
    wanted: Iterable[tuple[Value, Layout]],
    renamed: Mapping[str, Value],
) -> Padded:
    """Insert the operators that pad, mask and trim into planned work.

    Args:
        work: the expanded operators of a plan.
        sources: the layouts of inputs, buffers and constants, by name.
        parameters: each parameter with its storage layout.
        wanted: the values needed in their true shape at the end (outputs and new values of buffers), with their
            layouts.
        renamed: name of an operator's output -> the value that replaced it when the operator was expanded.

    Raises:
        StrategyError: an operator that cannot work on padded slices.
    """
    padder = _Padder(sources, parameters, renamed)
    for piece in work:
        padder.piece(*piece)
    ends = [padder.obtain(value, value.shape, layout) for value, layout in wanted]
    return Padded(padder.work, padder.outer_values, padder.parameters, ends, padder.notes)


@dataclass(frozen=True)
class _Made:
    """A value that exists padded.

    Attributes:
        value: the value in its padded shape, under the name of the true value or of the operator that pads it.
        shape: the true shape.
        zeros: True where the padding holds zeros.
        leaks: True where gradients that come to its padding would get into a sum.
        detached: the value before a ``detach``; None: it was not detached.
    """

    value: Value
    shape: tuple[int, ...]
    layout: Layout
    zeros: bool = False
    leaks: bool = False
    detached: _Made | None = None


class _Padder:
    def __init__(
        self, sources: Mapping[str, Layout], parameters: Iterable[tuple[Value, Layout]], renamed: Mapping[str, Value]
    ) -> None:
        self.work: list[Piece] = []
        self.renamed = renamed
        self.outer_values: dict[str, Value] = {}
        self.notes: list[str] = []
        self.parameters: dict[str, Value] = {}
        self.layouts = dict(sources)  # name of a value in its true shape -> its layout
        self.made: dict[str, _Made] = {}  # name of a true value -> its padded form
        self.variants: dict[tuple[object, ...], Value] = {}
        self.decision: Decision | None = None
        for value, layout in parameters:
            shape = layout.padded(value.shape)
            if shape != value.shape and is_stored_padded(layout, value.shape):
                self.parameters[value.name] = replace(value, shape=shape)
                self.made[value.name] = _Made(self.parameters[value.name], value.shape, layout, zeros=True)
            elif shape != value.shape:
                self.notes.append(
                    f"the parameter {value.name!r} {value.shape} is stored whole in the dims that its "
                    f"cuts {layout.cuts} do not divide: no single digit of the rank makes these"
                )

    # -- operators --

    def piece(self, decision: Decision, op: Op, rule: Rule, bound: Bound, assignment: Assignment) -> None:
        """Add an operator, on padded values where its cuts do not divide."""
        self.decision = decision
        factors = tuple(
            replace(f, size=-(-f.size // digits_size(d)) * digits_size(d))
            for f, d in zip(bound.factors, assignment.digits)
        )

        def padded(dims: Sequence[tuple[int, ...]], shape: tuple[int, ...]) -> tuple[int, ...]:
            sizes = []
            for dim, size in zip(dims, shape):
                length = 1
                for i in dim:
                    length *= factors[i].size
                sizes.append(length if dim else size)
            return tuple(sizes)

        shapes = [
            [padded(dims, shape) for dims, shape in zip(*side)]
            for side in ((bound.inputs, bound.in_shapes), (bound.outputs, bound.out_shapes))
        ]
        operands = [*zip(bound.inputs, bound.in_shapes, shapes[0]), *zip(bound.outputs, bound.out_shapes, shapes[1])]
        uneven = {i for dims, true, wide in operands for dim, a, b in zip(dims, true, wide) if a != b for i in dim}
        met, contracted = _met(bound, uneven) if rule.reduction != "none" else (set(), set())
        flows = any(v is not None and v.requires_grad for v in op.outputs)

        def meets(dims: Sequence[tuple[int, ...]], which: set[int]) -> bool:
            return any(i in which for dim in dims for i in dim)

        padded_inputs = [self.made.get(v.name) for v in op.inputs]
        passes = not met and flows and rule.is_linear(op)
        leaks = passes and any(made is not None and made.leaks for made in padded_inputs)
        inputs = []
        for i, (value, shape) in enumerate(zip(op.inputs, shapes[0])):
            fill = None
            if meets(bound.inputs[i], contracted):
                neutral = rule.filling(op)
                if neutral is None:
                    raise StrategyError(
                        f"sums over a dim that its cut does not divide, and {op.kind} does not leave padding out",
                        strategy=bound.in_strategy(assignment),
                        **op.where,
                        legal=f"cuts that divide, such as {bound.dividing(assignment)}",
                    )
                fill = filling(value.dtype, neutral)
            elif meets(bound.inputs[i], met - bound.windowed):  # windows read their own padding in its place
                fill = filling(value.dtype, 0)
            input_layout = bound.input_layout(i, assignment)
            assert input_layout is not None
            inputs.append(self.obtain(value, shape, input_layout, fill, flows and not passes))
        feed = iter(inputs)
        args, kwargs = map_values((op.args, op.kwargs), lambda _: next(feed))
        outputs: list[Value | None] = []
        k = 0
        for output in op.outputs:
            if output is not None:
                layout = bound.output_layout(k, assignment)
                assert layout is not None
                if shapes[1][k] == output.shape:
                    self.layouts[output.name] = layout.without_partial()
                else:
                    made = replace(output, shape=shapes[1][k])
                    self.made[output.name] = _Made(
                        made,
                        output.shape,
                        layout.without_partial(),
                        leaks=leaks or meets(bound.outputs[k], met),
                        detached=padded_inputs[0] if op.target is aten.detach.default else None,
                    )
                    output = made
                k += 1
            outputs.append(output)
        if uneven:
            op = replace(op, args=args, kwargs=kwargs, inputs=tuple(inputs), outputs=tuple(outputs))
            bound = replace(bound, factors=factors, in_shapes=tuple(shapes[0]), out_shapes=tuple(shapes[1]))
            _check(op, rule, bound, assignment)
        elif any(a is not b for a, b in zip(inputs, op.inputs)):
            op = replace(op, args=args, kwargs=kwargs, inputs=tuple(inputs))
        self.work.append((decision, op, rule, bound, assignment))
        self.hand_on(decision, op)

    def hand_on(self, decision: Decision, op: Op) -> None:
        """Pad or trim an output for an out_strategy whose cuts do not divide the shape that the operator produces."""
        ends = [v for v in decision.op.outputs if v is not None]
        for output, layout in zip(ends, decision.out or ()):
            end = self.renamed.get(output.name, output)
            if any(v is not None and v.name == end.name for v in op.outputs):
                made = self.made.get(end.name) or _Made(end, end.shape, layout)
                if any(size % cut for size, cut in zip(made.value.shape, layout.cuts)):
                    value = self.obtain(end, layout.padded(end.shape), layout, 0)
                    self.outer_values[output.name], self.layouts[value.name] = value, layout
                    made = _Made(value, end.shape, layout, zeros=True)
                self.made[end.name] = replace(made, layout=layout)
                self.layouts[end.name] = layout

    # -- values --

    def obtain(
        self, value: Value, shape: tuple[int, ...], input_layout: Layout, fill: float | None = None, flows: bool = True
    ) -> Value:
        """The value in its true shape or a padded one.

        Args:
            shape: the shape that the consumer needs.
            want: the layout that the consumer needs.
            fill: the number that its padding must hold; None: any.
            flows: True where a gradient comes back from the consumer.
        """
        made = self.made.get(value.name)
        if shape == value.shape:
            return value if made is None else self.trimmed(made, input_layout)
        if made is None or made.value.shape != shape:
            return self.widened(value, shape, input_layout, filling(value.dtype, 0) if fill is None else fill)
        if (fill is None and not (made.leaks and flows and made.value.requires_grad)) or (fill == 0 and made.zeros):
            return made.value
        return self.masked(made, filling(value.dtype, 0) if fill is None else fill)

    def widened(self, value: Value, shape: tuple[int, ...], input_layout: Layout, fill: float) -> Value:
        """The value padded with `fill`."""
        key = (value.name, shape, fill)
        if key not in self.variants:
            dims = [d for d, (a, b) in enumerate(zip(value.shape, shape)) if a != b]
            source = self.obtain(value, value.shape, _whole(input_layout, dims))
            layout = _between(self.layouts.get(source.name), input_layout, dims)
            builder = self.builder(value, {source.name: layout})
            self.variants[key] = self.add(
                builder, builder.call(aten.constant_pad_nd.default, source, amounts(value.shape, shape), fill)
            )
        return self.variants[key]

    def trimmed(self, made: _Made, input_layout: Layout) -> Value:
        """The padded value in its true shape."""
        dims = [d for d, (a, b) in enumerate(zip(made.shape, made.value.shape)) if a != b]
        if not dims:
            return made.value
        layout = _between(made.layout, input_layout, dims)
        key = (made.value.name, layout)
        if key not in self.variants:
            builder = self.builder(made.value, {made.value.name: layout})
            out = made.value
            for d in dims:
                out = builder.call(aten.narrow.default, out, d, 0, made.shape[d])
            self.variants[key] = self.add(builder, out)
        return self.variants[key]

    def masked(self, made: _Made, fill: float) -> Value:
        """The padded value with `fill` in its padding; no gradient flows out of the padding."""
        key = (made.value.name, made.value.shape, fill, "masked")
        if key not in self.variants and made.detached is not None and made.detached.value.shape == made.value.shape:
            whole = self.masked(made.detached, fill)  # one mask for both
            builder = self.builder(made.value, {whole.name: self.layouts.get(whole.name, made.layout)})
            self.variants[key] = self.add(builder, builder.call(aten.detach.default, whole))
        elif key not in self.variants:
            builder = self.builder(made.value, {made.value.name: made.layout})
            out = made.value
            for d, (size, length) in enumerate(zip(made.shape, made.value.shape)):
                if size != length:
                    out = builder.call(unpadded, out, self.starts(builder, made, d), d, size, fill)
            self.variants[key] = self.add(builder, out)
        return self.variants[key]

    def starts(self, builder: Builder, made: _Made, dim: int) -> Value:
        """The start of each part of a padded dim; one value for all dims with the same parts."""
        assert made.layout.dims is not None
        digits = made.layout.dims[dim]
        parts = digits_size(digits)
        key = (parts, made.value.shape[dim] // parts)
        if key not in self.variants:
            self.variants[key] = builder.call(count, made.value, *key)
        builder.layouts.setdefault(self.variants[key].name, made.layout)
        return builder.lay(self.variants[key], [digits])

    def builder(self, value: Value, layouts: dict[str, Layout]) -> Builder:
        """A builder of operators that are part of the present one."""
        assert self.decision is not None
        op = replace(self.decision.op, name=f"{value.name}.padding{len(self.variants)}")
        return Builder(op, layouts)

    def add(self, builder: Builder, value: Value) -> Value:
        assert self.decision is not None
        self.work += [(self.decision, *step) for step in builder.steps]
        self.layouts[value.name] = builder.layouts[value.name]
        return value


def _met(bound: Bound, uneven: set[int]) -> tuple[set[int], set[int]]:
    """Among some factors: those that some operand lacks, and those that some output lacks."""

    def lacks(dims: Sequence[tuple[int, ...]]) -> set[int]:
        return {i for i in uneven if all(i not in dim for dim in dims)}

    contracted = set().union(*map(lacks, bound.outputs))
    return contracted.union(*map(lacks, bound.inputs)), contracted


def _whole(layout: Layout, dims: Sequence[int]) -> Layout:
    return Layout.of(layout.devices, [() if d in dims else digits for d, digits in enumerate(layout.dims or ())])


def _between(source: Layout | None, input_layout: Layout, dims: Sequence[int]) -> Layout:
    """An intermediate layout with some dims whole: the one of two through which least is sent."""
    if source is None:
        return _whole(input_layout, dims)
    return min(
        (_whole(source, dims), _whole(input_layout, dims)),
        key=lambda middle: redistribution(source, middle).sent + redistribution(middle, input_layout).sent,
    )


def _check(op: Op, rule: Rule, bound: Bound, assignment: Assignment) -> None:
    """Check that the operator produces slices of the padded shapes from padded slices."""
    local = local_call(op, rule, bound, assignment)

    def local_shape(layout: Layout | None, shape: tuple[int, ...]) -> tuple[int, ...]:
        assert layout is not None
        return layout.local_shape(shape)

    shapes = iter([bound.in_local_shape(i, assignment, v.shape) for i, v in enumerate(op.inputs)])
    wanted = [local_shape(bound.output_layout(i, assignment), shape) for i, shape in enumerate(bound.out_shapes)]
    args, kwargs = map_values(
        (local.args, local.kwargs), lambda v: torch.empty(next(shapes), dtype=v.dtype, device="meta")
    )
    got: object
    try:
        made = local.target(*args, **kwargs)
        made = made if isinstance(made, (tuple, list)) else (made,)
        got = [tuple(x.shape) for x in made if isinstance(x, torch.Tensor)]
    except (RuntimeError, ValueError) as error:
        got = str(error)
    if got != wanted:
        raise StrategyError(
            f"cannot work on padded slices: {got} instead of {wanted}",
            strategy=bound.in_strategy(assignment),
            **op.where,
            legal=f"cuts that divide, such as {bound.dividing(assignment)}",
        )
