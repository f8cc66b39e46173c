"""Outlines: the tensors of a light run, with shape, strides, dtype and device and without elements; and operators on
them (`recapture`).

The result of an operator is an outline too. A call on tensors without elements gives its shape, once for all calls of
one form:

    conv1d(f32[8, 3, 16], f32[4, 3, 5])     computed on the meta device: f32[8, 4, 12]
    conv1d(f32[8, 3, 16], f32[4, 3, 5])     of the next layer: the same

The results of the most frequent operators on contiguous tensors follow from the shapes of these (`by_formula`):

    linear(f32[8, 16], f32[32, 16])         f32[8, 32]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..accelerators import default_device
from ..graph import map_leaves
from ..torch_private import FakeTensor, FakeTensorMode, no_torch_function, schema_of, shell, storage_id

__all__ = [
    "META",
    "PLAIN",
    "Differs",
    "OperatorResult",
    "Outline",
    "by_formula",
    "computed",
    "computed_on_meta",
    "facts_of",
    "form_of_arguments",
    "is_grad_enabled",
    "is_same",
    "memory_of",
    "outline",
    "outlines_of",
    "says_nothing",
    "written_names",
]

aten = torch.ops.aten

#: Namespaces of operators that are no part of an exported program.
_BESIDE = ("profiler", "prim")
#: Calls of one operator on the meta device that are remembered.
_REMEMBERED = 256

#: Types of most arguments besides tensors.
PLAIN = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})

META = torch.device("meta")

#: Torch's own functions: while a model is captured, others are in their places, which note the forward's questions.
_strides, _offset = torch.Tensor.stride, torch.Tensor.storage_offset
_requires_grad = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # torch declares a bool
is_grad_enabled = torch.is_grad_enabled


#: An operator: an overload of torch, or a function in its place.
Target = Callable[..., object]


class Differs(Exception):
    """A light run does not follow an exported program; the message is the reason."""


# -- tensors of a light run --------------------------------------------------------------------------------------------


class Outline(torch.Tensor):
    """A tensor of a light run: shape, strides, dtype and device, without elements.

    Attributes:
        form: shape, strides, dtype and device, as a key.
        token: what stands for this tensor: torch may make several Python objects of it.
        memory: what views of one tensor have in common.
    """

    form: tuple[object, ...]
    token: object
    memory: object

    __torch_function__ = no_torch_function

    @staticmethod
    def made(
        form: tuple[object, ...],
        requires_grad: bool,
        offset: int = 0,
        memory: object = None,
        token: object = None,
        parameter: bool = False,
    ) -> Outline:
        made = shell(Outline, (*form, requires_grad), offset, parameter)
        made.form, made.token = form, object() if token is None else token
        made.memory = made.token if memory is None else memory
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an ordinary method
        cls,
        func: Target,
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Outline:
        x = args[0] if args else None
        if func is aten.detach.default and type(x) is Outline:  # torch wraps the result of a factory once more
            return Outline.made(x.form, False, int(_offset(x)), x.memory, x.token)
        raise Differs(f"{func} is called where the light run does not see it")


def outline(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool, parameter: bool = False
) -> Outline:
    """A contiguous tensor that is an input, a parameter or a buffer of a light run."""
    return Outline.made((tuple(shape), _contiguous(shape), dtype, device), requires_grad, parameter=parameter)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def memory_of(tensor: torch.Tensor) -> object:
    """The memory of a tensor: the same for its views, and for no other tensor."""
    return tensor.memory if type(tensor) is Outline else storage_id(tensor.untyped_storage())


def is_same(one: object, other: object) -> bool:
    """True where two Python objects are the same tensor."""
    return one is other or (type(one) is type(other) is Outline and one.token is other.token)


# -- operators on tensors without elements -----------------------------------------------------------------------------


class OperatorResult(NamedTuple):
    """A result of an operator, for all calls of one form.

    Args:
        form, requires_grad, offset: of its outline; the offset counts from that of the tensor which it views.
        viewed: index of the tensor argument whose memory it shares; None: it has its own.
        same: True where it is that argument itself.
    """

    form: tuple[object, ...]
    requires_grad: bool
    offset: int
    viewed: int | None
    same: bool


#: The results of one operator call: one, or several in a list or tuple; None is a result that is no tensor.
Results = OperatorResult | None | list["Results"] | tuple["Results", ...]
#: The same results as tensors.
Tensors = torch.Tensor | None | list["Tensors"] | tuple["Tensors", ...]


def computed(
    target: Target, args: tuple[object, ...], kwargs: Mapping[str, object], fakes: FakeTensorMode | None = None
) -> Results:
    """The results of an operator as `OperatorResult`s, by a call on stand-ins of its arguments.

    Args:
        fakes: the mode of the stand-ins, which are fake tensors; None: tensors on the meta device.

    Raises:
        Differs: results that are no plain tensors, or an operator that changes the dims of its input.
    """
    tensors: list[torch.Tensor] = []
    stand_ins: list[torch.Tensor] = []
    named_device: list[torch.device] = []

    def stand_in(x: object) -> object:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            made = torch.empty_strided(x.shape, _strides(x), dtype=x.dtype, device=META)
            if fakes is not None:
                made = FakeTensor(fakes, made, x.device)
            made.requires_grad = _requires_grad(x) and is_grad_enabled()
            stand_ins.append(made)
            return made
        if type(x) is torch.device:
            named_device.append(x)
            return META if fakes is None else x
        return x

    positional, named = map_leaves(stand_in, (args, dict(kwargs)))
    before = [_placed(t) for t in stand_ins] if written_names(target) else []
    with fakes or nullcontext():
        made = target(*positional, **named)
    if before and [_placed(t) for t in stand_ins] != before:
        raise Differs(f"{target} changes the dims of its input")
    memories = [storage_id(t.untyped_storage()) for t in stand_ins]

    def result(x: object) -> OperatorResult | None:
        if x is None:
            return None
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.is_conj() or x.is_neg():
            raise Differs(f"{target} gives what no outline can hold")
        itself = next((i for i, t in enumerate(stand_ins) if t is x), None)
        memory = storage_id(x.untyped_storage())
        viewed = next((i for i, m in enumerate(memories) if m == memory), None) if itself is None else itself
        on = _common_device(tensors, named_device) if fakes is None else x.device
        form, offset = (tuple(x.shape), _strides(x), x.dtype, on), int(_offset(x))
        return OperatorResult(form, _requires_grad(x), offset, viewed, itself is not None)

    return map_leaves(result, made)


def _common_device(tensors: Sequence[torch.Tensor], named: Sequence[torch.device]) -> torch.device:
    """The device of a result: the one that is named, or that of the arguments with dims."""
    if named:
        return named[0]
    return next((t.device for t in tensors if t.dim()), tensors[0].device if tensors else default_device())


def outlines_of(results: Results, tensors: Sequence[torch.Tensor]) -> Tensors:
    """The outlines of an operator's results. A result that is an argument is that argument.

    Args:
        results: `OperatorResult`s.
        tensors: the tensors among the arguments, in order.
    """
    if isinstance(results, OperatorResult):
        if results.viewed is None:
            return Outline.made(results.form, results.requires_grad)
        viewed = tensors[results.viewed]
        if results.same and type(viewed) is Outline:
            return viewed
        offset = results.offset + int(_offset(viewed))
        return Outline.made(results.form, results.requires_grad, offset, memory_of(viewed))
    if results is None:
        return None
    outlines = [outlines_of(r, tensors) for r in results]
    return outlines if isinstance(results, list) else tuple(outlines)


def form_of_arguments(x: object, tensors: list[torch.Tensor]) -> object:
    """An argument as a key: equal for calls with equal results, but for the tensors themselves.

    Args:
        tensors: receives the tensors in the argument.
    """
    if type(x) is Outline:
        tensors.append(x)
        return x.form, _requires_grad(x)
    if isinstance(x, torch.Tensor):
        tensors.append(x)
        return (tuple(x.shape), _strides(x), x.dtype, x.device), _requires_grad(x)
    if isinstance(x, (list, tuple)):
        return type(x), tuple([(type(y), y) if type(y) in PLAIN else form_of_arguments(y, tensors) for y in x])
    return type(x), x


def _placed(x: torch.Tensor) -> tuple[object, ...]:
    return tuple(x.shape), _strides(x), _offset(x), storage_id(x.untyped_storage())


@dataclass(frozen=True, eq=False)
class _Facts:
    """Facts of an operator's schema: see `written_names` and `says_nothing`. As a key, they stand for the operator."""

    target: Target
    written: tuple[str, ...]
    silent: bool
    beside: bool
    on_meta: dict[object, Results]  # the form of a call on the meta device -> its results, for operators of torch


#: Operator -> its facts.
_FACTS: dict[Target, _Facts] = {}


def facts_of(target: Target) -> _Facts:
    """The facts of an operator."""
    known = _FACTS.get(target)
    if known is None:
        schema = schema_of(target)
        written = tuple([a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write])
        beside = getattr(target, "namespace", "") in _BESIDE
        known = _Facts(target, written, not schema.returns and not written, beside, {})
        _FACTS[target] = known
    return known


def computed_on_meta(
    target: Target,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    form: object,
    tensors: Sequence[torch.Tensor],
) -> Results:
    """The results of an operator as `OperatorResult`s, by a call on the meta device, which the process remembers.

    Args:
        form, tensors: the key of the arguments, and the tensors in them.
    """
    known = facts_of(target).on_meta
    key = form, is_grad_enabled(), torch.get_default_dtype()
    try:
        results = known.get(key)
    except TypeError:  # what cannot be looked up, such as a slice
        return computed(target, args, kwargs)
    # Without tensors a result is on the device of the process; another operator's function may be the user's.
    if results is None and (not tensors or getattr(target, "namespace", "") != "aten"):
        return computed(target, args, kwargs)
    if results is None:
        results = by_formula(target, args, kwargs, tensors) or computed(target, args, kwargs)
        if len(known) >= _REMEMBERED:
            known.clear()
        known[key] = results
    return results


# -- operators on contiguous tensors -----------------------------------------------------------------------------------

_Shape = tuple[int, ...]
#: (shapes of the tensors, their one dtype, the arguments besides tensors) -> (shape, dtype) of the result; None: the
#: formula does not tell.
_Formula = Callable[[Sequence[_Shape], torch.dtype, Sequence[object]], tuple[_Shape, torch.dtype] | None]

_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


def by_formula(
    target: Target, args: tuple[object, ...], kwargs: Mapping[str, object], tensors: Sequence[torch.Tensor]
) -> OperatorResult | None:
    """The result of an operator as the shapes of its arguments tell it; None where no formula does.

    The kernels of the meta device take 60 microseconds for a sum of two tensors, and 500 for a layer norm, since many
    are written in Python. A formula takes 5. It is for contiguous tensors with elements on one device, and for
    operands of one dtype, or of the dtypes that the operator is for.
    """
    formula = _FORMULAS.get(target)
    if formula is None or kwargs or not tensors:
        return None
    dtype, device = tensors[0].dtype, tensors[0].device
    shapes: list[_Shape] = []
    for i, x in enumerate(tensors):
        shape = tuple(x.shape)
        wanted = torch.int64 if i and target in _OF_INDICES else dtype
        if x.dtype is not wanted or x.device != device or 0 in shape or _strides(x) != _contiguous(shape):
            return None
        shapes.append(shape)
    found = formula(shapes, dtype, [a for a in args if not isinstance(a, torch.Tensor)])
    if found is None:
        return None
    shape, dtype = found
    grad = dtype.is_floating_point and is_grad_enabled() and any(_requires_grad(t) for t in tensors)
    return OperatorResult((shape, _contiguous(shape), dtype, device), grad, 0, 0 if target in _VIEWS else None, False)


def _broadcast(shapes: Sequence[_Shape]) -> _Shape | None:
    """The shape to which tensors are broadcast; None where they do not fit."""
    first, *further = shapes
    for shape in further:
        if shape != first:
            whole = list(first if len(first) >= len(shape) else shape)
            for k in range(1, min(len(first), len(shape)) + 1):
                one, other = first[-k], shape[-k]
                if one != other and 1 not in (one, other):
                    return None
                whole[-k] = max(one, other)
            first = tuple(whole)
    return first


def _arithmetic(
    shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]
) -> tuple[_Shape, torch.dtype] | None:
    numbers = {int, float} if dtype.is_floating_point else {int} if dtype in _INTEGERS else set()
    shape = _broadcast(shapes)
    return None if shape is None or not numbers or not numbers.issuperset(map(type, rest)) else (shape, dtype)


def _of_floats(
    shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]
) -> tuple[_Shape, torch.dtype] | None:
    return _arithmetic(shapes, dtype, rest) if dtype.is_floating_point else None


def _comparison(
    shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]
) -> tuple[_Shape, torch.dtype] | None:
    found = _arithmetic(shapes, dtype, rest)
    return None if found is None else (found[0], torch.bool)


def _of_truths(
    shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]
) -> tuple[_Shape, torch.dtype] | None:
    shape = _broadcast(shapes) if dtype is torch.bool and not rest else None
    return None if shape is None else (shape, dtype)


def _running_sum(
    shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]
) -> tuple[_Shape, torch.dtype] | None:
    return shapes[0], torch.int64 if dtype is torch.bool or dtype in _INTEGERS else dtype


def _norm(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> tuple[_Shape, torch.dtype] | None:
    normalized = rest[0]
    assert isinstance(normalized, Sequence)
    fits = dtype.is_floating_point and all(shape == tuple(normalized) for shape in shapes[1:])
    return (shapes[0], dtype) if fits and shapes[0][-len(normalized) :] == tuple(normalized) else None


def _linear(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> tuple[_Shape, torch.dtype] | None:
    x, weight, *bias = shapes
    fits = dtype.is_floating_point and len(x) > 1 and len(weight) == 2 and x[-1] == weight[1]
    return ((*x[:-1], weight[0]), dtype) if fits and bias in ([], [weight[:1]]) else None


def _product(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> tuple[_Shape, torch.dtype] | None:
    *added, x, w = shapes
    fits = dtype.is_floating_point and len(x) == len(w) > 1 and x[-1] == w[-2] and x[:-2] == w[:-2]
    shape = *x[:-1], w[-1]
    return (shape, dtype) if fits and added in ([], [shape[-1:]], [shape]) else None


def _embedding(
    shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]
) -> tuple[_Shape, torch.dtype] | None:
    weight, indices = shapes
    return ((*indices, weight[1]), dtype) if len(weight) == 2 and dtype.is_floating_point else None


def _cross_entropy(
    shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]
) -> tuple[_Shape, torch.dtype] | None:
    if len(shapes) != 2 or not dtype.is_floating_point or len(shapes[0]) != 2 or shapes[0][:1] != shapes[1]:
        return None
    reduces = len(rest) < 2 or rest[1] in (1, 2)  # after the weight, which is None
    return ((), dtype) if reduces else None


def _view(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> tuple[_Shape, torch.dtype] | None:
    sizes, elements = rest[0], math.prod(shapes[0])
    assert isinstance(sizes, Sequence)
    known = math.prod(size for size in sizes if size != -1)
    if known <= 0 or elements % known or (-1 not in sizes and known != elements):
        return None  # an error of torch
    return tuple([elements // known if size == -1 else size for size in sizes]), dtype


#: Operators of which one result is contiguous where the operands are.
_FORMULAS: dict[object, _Formula] = {
    **dict.fromkeys((aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor), _arithmetic),
    **dict.fromkeys(
        (
            aten.div.Tensor,
            aten.pow.Tensor_Scalar,
            *(getattr(aten, n).default for n in "tanh relu sigmoid silu gelu exp neg sqrt rsqrt cos sin".split()),
        ),
        _of_floats,
    ),
    **dict.fromkeys(
        [getattr(getattr(aten, n), kind) for n in "eq ne lt le gt ge".split() for kind in ("Tensor", "Scalar")],
        _comparison,
    ),
    **dict.fromkeys((aten.__and__.Tensor, aten.__or__.Tensor, aten.bitwise_and.Tensor), _of_truths),
    aten.cumsum.default: _running_sum,
    aten.layer_norm.default: _norm,
    aten.linear.default: _linear,
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default), _product),
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.view.default: _view,
}
#: Operators whose further operands are indices; and those whose result has the memory of the first operand.
_OF_INDICES = frozenset({aten.embedding.default, aten.cross_entropy_loss.default})
_VIEWS = frozenset({aten.view.default})


def written_names(target: Target) -> tuple[str, ...]:
    """The names of the arguments into which an operator writes."""
    return facts_of(target).written


def says_nothing(target: Target) -> bool:
    """True for an operator without results, such as an assertion of export."""
    return facts_of(target).silent
