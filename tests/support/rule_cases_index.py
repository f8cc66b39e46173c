"""Reading and writing by index, along cut dims too: concrete calls, see `rule_cases`."""

import torch
from rule_cases import booleans, fixed, integers, rand
from rule_reference import collected

aten = torch.ops.aten
CASES, case = collected()


# -- embedding ---------------------------------------------------------------------------------------------------------

case(4, aten.embedding.default, rand(8, 4), integers(8, 4, 2))
case(3, aten.embedding.default, rand(8, 4), torch.tensor([1, 1, 7, 1]), 1)  # row 1 gets no gradient
case(2, aten.embedding.default, rand(8, 4), torch.tensor(3))
case(1, aten.embedding.default, rand(8, 4), integers(8, 4), -1, True)  # gradients divided by how often
case(1, aten.embedding_bag.default, rand(8, 4), integers(8, 6), torch.tensor([0, 2]))
for mode in (0, 1, 2):
    case(
        1,
        aten.embedding_bag.padding_idx,
        rand(8, 4),
        integers(8, 6),
        torch.tensor([0, 2, 4]),
        False,
        mode,
        False,
        None,
        False,
        2,
    )
case(
    1,
    aten.embedding_bag.padding_idx,
    rand(8, 4),
    integers(8, 6),
    torch.tensor([0, 2, 6]),
    False,
    0,
    False,
    rand(6),
    True,
    None,
)
case(0, aten.embedding_bag.default, rand(8, 4), integers(8, 6), torch.tensor([0, 2]), True)

# -- gather, index -----------------------------------------------------------------------------------------------------

case(3, aten.gather.default, rand(4, 8), 1, integers(8, 4, 2))
case(3, aten.gather.default, rand(8, 4), -2, integers(8, 4, 4))
case(3, aten.gather.default, rand(4, 8, 1), 1, integers(8, 4, 4, 1))
case(2, aten.gather.default, rand(4, 8), 1, integers(8, 2, 4))  # an index shorter in another dim
case(2, aten.gather.default, rand(4, 8), 1, integers(8, 1, 4))
case(0, aten.gather.default, rand(), 0, torch.tensor(0))
case(3, aten.take_along_dim.default, rand(4, 8), integers(8, 4, 2), 1)
case(3, aten.take_along_dim.default, rand(4, 8), integers(8, 1, 2), 1)  # broadcast
case(3, aten.take_along_dim.default, rand(1, 8), integers(8, 4, 2), 1)
case(0, aten.take_along_dim.default, rand(4, 8), integers(32, 6))
case(3, aten.index_select.default, rand(4, 8), 1, integers(8, 4))
case(3, aten.index_select.default, rand(4, 8, 2), 0, torch.tensor([3]))
case(0, aten.index_select.default, rand(4, 8), 1, torch.tensor(3))
case(3, aten.index.Tensor, rand(8, 4), [integers(8, 4)])
case(4, aten.index.Tensor, rand(8, 4), [integers(8, 2, 4) - 8])  # counted from the end
case(3, aten.index.Tensor, rand(4, 8), [None, integers(8, 4)])
case(3, aten.index.Tensor, rand(4, 8), [integers(4, 4), integers(8, 4)])  # pairs, of which both dims may be cut
case(4, aten.index.Tensor, rand(4, 8), [integers(4, 4, 1), integers(8, 2)])  # a grid
case(4, aten.index.Tensor, rand(2, 4, 8), [integers(2, 4), None, integers(8, 4)])  # apart: they stand in front
case(5, aten.index.Tensor, rand(2, 4, 8, 2), [None, integers(4, 4), integers(8, 4)])  # together: in their place
case(2, aten.index.Tensor, rand(4, 8), [torch.tensor(2), torch.tensor(5)])
case(0, aten.index.Tensor, rand(4, 8), [torch.tensor([True, False, True, True])])

# -- one_hot, bucketize ------------------------------------------------------------------------------------------------

case(3, aten.one_hot.default, integers(8, 4, 2), 8)
case(1, aten.one_hot.default, torch.tensor(3), 8)
boundaries = fixed(rand(8)).sort().values
case(3, aten.bucketize.Tensor, fixed(rand(4, 2)), boundaries)
case(2, aten.bucketize.Tensor, torch.cat([boundaries[:3], torch.tensor([torch.nan])]), boundaries, right=True)
case(3, aten.searchsorted.Tensor, boundaries, fixed(rand(4, 2)), out_int32=True)
case(3, aten.searchsorted.Tensor, fixed(rand(4, 8)).sort().values, fixed(rand(4, 2)))
case(0, aten.searchsorted.Tensor, boundaries, fixed(rand(4)), sorter=torch.arange(8))
case(1, aten.searchsorted.Scalar, boundaries, 0.25)

# -- scatter -----------------------------------------------------------------------------------------------------------

distinct = torch.stack(
    [torch.tensor([5, 0, 7, 2]), torch.tensor([1, 2, 3, 4]), torch.tensor([7, 6, 0, 1]), torch.tensor([0, 4, 2, 6])]
)
often = integers(8, 4, 4)
case(2, aten.scatter.src, rand(4, 8), 1, distinct, rand(4, 4))
case(2, aten.scatter.src, rand(8, 4), 0, distinct.t().contiguous(), rand(4, 4))
case(2, aten.scatter.src, rand(4, 8), 1, distinct, fixed(rand(4, 8)))  # a source longer than its index
case(1, aten.scatter.src, rand(4, 8), 1, distinct[:2], fixed(rand(4, 4)))
case(2, aten.scatter.value, rand(4, 8), 1, often, 2.5)
for how in ("add", "multiply"):
    case(2, aten.scatter.reduce, fixed(rand(4, 8)), 1, often, fixed(rand(4, 4)), reduce=how)
    case(2, aten.scatter.value_reduce, fixed(rand(4, 8)), 1, often, 2.5, reduce=how)
case(3, aten.scatter_add.default, rand(4, 8), 1, often, rand(4, 4))
case(2, aten.scatter_add.default, rand(4, 8), 1, often[:2], rand(2, 4))
for how in ("sum", "prod", "mean", "amax", "amin"):
    for include in (True, False):
        case(
            3 if how == "sum" and include else 2,
            aten.scatter_reduce.two,
            rand(4, 8),
            1,
            often,
            rand(4, 4),
            how,
            include_self=include,
        )
case(0, aten.scatter_add.default, rand(), 0, torch.tensor(0), rand())
case(3, aten.index_add.default, rand(4, 8), 1, torch.tensor([5, 0, 5, 2]), rand(4, 4))
case(3, aten.index_add.default, rand(8, 4), -2, torch.tensor([7, 0, 7, 2]), rand(4, 4), alpha=2)
case(0, aten.index_add.default, rand(4, 8), 1, torch.tensor(3), rand(4, 1))
case(2, aten.index_copy.default, rand(4, 8), 1, torch.tensor([5, 0, 7, 2]), rand(4, 4))
for how in ("prod", "mean", "amax", "amin"):
    case(2, aten.index_reduce.default, rand(4, 8), 1, torch.tensor([5, 0, 7, 2]), rand(4, 4), how)
case(2, aten.index_fill.int_Scalar, rand(4, 8), 1, torch.tensor([5, 0, 7, 0]), 2.5)
case(2, aten.index_fill.int_Tensor, rand(4, 8), 1, torch.tensor([5, 0, 7, 2]), rand())
case(2, aten.index_put.default, rand(8, 4), [torch.tensor([5, 0, 7, -6])], rand(4, 4))
case(3, aten.index_put.default, rand(8, 4), [torch.tensor([5, 0, 5, -6])], rand(4, 4), True)
case(3, aten.index_put.default, rand(8, 4), [torch.tensor([5, 0, 5, -6])], rand(4), True)  # values broadcast
case(2, aten.index_put.default, rand(8, 4), [torch.tensor([5, 0, 7, 2])], rand())
case(3, aten.index_put.default, rand(4, 8), [torch.tensor([3, 0, 3, 1]), torch.tensor([5, 0, 5, 1])], rand(4), True)
case(3, aten.index_put.default, rand(2, 4, 8), [torch.tensor([1, 0]), None, torch.tensor([5, 0])], rand(2, 4))
case(2, aten.index_put.default, rand(4, 8), [None, torch.tensor([5, 0])], rand(4, 2))
case(2, aten.index_put.default, rand(4, 8), [booleans(4)], fixed(rand()))
case(2, aten.index_put.default, rand(4, 8), [booleans(4, 8)], rand(1))
case(0, aten.index_put.default, rand(4, 8), [torch.tensor([True, False, True, True])], rand(3, 8))
case(1, aten.select_scatter.default, rand(4, 8), rand(4), 1, 3)
case(1, aten.slice_scatter.default, rand(4, 8), rand(4, 4), 1, 0, 4)
case(1, aten.diagonal_scatter.default, rand(4, 8, 4), rand(8, 4), 0, 0, 2)

# -- along a cut dim ---------------------------------------------------------------------------------------------------

case(2, aten.cumsum.default, rand(4, 8), 1)
case(3, aten.cumsum.default, rand(4, 8, 2), -2)
case(2, aten.cumsum.default, fixed(rand(8, 4, dtype=torch.float32)), 0, dtype=torch.float64)
case(2, aten.cumsum.default, integers(9, 4, 8), 0)
ties = integers(3, 4, 8).double()
strange = fixed(rand(4, 8))
strange[[0, 0, 2], [3, 6, 1]] = torch.nan
for target in (aten.argmax.default, aten.argmin.default):
    case(2, target, rand(4, 8), -1)
    case(2, target, ties, 0, True)
    case(2, target, integers(5, 4, 8), 1)
    case(2, target, strange, 1)
    case(1, target, ties)
    case(1, target, ties, None, True)
for target in (aten.max.dim, aten.min.dim):
    case(2, target, rand(4, 8), 1)
    case(3, target, rand(4, 8, 4), -3, True)
    case(2, target, ties.clone().requires_grad_(), 1)  # the first alone gets the gradient
    case(2, target, strange, 1)
for target in (aten.tril.default, aten.triu.default):
    for diagonal in (0, 2, -3):
        case(3, target, rand(2, 4, 8), diagonal)
    case(2, target, booleans(8, 8), 1)
