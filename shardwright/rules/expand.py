"""Working an operator out into simpler ones, where the cut it gets needs more than running it on slices.

A softmax whose dim is cut is a maximum, a difference, an exponential, a sum and a quotient; each of these has a rule
of its own, so that the reductions over ranks, their transposes and their prices follow and are written nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..errors import ShardwrightError, StrategyError
from ..graph import SEED, Op, Value, values_in
from ..layout import Digits, Layout
from ..torch_private import pytree
from .notation import Assignment, Bound
from .registry import Rule, bound_rule, find_rule

__all__ = ["Builder", "expand"]


class _Like(NamedTuple):
    """A tensor but for its elements."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@lru_cache(maxsize=1 << 14)
def _results(target: Any, spec: Any, leaves: tuple, kinds: tuple[type, ...]) -> tuple[_Like, ...]:
    """What a call returns. Searches work the same operator out under hundreds of cuts, whose parts are much alike.

    Args:
        leaves: the flattened arguments, tensors as `_Like`s.
        kinds: their types: 1, 1.0 and True are equal, but not to an operator.
    """
    args, kwargs = pytree.tree_unflatten([torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, _Like)
                                          else x for x in leaves], spec)
    result = target(*args, **kwargs)
    return tuple(_Like(tuple(r.shape), r.dtype) for r in (result if isinstance(result, (tuple, list)) else (result,)))


class Builder:
    """Records operators. Each follows the layouts of its inputs; open sums are completed unless its rule is linear."""

    def __init__(self, op: Op, layouts: Mapping[str, Layout], uneven: bool = False) -> None:
        self.op, self.uneven = op, uneven
        self.layouts = dict(layouts)
        self.steps: list[tuple[Op, Rule, Bound, Assignment]] = []

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Record ``target(*args, **kwargs)``; returns its output value, or a tuple of them."""
        inputs = values_in((args, kwargs))
        leaves, spec = pytree.tree_flatten((args, kwargs))
        results = _results(target, spec, tuple(_Like(leaf.shape, leaf.dtype) if isinstance(leaf, Value) else leaf
                                               for leaf in leaves), tuple(map(type, leaves)))
        name = f"{self.op.name}.{len(self.steps)}"
        needs_grad = any(v.requires_grad for v in inputs) and target is not torch.ops.aten.detach.default
        outputs = tuple(
            Value(name if len(results) == 1 else f"{name}.{i}", r.shape, r.dtype,
                  needs_grad and (r.dtype.is_floating_point or r.dtype.is_complex))
            for i, r in enumerate(results))
        op = Op(name, target, args, kwargs, inputs, outputs, self.op.module, self.op.source, origin=self.op.name)
        described = find_rule(op)
        bound = bound_rule(op, described, self.uneven)
        assignment = bound.follow({i: self.layouts[v.name] for i, v in enumerate(inputs)},
                                  devices=next(iter(self.layouts.values())).devices)
        if assignment is None:
            raise StrategyError(f"cannot be worked out under this cut: {op.kind} cannot follow "
                                f"{[str(self.layouts[v.name]) for v in inputs]}", **self.op.where)
        for i, value in enumerate(outputs):
            layout = bound.output_layout(i, assignment)
            assert layout is not None
            self.layouts[value.name] = layout.without_partial()
        self.steps.append((op, described, bound, assignment))
        return outputs[0] if len(outputs) == 1 else outputs

    def lay(self, value: Value, dims: Sequence[Digits]) -> Value:
        """The value with its dims cut by these digits from here on; a conversion brings it there."""
        self.layouts[value.name] = Layout.of(self.layouts[value.name].devices, dims)
        return value

    def to(self, value: Value, dtype: torch.dtype) -> Value:
        """The value in another type; itself where it has that type."""
        return value if value.dtype == dtype else self.call(torch.ops.aten.to.dtype, value, dtype)


def expand(op: Op, described: Rule, bound: Bound, assignment: Assignment
           ) -> tuple[list[tuple[Op, Rule, Bound, Assignment]], dict[str, Value]]:
    """An operator as it will run: itself, or the operators that do its work under this assignment.

    Returns:
        The operators with their rules and assignments, and for each output of `op` that got a new name, its new value.
    """
    worked_out = described.expand(op, bound, assignment) if described.expand is not None else None
    if worked_out is None:
        return [(op, described, bound, assignment)], {}
    layouts: dict[str, Layout] = {SEED.name: Layout.replicated(assignment.devices, 1)}
    for i, value in enumerate(op.inputs):
        layout = bound.input_layout(i, assignment)
        assert layout is not None
        if layouts.setdefault(value.name, layout) != layout:
            raise StrategyError(f"takes {value} twice, cut as {layouts[value.name]} and as {layout}, and cannot be "
                                "worked out so", **op.where, legal=f"one layout for {value}, or a clone of it")
    builder = Builder(op, layouts, bound.uneven)
    try:
        results = worked_out(builder)
    except (ShardwrightError, RuntimeError) as error:
        if bound.divides(assignment):
            raise
        raise StrategyError(f"cannot be worked out on dims that their cuts do not divide: {error}",
                            strategy=bound.in_strategy(assignment), **op.where,
                            legal=f"cuts that divide, such as {bound.dividing(assignment)}") from None
    results = results if isinstance(results, (tuple, list)) else (results,)
    renamed = {old.name: new for old, new in zip((v for v in op.outputs if v is not None), results, strict=True)}
    return builder.steps, renamed
