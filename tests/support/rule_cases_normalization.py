"""Normalisation layers and the pieces of one over cut dims: concrete calls, see `rule_cases`."""

import torch
from rule_cases import fixed, integers, positive, rand
from rule_reference import collected

from shardwright.rules import normalization

aten = torch.ops.aten
CASES, case = collected()

# Far from zero, where sums of squares would cancel.
far = (fixed(rand(4, 4, 4)) + 1e4).requires_grad_()

# -- over the last dims ------------------------------------------------------------------------------------------------

for affine in ((None, None), (rand(8), None), (rand(8), rand(8))):
    case(3, aten.layer_norm.default, rand(4, 2, 8), [8], *affine)
case(3, aten.layer_norm.default, rand(2, 4, 8), [4, 8], rand(4, 8), rand(4, 8), 0.5, False)
case(1, aten.layer_norm.default, rand(8), [8], rand(8))
case(3, aten.layer_norm.default, far, [4])
case(2, aten.rms_norm.default, rand(4, 8), [8])
case(3, aten.rms_norm.default, rand(4, 2, 8), [2, 8], rand(2, 8), 0.5)

# -- a weight by direction and length ----------------------------------------------------------------------------------

for dim, shape in ((0, (4, 1, 1)), (1, (1, 4, 1)), (2, (1, 1, 4)), (-1, ())):
    case(3, aten._weight_norm.default, rand(4, 4, 4), rand(*shape), dim)

# -- by groups of channels ---------------------------------------------------------------------------------------------

case(3, aten.group_norm.default, rand(4, 8), 2, rand(8), rand(8))
case(5, aten.group_norm.default, rand(2, 8, 4, 2), 4, rand(8), rand(8), 0.5)
case(3, aten.group_norm.default, rand(2, 8, 4), 8)
case(3, aten.group_norm.default, rand(2, 8, 4), 1, rand(8))
case(3, aten.group_norm.default, far, 4)

# -- by channels -------------------------------------------------------------------------------------------------------

for count, shape in ((2, (8, 4)), (3, (4, 4, 2)), (4, (2, 4, 4, 2)), (5, (2, 2, 2, 2, 2))):
    channels = shape[1]
    mean, var = fixed(rand(channels)), fixed(positive(channels))
    for affine in ((None, None), (rand(channels), rand(channels))):
        case(count, aten.batch_norm.default, rand(*shape), *affine, None, None, True, 0.1, 1e-5, False)
        case(count, normalization.batch_norm, rand(*shape), *affine, mean, var, None, 0.3, 0.5, False)
    case(count, normalization.batch_norm, rand(*shape), *affine, mean, var, torch.tensor(3), float("nan"), 1e-5, False)
    case(count, aten.batch_norm.default, rand(*shape), *affine, mean, var, False, 0.1, 1e-5, False)
    case(count, aten.batch_norm.default, rand(*shape), None, None, mean, var, False, 0.1, 1e-5, False)
case(
    2,
    normalization.batch_norm,
    rand(4, 1, 4),
    rand(1),
    rand(1),
    fixed(rand(1)),
    fixed(positive(1)),
    None,
    0.1,
    0.5,
    False,
)
case(3, normalization.batch_norm, far, rand(4), None, fixed(rand(4)), fixed(positive(4)), None, 0.1, 1e-5, False)
for affine in ((None, None), (rand(4), rand(4))):
    mean, var = fixed(rand(4)), fixed(positive(4))
    case(4, aten.instance_norm.default, rand(2, 4, 4, 2), *affine, None, None, True, 0.1, 1e-5, False)
    case(4, normalization.instance_norm, rand(2, 4, 4, 2), *affine, mean, var, 0.3, 0.5, False)
    case(3, aten.instance_norm.default, rand(2, 4, 4), *affine, mean, var, False, 0.1, 1e-5, False)

# -- the pieces --------------------------------------------------------------------------------------------------------

case(3, normalization.moments, rand(4, 8, 4), [0, 2], [4, 2])
case(2, normalization.moments, rand(4, 8, 2), [0, 1], [1, 4])
case(2, normalization.moments, far, [1], [1])
case(2, normalization.combined_moments, rand(4, 2, 4, 2))
case(2, normalization.normalise, rand(4, 8), positive(2, 4, 1), rand(8), rand(8), 0.5)
case(3, normalization.normalise, rand(4, 2, 8), positive(2, 1, 2, 1), rand(2, 1), None, 0.5)
case(3, normalization.batch_normalise, rand(4, 8, 2), positive(2, 1, 8, 1), rand(8), rand(8), 0.5)
case(2, normalization.batch_normalise, rand(4, 8), positive(2, 1, 8), None, None, 0.5)
one, two = ([fixed(rand(n)), fixed(positive(n))] for n in (8, 4))
case(1, normalization.running_averages, fixed(positive(2, 1, 8, 1)), one, [], [0.25], [0.5, 1.5])
case(1, normalization.running_averages, fixed(positive(2, 8)), one, [integers(9) + 1], [0.0], [1.0, 2.0])
case(0, normalization.running_averages, fixed(positive(2, 12)), one + two, [], [0.25, 0.5], [0.5, 1.5])
for affine in ((None, None), (rand(2), rand(2))):
    case(2, normalization.own_batch_norm, rand(8, 2, 3), *affine, 4, torch.float64, 0.5, False)
case(1, normalization.own_batch_norm, rand(8, 2), None, None, 1, torch.float64, 0.5, False)
