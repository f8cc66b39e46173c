"""Windows over the spatial dims of a tensor, which convolutions, pooling and patches share.

    window o of a dim has the elements  o·stride - padding + dilation·(0 … kernel-1)

A dim falls into stretches of `stride` elements, and window o keeps within stretch o, where nothing is padded and
dilation·(kernel-1) < stride. If the stretches fill the dim, it is ``(o r!)``: it may be cut between stretches, and each
slice is windowed by the same call. Otherwise the dim stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..graph import Op

__all__ = ["Texts", "per_dim", "spatial", "windowed", "windows_of"]

#: The texts of the dims that windows lie on, of the dims that count windows, and the sizes of their factors.
Texts = tuple[list[str], list[str], dict[str, int]]


def spatial(op: Op) -> int:
    """How many spatial dims an operator has: its name says so, as in ``max_pool2d_with_indices``."""
    return next(int(letter) for letter in op.kind if letter.isdigit())


def per_dim(argument: Any, count: int) -> tuple:
    """An argument with one entry a spatial dim, where one for all may be given."""
    listed = tuple(argument) if isinstance(argument, (tuple, list)) else (argument,)
    return listed * count if len(listed) == 1 else listed


def windows_of(op: Op, kernel: Sequence[int]) -> list[tuple[int, int, int]]:
    """The (stride, padding, extent) of an operator's windows in each spatial dim; an extent is dilation·(kernel-1) + 1.

    Padding by name counts as none: "valid" is none, and "same" pads nothing where the kernel is 1, the one case in
    which its windows keep apart.
    """
    count, padding = len(kernel), op.argument("padding", 0)
    strides = per_dim(op.argument("stride") or kernel, count)
    paddings = per_dim(0 if isinstance(padding, str) else padding, count)
    dilations = per_dim(op.argument("dilation", 1), count)
    return [(s, p, d * (k - 1) + 1) for s, p, d, k in zip(strides, paddings, dilations, kernel)]


def windowed(op: Op, sizes: Sequence[int], counts: Sequence[int], kernel: Sequence[int]) -> Texts:
    """The spatial dims of an operator's windows.

    Args:
        sizes: of the dims that the windows lie on: what a convolution reads, what its transpose writes.
        counts: how many windows each dim has.
    """
    before, after, factors = [], [], {}
    for i, (size, windows, (stride, padding, extent)) in enumerate(zip(sizes, counts, windows_of(op, kernel))):
        if padding == 0 and extent <= stride and size == windows * stride:
            before.append(f"(o{i} r{i}!)")
            after.append(f"o{i}")
            factors |= {f"o{i}": windows, f"r{i}": stride}
        else:
            before.append(f"s{i}!")
            after.append(f"o{i}!")
    return before, after, factors
