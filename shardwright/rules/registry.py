"""Which rule describes which operator.

A `Rule` is the one description of an operator: its notation, and where plain notation does not suffice, how its
arguments change on a slice (`localize`) or which simpler operators do its work when certain factors are cut
(`expand`). Layouts, legality, partial sums, candidates of a search and costs all follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ..autocast import UnderAutocast, under
from ..errors import MissingRuleError, RuleError
from ..graph import Op
from ..layout import Layout
from ..torch_private import OpOverload, OpOverloadPacket, overload_of
from .notation import Assignment, Bound, bind, parse

__all__ = ["Expansion", "Rule", "bound_rule", "find_rule", "has_rule", "register", "rule", "whole_rule"]


@dataclass(frozen=True)
class Local:
    """What a rank calls on its slices: an operator and its arguments, with `Value`s in the place of tensors.

    The values are the operator's inputs in their order; last ones of which only the shape was read may be missing.
    """

    target: Any
    args: tuple
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """The description of an operator.

    Args:
        notation: the string, or a function of the operator call that returns it (or it and the sizes of factors that
            stand only in compound dims).
        reduction: how terms of a cut contracted factor are put together: "sum", "max" or "min"; "none": every rank
            has the same, whole result already.
        linear: whether open sums pass through: of its one input, or of all its inputs where they are open over the same
            digits; or a function of the operator call that says so.
        view: it moves no data and follows its input where that costs nothing.
        localize: the call on slices, where it is not the same call: ``(op, bound, assignment) -> Local``.
        expand: simpler operators that do the same work when this assignment cuts what the plain operator cannot:
            ``(op, bound, assignment) -> function or None``; the function takes a builder and returns the outputs.
        neutral: what may stand in the padding of contracted dims of its inputs and adds nothing to its outputs, or a
            function of the operator call that says so; None: such dims are not padded.
        product: each element of the output is a sum, over the contracted factors, of products of the elements of two
            inputs, to which a third one is added, if there is one; or a function of the operator call that says so.
    """

    notation: str | Callable[[Op], str | tuple[str, dict[str, int]]]
    reduction: str = "sum"
    linear: bool | Callable[[Op], bool] = False
    view: bool = False
    localize: Callable[[Op, Bound, Assignment], Local] | None = None
    expand: Callable[[Op, Bound, Assignment], Expansion | None] | None = None
    neutral: float | Callable[[Op], float | None] | None = None
    product: bool | Callable[[Op], bool] = False

    def filling(self, op: Op) -> float | None:
        """What adds nothing where this call contracts it; None where nothing is sure not to."""
        return self.neutral(op) if callable(self.neutral) else self.neutral

    def is_linear(self, op: Op) -> bool:
        """Whether open sums may pass through this call."""
        return self.linear(op) if callable(self.linear) else self.linear

    def is_product(self, op: Op) -> bool:
        """Whether this call multiplies two inputs, and no more."""
        return self.product(op) if callable(self.product) else self.product


#: Writes an operator's work as simpler operators: takes a builder, returns the outputs' values.
Expansion = Callable[["Builder"], Sequence[Any]]  # noqa: F821  (expand.Builder, a room below)

_RULES: dict[Any, Rule] = {}


def _keys(target: Any) -> list[Any]:
    """Registry keys of what a user may name: an overload, a packet (all overloads), a custom op, a function."""
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
    raise RuleError(f"{target!r} is not an operator that a graph can hold",
                    legal="a torch.ops overload, a function made with torch.library.custom_op, or a torch.autograd.Function")


def register(targets: Sequence[Any], described: Rule) -> None:
    """Describe operators. A later description of the same operator replaces the earlier one.

    Args:
        targets: operators, or names such as ``"library::operator"`` of those that a library registers when it is imported.

    Raises:
        RuleError: a notation that cannot be read, or a target that is no operator.
    """
    if isinstance(described.notation, str):
        parse(described.notation)
    for target in targets:
        for key in _keys(target):
            _RULES[key] = described


def rule(op: Any, notation: str, *, reduction: str = "sum", linear: bool = False,
         neutral: float | None = None) -> None:
    """Describe an operator of your own, so that it can be split and planned.

    Args:
        op: a function made with ``torch.library.custom_op``, an operator of ``torch.ops``, or a
            ``torch.autograd.Function``.
        notation: how its dims correspond, e.g. ``"... m k, ... k n -> ... m n"``: dims of one name are cut alike, a
            name that the output lacks is contracted and leaves a partial sum, ``!`` keeps a dim whole.
        reduction: how the terms of a contracted dim go together: "sum", "max" or "min".
        linear: a partial sum may pass through it.
        neutral: a number that adds nothing where all inputs hold it in a contracted dim; None: such a dim is not padded.

    Raises:
        RuleError: a notation that cannot be read, with the place in it.
    """
    register((op,), Rule(notation, reduction=reduction, linear=linear, neutral=neutral))


def _pointwise(op: Op) -> str:
    outputs = sum(v is not None for v in op.outputs)
    return ", ".join(["..."] * len(op.inputs)) + " -> " + ", ".join(["..."] * outputs)


#: Every operator that torch itself tags as pointwise.
POINTWISE = Rule(_pointwise)


def find_rule(op: Op) -> Rule | None:
    """The rule of an operator call, or None. A user's `torch.autograd.Function` without one runs whole."""
    if type(op.target) is OpOverload and op.target in _RULES:
        return _RULES[op.target]
    if isinstance(op.target, UnderAutocast):
        found = find_rule(replace(op, target=op.target.inner))
        return found if found is None or found.expand is None else whole_rule(op)
    function = getattr(op.target, "described_as", None)
    if function is not None:
        return _RULES.get(function) or whole_rule(op)
    found = _RULES.get(op.target)
    if found is None and isinstance(op.target, OpOverload):
        found = _RULES.get(op.target.name())
    if found is None and torch.Tag.pointwise in getattr(op.target, "tags", ()) \
            and torch.Tag.nondeterministic_seeded not in op.target.tags:
        return POINTWISE
    return found


def has_rule(op: Op) -> bool:
    """Whether some rule describes the operator."""
    return find_rule(op) is not None


def whole_rule(op: Op) -> Rule:
    """A rule that keeps every dim whole: what an operator without a rule is taken for, when the user asks for it."""
    names = iter(f"d{i}!" for i in range(10_000))
    sides = [", ".join(" ".join(next(names) for _ in v.shape) or "..." for v in side if v is not None)
             for side in (op.inputs, op.outputs)]
    return Rule(f"{sides[0]} -> {sides[1]}")


@lru_cache(4096)
def _bound(text: str, in_shapes: tuple, out_shapes: tuple, sizes: tuple, reduction: str, pads: bool | None) -> Bound:
    """The same for all calls of one kind and shape: the layers of a model are alike."""
    bound = bind(parse(text), in_shapes, out_shapes, dict(sizes), reduction)
    return bound if pads is None else bound.with_padding(pads)


def bound_rule(op: Op, described: Rule | None = None, uneven: bool = False) -> Bound:
    """An operator's notation, bound to its shapes.

    Args:
        uneven: dims may be cut into parts that do not divide them, where padding them is right.

    Raises:
        MissingRuleError: the operator has no rule.
        RuleError: its notation does not fit the call.
    """
    described = described or find_rule(op)
    if described is None:
        raise MissingRuleError(
            f"there is no rule for {op.target}, called on {[v.shape for v in op.inputs]}", **op.where,
            legal=f'sw.rule({op.target}, "…") describes it; '
                  'AutoParallel(..., on_missing_rule="replicate") runs it whole on every device')
    text = described.notation if isinstance(described.notation, str) else described.notation(op)
    text, sizes = text if isinstance(text, tuple) else (text, {})
    try:
        pads = described.filling(op) is not None if uneven else None
        return _bound(text, tuple(v.shape for v in op.inputs), tuple(v.shape for v in op.outputs if v is not None),
                      tuple(sizes.items()), described.reduction, pads)
    except RuleError as error:
        raise error.located(**op.where) from None


def local_call(op: Op, described: Rule, bound: Bound, assignment: Assignment) -> Local:
    """What a rank calls on its slices of the operator's inputs."""
    if isinstance(op.target, UnderAutocast):
        local = local_call(replace(op, target=op.target.inner), described, bound, assignment)
        return replace(local, target=under(local.target, op.target.state))
    if described.localize is not None:
        return described.localize(op, bound, assignment)
    return Local(op.target, op.args, op.kwargs)


def local_output_shape(bound: Bound, assignment: Assignment, index: int = 0) -> tuple[int, ...]:
    """The shape of a rank's slice of an output."""
    layout: Layout | None = bound.output_layout(index, assignment)
    assert layout is not None
    return layout.local_shape(bound.out_shapes[index])
