"""An operator's call for all ranks at once, on values whose leading axes are the digits of the rank (`shards.Axes`).

The first way that fits is taken:

1. The value is the same on all ranks: the plain call.
2. A matrix product: `matrix_products`.
3. Elementwise: the plain call, since axes of size 1 broadcast as dims do.
4. Dims or a shape are among the arguments: the call with the axes as more dims, where a rule keeps these apart
   (`leading`).
5. Dim 0 may be split: the ranks' slices beside one another along dim 0. By its rule the operator gives the same.
6. A loss summed over rows: the same, row by row, and a sum for each rank.
7. A dropout: the mask of each rank, and the plain product.
8. Any other operator: the call with the axes as more dims, or a call for each stored shard, with the results stacked.

The call with more dims before all others (`leading`) changes the arguments: dims are counted from the last one, new
sizes come first in a shape, and new dims are not indexed. The rule of the longer call decides whether it may be made:
the first dim must be one factor that may be split and occurs nowhere else, and the rest must be as in the plain call.
Slices along such a factor are independent of one another: the longer call on stacked tensors is the plain call on
each.

Example: ``sum(x, dim=0)`` of 4 ranks' (3, 5) shards becomes ``sum(x, dim=-2)`` of a (4, 3, 5) tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import takewhile
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ...graph import Op, Value, changed, form_of, key_of, leaves_of_type, map_leaves, map_values
from ...layout import Digit, Layout
from ...partition.local_program import LocalOp
from ...rules import Bound, Rule, bound_rule, find_rule
from ...rules.loss import SUM
from ...rules.random_numbers.counter_rng import PLAIN
from ...rules.random_numbers.dropout import drop, mask_of, scale_of
from ...rules.registry import POINTWISE
from ...rules.result_shapes import results_of
from ...torch_private import OpOverload, overload_name, schema_of, torch_function
from ..lowering import Node
from ..profile_ranges import named_when_profiled, profiling, rank_text
from .matrix_products import product
from .shards import Axes, RankShape, check_replicas, union

__all__ = ["Call", "leading", "plain_function", "told_of_dims"]


# -- calls with more dims

aten = torch.ops.aten

#: The names in torch's schemas of arguments that number dims, and of arguments that are the shape of the result.
DIMS, SHAPES = ("dim", "dim0", "dim1", "dim2", "dims", "start_dim", "end_dim"), ("size", "shape")
#: Overloads that reduce all dims -> the overload that takes the dims.
INFORMED = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
#: Operators of one operand that leave the dims before those that they name alone, whatever the sizes: no rule is tried.
APART = frozenset(
    {aten.view.default, aten.reshape.default, aten.transpose.int, aten.permute.default, aten.split.Tensor}
    | {aten.slice.Tensor, aten.select.int}
)
#: The size of the extra dim with which a rule is tried.
ASKED = 5
#: Plain call -> longer call: the layers of a model are alike, and so are its programs at one size.
_KNOWN: dict[object, Op | None] = {}
#: The number of calls that are remembered.
MOST_KNOWN = 4096


def leading(op: Op, led: Sequence[bool], sizes: tuple[int, ...]) -> Op | None:
    """The call with dims of `sizes` before all others of its results, and of those inputs that are `led`.

    Args:
        op: a call of an operator of ``torch.ops.aten``; its outputs are not read.
        led: for each input, whether it has the new dims.
        sizes: of the new dims.

    Returns:
        The call, with the placeholders of tensors in `op` unchanged; None where it is not known to do the same.
    """
    if torch.Tag.nondeterministic_seeded in op.target.tags:
        return None
    key = op.target, find_rule(op), key_of((op.args, op.kwargs)), op.inputs, tuple(led), sizes
    if key not in _KNOWN:
        if len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.clear()
        apart = op.target in APART and 0 not in op.inputs[0].shape
        _KNOWN[key] = _longer(op, sizes) if apart else _found(op, led, sizes)
    return _KNOWN[key]


def _found(op: Op, led: Sequence[bool], sizes: tuple[int, ...]) -> Op | None:
    try:
        plain = _run(op)
        informed = changed(plain, target=INFORMED[op.target], args=(*op.args, None)) if op.target in INFORMED else plain
        asked = _run(_longer(informed, (ASKED,)), led, (ASKED,))
        if not _is_longer(asked, plain, (ASKED,)) or not _keeps_apart(plain, asked, led):
            return None
        if len(sizes) > 1 and not _is_longer(_run(_longer(informed, sizes), led, sizes), plain, sizes):
            return None
    except Exception:  # shape functions and rules raise anything on calls that they do not support
        return None
    return _longer(informed, sizes)


def _is_longer(longer: Op, plain: Op, lead: tuple[int, ...]) -> bool:
    """True where the outputs of a call have the dims `lead` before those of the plain call."""
    found, wanted = ([v.shape for v in op.outputs if v is not None] for op in (longer, plain))
    return found == [(*lead, *shape) for shape in wanted]


def told_of_dims(target: object) -> bool:
    """True where dims or a shape are among an operator's arguments."""
    schema = schema_of(target)
    return target in INFORMED or (schema is not None and any(a.name in (*DIMS, *SHAPES) for a in schema.arguments))


def _longer(op: Op, lead: tuple[int, ...]) -> Op:
    """The call with arguments for the new dims `lead`."""
    rank = max(len(v.shape) for v in (*op.inputs, *op.outputs) if v is not None)
    if op.target is aten.permute.default:
        new = range(len(lead))
        args, kwargs = op.with_arguments(dims=[*new, *(len(lead) + d % rank for d in op.argument("dims"))])
        return changed(op, args=args, kwargs=kwargs)
    changes: dict[str, object] = {}
    for argument in schema_of(op.target).arguments:
        kind, value = str(argument.type), op.argument(argument.name)
        if argument.name in DIMS and kind in ("int", "List[int]", "Optional[List[int]]"):
            dims = [value] if isinstance(value, int) else value or range(rank)
            counted = [d % rank - rank for d in dims]
            changes[argument.name] = counted[0] if isinstance(value, int) else counted
        elif argument.name in SHAPES and kind == "List[int]":
            changes[argument.name] = [*lead, *value]
        elif kind == "List[Optional[Tensor]]":  # one index for each dim
            changes[argument.name] = [*[None] * len(lead), *value]
    args, kwargs = op.with_arguments(**changes)
    return changed(op, args=args, kwargs=kwargs)


def _run(op: Op, led: Sequence[bool] = (), lead: tuple[int, ...] = ()) -> Op:
    """The call on inputs with the new dims, with its outputs' shapes.

    Raises:
        Exception: of any kind, from a shape function that does not support the call.
    """
    values = {
        v.name: changed(v, shape=(*lead, *v.shape)) if lead and has else v
        for v, has in zip(op.inputs, led or (False,) * len(op.inputs))
    }
    args, kwargs = map_values((op.args, op.kwargs), lambda v: values[v.name])
    return changed(
        op,
        args=args,
        kwargs=kwargs,
        inputs=tuple(values[v.name] for v in op.inputs),
        outputs=tuple(Value(f"{op.name}.{i}", *made) for i, made in enumerate(results_of(op.target, args, kwargs))),
    )


def _keeps_apart(plain: Op, asked: Op, led: Sequence[bool]) -> bool:
    """True where the first dim of the longer call is independent of all others."""
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
        if (has and long[0] != first) or len(rest := long[has:]) != len(short):
            return False
        for a, b in zip(short, rest):
            if len(a) != len(b) or first[0] in b or any(same.setdefault(f, g) != g for f, g in zip(a, b)):
                return False
    return len(set(same.values())) == len(same) and all(
        before.factors[f].splittable == after.factors[g].splittable
        and _works_out(plain, rule, before, f) == _works_out(asked, rule, after, g)
        for f, g in same.items()
    )


def _works_out(op: Op, rule: Rule, bound: Bound, factor: int) -> bool:
    """True where a cut of this factor alone is expanded into other operators, as that of a normalised dim is."""
    size = bound.factors[factor].size
    if rule.expand is None or size == 1 or not bound.factors[factor].splittable:
        return False
    return rule.expand(op, bound, bound.cut_by(size, {factor: (Digit(size, 1),)})) is not None


# -- calls for all ranks


#: Overloads that functions of `torch` choose by their arguments.
PARSED = frozenset({"default", "Tensor", "Scalar", "int", "dim", "dim_IntList", "Tensor_Scalar", "self"})


#: Elementwise operators of which one operand, by its number, has the shape of the result.
SHAPING: dict[object, int] = {aten.copy.default: 0, aten.expand_as.default: 1}


#: A function from the operands of a call to one of them, or to what is computed from them.
Get = Callable[[Sequence[Any]], Any]


class Call:
    """A node of a program, called for all ranks.

    Args:
        node: the node.
        axes: of the program.
        rank_shapes: the leading axes of each value.
        terms: the axes along which the gradients of a value's consumers are terms of a sum, although the value is
            stored once; the backward of broadcasting sums them.
        gradients: the layout of each value's gradient.

    Attributes:
        operands: the values that the call reads, in the order in which a step takes them.
    """

    def __init__(
        self,
        node: Node,
        axes: Axes,
        rank_shapes: Mapping[Node, RankShape],
        terms: Mapping[Node, RankShape],
        gradients: Mapping[Node, Layout],
    ) -> None:
        self.node, self.axes, self.rank_shapes = node, axes, rank_shapes
        self.terms, self.gradients = terms, gradients
        self.operands = list(node.all_input_nodes)
        self.slots = {a: i for i, a in enumerate(self.operands)}
        self.out = rank_shapes[node]
        self.instruction: LocalOp = node.meta["instruction"]
        self._shapes: dict[Node, RankShape | None] = {}

    def form(self) -> tuple[object, ...]:
        """A key that is equal for calls of one program with equal steps: the call without its names."""
        node, op, slots = self.node, self.instruction.op, self.slots
        operands = [(self._local(a), self.rank_shapes[a], self.terms.get(a), self.gradients[a]) for a in self.operands]
        # The operator's form tells the arguments and the operands' dtypes, where each input is an operand of its own.
        if self.instruction.as_written and len(self.operands) == len(op.inputs):
            return self.out, tuple(operands), form_of(op), op.micro, op.fast, op.origin is None
        called = key_of((node.args, node.kwargs), lambda a: slots[a] if type(a) is Node else a)
        values = [(v.shape, v.dtype, v.requires_grad) for v in map(self._value, self.operands)]
        drawn = op.micro, op.fast  # rules only pass the operator's number on, and it is an argument in `called`
        return node.target, called, self.out, tuple(operands), tuple(values), form_of(op), drawn, op.origin is None

    def step(self) -> Get:
        """The function ``operands -> value``: a tensor with axes for the ranks, or a tuple of them."""
        for way in (
            self._once,
            self._product,
            self._elementwise,
            self._told_of_dims,
            self._side_by_side,
            self._sums_of_rows,
            self._dropping,
            self._with_more_dims,
        ):
            made = way()
            if made is not None:
                return made
        return self._one_by_one()

    # -- the ways, in order --

    def _once(self) -> Get | None:
        """The plain call, where the value is the same on all ranks."""
        return None if self.out else self._written(plain_function(self.node))

    def _product(self) -> Get | None:
        op, tensors = self.instruction.op, self._tensors
        rule = find_rule(op)
        if (
            rule is None
            or not rule.is_product(op)
            or self.node.target != op.target
            or len(tensors) != len(op.inputs)
            or any(self._value(a).dtype.is_complex for a in tensors)
        ):
            return None
        bound = bound_rule(op, rule)
        x, w, *added = bound.inputs
        out = bound.outputs[0]
        if (
            any(len(dim) > 1 for dims in (x, w, out) for dim in dims)
            or not all(f.splittable for f in bound.factors)
            or any(dims != out[len(out) - len(dims) :] for dims in added)
        ):
            return None
        led = [bool(self._shape(a)) for a in tensors]
        return self._written(
            product(len(self.axes.sizes), (led[0], x), (led[1], w), out),
            len(out),
            tensors[2:],
            args=tuple(tensors),
            kwargs={},
        )

    def _elementwise(self) -> Get | None:
        rule = find_rule(self.instruction.op)
        if rule is None or rule.notation is not POINTWISE.notation or rule.localize is not None:
            return None
        dims = max(map(self._dims, self.operands))
        alike = len({self._value(a).dtype for a in self.operands}) == 1 and not dims
        if not alike and any(not self._dims(a) and self._shape(a) for a in self.operands):
            return None  # a 0-dim tensor counts less than others in type promotion; with axes it would not
        shaping = SHAPING.get(self.node.target)
        if shaping is not None and self._shape(self.operands[shaping]) != self.out:
            return None  # this operand determines the shape of the result
        return self._written(plain_function(self.node), dims, self.operands)

    def _told_of_dims(self) -> Get | None:
        """The call with more dims, where dims or a shape are among the arguments."""
        return self._longer if told_of_dims(self.node.target) else None

    def _with_more_dims(self) -> Get | None:
        return self._longer

    @cached_property
    def _longer(self) -> Get | None:
        """The call with the axes as more dims before all others."""
        node, tensors = self.node, self._tensors
        if (
            not isinstance(node.target, OpOverload)
            or node.target.namespace != "aten"
            or any(self._shape(a) not in ((), self.out) for a in tensors)
        ):
            return None
        broadcast = node.target is aten.expand.default
        made_shape = node.args[1] if broadcast else ()
        assert isinstance(made_shape, (list, tuple))
        dims = len(made_shape)
        values = {
            a: Value(str(i), (1,) * (dims - self._dims(a)) + tuple(self._local(a)), self._value(a).dtype)
            for i, a in enumerate(dict.fromkeys(tensors))
        }
        nodes = {value.name: a for a, value in values.items()}
        args, kwargs = map_leaves(lambda a: values[a] if isinstance(a, Node) else a, (node.args, node.kwargs))
        made = leading(
            Op(node.target.name(), node.target, args, kwargs, tuple(values[a] for a in tensors), ()),
            tuple(bool(self._shape(a)) for a in tensors),
            self.out,
        )
        if made is None:
            return None
        args, kwargs = map_values((made.args, made.kwargs), lambda v: nodes[v.name])
        function = plain_function(node) if made.target is node.target else made.target
        return self._written(function, dims, tensors if broadcast else (), args=args, kwargs=kwargs)

    def _side_by_side(self) -> Get | None:
        """The call with the ranks' slices beside one another along dim 0. Dim 0 must be one factor that may be split;
        the results must keep it there, and among the operands exactly those that differ must have it."""
        op, node = self.instruction.op, self.node
        rule = find_rule(op)
        if (
            rule is None
            or rule.localize is not None
            or not isinstance(node.target, OpOverload)
            or node.target.namespace != "aten"
            or len(op.inputs) != len(self._tensors)
            or any(v is None for v in op.outputs)
        ):
            return None
        bound = bound_rule(op, rule)
        spread = [i for i, a in enumerate(self._tensors) if self._shape(a)]
        first = {bound.inputs[i][0] if bound.inputs[i] else () for i in spread} | {
            dims[0] if dims else () for dims in bound.outputs
        }
        if (
            len(first) != 1
            or len(factor := first.pop()) != 1
            or not bound.factors[factor[0]].splittable
            or bound.factors[factor[0]].size == 1
            or any(self._shape(self._tensors[i]) != self.out for i in spread)
            or any(factor[0] in dim for i, dims in enumerate(bound.inputs) if i not in spread for dim in dims)
            or any(factor[0] in dim for i in spread for dim in bound.inputs[i][1:])
        ):
            return None
        split = bound.cut_by(self._count(), {factor[0]: (Digit(self._count(), 1),)})
        if rule.expand is not None and rule.expand(op, bound, split) is not None:
            return None
        out = self.out
        apart = lambda made: made.view(*out, made.shape[0] // math.prod(out), *made.shape[1:])
        return self._written(plain_function(node), side=True, after=apart)

    def _sums_of_rows(self) -> Get | None:
        """A loss summed over rows, with the number of rows that count: computed for all ranks' rows, then summed for
        each rank."""
        node, out = self.node, self.out
        if node.target is not aten.nll_loss_forward.default or any(self._shape(a) != out for a in self.operands):
            return None
        scores, target, weight, reduction, ignored = node.args
        assert isinstance(scores, Node) and isinstance(ignored, int)
        if weight is not None or reduction != SUM or self._dims(scores) != 2:
            return None

        def sums(scores: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
            losses = torch.nn.functional.nll_loss(scores, target, ignore_index=ignored, reduction="none")
            counted = (target != ignored).view(*out, -1).sum(-1).to(scores.dtype)
            return losses.view(*out, -1).sum(-1), counted

        return self._written(sums, side=True, args=(scores, target), kwargs={})

    def _dropping(self) -> Get | None:
        """A dropout: the masks are drawn rank by rank, and multiplied for all ranks at once."""
        node = self.node
        if node.target is not drop:
            return None
        x, p = node.args[2], node.args[7]
        assert isinstance(x, Node) and isinstance(p, float)
        masks, get, scale = self._one_by_one(mask_of), self._get(x), scale_of(p)

        def dropped(tensors: Sequence[object]) -> tuple[Tensor, Tensor]:
            mask = masks(tensors)
            return get(tensors) * mask * scale, mask

        return dropped

    def _one_by_one(self, function: Callable[..., Tensor] | None = None) -> Get:
        """A call for each stored shard of the result.

        Args:
            function: with the arguments of the operator; None: the operator.
        """
        axes, out, node = self.axes, self.out, self.node
        count, firsts = self._count(), dict[int, int]()
        for rank, place in enumerate(axes.places(out)):
            firsts.setdefault(place, rank)
        ranks = [firsts[k] for k in range(count)]
        parts = [(self._get(a), self._shape(a), [axes.places(self._shape(a))[r] for r in ranks]) for a in self.operands]
        shard = {a: itemgetter(i) for i, a in enumerate(self.operands)}
        each = _call(function or plain_function(node), node.args, node.kwargs, shard.__getitem__)
        several = "instance" not in node.meta and function is None

        def run(tensors: Sequence[object]) -> object:
            shards = []
            for get, shape, places in parts:
                stored = axes.unbind(get(tensors), shape)
                shards.append([stored[k] for k in places])
            values = list(zip(*shards)) if shards else [()] * len(ranks)
            if profiling():
                made = [named_when_profiled(each, rank_text(rank))(x) for rank, x in zip(ranks, values)]
            else:
                made = [each(x) for x in values]
            if not several:
                return axes.joined(made, out)
            return tuple(axes.joined(x, out) if isinstance(x[0], Tensor) else x[0] for x in zip(*made))

        return run

    # -- parts of several ways --

    def _value(self, a: Node) -> Any:
        return a.meta["instance"].value

    def _local(self, a: Node) -> tuple[int, ...]:
        return a.meta["instance"].local_shape

    def _dims(self, a: Node) -> int:
        return len(self._value(a).shape)

    def _count(self) -> int:
        return math.prod(self.out)

    @cached_property
    def _tensors(self) -> list[Node]:
        """Tensor arguments in call order; a tensor passed twice is listed twice."""
        return leaves_of_type((self.node.args, self.node.kwargs), Node)

    def _checked(self, a: Node) -> RankShape | None:
        """The axes of an operand with replicas expanded, where ranks with the same value compute with it independently
        and should get equal gradients; None where there are no such ranks."""
        if a not in self._shapes:
            self._shapes[a] = self._replicas(a)
        return self._shapes[a]

    def _replicas(self, a: Node) -> RankShape | None:
        shapes, terms = (s[a] if s.get(a) else (1,) * len(self.out) for s in (self.rank_shapes, self.terms))
        shape = union(h if h > 1 or t > 1 else out for h, t, out in zip(shapes, terms, self.out))
        return shape if self._value(a).requires_grad and shape != self.rank_shapes[a] else None

    @cached_property
    def _expanded(self) -> Node | None:
        """An operand to be expanded along axes that no operand has: the terms of its gradient are all the same."""
        if union(*(self._checked(a) or self.rank_shapes[a] for a in self.operands)) == self.out:
            return None
        return next(
            a for a in self.operands if union(self.rank_shapes[a], self.terms.get(a, ())) != self.rank_shapes[a]
        )

    def _shape(self, a: Node) -> RankShape:
        """The axes of an operand as it is passed to the call."""
        return self.out if a is self._expanded else self._checked(a) or self.rank_shapes[a]

    def _get(self, a: Node) -> Get:
        """The function ``operands -> operand``."""
        slot = self.slots[a]
        get: Get = itemgetter(slot)
        if checked := self._checked(a):
            alike, how = SameOnAllRanks.apply, (self.axes, self.rank_shapes[a], checked, self.gradients[a])
            get = lambda tensors: alike(tensors[slot], *how)
        return _then(get, Tensor.expand, (*self.out, *self._local(a))) if a is self._expanded else get

    def _written(
        self,
        function: object,
        dims: int = 0,
        aligned: Any = (),
        *,
        args: tuple[object, ...] | None = None,
        kwargs: dict[str, object] | None = None,
        side: bool = False,
        after: Any = None,
    ) -> Get:
        """The function ``operands -> value`` of one call.

        Args:
            function: the function to call.
            dims: the number of dims, besides the axes, to which operands in `aligned` are padded.
            aligned: operands that are padded with dims of size 1.
            args, kwargs: arguments in place of the node's.
            side: True where operands have the ranks' slices side by side along dim 0.
            after: applied to each result.
        """

        def operand(a: Node) -> Get:
            get, shape, local = self._get(a), self._shape(a), self._local(a)
            if side and shape:
                return _then(get, Tensor.reshape, (local[0] * self._count(), *local[1:]))
            if a in aligned and shape and self._dims(a) < dims:
                return _then(get, Tensor.view, (*shape, *[1] * (dims - self._dims(a)), *local))
            return get

        made = _call(
            function, self.node.args if args is None else args, self.node.kwargs if kwargs is None else kwargs, operand
        )
        if after is None:
            return made
        if "instance" in self.node.meta:
            return lambda tensors: after(made(tensors))
        return lambda tensors: tuple(map(after, made(tensors)))


def _call(function: Any, args: Sequence[Any], kwargs: Mapping[str, object], operand: Callable[[Node], Get]) -> Get:
    """The function ``operands -> function(*args, **kwargs)`` with `operand` for each node.

    Most calls have one, two or three tensors first, then constants. Others fill in a copy of their arguments.
    """
    first = list(takewhile(lambda a: isinstance(a, Node), args))
    rest, names = tuple(args[len(first) :]), tuple(kwargs)
    filled = _filled(tuple(args), operand) or (lambda tensors: args)
    named = _filled([*kwargs.values()], operand)
    if named is not None:
        return lambda tensors: function(*filled(tensors), **dict(zip(names, named(tensors))))
    if kwargs:
        function = partial(function, **kwargs)
    if not 1 <= len(first) <= 3 or _filled(rest, operand) is not None:
        return lambda tensors: function(*filled(tensors))
    x, *further = map(operand, first)
    if not further:
        return lambda tensors: function(x(tensors), *rest)
    y, *last = further
    if not last:
        return lambda tensors: function(x(tensors), y(tensors), *rest)
    (z,) = last
    return lambda tensors: function(x(tensors), y(tensors), z(tensors), *rest)


def _filled(a: object, operand: Callable[[Node], Get]) -> Get | None:
    """The function ``operands -> a`` with `operand` for each node; None where there is no node in `a`."""
    if isinstance(a, Node):
        return operand(a)
    if not isinstance(a, (list, tuple)):
        return None
    places = [(i, get) for i, e in enumerate(a) if (get := _filled(e, operand)) is not None]
    if not places:
        return None

    def fill(tensors: Sequence[object]) -> list[object]:
        made = [*a]
        for i, get in places:
            made[i] = get(tensors)
        return made

    return fill if isinstance(a, list) else lambda tensors: tuple(fill(tensors))


def _then(get: Get, method: Callable[[Tensor, tuple[int, ...]], Tensor], shape: tuple[int, ...]) -> Get:
    """The function ``operands -> tensor`` in another shape, by this method."""
    return lambda tensors: method(get(tensors), shape)


class SameOnAllRanks(torch.autograd.Function):
    """A value that is the same on all ranks, expanded for each of them. Backward: the ranks' gradients must agree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, rank_shape: RankShape, out: RankShape, gradient: Layout) -> Tensor:
        ctx.axes, ctx.rank_shape, ctx.out, ctx.gradient = axes, rank_shape, out, gradient
        return x.expand(*out, *x.shape[len(rank_shape) :])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            made = _OneOfAllRanks.apply(gradient, ctx.axes, ctx.rank_shape, ctx.out, ctx.gradient)
        else:
            made = _one_of(gradient, ctx.axes, ctx.rank_shape, ctx.out, ctx.gradient)
        return made, None, None, None, None


def _one_of(gradient: Tensor, axes: Axes, rank_shape: RankShape, out: RankShape, layout: Layout) -> Tensor:
    """The value that all ranks have, once."""
    check_replicas(axes.shards(gradient, out), layout)
    for k, (size, has) in enumerate(zip(out, rank_shape or (1,) * len(out))):
        if size > has:
            gradient = gradient.narrow(k, 0, 1)
    return gradient.reshape((*rank_shape, *gradient.shape[len(out) :]))


class _OneOfAllRanks(torch.autograd.Function):
    """The transpose of `SameOnAllRanks`, for a gradient that is differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Axes, rank_shape: RankShape, out: RankShape, layout: Layout) -> Tensor:
        ctx.places = axes, rank_shape, out, layout
        return _one_of(x, *ctx.places).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return SameOnAllRanks.apply(gradient, *ctx.places), None, None, None, None


@cache
def _of_torch(target: OpOverload) -> tuple[str, object]:
    """The function that calls an overload for all arguments that a node may have, and its name in `torch`; None where
    there is none.

    torch.bernoulli lacks one overload, and torch.index_put takes no None as an index.
    """
    if (
        target.namespace != "aten"
        or overload_name(target) not in PARSED
        or not isinstance(schema_of(target).arguments[0].type, torch.TensorType)
        or target in (aten.bernoulli.Tensor, aten.index_put.default)
    ):
        return "", None
    name = target.overloadpacket.__name__
    return name, torch_function(name)


@cache
def _place_of_reduction(target: OpOverload) -> int | None:
    """The place of ``reduction`` among the arguments of an overload; None where it has no such argument."""
    names = [a.name for a in schema_of(target).arguments]
    return names.index("reduction") if "reduction" in names else None


def plain_function(node: Node) -> Any:
    """The function that a node calls, without the Python layer of its overload object: ``torch.relu`` for
    ``aten.relu.default``; ``torch.mm`` for a matmul of two matrices, to which it reduces; plain functions for this
    package's random operators.

    The function replaces the overload only where its name means this function in `torch` itself, because code that fx
    writes calls it by its name (``torch.broadcast_tensors`` takes its tensors one by one), and where its arguments
    determine the overload. An overload object takes 6 µs a call longer.
    """
    target = PLAIN.get(node.target) or node.target
    if target is aten.matmul.default and all(len(a.meta["instance"].value.shape) == 2 for a in node.all_input_nodes):
        return torch.mm
    name, function = _of_torch(target) if isinstance(target, OpOverload) else ("", None)
    if function is None or getattr(torch, name, None) != function:
        return target
    # A loss without `reduction` is a mean by its schema; torch.kl_div and its kin take it for no reduction.
    place = _place_of_reduction(target)
    return target if place is not None and place >= len(node.args) and "reduction" not in node.kwargs else function
