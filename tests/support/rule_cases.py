"""Concrete calls of every operator that has a rule: at least one each, and what was easy to get wrong.

The first number is how many factors of a size above 1 the rule lets be split in this call. Further families put their
calls into a file of their own, ``rule_cases_<family>.py`` with a list ``CASES``, which `test_rules_every_rule` finds.
"""

from __future__ import annotations

import math

import torch
from rule_reference import collected, runs

aten = torch.ops.aten
_GENERATOR = torch.Generator().manual_seed(0)

CASES, case = collected()


def rand(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Normal numbers that want a gradient."""
    return torch.randn(shape, dtype=dtype, generator=_GENERATOR).requires_grad_()


def positive(*shape: int) -> torch.Tensor:
    """Numbers in [0.2, 0.8] that want a gradient."""
    return (torch.rand(shape, dtype=torch.float64, generator=_GENERATOR) * 0.6 + 0.2).requires_grad_()


def fixed(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, no gradient wanted."""
    return tensor.detach()


def integers(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_GENERATOR)


def booleans(*shape: int) -> torch.Tensor:
    return integers(2, *shape).bool()


# -- pointwise ---------------------------------------------------------------------------------------------------------

for name in [
    "neg",
    "negative",
    "positive",
    "clone",
    "alias_copy",
    "lift_fresh_copy",
    "conj_physical",
    "deg2rad",
    "rad2deg",
    "contiguous",
    "detach",
    "alias",
    "lift_fresh",
    "conj",
    "resolve_conj",
    "resolve_neg",
    "real",
    "_neg_view",
    "hardswish",
    "log_sigmoid",
    "absolute",
    "fix",
    "special_erf",
    "special_expit",
    "special_expm1",
    "arctan",
    "arcsinh",
    "isreal",
    "zeros_like",
    "ones_like",
    "relu",
    "gelu",
    "tanh",
]:
    case(2, getattr(aten, name).default, rand(4, 8))
for name in ["special_log1p", "arcsin", "arccos", "arccosh", "arctanh", "sqrt"]:
    shift = 1.0 if name == "arccosh" else 0.0
    case(2, getattr(aten, name).default, (fixed(positive(4, 8)) + shift).requires_grad_())
case(2, aten.lift.default, fixed(rand(4, 8)))
case(2, aten.detach_copy.default, fixed(rand(4, 8)))
case(2, aten.imag.default, rand(4, 8, dtype=torch.complex128))
case(2, aten.conj.default, rand(4, 8, dtype=torch.complex128))
case(2, aten._conj.default, rand(4, 8, dtype=torch.complex128))
case(2, aten.complex.default, rand(4, 8), rand(8))
case(2, aten.polar.default, positive(4, 8), rand(4, 8))
case(2, aten.view_as_real.default, rand(4, 8, dtype=torch.complex128))
case(2, aten.view_as_complex.default, rand(4, 8, 2))
case(2, aten.zero.default, rand(4, 8))
case(2, aten.full_like.default, rand(4, 8), 2.5)
case(2, aten.empty_like.default, rand(4, 8), values_matter=False)
case(2, aten.fill.Scalar, rand(4, 8), 1.5)
case(2, aten.fill.Tensor, rand(4, 8), rand())
case(2, aten.copy.default, fixed(rand(4, 8)), fixed(rand(8)))
for name in ["greater", "greater_equal", "less", "less_equal", "not_equal", "multiply", "subtract"]:
    case(2, getattr(aten, name).Tensor, rand(4, 8), rand(8))
for name in ["greater", "greater_equal", "less", "less_equal", "not_equal", "subtract", "multiply"]:
    case(2, getattr(aten, name).Scalar, rand(4, 8), 0.25)
case(2, aten.divide.Tensor, rand(4, 8), positive(8))
case(2, aten.divide.Tensor, rand(4, 8), 4)
case(2, aten.divide.Scalar, rand(4, 8), 4)
case(2, aten.divide.Tensor_mode, fixed(rand(4, 8)), fixed(positive(8)), rounding_mode="floor")
case(2, aten.floor_divide.default, fixed(rand(4, 8)), 2)
case(2, aten.floor_divide.Scalar, fixed(rand(4, 8)), 2)
for target in (
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.true_divide.Tensor,
    aten.true_divide.Scalar,
):
    case(2, target, rand(4, 8), 3)
case(2, aten.mul.Tensor, rand(4, 8), rand())
case(3, aten.mul.Tensor, rand(4, 1, 8), rand(4, 1))
case(2, aten.mul.Tensor, rand(4, 1), rand(1, 8))
case(2, aten.mul.Tensor, *[rand(4, 8)] * 2)
case(2, aten.div.Tensor, rand(4, 8), positive(4, 1))
case(2, aten.add.Tensor, rand(4, 8), rand(8), alpha=2)
case(2, aten.add.Tensor, rand(4, 8), 1.5)
case(2, aten.add.Tensor, integers(9, 4, 8), rand(4, 1))
case(2, aten.rsub.Tensor, rand(4, 8), rand(8))
case(2, aten.arctan2.default, rand(4, 8), positive(8))
case(2, aten.special_xlogy.default, rand(4, 8), positive(8))
case(2, aten.isclose.default, rand(4, 8), rand(8))
case(2, aten.isin.Tensor_Scalar, integers(3, 4, 8), 1)
for name in ["__and__", "__or__", "__xor__"]:
    case(2, getattr(aten, name).Tensor, booleans(4, 8), booleans(8))
    case(2, getattr(aten, name).Scalar, integers(9, 4, 8), 3)
case(2, aten.where.self, booleans(4, 1), rand(8), rand(4, 8))
case(2, aten.where.ScalarOther, booleans(4, 8), rand(8), 0.0)
case(2, aten.where.ScalarSelf, booleans(4, 8), 0.0, rand(4, 1))
case(2, aten.where.Scalar, booleans(4, 8), 1.0, 0.0)
case(2, aten.masked_fill.Scalar, rand(4, 8), booleans(4, 1), 0.5)
case(2, aten.masked_fill.Tensor, rand(4, 8), booleans(4, 8), rand())
case(2, aten.clamp.default, rand(4, 8), -0.5, 0.5)
case(2, aten.clamp.Tensor, rand(4, 8), fixed(rand(8)))
case(2, aten.lerp.Tensor, rand(4, 8), rand(8), rand(4, 1))
case(2, aten.addcmul.default, rand(8), rand(4, 8), rand(4, 1), value=2)
case(2, aten.pow.Tensor_Scalar, rand(4, 8), 3)
case(2, aten.maximum.default, rand(4, 8), rand(8))
case(2, aten.to.dtype, rand(4, 8), torch.float32)
case(2, aten.to.dtype, rand(4, 8), torch.int64)
case(2, aten.to.device, rand(4, 8), torch.device("cpu"), torch.float64)
case(2, aten.to.dtype_layout, rand(4, 8, dtype=torch.float32), dtype=torch.float64)
case(2, aten.to.prim_Device, rand(4, 8), None, 7)
case(2, aten.to.prim_dtype, rand(4, 8), 7)
case(2, aten._to_copy.default, rand(4, 8), dtype=torch.float64)
case(2, aten.type_as.default, integers(9, 4, 8), rand(4, 8))
case(2, aten.type_as.default, integers(9, 4, 8), rand(4, 3))
case(2, aten.to.other, integers(9, 4, 8), rand())
case(3, aten.prelu.default, rand(4, 8, 2), rand(8))
case(2, aten.prelu.default, rand(4, 8), rand(1))
case(1, aten.prelu.default, rand(4), rand())
case(1, aten.glu.default, rand(4, 8), -1)
case(0, aten.relu.default, rand())

# -- reduce ------------------------------------------------------------------------------------------------------------

for target in (
    aten.sum.default,
    aten.nansum.default,
    aten.mean.default,
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.any.default,
    aten.all.default,
    aten.count_nonzero.default,
):
    truth = target in (aten.any.default, aten.all.default, aten.count_nonzero.default)
    case(2, target, booleans(4, 8) if truth else rand(4, 8))
    case(0, target, booleans() if truth else rand())
for target in (aten.sum.dim_IntList, aten.mean.dim):
    case(2, target, rand(4, 8), [1])
    case(2, target, rand(4, 8), [])
    case(2, target, rand(4, 8), None, True)
    case(3, target, rand(4, 8, 4), [-1, 0], True)
    case(2, target, rand(4, 8, dtype=torch.float32), [0], dtype=torch.float64)
case(2, aten.sum.dim_IntList, integers(9, 4, 8), [0])
case(2, aten.nansum.default, rand(4, 8), [1], True)
for target in (aten.amax.default, aten.amin.default):
    case(2, target, rand(4, 8), [-1])
    case(3, target, rand(4, 8, 4), [0, 2], True)
case(2, aten.count_nonzero.dim_IntList, booleans(4, 8), [1])
for dims in ([0], [0, 1], None):
    case(2, aten.any.dims, booleans(4, 8), dims)
    case(2, aten.all.dims, booleans(4, 8), dims, True)
case(2, aten.any.dims, booleans(4, 8), [])
case(2, aten.any.dim, torch.zeros(4, 8), 1)
case(2, aten.all.dim, torch.ones(4, 8, dtype=torch.uint8), 1)
case(0, aten.prod.default, rand(4, 8))
case(1, aten.prod.dim_int, rand(4, 8), 1)
case(2, aten.ldexp.Tensor, rand(4, 8), fixed(rand(8)))
extremes = rand(4, 8)
has_derivative = runs(aten.aminmax.default, extremes, dim=1, backward=True)  # none in torch 2.9
case(1, aten.aminmax.default, extremes if has_derivative else fixed(extremes), dim=1)
case(1, aten.nanmean.default, rand(4, 8), [1])
case(0, aten.median.default, rand(4, 8))
for target in (aten.median.dim, aten.mode.default):
    case(1, target, rand(4, 8), 1)
    case(2, target, rand(4, 8, 4), -3, True)
case(1, aten.kthvalue.default, rand(4, 8), 2, 1)
case(1, aten.topk.default, rand(4, 8), 3)
case(1, aten.sort.default, rand(4, 8), 0)
case(1, aten.sort.stable, rand(4, 8), stable=True, dim=1)
case(1, aten.argsort.default, rand(4, 8))
case(1, aten.argsort.stable, rand(4, 8), stable=True, dim=0)
for name in ["cumprod", "logcumsumexp", "cummax", "cummin"]:
    case(1, getattr(aten, name).default, rand(4, 8), 1)
case(0, aten.cumsum.default, rand(), 0)
case(2, aten.cosine_similarity.default, rand(4, 8, 4), rand(8, 4), -1)
case(2, aten.linalg_vecdot.default, rand(4, 8, 4), rand(4, 1, 4))
case(1, aten.pairwise_distance.default, rand(4, 8), rand(4, 8))
case(1, aten.pairwise_distance.default, rand(4, 8), rand(8), keepdim=True)
case(3, aten.cdist.default, rand(2, 4, 3), rand(2, 8, 3))
case(0, aten.dist.default, rand(4, 8), rand(8))

# -- moments -----------------------------------------------------------------------------------------------------------

for name in ["var", "std", "var_mean", "std_mean"]:
    packet = getattr(aten, name)
    case(2, packet.default, rand(4, 8), False)
    case(2, packet.dim, rand(4, 8), [1])
    case(2, packet.dim, rand(4, 8), [-1], False, True)
    case(3, packet.correction, rand(4, 8, 4), [0, 2], correction=2)
    case(2, packet.correction, rand(4, 8))
for p in (2, 1, 0, 3, 0.5, math.inf, -math.inf):
    case(2, aten.linalg_vector_norm.default, rand(4, 8), p, [1])
case(1, aten.linalg_vector_norm.default, rand(4, 8), -1, [1])
case(2, aten.linalg_vector_norm.default, rand(4, 8))
case(2, aten.linalg_vector_norm.default, rand(4, 8, dtype=torch.float32), 2, [0], True, dtype=torch.float64)
case(2, aten.norm.Scalar, rand(4, 8))
case(2, aten.norm.ScalarOpt_dim, rand(4, 8), None, [0])
case(2, aten.norm.ScalarOpt_dtype, rand(4, 8), 1, dtype=torch.float64)
case(2, aten.norm.ScalarOpt_dim_dtype, rand(4, 8), 3, [1], True, dtype=torch.float64)
case(2, aten.frobenius_norm.dim, rand(4, 8), [0, 1])
case(2, aten.linalg_norm.default, rand(4, 8))
case(2, aten.linalg_norm.default, rand(4, 8), 1, [1])
case(0, aten.linalg_norm.default, rand(4, 8), 1)
case(2, aten.linalg_norm.ord_str, rand(4, 8), "fro", [0, 1])
case(0, aten.linalg_norm.ord_str, rand(4, 4), "nuc")
case(1, aten.linalg_matrix_norm.default, rand(4, 8, 4), 1)
case(3, aten.linalg_matrix_norm.str_ord, rand(4, 8, 4))

# -- norm --------------------------------------------------------------------------------------------------------------

for target in (aten.softmax.int, aten.log_softmax.int, aten.special_softmax.default, aten.special_log_softmax.default):
    case(2, target, rand(4, 8), 1)
    case(2, target, rand(8, 4, dtype=torch.float32), -2, dtype=torch.float64)
case(3, aten.softmax.int, rand(4, 8, 4), 1)
case(0, aten.softmax.int, rand(), 0)
case(2, aten._softmax.default, rand(4, 8), 1, False)
case(2, aten._log_softmax.default, rand(4, 8), 1, False)
case(2, aten.logsumexp.default, rand(4, 8), [1])
case(2, aten.logsumexp.default, rand(4, 8), [0, 1], True)

# -- view --------------------------------------------------------------------------------------------------------------

for target in (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default):
    case(3, target, rand(4, 8, 2), [32, 2])
    case(2, target, rand(4, 8), [-1])
    case(3, target, rand(8, 8), [8, 4, 2])
case(4, aten.view.default, rand(4, 4, 4), [4, 2, 8])  # 4·(2·2)·4: a dim that takes the back of the one before
case(2, aten.view.default, rand(4, 6, 4), [4, 8, 3])  # no common refinement: 2 in front, the rest whole
case(2, aten.view.default, rand(6, 4, 4), [8, 3, 4])
case(0, aten.view.default, rand(3, 4), [4, 1, 3])
case(0, aten.view.default, rand(1), [])
case(0, aten.view.default, rand(), [1, 1])
case(2, aten.view.default, rand(4, 1, 8), [1, 4, 8, 1])
case(0, aten.view.default, torch.zeros(0, 4), [4, 0])
case(2, aten._reshape_alias.default, rand(4, 8), [32], [1])
case(3, aten.flatten.using_ints, rand(4, 8, 2), 1)
case(2, aten.flatten.using_ints, rand(4, 8))
case(0, aten.flatten.using_ints, rand())
case(3, aten.unflatten.int, rand(4, 8), 1, [4, 2])
case(3, aten.unflatten.int, rand(4, 8), -1, [2, -1])
case(2, aten.ravel.default, rand(4, 8))
case(2, aten.squeeze.default, rand(4, 1, 8, 1))  # on a slice that is 1 long in a dim that stays
case(2, aten.squeeze.dim, rand(4, 8), 0)
case(2, aten.squeeze.dims, rand(4, 1, 8), [0, 1])
case(2, aten.unsqueeze.default, rand(4, 8), -1)
case(2, aten.view_as.default, rand(4, 8), rand(32))
case(3, aten.reshape_as.default, rand(4, 8), rand(8, 4))
case(3, aten.expand.default, rand(4, 1, 8), [-1, 4, 8])
case(3, aten.expand.default, rand(1, 8), [2, 4, 8])
case(1, aten.expand.default, rand(), [4])
case(2, aten.broadcast_to.default, rand(8), [4, 8])
case(2, aten.expand_as.default, rand(4, 1), rand(4, 8))
case(2, aten.broadcast_tensors.default, [rand(4, 1), rand(8)])
case(1, aten.atleast_1d.default, rand(4))
case(1, aten.atleast_2d.default, rand(4))
case(2, aten.atleast_3d.default, rand(4, 8))
case(3, aten.transpose.int, rand(4, 8, 2), 0, -1)
case(3, aten.permute.default, rand(4, 8, 2), [2, 0, 1])
case(2, aten.t.default, rand(4, 8))
case(3, aten.numpy_T.default, rand(4, 8, 2))
case(3, aten.mT.default, rand(4, 8, 2))
case(3, aten.mH.default, rand(4, 8, 2))
case(2, aten.matrix_H.default, rand(4, 8))
case(3, aten.adjoint.default, rand(4, 8, 2))
for name in ["movedim", "moveaxis"]:
    case(3, getattr(aten, name).int, rand(4, 8, 2), 0, 2)
    case(3, getattr(aten, name).intlist, rand(4, 8, 2), [0, 1], [2, 0])
case(2, aten.swapaxes.default, rand(4, 8), 0, 1)
case(2, aten.swapdims.default, rand(4, 8), 0, 1)
case(1, aten.select.int, rand(4, 8), -1, 3)
case(1, aten.unbind.int, rand(2, 8))
case(1, aten.slice.Tensor, rand(4, 8), 1, 2, 6)
case(2, aten.slice.Tensor, rand(4, 8), 1, 0, 9223372036854775807)
case(1, aten.slice.Tensor, rand(4, 8), 1, 0, -1)
case(1, aten.slice.Tensor, rand(4, 8), 1, None, None, 2)
case(2, aten.narrow.default, rand(4, 8), 1, 0, 8)
case(1, aten.split.Tensor, rand(4, 8), 3, 1)
case(1, aten.split.sizes, rand(4, 8), [2, 6], 1)
case(1, aten.split_with_sizes.default, rand(4, 8), [2, 2], 0)
case(1, aten.chunk.default, rand(4, 8), 2, -1)
case(1, aten.tensor_split.sections, rand(4, 8), 3, 1)
case(1, aten.tensor_split.indices, rand(4, 8), [2, 3], 1)
case(1, aten.diagonal.default, rand(4, 8, 4), 0, 0, -1)
case(1, aten.unfold.default, rand(4, 8), 1, 4, 2)

# -- arrange -----------------------------------------------------------------------------------------------------------

for name in ["cat", "concat", "concatenate"]:
    case(1, getattr(aten, name).default, [rand(4, 8), rand(4, 4)], -1)
case(1, aten.cat.default, [torch.zeros(0, dtype=torch.float64), rand(4, 8)], 1)
case(2, aten.stack.default, [rand(4, 8), rand(4, 8)], -1)
case(0, aten.stack.default, [rand(), rand()])
case(1, aten.hstack.default, [rand(4, 8), rand(4, 4)])
case(0, aten.hstack.default, [rand(4), rand(8)])
case(0, aten.hstack.default, [rand(), rand()])
case(1, aten.vstack.default, [rand(4, 8), rand(2, 8)])
case(1, aten.vstack.default, [rand(8), rand(8)])
case(0, aten.vstack.default, [rand(), rand()])
case(1, aten.flip.default, rand(4, 8), [1])
case(2, aten.flip.default, rand(4, 8), [])
case(1, aten.roll.default, rand(4, 8), [1], [-1])
case(0, aten.roll.default, rand(4, 8), [3])
case(2, aten.pad.default, rand(4, 8, 2), [1, 2])
case(1, aten.pad.default, rand(4, 8, 4), [1, 1, 2, 2], "reflect")
case(2, aten.pad.default, rand(4, 8, 4), [0, 0, 1, 0], "constant", 1.5)
case(1, aten.constant_pad_nd.default, rand(4, 8), [1, -1], 0.0)
case(3, aten.repeat.default, rand(4, 8), [2, 1])
case(3, aten.repeat.default, rand(8), [4, 2])
case(2, aten.repeat.default, rand(4, 1), [1, 8])
case(3, aten.tile.default, rand(4, 8), [2])
case(3, aten.repeat_interleave.self_int, rand(4, 8), 2, 1)
case(3, aten.repeat_interleave.self_int, rand(4, 8), 4, -2, output_size=16)
case(0, aten.repeat_interleave.self_int, rand(4, 8), 2)

# -- create ------------------------------------------------------------------------------------------------------------

case(2, aten.zeros.default, [4, 8], dtype=torch.float64)
case(2, aten.ones.default, [4, 8])
case(2, aten.full.default, [4, 8], 1.5)
case(0, aten.full.default, [], 1.5)
case(2, aten.empty.memory_format, [4, 8], values_matter=False)
case(0, aten.scalar_tensor.default, 1.5)
case(0, aten.arange.default, 8)
case(0, aten.arange.start, 2, 8)
case(0, aten.arange.start_step, 2, 8, 2)
case(0, aten.linspace.default, 0, 1, 8)
case(0, aten.logspace.default, 0, 1, 8)
case(0, aten.eye.default, 4)
case(0, aten.eye.m, 4, 8)
case(0, aten.tril_indices.default, 4, 4)
case(0, aten.triu_indices.default, 4, 4)
case(2, aten.new_zeros.default, rand(4, 2), [4, 8])
case(1, aten.new_ones.default, rand(), [4])
case(2, aten.new_full.default, rand(4, 8), [8, 4], 2.5, dtype=torch.int64)
case(2, aten.new_empty.default, rand(4, 8), [4, 8], values_matter=False)
