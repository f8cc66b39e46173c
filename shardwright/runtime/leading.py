"""An operator called with more dims before all others.

    its arguments     dims are counted from the last one; of a shape, the new sizes come first; new dims are not indexed
    whether it may    says its rule, of the longer call: the first dim is one factor, which may be split and stands
                      in no other place, and the rest is as in the plain call

Slices along such a factor do not know of one another: the longer call on stacked tensors is the plain one on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..graph import Op, Value, key_of
from ..layout import Digit
from ..rules import Bound, Rule, bound_rule, find_rule
from ..torch_private import pytree, schema_of

__all__ = ["leading", "told_of_dims"]

aten = torch.ops.aten

#: How torch's schemas call arguments that number dims, and those that are the shape of the result.
DIMS, SHAPES = ("dim", "dim0", "dim1", "dim2", "dims", "start_dim", "end_dim"), ("size", "shape")
#: Overloads that reduce all dims, with the one that is told which.
TOLD = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
#: The size of the dim of which a rule is asked.
ASKED = 5
#: Calls for which the longer one was looked for: the layers of a model are alike, and so are its programs at one size.
_KNOWN: dict[Any, Op | None] = {}
#: How many of them are kept.
KEPT = 4096


def leading(op: Op, led: Sequence[bool], sizes: tuple[int, ...]) -> Op | None:
    """The call with dims of `sizes` before all others of its results, and of those inputs that are `led`.

    Args:
        op: a call of an operator of ``torch.ops.aten``; its outputs are not read.

    Returns:
        The call, with what stands for tensors in `op` unchanged; None where it is not known to do the same.
    """
    if torch.Tag.nondeterministic_seeded in op.target.tags:
        return None
    key = op.target, find_rule(op), key_of((op.args, op.kwargs)), op.inputs, tuple(led), sizes
    if key not in _KNOWN:
        if len(_KNOWN) >= KEPT:
            _KNOWN.clear()
        _KNOWN[key] = _found(op, led, sizes)
    return _KNOWN[key]


def _found(op: Op, led: Sequence[bool], sizes: tuple[int, ...]) -> Op | None:
    try:
        plain = _run(op)
        told = replace(plain, target=TOLD[op.target], args=(*op.args, None)) if op.target in TOLD else plain
        asked, longer = (_run(_longer(told, lead), led, lead) for lead in ((ASKED,), sizes))
        if not _keeps_apart(plain, asked, led) or \
                [v.shape for v in longer.outputs] != [(*sizes, *v.shape) for v in plain.outputs]:
            return None
    except Exception:  # of any kind, by a function of shapes or a rule that does not know these: another way is taken
        return None
    return _longer(told, sizes)


def told_of_dims(target: Any) -> bool:
    """Whether dims or a shape are among an operator's arguments."""
    schema = schema_of(target)
    return target in TOLD or schema is not None and any(a.name in (*DIMS, *SHAPES) for a in schema.arguments)


def _longer(op: Op, lead: tuple[int, ...]) -> Op:
    """The call with other arguments."""
    rank = max(len(v.shape) for v in (*op.inputs, *op.outputs))
    if op.target is aten.permute.default:
        new = range(len(lead))
        args, kwargs = op.with_arguments(dims=[*new, *(len(lead) + d % rank for d in op.argument("dims"))])
        return replace(op, args=args, kwargs=kwargs)
    changes: dict[str, Any] = {}
    for argument in schema_of(op.target).arguments:
        kind, given = str(argument.type), op.argument(argument.name)
        if argument.name in DIMS and kind in ("int", "List[int]", "Optional[List[int]]"):
            dims = [given] if isinstance(given, int) else given or range(rank)
            counted = [d % rank - rank for d in dims]
            changes[argument.name] = counted[0] if isinstance(given, int) else counted
        elif argument.name in SHAPES and kind == "List[int]":
            changes[argument.name] = [*lead, *given]
        elif kind == "List[Optional[Tensor]]":  # an index a dim
            changes[argument.name] = [*[None] * len(lead), *given]
    args, kwargs = op.with_arguments(**changes)
    return replace(op, args=args, kwargs=kwargs)


def _run(op: Op, led: Sequence[bool] = (), lead: tuple[int, ...] = ()) -> Op:
    """The call on inputs with these dims, with the outputs that it has.

    Raises:
        Exception: of any kind, by the function that gives the shapes of a result, of a call that it does not know.
    """
    held = {v.name: replace(v, shape=(*lead, *v.shape)) if lead and has else v
            for v, has in zip(op.inputs, led or (False,) * len(op.inputs))}
    args, kwargs = pytree.tree_map_only(Value, lambda v: held[v.name], (op.args, op.kwargs))
    with torch.no_grad():
        made = op.target(*pytree.tree_map_only(Value, _meta, args), **pytree.tree_map_only(Value, _meta, kwargs))
    made = made if isinstance(made, (list, tuple)) else (made,)
    return replace(op, args=args, kwargs=kwargs, inputs=tuple(held[v.name] for v in op.inputs),
                   outputs=tuple(Value(f"{op.name}.{i}", tuple(x.shape), x.dtype) for i, x in enumerate(made)))


def _meta(value: Value) -> torch.Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def _keeps_apart(plain: Op, asked: Op, led: Sequence[bool]) -> bool:
    """Whether the first dim of the longer call is apart from everything."""
    rule = find_rule(asked)
    if rule is None:
        return False
    before, after = bound_rule(plain), bound_rule(asked, rule)
    first = after.inputs[list(led).index(True)][0]
    if len(first) != 1 or not after.factors[first[0]].splittable:
        return False
    split = after.cut_by(ASKED, {first[0]: (Digit(ASKED, 1),)})
    if rule.expand is not None and rule.expand(asked, after, split) is not None:
        return False
    same: dict[int, int] = {}
    sides = [*zip(before.inputs, after.inputs, led), *((b, a, True) for b, a in zip(before.outputs, after.outputs))]
    for short, long, has in sides:
        if has and long[0] != first or len(rest := long[has:]) != len(short):
            return False
        for a, b in zip(short, rest):
            if len(a) != len(b) or first[0] in b or any(same.setdefault(f, g) != g for f, g in zip(a, b)):
                return False
    return len(set(same.values())) == len(same) and all(
        before.factors[f].splittable == after.factors[g].splittable
        and _works_out(plain, rule, before, f) == _works_out(asked, rule, after, g) for f, g in same.items())


def _works_out(op: Op, rule: Rule, bound: Bound, factor: int) -> bool:
    """Whether a cut of this factor alone is worked out into other operators, as that of a dim which is normalised over."""
    size = bound.factors[factor].size
    if rule.expand is None or size == 1 or not bound.factors[factor].splittable:
        return False
    return rule.expand(op, bound, bound.cut_by(size, {factor: (Digit(size, 1),)})) is not None
