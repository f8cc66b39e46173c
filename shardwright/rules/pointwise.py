"""Pointwise operators without torch's tag, their linear members, and tensors created from nothing.

1. Every operator with `torch.Tag.pointwise` has a rule already (`registry.POINTWISE`): dims correspond, aligned on the
   right, and broadcast. This file adds pointwise operators without the tag, and tells which operators are linear.

2. *Created tensors*: where all elements have one value, any dim may be split, and a rank creates its slice alone; where
   the value depends on the position, the tensor is created whole. `tril` and `triu` of a tensor are expanded.

Example: on 2 devices `zeros(8, 4)` with dim 0 cut is `zeros(4, 4)` on each rank; `arange(8)` is created whole and
sliced.
"""

from __future__ import annotations

import torch

from ..graph import Op, Value
from ..torch_private import operators
from .dims import cut_size, lent, named, normal, operand, positions, whole
from .notation import Assignment, Bound
from .registry import POINTWISE, Builder, Expansion, Local, Rule, local_output_shape, register

aten = torch.ops.aten


def _untagged() -> tuple[object, ...]:
    names = """leaky_relu ldexp.Tensor hardswish log_sigmoid rsub.Tensor floor_divide floor_divide.Scalar absolute fix
        where.ScalarOther where.ScalarSelf where.Scalar masked_fill.Tensor special_erf special_expit
        special_expm1 special_log1p special_xlogy arcsin arccos arctan arctan2 arcsinh arccosh arctanh
        __and__.Tensor __and__.Scalar __or__.Tensor __or__.Scalar __xor__.Tensor __xor__.Scalar
        multiply.Tensor divide.Tensor divide.Tensor_mode subtract.Tensor subtract.Scalar
        greater.Tensor greater.Scalar greater_equal.Tensor greater_equal.Scalar less.Tensor less.Scalar
        less_equal.Tensor less_equal.Scalar not_equal.Tensor not_equal.Scalar isclose isreal
        isin.Tensor_Scalar fill.Scalar fill.Tensor zero copy complex polar
        zeros_like ones_like full_like empty_like"""
    return operators(*names.split())


def _by_a_number(op: Op) -> bool:
    """True where a product or quotient has one tensor, in which it is linear."""
    return len(op.inputs) == 1 and isinstance(op.args[0], Value)


def _keeps_precision(op: Op) -> bool:
    """True for a cast between floating dtypes that does not round the terms of a partial sum before they are summed."""
    before, after = op.inputs[0].dtype, op.output(0).dtype
    return before.is_floating_point and after.is_floating_point and after == torch.promote_types(before, after)


def _like_other(op: Op) -> str:
    """The notation of a cast to the dtype of the second input."""
    shape, other = (v.shape for v in op.inputs)
    names = operand(named(len(shape)))
    return f"{names}, {operand(lent(other, shape))} -> {names}"


def _prelu(op: Op) -> str:
    """The notation of prelu: one weight for each channel, dim 1."""
    channels = ["1"] if op.inputs[1].shape == (1,) else ["d1"] if op.inputs[1].shape else []
    names = named(len(op.inputs[0].shape))
    return f"{operand(names)}, {operand(channels)} -> {operand(names)}"


def _glu(op: Op) -> str:
    """The notation of glu: the two halves of a dim are combined, so that the dim stays whole."""
    before = named(len(op.inputs[0].shape))
    at = normal(op.argument("dim"), len(before))
    after = [*before]
    before[at], after[at] = "two!", "half!"
    return f"{operand(before)} -> {operand(after)}"


register(_untagged(), POINTWISE)
_LINEAR = "neg negative positive clone detach_copy alias_copy lift lift_fresh_copy conj_physical deg2rad rad2deg"
_VIEWS = "contiguous detach alias lift_fresh conj _conj resolve_conj resolve_neg real imag _neg_view"
_PRODUCTS = """mul.Tensor mul.Scalar multiply.Scalar div.Tensor div.Scalar divide.Scalar \
true_divide.Tensor true_divide.Scalar
    multiply.Tensor divide.Tensor"""
_CASTS = "to.dtype to.device to.dtype_layout to.prim_Device to.prim_dtype _to_copy"
register(operators(*_LINEAR.split()), Rule(POINTWISE.notation, linear=True))
register(operators(*_VIEWS.split()), Rule(POINTWISE.notation, linear=True, view=True))
register(operators(*_PRODUCTS.split()), Rule(POINTWISE.notation, linear=_by_a_number))
register(operators(*_CASTS.split()), Rule(POINTWISE.notation, linear=_keeps_precision))
register((aten.type_as.default, aten.to.other), Rule(_like_other))
register((aten.prelu.default,), Rule(_prelu))
register((aten.glu.default,), Rule(_glu))
register((aten.view_as_real.default,), Rule("... -> ... two!", linear=True, view=True))
register((aten.view_as_complex.default,), Rule("... two! -> ...", linear=True, view=True))


# -- created tensors and triangles


def _even(op: Op) -> str:
    return f" -> {operand(named(len(op.output(0).shape)))}"


def _local_even(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(size=list(local_output_shape(bound, assignment)))
    return Local(op.target, args, kwargs)


def _placed(op: Op) -> str:
    return f" -> {operand(whole(named(len(op.output(0).shape))))}"


def _new(op: Op) -> str:
    """The notation of new_zeros and its like: the input gives dtype and device, and shares dims with the output."""
    shape = op.output(0).shape
    return f"{operand(lent(op.inputs[0].shape, shape))} -> {operand(named(len(shape)))}"


def _triangle(op: Op) -> str:
    names = operand([*named(len(op.inputs[0].shape) - 2), "m", "n"])
    return f"{names} -> {names}"


def _expand_triangle(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """Mask a slice by its positions in the whole tensor."""
    if cut_size(bound, assignment, ["m", "n"]) == 1:
        return None
    x, beyond = op.inputs[0], aten.gt.Scalar if op.kind == "tril" else aten.lt.Scalar

    def work(b: Builder) -> Value:
        rows, columns = (positions(b, x, x, len(x.shape) - k) for k in (2, 1))
        right = b.call(aten.sub.Tensor, columns, b.call(aten.unsqueeze.default, rows, 1))
        dropped = b.call(beyond, right, op.argument("diagonal"))
        return b.call(aten.masked_fill.Scalar, x, dropped, 0)

    return work


#: Windows of a spectrum, by their length.
_WINDOWS = """bartlett_window bartlett_window.periodic blackman_window blackman_window.periodic hamming_window
    hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta hann_window
    hann_window.periodic kaiser_window kaiser_window.periodic kaiser_window.beta"""

register(
    (aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format),
    Rule(_even, localize=_local_even),
)
register(
    (
        aten.scalar_tensor.default,
        aten.arange.default,
        aten.arange.start,
        aten.arange.start_step,
        aten.linspace.default,
        aten.logspace.default,
        aten.eye.default,
        aten.eye.m,
        aten.tril_indices.default,
        aten.triu_indices.default,
        *operators("fft_fftfreq", "fft_rfftfreq"),
        *operators(*_WINDOWS.split()),
    ),
    Rule(_placed),
)
register(
    (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default),
    Rule(_new, localize=_local_even),
)
register((aten.tril.default, aten.triu.default), Rule(_triangle, linear=True, expand=_expand_triangle))
