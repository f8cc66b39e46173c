"""Pooling, interpolation, padding by reflection, patches and grids: concrete calls, see `rule_cases`."""

import torch
from rule_cases import fixed, positive, rand
from rule_reference import collected

aten = torch.ops.aten
CASES, case = collected()

# -- pooling: n, c, and spatial dims whose windows keep apart ----------------------------------------------------------

for pool in ("max_pool", "avg_pool"):
    one, two, three = (getattr(aten, f"{pool}{d}d").default for d in (1, 2, 3))
    case(3, one, rand(2, 4, 8), [2])
    case(2, one, rand(2, 4, 7), [3], [2], [1])
    case(1, one, rand(4, 7), [3], [1])
    case(4, two, rand(2, 4, 4, 8), [2, 2])
    case(4, two, rand(2, 2, 4, 8), [1, 3], [2, 4])
    case(2, two, rand(2, 4, 5, 5), [3, 3], [2, 2], [1, 1])
    case(2, two, rand(2, 4, 5, 7), [2, 2], [2, 2])
    case(2, two, rand(2, 4, 5, 7), [2, 3], [2, 2], [1, 1], ceil_mode=True)
    case(4, two, rand(2, 2, 4, 12), [2, 3], ceil_mode=True)
    case(3, two, rand(4, 4, 8), [2, 2])
    case(5, three, rand(2, 2, 4, 2, 4), [2, 1, 2])
    case(3, three, rand(2, 2, 3, 4, 3), [2, 3, 2], [1, 1, 1], [1, 1, 0])
    # windows over several slices, past the border
    case(3, one, rand(2, 2, 8), [3], [2], [1])
    case(3, one, rand(2, 2, 8), [3], [1], [1])
    case(2, one, rand(4, 8), [4], [2], [1], ceil_mode=True)
    case(4, two, rand(2, 2, 8, 4), [3, 2], [2, 2], [0, 0], ceil_mode=True)
    case(3, two, rand(2, 2, 12, 8), [3, 3], [2, 2], [0, 1], ceil_mode=True)
for padded in (True, False):
    case(3, aten.avg_pool1d.default, rand(2, 2, 8), [3], [2], [0], True, padded)
    case(4, aten.avg_pool2d.default, rand(2, 2, 8, 12), [4, 3], [2, 2], [1, 0], True, padded)
    case(4, aten.avg_pool2d.default, rand(2, 2, 8, 12), [4, 3], [2, 2], [1, 0], True, padded, 5)
    case(4, aten.avg_pool2d.default, rand(2, 2, 4, 5), [3, 3], [1, 1], [1, 1], False, padded)
    case(4, aten.avg_pool2d.default, rand(2, 2, 8, 4), [3, 4], [1, 4], [1, 0], False, padded)
    case(4, aten.avg_pool3d.default, rand(1, 2, 4, 4, 4), [3, 3, 3], [1, 1, 2], [1, 1, 1], False, padded)
case(2, aten.max_pool2d.default, rand(2, 4, 8, 8), [2, 2], [2, 2], [0, 0], [2, 2])
case(4, aten.max_pool2d.default, rand(2, 2, 8, 8), [2, 2], [4, 4], [0, 0], [3, 3])
case(2, aten.max_pool2d.default, rand(2, 4, 2, 4), [2, 4])

# one window as large as the dim: a mean, the dim may be cut
case(3, aten.avg_pool1d.default, rand(2, 4, 8), [8])
case(4, aten.avg_pool2d.default, rand(2, 4, 4, 8), [4, 8])
case(4, aten.avg_pool2d.default, rand(2, 2, 4, 8), [4, 2])
case(3, aten.avg_pool2d.default, rand(2, 2, 4, 5), [4, 3], [4, 2], [0, 1], False, False)
case(3, aten.avg_pool2d.default, rand(2, 2, 4, 4), [4, 2], [4, 2], divisor_override=3)
case(4, aten.avg_pool3d.default, rand(2, 2, 4, 2, 5), [4, 2, 2])
case(4, aten.avg_pool2d.default, fixed(rand(2, 4, 4, 8)).half(), [4, 8], values_matter=False)

# adaptive: equal pieces, repeated elements, pieces that overlap within a common stretch, one piece
case(3, aten.adaptive_avg_pool1d.default, rand(2, 4, 8), [4])
case(3, aten.adaptive_avg_pool1d.default, rand(2, 4, 4), [8])
case(3, aten.adaptive_avg_pool1d.default, rand(2, 2, 8), [12])
case(2, aten.adaptive_avg_pool1d.default, rand(2, 4, 8), [3])
case(2, aten.adaptive_avg_pool1d.default, rand(4, 8), [1])
case(4, aten.adaptive_avg_pool2d.default, rand(2, 2, 4, 8), [1, 1])
case(4, aten.adaptive_avg_pool2d.default, rand(2, 2, 4, 8), [1, 4])
case(3, aten.adaptive_avg_pool2d.default, rand(2, 4, 4, 5), [1, 3])
case(4, aten.adaptive_avg_pool2d.default, rand(2, 2, 4, 4), [4, 2])
case(3, aten.adaptive_avg_pool2d.default, rand(4, 4, 8), [1, 1])
case(5, aten.adaptive_avg_pool3d.default, rand(2, 2, 4, 2, 4), [1, 1, 1])
case(4, aten.adaptive_avg_pool3d.default, rand(2, 2, 4, 3, 4), [2, 2, 1])
case(4, aten.adaptive_avg_pool2d.default, fixed(rand(2, 4, 4, 8)).bfloat16(), [1, 2], values_matter=False)

# indices count in the plane of a channel
case(2, aten.max_pool1d_with_indices.default, rand(2, 4, 8), [2])
case(2, aten.max_pool2d_with_indices.default, rand(2, 4, 4, 4), [2, 2])
case(1, aten.max_pool2d_with_indices.default, rand(4, 4, 4), [3, 3], [1, 1], [1, 1])
case(2, aten.max_pool3d_with_indices.default, rand(2, 4, 2, 4, 2), [2, 2, 2])
case(2, aten.adaptive_max_pool1d.default, rand(2, 4, 8), [2])
case(2, aten.adaptive_max_pool2d.default, rand(2, 4, 4, 4), [1, 1])
case(1, aten.adaptive_max_pool2d.default, rand(4, 4, 4), [2, 3])
case(2, aten.adaptive_max_pool3d.default, rand(2, 4, 2, 4, 2), [1, 2, 2])
case(2, aten.fractional_max_pool2d.default, rand(2, 4, 6, 6), [2, 2], [3, 3], fixed(positive(2, 4, 2)))
case(2, aten.fractional_max_pool3d.default, rand(2, 4, 4, 4, 4), [2, 2, 2], [2, 2, 2], fixed(positive(2, 4, 3)))
_pooled, _places = aten.max_pool2d_with_indices.default(rand(2, 4, 4, 4), [2, 2])
case(2, aten.max_unpool2d.default, fixed(_pooled).requires_grad_(), _places, [4, 4])
_pooled, _places = aten.max_pool3d_with_indices.default(rand(2, 4, 2, 4, 2), [2, 2, 2])
case(2, aten.max_unpool3d.default, fixed(_pooled).requires_grad_(), _places, [2, 4, 2], [2, 2, 2], [0, 0, 0])

# -- interpolation: nearest neighbours by powers of two keep apart -----------------------------------------------------

for name in ("upsample_nearest", "_upsample_nearest_exact"):
    one, two, three = (getattr(aten, f"{name}{d}d").vec for d in (1, 2, 3))
    case(3, one, rand(2, 4, 4), None, [2.0])
    case(3, one, rand(2, 4, 8), None, [0.5])
    case(3, one, rand(2, 4, 8), [4], None)
    case(2, one, rand(2, 4, 8), [12], None)
    case(4, two, rand(2, 4, 4, 2), [16, 4], None)
    case(3, two, rand(2, 2, 4, 8), None, [2.2, 1.0])
    case(3, two, rand(2, 2, 4, 4), [8, 6], None)
    case(2, two, rand(2, 2, 4, 4), None, [1.1, 1.6])
    case(5, three, rand(2, 2, 2, 2, 4), [2, 4, 8], None)
case(2, aten.upsample_linear1d.vec, rand(2, 4, 4), [8], False, None)
case(2, aten.upsample_linear1d.vec, rand(2, 4, 4), None, True, [1.1])
for name in (
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "_upsample_lanczos2d_aa",
):
    if hasattr(aten, name):
        case(2, getattr(aten, name).vec, rand(2, 4, 4, 4), [8, 6], False, None)
        case(3, getattr(aten, name).vec, rand(2, 4, 4, 4), None, False, [1.0, 0.5])
        if "lanczos" not in name:
            case(2, getattr(aten, name).vec, rand(2, 4, 4, 4), [2, 4], True, None)
case(2, aten.upsample_trilinear3d.vec, rand(2, 4, 2, 2, 2), None, False, [2.0, 2.0, 2.0])
case(3, aten.upsample_trilinear3d.vec, rand(2, 4, 2, 4, 2), [4, 4, 3], False, None)

# -- padding with what is there ----------------------------------------------------------------------------------------

for mode in ("reflect", "replicate", "circular"):
    case(2, aten.pad.default, rand(2, 4, 4), [1, 2], mode)
    case(1, aten.pad.default, rand(4, 4), [1, 2], mode)
    case(2, aten.pad.default, rand(2, 4, 4, 4), [1, 0, 2, 1], mode)
    case(3, aten.pad.default, rand(2, 4, 4, 4), [1, 0, 0, 0], mode)
    case(2, aten.pad.default, rand(2, 4, 2, 4, 2), [1, 1, 1, 1, 1, 1], mode)

# -- patches, pixels ---------------------------------------------------------------------------------------------------

case(2, aten.im2col.default, rand(2, 4, 4, 4), [3, 3], [1, 1], [1, 1], [1, 1])
case(1, aten.im2col.default, rand(4, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])
case(4, aten.im2col.default, rand(2, 4, 4, 8), [2, 2], [1, 1], [0, 0], [2, 2])
case(3, aten.im2col.default, rand(2, 2, 8, 4), [2, 3], [3, 1], [0, 1], [4, 1])
case(2, aten.col2im.default, rand(2, 16, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])
case(4, aten.col2im.default, rand(2, 16, 8), [4, 8], [2, 2], [1, 1], [0, 0], [2, 2])
case(3, aten.col2im.default, rand(16, 8), [4, 8], [2, 2], [1, 1], [0, 0], [2, 2])
case(4, aten.pixel_shuffle.default, rand(2, 8, 4, 2), 2)
case(4, aten.pixel_unshuffle.default, rand(2, 2, 8, 4), 2)
case(5, aten.pixel_shuffle.default, rand(2, 2, 8, 2, 2), 2)
case(3, aten.channel_shuffle.default, rand(2, 4, 4, 2), 2)

# -- grids -------------------------------------------------------------------------------------------------------------

case(4, aten.grid_sampler.default, rand(2, 4, 3, 3), rand(2, 4, 2, 2), 0, 0, False)
case(4, aten.grid_sampler.default, rand(2, 4, 3, 3), fixed(rand(2, 4, 2, 2)), 1, 1, True)
case(5, aten.grid_sampler.default, rand(2, 2, 3, 3, 3), rand(2, 2, 4, 2, 3), 0, 2, True)
case(1, aten.affine_grid_generator.default, rand(4, 2, 3), [4, 2, 3, 4], False)
case(1, aten.affine_grid_generator.default, rand(4, 3, 4), [4, 2, 2, 3, 4], True)
