"""Outlines: the tensors of a light run, with shape, strides, dtype and device and without elements; and operators on
them (`recapture`).

The result of an operator is an outline too. A call on tensors without elements gives its shape, once for all calls of
one form:

    conv1d(f32[8, 3, 16], f32[4, 3, 5])     computed on the meta device: f32[8, 4, 12]
    conv1d(f32[8, 3, 16], f32[4, 3, 5])     of the next layer: the same

The results of the most frequent operators on contiguous tensors follow from the shapes (`rules.result_shapes`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..accelerators import default_device
from ..graph import map_leaves
from ..rules.result_shapes import VIEWS, contiguous_strides, result_by_formula
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
_requires_grad = inspect.getattr_static(torch.Tensor, "requires_grad").__get__
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
    form = tuple(shape), contiguous_strides(tuple(shape)), dtype, device
    return Outline.made(form, requires_grad, parameter=parameter)


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


def by_formula(
    target: Target, args: tuple[object, ...], kwargs: Mapping[str, object], tensors: Sequence[torch.Tensor]
) -> OperatorResult | None:
    """The result of an operator by its formula; None where there is none, or an operand is not contiguous."""
    device = tensors[0].device if tensors else META
    shapes = [tuple(x.shape) for x in tensors]
    if any(x.device != device or _strides(x) != contiguous_strides(shape) for x, shape in zip(tensors, shapes)):
        return None
    rest = [a for a in args if not isinstance(a, torch.Tensor)]
    found = result_by_formula(target, shapes, [x.dtype for x in tensors], rest, kwargs)
    if found is None:
        return None
    shape, dtype = found
    grad = dtype.is_floating_point and is_grad_enabled() and any(map(_requires_grad, tensors))
    return OperatorResult(
        (shape, contiguous_strides(shape), dtype, device), grad, 0, 0 if target in VIEWS else None, False
    )


def written_names(target: Target) -> tuple[str, ...]:
    """The names of the arguments into which an operator writes."""
    return facts_of(target).written


def says_nothing(target: Target) -> bool:
    """True for an operator without results, such as an assertion of export."""
    return facts_of(target).silent
