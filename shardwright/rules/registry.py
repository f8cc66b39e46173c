"""The registry of rules: operator -> its rule.

1. A `Rule` is the one description of an operator: its notation, and where plain notation does not suffice, a change
   of its arguments on a slice (`localize`), or simpler operators that do its work when certain factors are cut
   (`expand`). Layouts, legality, partial sums, candidates of a search and costs all follow from the rule.

2. `expand` with a `Builder` expands an operator into simpler ones, where its cut needs more than a run on slices. A
   softmax whose dim is cut is a maximum, a difference, an exponential, a sum and a quotient. Each of these has a rule
   of its own, from which the reductions over ranks, their transposes and their costs follow.

Example: softmax of [8, 16] with dim 1 cut in 4. A rank has [8, 4]; the maximum and the sum are each completed over 4
ranks, as 8 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ..autocast import UnderAutocast, under
from ..errors import MissingRuleError, RuleError, ShardwrightError, StrategyError
from ..graph import SEED, Op, Value, values_in
from ..layout import Digits, Layout
from ..redistribution import Window
from ..torch_private import OpOverload, OpOverloadPacket, overload_of
from .notation import Assignment, Bound, bind, parse
from .result_shapes import results_of

__all__ = [
    "Builder",
    "Expansion",
    "Rule",
    "bound_rule",
    "expand",
    "find_rule",
    "has_rule",
    "register",
    "rule",
    "whole_rule",
]


@dataclass(frozen=True)
class Local:
    """The call of a rank on its slices: an operator and its arguments, with `Value`s in place of tensors.

    The values are the operator's inputs in order; trailing inputs of which only the shape was read may be missing.
    """

    target: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


#: A notation; with the sizes of factors that occur only in compound dims; with the windows of factors.
Described = str | tuple[str, dict[str, int]] | tuple[str, dict[str, int], dict[str, Window]]


@dataclass(frozen=True)
class Rule:
    """The description of an operator.

    Args:
        notation: the string, or a function of the operator call that returns it (or the string and the sizes of factors
            that occur only in compound dims, or these two and the windows of factors that the string marks with ``~``).
        reduction: the reduction of the terms of a cut contracted factor: "sum", "max" or "min"; "none": every rank has
            the whole result already.
        linear: partial sums may pass through: of its one input, or of all inputs where they are partial over the same
            digits; or a function of the operator call that returns this.
        view: the operator moves no data and follows its input where that costs nothing.
        localize: the call on slices, where it differs from the plain call: ``(op, bound, assignment) -> Local``.
        with_halos: the same where a factor of windows is cut, on slices with halos. The halos hold what the operator's
            padding would; the call pads the other dims alone.
        expand: simpler operators that do the same work where the plain operator cannot run on this cut:
            ``(op, bound, assignment) -> function or None``; the function takes a builder and returns the outputs.
        neutral: a number that may fill the padding of contracted dims of the inputs and adds nothing to the outputs, or
            a function of the operator call that returns it; None: such dims are not padded.
        product: each element of the output is a sum, over the contracted factors, of products of the elements of two
            inputs, plus a third input, if there is one; or a function of the operator call that returns this.
        pads: False: no dim is padded, since the operator fails on what a padding holds: its cuts have to divide.
    """

    notation: str | Callable[[Op], Described]
    reduction: str = "sum"
    linear: bool | Callable[[Op], bool] = False
    view: bool = False
    localize: Callable[[Op, Bound, Assignment], Local] | None = None
    with_halos: Callable[[Op, Bound, Assignment], Local] | None = None
    expand: Callable[[Op, Bound, Assignment], Expansion | None] | None = None
    neutral: float | Callable[[Op], float | None] | None = None
    product: bool | Callable[[Op], bool] = False
    pads: bool = True

    def filling(self, op: Op) -> float | None:
        """The number that adds nothing where this call contracts it; None where no such number is known."""
        return self.neutral(op) if callable(self.neutral) else self.neutral

    def is_linear(self, op: Op) -> bool:
        """True where partial sums may pass through this call."""
        return self.linear(op) if callable(self.linear) else self.linear

    def is_product(self, op: Op) -> bool:
        """True where this call is a product of two inputs."""
        return self.product(op) if callable(self.product) else self.product


#: A function that records an operator as simpler operators: takes a builder, returns the outputs' values.
Expansion = Callable[["Builder"], Value | Sequence[object]]

_RULES: dict[Hashable, Rule] = {}


def _keys(target: object) -> list[object]:
    """Registry keys of a user's target: an overload, a packet (all overloads), a custom op, a function."""
    if isinstance(target, str):
        return [target]
    overload = overload_of(target)
    if overload is not None:
        return [overload]
    if isinstance(target, OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    if isinstance(target, OpOverload):
        return [target]
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        return [target]
    raise RuleError(
        f"{target!r} is not an operator that a graph can hold",
        legal="a torch.ops overload, a function made with torch.library.custom_op, or a torch.autograd.Function",
    )


def register(targets: Sequence[object], described: Rule) -> None:
    """Register a rule for operators. A later rule for the same operator replaces the earlier one.

    Args:
        targets: operators, or names such as ``"library::operator"`` of operators that a library registers when it is
            imported.
        described: the rule.

    Raises:
        RuleError: a notation with a syntax error or with a ``~`` but no windows, or a target that is not an operator.
    """
    if isinstance(described.notation, str) and (names := parse(described.notation).windowed):
        raise RuleError(
            f"the rule {described.notation!r} gives no windows for {', '.join(sorted(names))}",
            legal="a notation that is a function of the call and returns the windows too; or ! in place of ~",
        )
    for target in targets:
        for key in _keys(target):
            _RULES[key] = described


def rule(
    op: object, notation: str, *, reduction: str = "sum", linear: bool = False, neutral: float | None = None
) -> None:
    """Describe an operator of your own, so that it can be split and planned.

    Args:
        op: a function made with ``torch.library.custom_op``, an operator of ``torch.ops``, or a
            ``torch.autograd.Function``.
        notation: the correspondence of its dims, e.g. ``"... m k, ... k n -> ... m n"``: dims of one name are cut
            alike, a name that the output lacks is contracted and leaves a partial sum, ``!`` keeps a dim whole.
        reduction: the reduction of the terms of a contracted dim: "sum", "max" or "min".
        linear: a partial sum may pass through the operator.
        neutral: a number that adds nothing where all inputs hold it in a contracted dim; None: such a dim is not
            padded.

    Raises:
        RuleError: a notation with a syntax error, with its place in the string.

    Example:
        >>> @torch.library.custom_op("example::scaled", mutates_args=())
        ... def scaled(x: torch.Tensor) -> torch.Tensor:
        ...     return 2 * x
        >>> sw.rule(torch.ops.example.scaled.default, "... -> ...")  # each dim can be cut
    """
    register((op,), Rule(notation, reduction=reduction, linear=linear, neutral=neutral))


def _pointwise(op: Op) -> str:
    outputs = sum(v is not None for v in op.outputs)
    return ", ".join(["..."] * len(op.inputs)) + " -> " + ", ".join(["..."] * outputs)


#: The rule of every operator that torch itself tags as pointwise.
POINTWISE = Rule(_pointwise)


def find_rule(op: Op) -> Rule | None:
    """The rule of an operator call, or None. A user's `torch.autograd.Function` without a rule runs whole."""
    if type(op.target) is OpOverload and op.target in _RULES:
        return _RULES[op.target]
    if isinstance(op.target, UnderAutocast):
        found = find_rule(replace(op, target=op.target.operator))
        return found if found is None or found.expand is None else whole_rule(op)
    function = getattr(op.target, "described_as", None)
    if function is not None:
        return function_rule(function) or whole_rule(op)
    found = _RULES.get(op.target)
    if found is None and isinstance(op.target, OpOverload):
        found = _RULES.get(op.target.name())
    if (
        found is None
        and torch.Tag.pointwise in getattr(op.target, "tags", ())
        and torch.Tag.nondeterministic_seeded not in op.target.tags
    ):
        return POINTWISE
    return found


def function_rule(function: type) -> Rule | None:
    """The rule of a `torch.autograd.Function`, registered by the class or by its name; None where there is none."""
    return _RULES.get(function) or _RULES.get(f"{function.__module__}.{function.__qualname__}")


def has_rule(op: Op) -> bool:
    """True where a rule describes the operator."""
    return find_rule(op) is not None


def whole_rule(op: Op) -> Rule:
    """A rule that keeps every dim whole: for an operator without a rule, where the user asks for it."""
    names = iter(f"d{i}!" for i in range(10_000))
    sides = [
        ", ".join(" ".join(next(names) for _ in v.shape) or "..." for v in side if v is not None)
        for side in (op.inputs, op.outputs)
    ]
    return Rule(f"{sides[0]} -> {sides[1]}")


@lru_cache(4096)
def _bound(
    text: str,
    in_shapes: tuple[tuple[int, ...], ...],
    out_shapes: tuple[tuple[int, ...], ...],
    sizes: tuple[tuple[str, int], ...],
    windows: tuple[tuple[str, Window], ...],
    reduction: str,
    pads: bool | None,
) -> Bound:
    """The bound notation, cached for all calls of one kind and shape: the layers of a model are alike."""
    bound = bind(parse(text), in_shapes, out_shapes, dict(sizes), reduction, dict(windows))
    return bound if pads is None else bound.with_padding(pads)


def bound_rule(op: Op, described: Rule | None = None, uneven: bool = False) -> Bound:
    """The notation of an operator, bound to its shapes.

    Args:
        op: the operator call.
        described: its rule; None: the registered one.
        uneven: dims may be cut into parts that do not divide them, where padding them is right.

    Raises:
        MissingRuleError: the operator has no rule.
        RuleError: its notation does not fit the call.
    """
    described = described or find_rule(op)
    if described is None:
        raise MissingRuleError(
            f"there is no rule for {op.target}, called on {[v.shape for v in op.inputs]}",
            **op.where,
            legal=f'sw.rule({op.target}, "…") describes it; '
            'AutoParallel(..., on_missing_rule="replicate") runs it whole on every device',
        )
    found = described.notation if isinstance(described.notation, str) else described.notation(op)
    text, sizes, windows = (*(found if isinstance(found, tuple) else (found,)), {}, {})[:3]
    try:
        pads = described.filling(op) is not None if uneven and described.pads else None
        return _bound(
            text,
            tuple(v.shape for v in op.inputs),
            tuple(v.shape for v in op.outputs if v is not None),
            tuple(sizes.items()),
            tuple(windows.items()),
            described.reduction,
            pads,
        )
    except RuleError as error:
        raise error.located(**op.where) from None


def local_call(op: Op, described: Rule, bound: Bound, assignment: Assignment) -> Local:
    """The call of a rank on its slices of the operator's inputs."""
    if isinstance(op.target, UnderAutocast):
        local = local_call(replace(op, target=op.target.operator), described, bound, assignment)
        return replace(local, target=under(local.target, op.target.state))
    if described.with_halos is not None and bound.has_halos(assignment):
        return described.with_halos(op, bound, assignment)
    if described.localize is not None:
        return described.localize(op, bound, assignment)
    return Local(op.target, op.args, op.kwargs)


def local_output_shape(bound: Bound, assignment: Assignment, index: int = 0) -> tuple[int, ...]:
    """The shape of a rank's slice of an output, padded where dims need not divide."""
    layout: Layout | None = bound.output_layout(index, assignment)
    assert layout is not None
    shape = bound.out_shapes[index]
    return layout.local_shape(layout.padded(shape) if bound.uneven else shape)


# -- expansion into simpler operators


class Builder:
    """A recorder of operators.

    Each operator follows the layouts of its inputs; partial sums are completed unless its rule is linear.
    """

    def __init__(self, op: Op, layouts: Mapping[str, Layout], uneven: bool = False) -> None:
        self.op, self.uneven = op, uneven
        self.layouts = dict(layouts)
        self.steps: list[tuple[Op, Rule, Bound, Assignment]] = []

    def call(self, target: Callable[..., object], *args: object, **kwargs: object) -> Any:
        """Record ``target(*args, **kwargs)``; returns its output value, or a tuple of output values."""
        inputs = values_in((args, kwargs))
        results = results_of(target, args, kwargs)
        name = f"{self.op.name}.{len(self.steps)}"
        needs_grad = any(v.requires_grad for v in inputs) and target is not torch.ops.aten.detach.default
        outputs = tuple(
            Value(
                name if len(results) == 1 else f"{name}.{i}",
                r.shape,
                r.dtype,
                needs_grad and (r.dtype.is_floating_point or r.dtype.is_complex),
            )
            for i, r in enumerate(results)
        )
        op = Op(name, target, args, kwargs, inputs, outputs, self.op.module, self.op.source, origin=self.op.name)
        described = find_rule(op)
        bound = bound_rule(op, described, self.uneven)
        assert described is not None  # else bound_rule has raised
        assignment = bound.follow(
            {i: self.layouts[v.name] for i, v in enumerate(inputs)}, devices=next(iter(self.layouts.values())).devices
        )
        if assignment is None:
            raise StrategyError(
                f"cannot be worked out under this cut: {op.kind} cannot follow "
                f"{[str(self.layouts[v.name]) for v in inputs]}",
                **self.op.where,
            )
        for i, value in enumerate(outputs):
            layout = bound.output_layout(i, assignment)
            assert layout is not None
            self.layouts[value.name] = layout.without_partial()
        self.steps.append((op, described, bound, assignment))
        return outputs[0] if len(outputs) == 1 else outputs

    def lay(self, value: Value, dims: Sequence[Digits]) -> Value:
        """The value with its dims cut by these digits from here on; a redistribution gives it that layout."""
        self.layouts[value.name] = Layout.of(self.layouts[value.name].devices, dims)
        return value

    def to(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another dtype; the value itself where it has that dtype."""
        return value if value.dtype == dtype else self.call(torch.ops.aten.to.dtype, value, dtype)


def expand(
    op: Op, described: Rule, bound: Bound, assignment: Assignment
) -> tuple[list[tuple[Op, Rule, Bound, Assignment]], dict[str, Value]]:
    """The operators that run for an operator: itself, or the simpler operators of its expansion under this assignment.

    Returns:
        The operators with their rules and assignments, and for each output of `op` with a new name, its new value.

    Raises:
        StrategyError: the operator cannot be expanded under this assignment.
    """
    worked_out = described.expand(op, bound, assignment) if described.expand is not None else None
    if worked_out is None:
        return [(op, described, bound, assignment)], {}
    layouts: dict[str, Layout] = {SEED.name: Layout.replicated(assignment.devices, 1)}
    for i, value in enumerate(op.inputs):
        layout = bound.input_layout(i, assignment)
        assert layout is not None
        if layouts.setdefault(value.name, layout) != layout:
            raise StrategyError(
                f"takes {value} twice, cut as {layouts[value.name]} and as {layout}, and cannot be worked out so",
                **op.where,
                legal=f"one layout for {value}, or a clone of it",
            )
    builder = Builder(op, layouts, bound.uneven)
    try:
        results = worked_out(builder)
    except (ShardwrightError, RuntimeError) as error:
        if bound.divides(assignment):
            raise
        raise StrategyError(
            f"cannot be worked out on dims that their cuts do not divide: {error}",
            strategy=bound.in_strategy(assignment),
            **op.where,
            legal=f"cuts that divide, such as {bound.dividing(assignment)}",
        ) from None
    results = results if isinstance(results, (tuple, list)) else (results,)
    renamed = {old.name: new for old, new in zip((v for v in op.outputs if v is not None), results, strict=True)}
    return builder.steps, renamed
