"""Results of operators: their shapes and dtypes, from those of contiguous operands.

torch tells them by kernels of the meta device. These take 60 microseconds for a sum of two tensors and 500 for a layer
norm, since many are written in Python. The most frequent operators have formulas, which take 2:

    linear    [8, 16], [32, 16]         -> [8, 32]
    add       [8, 1, 16], [4, 16]       -> [8, 4, 16]

The result of such an operator is contiguous, where its operands are contiguous and have elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from ..graph import Value, key_of, map_values, values_in

__all__ = ["VIEWS", "Result", "contiguous_strides", "result_by_formula", "results_of"]

aten = torch.ops.aten

_Shape = tuple[int, ...]


class Result(NamedTuple):
    """The shape and dtype of a result."""

    shape: _Shape
    dtype: torch.dtype


_Found = tuple[_Shape, torch.dtype] | None
#: (shapes of the operands, their one dtype, the arguments besides tensors) -> shape and dtype of the result; None: the
#: formula does not tell.
_Formula = Callable[[Sequence[_Shape], torch.dtype, Sequence[object]], _Found]

_INTEGERS = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64})


@lru_cache(maxsize=1 << 14)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def result_by_formula(
    target: object,
    shapes: Sequence[_Shape],
    dtypes: Sequence[torch.dtype],
    rest: Sequence[object],
    kwargs: Mapping[str, object],
) -> _Found:
    """The shape and dtype of the only result of an operator on contiguous tensors of one device.

    Args:
        target: the operator.
        shapes, dtypes: of its operands, in call order.
        rest: its further arguments by position.
        kwargs: its arguments by name; no formula tells of these.

    Returns:
        None where no formula tells.

    Example:
        >>> result_by_formula(aten.mm.default, [(8, 16), (16, 4)], [torch.float32] * 2, (), {})
        ((8, 4), torch.float32)
    """
    formula = _FORMULAS.get(target)
    if formula is None or kwargs or not shapes or any(0 in shape for shape in shapes):
        return None
    dtype = dtypes[0]
    wanted = torch.int64 if target in _OF_INDICES else dtype
    return None if any(other is not wanted for other in dtypes[1:]) else formula(shapes, dtype, rest)


#: Call -> its results. Searches expand the same operator under hundreds of cuts, with much the same parts.
_RESULTS: dict[Hashable, tuple[Result, ...]] = {}
#: The number of calls that are remembered.
MOST_RESULTS = 1 << 14


def results_of(
    target: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Result, ...]:
    """The shapes and dtypes of the results of an operator on contiguous values, by a formula or on the meta device.

    Args:
        target: the operator, or a function in its place.
        args, kwargs: its arguments, with a `Value` for each tensor.

    Raises:
        Exception: of any kind, from a kernel that does not support the call.
    """
    called = key_of((args, kwargs), lambda x: Result(x.shape, x.dtype) if type(x) is Value else x)
    key = target, called, torch.get_default_dtype()  # the dtype of a quotient of integers
    known = _RESULTS.get(key)
    if known is None:
        if len(_RESULTS) >= MOST_RESULTS:
            _RESULTS.clear()
        known = _RESULTS[key] = _computed(target, args, kwargs)
    return known


def _computed(
    target: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Result, ...]:
    values = values_in(args)
    rest = [a for a in args if type(a) is not Value]
    found = result_by_formula(target, [v.shape for v in values], [v.dtype for v in values], rest, kwargs)
    if found is not None:
        return (Result(*found),)
    positional, named = map_values((args, kwargs), lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"))
    with torch.no_grad():
        made = target(*positional, **named)
    several = made if isinstance(made, (tuple, list)) else (made,)
    return tuple([Result(tuple(x.shape), x.dtype) for x in several])


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


def _arithmetic(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    numbers = {int, float} if dtype.is_floating_point else {int} if dtype in _INTEGERS else set()
    shape = _broadcast(shapes)
    return None if shape is None or not numbers or not numbers.issuperset(map(type, rest)) else (shape, dtype)


def _of_floats(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    return _arithmetic(shapes, dtype, rest) if dtype.is_floating_point else None


def _comparison(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    found = _arithmetic(shapes, dtype, rest)
    return None if found is None else (found[0], torch.bool)


def _of_truths(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    shape = _broadcast(shapes) if dtype is torch.bool and not rest else None
    return None if shape is None else (shape, dtype)


def _shares(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    fits = dtype.is_floating_point and _has_dim(shapes[0], rest[0]) and list(rest[1:]) in ([], [None])
    return (shapes[0], dtype) if fits else None


def _running_sum(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    made = torch.int64 if dtype is torch.bool or dtype in _INTEGERS else dtype
    return (shapes[0], made) if _has_dim(shapes[0], rest[0]) else None


def _has_dim(shape: _Shape, dim: object) -> bool:
    return isinstance(dim, int) and -len(shape) <= dim < len(shape)


def _norm(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    normalized = rest[0]
    assert isinstance(normalized, Sequence)
    fits = dtype.is_floating_point and all(shape == tuple(normalized) for shape in shapes[1:])
    return (shapes[0], dtype) if fits and shapes[0][-len(normalized) :] == tuple(normalized) else None


def _linear(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    x, weight, *bias = shapes
    fits = dtype.is_floating_point and len(x) > 1 and len(weight) == 2 and x[-1] == weight[1]
    return ((*x[:-1], weight[0]), dtype) if fits and bias in ([], [weight[:1]]) else None


def _product(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    *added, x, w = shapes
    fits = dtype.is_floating_point and len(x) == len(w) > 1 and x[-1] == w[-2] and x[:-2] == w[:-2]
    shape = *x[:-1], w[-1]
    return (shape, dtype) if fits and added in ([], [shape[-1:]], [shape]) else None


def _embedding(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    weight, indices = shapes
    return ((*indices, weight[1]), dtype) if len(weight) == 2 and dtype.is_floating_point else None


def _cross_entropy(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    if len(shapes) != 2 or not dtype.is_floating_point or len(shapes[0]) != 2 or shapes[0][:1] != shapes[1]:
        return None
    reduces = len(rest) < 2 or rest[1] in (1, 2)  # after the weight, which is None
    return ((), dtype) if reduces else None


def _view(shapes: Sequence[_Shape], dtype: torch.dtype, rest: Sequence[object]) -> _Found:
    sizes, elements = rest[0], math.prod(shapes[0])
    assert isinstance(sizes, Sequence)
    known = math.prod(size for size in sizes if size != -1)
    open_sizes = [size for size in sizes if size < 0]
    if open_sizes not in ([], [-1]) or known <= 0 or elements % known or (not open_sizes and known != elements):
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
    **dict.fromkeys((aten.softmax.int, aten.log_softmax.int), _shares),
    aten.cumsum.default: _running_sum,
    aten.layer_norm.default: _norm,
    aten.linear.default: _linear,
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.matmul.default, aten.addmm.default), _product),
    aten.embedding.default: _embedding,
    aten.cross_entropy_loss.default: _cross_entropy,
    **dict.fromkeys((aten.view.default, aten.reshape.default), _view),
}
#: Operators whose further operands are indices; and those whose result has the memory of the first operand.
_OF_INDICES = frozenset({aten.embedding.default, aten.cross_entropy_loss.default})
VIEWS = frozenset({aten.view.default, aten.reshape.default})
