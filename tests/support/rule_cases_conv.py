"""Convolutions: concrete calls, see `rule_cases`."""

import torch
from rule_cases import rand
from rule_reference import collected

aten = torch.ops.aten
CASES, case = collected()

# n, ci, co; a padded or overlapping dim is cut with halos where its size and the windows have a common divisor
case(3, aten.conv1d.default, rand(4, 2, 5), rand(4, 2, 3))
case(3, aten.conv1d.default, rand(4, 2, 5), rand(4, 2, 3), rand(4), [2], [1], [2])
case(3, aten.conv1d.default, rand(4, 6), rand(2, 4, 3), rand(2))
case(4, aten.conv2d.default, rand(2, 4, 3, 4), rand(2, 4, 3, 2), rand(2), [1, 1], [1, 0])
case(3, aten.conv2d.default, rand(2, 4, 5, 5), rand(4, 4, 3, 3), None, [2, 2], [1, 1])
case(4, aten.conv2d.default, rand(4, 4, 4), rand(2, 4, 3, 3), rand(2), [1], [1])
case(4, aten.conv3d.default, rand(2, 2, 2, 3, 2), rand(4, 2, 2, 3, 2), rand(4), [1, 1, 1], [1, 1, 0])

# spatial dims whose windows keep apart: 1x1, patches, strides past the kernel; not where a piece is left over
case(5, aten.conv2d.default, rand(2, 2, 4, 2), rand(4, 2, 1, 1), rand(4))
case(5, aten.conv2d.default, rand(2, 4, 4, 4), rand(2, 4, 2, 2), rand(2), [2, 2])
case(5, aten.conv2d.default, rand(2, 2, 8, 6), rand(2, 2, 1, 2), None, [2, 4])
case(5, aten.conv2d.default, rand(2, 2, 8, 3), rand(2, 2, 2, 3), None, [4, 1], [0, 1], [3, 1])
case(3, aten.conv2d.default, rand(2, 2, 4, 4), rand(2, 2, 2, 2), None, [2, 2], [0, 0], [2, 2])
case(4, aten.conv1d.default, rand(2, 4, 12), rand(2, 4, 3), rand(2), [3])
case(5, aten.conv3d.default, rand(2, 2, 4, 2, 4), rand(2, 2, 2, 2, 2), rand(2), [2, 2, 2])

# windows over several slices: strides below and above the kernel, reaching two slices far, left over behind
case(3, aten.conv1d.default, rand(1, 2, 8), rand(2, 2, 3), rand(2), [2], [1])
case(5, aten.conv2d.default, rand(2, 2, 8, 16), rand(2, 2, 7, 3), None, [2, 2], [3, 1])
case(3, aten.conv1d.default, rand(1, 2, 8), rand(2, 2, 3), rand(2), [1], [4], [4])
case(3, aten.conv1d.default, rand(1, 2, 12), rand(2, 2, 5), rand(2))
case(3, aten.conv1d.default, rand(1, 2, 8), rand(2, 2, 2), None, [2], [4])
case(3, aten.conv1d.default, rand(1, 2, 9), rand(2, 2, 4), None, [4], [3])

# padding by name
case(4, aten.conv1d.padding, rand(2, 2, 6), rand(4, 2, 3), rand(4), [1], "same")
case(5, aten.conv2d.padding, rand(2, 4, 4, 4), rand(2, 4, 4, 2), None, [1, 1], "same")
case(5, aten.conv2d.padding, rand(2, 2, 2, 4), rand(4, 2, 1, 1), rand(4), [1, 1], "same")
case(5, aten.conv2d.padding, rand(2, 2, 4, 4), rand(4, 2, 2, 2), rand(4), [2, 2], "valid")
case(6, aten.conv3d.padding, rand(2, 2, 2, 3, 3), rand(2, 2, 1, 3, 3), None, [1, 1, 1], "same")

# groups: n, g, ci, co; depthwise; fewer groups than devices
case(4, aten.conv1d.default, rand(2, 8, 4), rand(4, 2, 3), rand(4), [1], [1], [1], 4)
case(4, aten.conv2d.default, rand(2, 4, 4, 4), rand(4, 1, 3, 3), rand(4), [1, 1], [1, 1], [1, 1], 4)
case(5, aten.conv2d.padding, rand(2, 4, 4, 4), rand(8, 1, 3, 3), None, [1, 1], "same", groups=4)
case(4, aten.conv2d.default, rand(2, 8, 3, 3), rand(8, 4, 3, 3), rand(8), groups=2)
case(3, aten.conv2d.default, rand(8, 3, 3), rand(8, 4, 3, 3), rand(8), groups=2)
case(6, aten.conv2d.default, rand(2, 4, 4, 2), rand(8, 2, 1, 1), rand(8), [1, 1], [0, 0], [1, 1], 2)
case(2, aten.conv3d.default, rand(2, 4, 2, 2, 2), rand(4, 1, 2, 2, 2), rand(4), [1, 1, 1], [1, 1, 1], groups=4)

# transposed: the same with the roles of input and output exchanged
case(3, aten.conv_transpose1d.default, rand(2, 4, 3), rand(4, 2, 3), rand(2))
case(4, aten.conv_transpose1d.default, rand(2, 2, 4), rand(2, 4, 2), rand(4), [2])
case(4, aten.conv_transpose1d.default, rand(2, 2, 4), rand(2, 4, 2), rand(4), [3], [0], [1])
case(3, aten.conv_transpose1d.default, rand(4, 3), rand(4, 2, 3), rand(2), [2], [1], [1])
case(5, aten.conv_transpose2d.input, rand(2, 2, 3, 3), rand(2, 4, 3, 3), rand(4), [2, 2], [1, 1], [1, 1])
case(5, aten.conv_transpose2d.input, rand(2, 2, 4, 2), rand(2, 4, 2, 2), None, [2, 2])
case(5, aten.conv_transpose2d.input, rand(2, 8, 2, 3), rand(8, 2, 2, 3), rand(8), [1, 2], [0, 1], [0, 1], 4)
case(2, aten.conv_transpose2d.input, rand(2, 4, 3, 3), rand(4, 1, 3, 3), rand(4), groups=4, dilation=[2, 1])
case(3, aten.conv_transpose3d.input, rand(2, 2, 2, 2, 2), rand(2, 4, 3, 2, 2), rand(4))

case(3, aten.conv_transpose1d.default, rand(1, 2, 4), rand(2, 2, 4), rand(2), [2], [1])
case(3, aten.conv_transpose1d.default, rand(1, 2, 8), rand(2, 2, 5), rand(2), [1], [2])
case(3, aten.conv_transpose1d.default, rand(1, 2, 4), rand(2, 2, 2), rand(2), [3], [0], [1])
case(3, aten.conv_transpose1d.default, rand(1, 2, 4), rand(2, 2, 3), rand(2), [3], [1], [2])
case(5, aten.conv_transpose2d.input, rand(2, 2, 4, 2), rand(2, 2, 4, 6), None, [2, 2], [1, 2])

# the operator beneath them
case(5, aten.convolution.default, rand(2, 4, 4, 4), rand(2, 4, 3, 3), rand(2), [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
case(4, aten.convolution.default, rand(2, 4, 3), rand(4, 2, 2), None, [2], [1], [1], True, [0], 2)
