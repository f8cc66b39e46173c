"""Operators that put elements elsewhere, and activations: concrete calls, see `rule_cases`."""

import torch
from rule_cases import booleans, fixed, integers, rand
from rule_reference import collected

aten = torch.ops.aten
CASES, case = collected()

case(1, aten.row_stack.default, [rand(4, 8), rand(2, 8)])
case(1, aten.column_stack.default, [rand(4, 8), rand(4, 4)])
case(1, aten.column_stack.default, [rand(4), rand(4)])
case(0, aten.column_stack.default, [rand(), rand()])
case(2, aten.dstack.default, [rand(4, 8), rand(4, 8)])
case(2, aten.dstack.default, [rand(4, 8, 2), rand(4, 8, 4)])
case(0, aten.dstack.default, [rand(4), rand(4)])
case(0, aten.block_diag.default, [rand(4, 8), rand(4)])
case(0, aten.diag.default, rand(4, 4))
case(0, aten.trace.default, rand(4, 4))
case(0, aten.put.default, rand(4, 8), torch.tensor([3, 9]), rand(2))
case(0, aten.masked_scatter.default, rand(4, 8), booleans(4, 8), rand(32))
case(2, aten.diag_embed.default, rand(4, 8, 2))
case(2, aten.diag_embed.default, rand(4, 8, 2), 1, 0, 2)
case(3, aten.meshgrid.default, [rand(4), rand(8), rand(2)])
case(2, aten.meshgrid.indexing, [rand(4), rand(8)], indexing="xy")
case(1, aten.meshgrid.indexing, [rand(4), rand()], indexing="ij")
case(1, aten.fliplr.default, rand(4, 8))
case(1, aten.flipud.default, rand(4, 8))
case(1, aten.rot90.default, rand(4, 8, 2), 1, [0, 2])
case(1, aten.rot90.default, rand(4, 8, 2), 2, [0, -1])
for name, _dim in (("hsplit", 1), ("vsplit", 0), ("dsplit", 2)):
    packet = getattr(aten, name)
    case(2, packet.int, rand(4, 8, 2), 2)
    case(2, packet.array, rand(4, 8, 2), [1])
case(0, aten.hsplit.int, rand(4), 2)
case(2, aten.slice.Tensor, rand(4, 8), 0, -4)
case(2, aten.narrow.default, rand(4, 8), -1, 0, 8)
case(1, aten.narrow.default, rand(4, 8), -1, 2, 4)

case(1, aten.msort.default, rand(4, 8))
case(1, aten.diff.default, rand(4, 8))
case(1, aten.diff.default, rand(4, 8), 2, 0, rand(1, 8), rand(2, 8))
for target in (aten.quantile.scalar, aten.nanquantile.scalar):
    case(1, target, rand(4, 8), 0.3, 1)
    case(1, target, rand(4, 8), 0.3, 0, True)
    case(0, target, rand(4, 8), 0.3)
case(1, aten.nanmedian.dim, rand(4, 8), 1)
case(0, aten.histc.default, fixed(rand(4, 8)), 4)
case(2, aten.isin.Tensor_Tensor, integers(9, 4, 8), integers(9, 4))
case(1, aten.renorm.default, rand(4, 8), 2, 0, 1.0)

# Everything among torch.nn.functional's activations, by what export makes of it.
for name in [
    "celu",
    "elu",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "log_sigmoid",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "softplus",
    "softshrink",
    "tanh",
]:
    case(2, getattr(aten, name).default, rand(4, 8))
case(2, aten.gelu.default, rand(4, 8), approximate="tanh")
case(2, aten.threshold.default, rand(4, 8), 0.1, 20.0)
case(2, aten.softplus.default, rand(4, 8), 2.0, 1.0)
case(2, aten.glu.default, rand(4, 8, 2), 1)
case(3, aten.prelu.default, rand(4, 8, 2), rand(8))
