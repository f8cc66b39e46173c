"""Images resampled: interpolation, grids.

Interpolation by sizes a·g and b·g takes stretches of a elements to b. Nearest neighbours keep within their stretch
(where a/b is a power of two, so that positions are exact), and a dim that keeps its size is left as it is: those may be
cut between stretches. Everything else reads its neighbours, and its spatial dims stay whole.
"""

from __future__ import annotations

import math

import torch

from ..graph import Op
from ..torch_private import operators
from .dims import named, operand, whole
from .notation import Assignment, Bound
from .registry import Local, Rule, local_output_shape, register
from .window import per_dim, spatial

aten = torch.ops.aten


def _keeps_apart(op: Op, before: int, after: int, scale: float | None) -> bool:
    """Whether interpolation of `before` to `after` elements reads within the stretches that both have in common."""
    shared = math.gcd(before, after)
    stretch, made = before // shared, after // shared
    if scale is not None and scale * stretch != made:
        return False  # positions follow the scale, which the rounded sizes hide
    if "nearest" in op.kind:
        return (stretch * made).bit_count() == 1
    return stretch == made == 1 and not op.argument("align_corners")  # aligned, a slice of 1 has no scale


def _interpolated(op: Op) -> tuple[str, dict[str, int]]:
    count = spatial(op)
    before, after, sizes = [], [], {}
    scales = per_dim(op.argument("scale_factors"), count)
    for i, (size, out, scale) in enumerate(zip(op.inputs[0].shape[2:], op.outputs[0].shape[2:], scales)):
        if _keeps_apart(op, size, out, scale):
            shared = math.gcd(size, out)
            before.append(f"(g{i} a{i}!)")
            after.append(f"(g{i} b{i}!)")
            sizes |= {f"g{i}": shared, f"a{i}": size // shared, f"b{i}": out // shared}
        else:
            before.append(f"s{i}!")
            after.append(f"o{i}!")
    return f"n c {operand(before)} -> n c {operand(after)}", sizes


def _local_interpolated(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.args, op.kwargs
    if op.argument("output_size") is not None:
        args, kwargs = op.with_arguments(output_size=list(local_output_shape(bound, assignment)[2:]))
    return Local(op.target, args, kwargs)


def _sampled(op: Op) -> str:
    """Any position of the grid may name any element."""
    count = len(op.inputs[0].shape) - 2
    out = operand(named(count, "o"))
    return f"n c {operand(whole(named(count, 's')))}, n {out} xy! -> n c {out}"


def _grid(op: Op) -> str:
    return f"n rows! columns! -> n {operand(whole(named(len(op.outputs[0].shape) - 2, 'o')))} rows!"


def _local_grid(op: Op, bound: Bound, assignment: Assignment) -> Local:
    size = [local_output_shape(bound, assignment)[0], *op.argument("size")[1:]]
    return Local(op.target, (op.inputs[0], size, op.argument("align_corners")), {})


register((aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
          aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_trilinear3d.vec,
          aten.upsample_bicubic2d.vec,
          *operators(*(f"_upsample_{way}.vec" for way in ("nearest_exact1d", "nearest_exact2d", "nearest_exact3d",
                                                          "bilinear2d_aa", "bicubic2d_aa", "lanczos2d_aa")))),
         Rule(_interpolated, linear=True, localize=_local_interpolated))
register((aten.grid_sampler.default,), Rule(_sampled))
register((aten.affine_grid_generator.default,), Rule(_grid, linear=True, localize=_local_grid))
