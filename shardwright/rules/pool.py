"""Pooling. Batch and channels may be cut, spatial dims as `window` says.

One window that is a whole dim makes a mean over it, and over a cut dim a sum divided by the global count. Adaptive
means of sizes a·g and b·g, g their greatest common divisor, take each stretch of a elements to b: the dim may be cut
between stretches. Where indices come out, which count in the whole plane, spatial dims stay whole.
"""

from __future__ import annotations

import math

import torch

from ..graph import Op
from .dims import cut_size, named, operand, wide, whole
from .notation import Assignment, Bound
from .registry import Expansion, Local, Rule, local_output_shape, register
from .window import Texts, per_dim, spatial, windowed, windows_of

aten = torch.ops.aten


def _lead(op: Op) -> list[str]:
    """Names of the dims in front of the spatial ones."""
    return ["n", "c"][2 - (len(op.inputs[0].shape) - spatial(op)):]


def _planes(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The spatial sizes of the input and of the output."""
    count = spatial(op)
    return op.inputs[0].shape[-count:], op.outputs[0].shape[-count:]


def _slid(op: Op) -> Texts:
    before, after = _planes(op)
    return windowed(op, before, after, per_dim(op.argument("kernel_size"), len(before)))


def _spread(op: Op) -> Texts:
    """Adaptive windows."""
    texts, out, sizes = [], [], {}
    for i, (before, after) in enumerate(zip(*_planes(op))):
        shared = math.gcd(before, after)
        texts.append(f"(o{i} r{i}!)")
        out.append(f"(o{i} m{i}!)")
        sizes |= {f"o{i}": shared, f"r{i}": before // shared, f"m{i}": after // shared}
    return texts, out, sizes


def _covered(op: Op) -> list[int]:
    """The spatial dims that one window takes in as they are."""
    before, after = _planes(op)
    if "adaptive" in op.kind:
        return [i for i, size in enumerate(after) if size == 1]
    if op.argument("divisor_override") is not None:
        return []
    windows = windows_of(op, per_dim(op.argument("kernel_size"), len(before)))
    return [i for i, (_, padding, extent) in enumerate(windows) if (extent, padding, after[i]) == (before[i], 0, 1)]


def _maximum_text(op: Op) -> tuple[str, dict[str, int]]:
    before, after, sizes = _slid(op)
    return f"{operand(_lead(op) + before)} -> {operand(_lead(op) + after)}", sizes


def _mean_text(op: Op) -> tuple[str, dict[str, int]]:
    before, after, sizes = _spread(op) if "adaptive" in op.kind else _slid(op)
    for i in _covered(op):
        before[i], after[i] = f"h{i}", "1"
    return f"{operand(_lead(op) + before)} -> {operand(_lead(op) + after)}", sizes


def _local_adaptive(op: Op, bound: Bound, assignment: Assignment) -> Local:
    plane = list(local_output_shape(bound, assignment)[-spatial(op):])
    return Local(op.target, (op.inputs[0], plane), {})


def _expand_mean(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    """First the mean over the dims that one window takes in, then the windows of the others."""
    covered, (before, after) = _covered(op), _planes(op)
    if cut_size(bound, assignment, [f"h{i}" for i in covered]) == 1:
        return None
    x, out, lead = op.inputs[0], op.outputs[0].dtype, len(_lead(op))
    dims, elements = [lead + i for i in covered], math.prod(before[i] for i in covered)

    def work(b):
        total = b.call(aten.sum.dim_IntList, x, dims, True, dtype=wide(out))
        mean = b.to(b.call(aten.div.Tensor, total, elements), out)
        if len(covered) == len(before):
            return mean
        if "adaptive" in op.kind:
            return b.call(op.target, mean, list(after))
        kernel = per_dim(op.argument("kernel_size"), len(before))
        strides = [stride for stride, _, _ in windows_of(op, kernel)]
        left = [[1 if i in covered else size for i, size in enumerate(sizes)] for sizes in (kernel, strides)]
        return b.call(op.target, mean, *left, *map(op.argument, ("padding", "ceil_mode", "count_include_pad")))
    return work


def _plane_text(op: Op) -> str:
    """Planes stay whole; further inputs and outputs have the same batch and channels."""
    lead = _lead(op)
    sides = [", ".join(operand([*lead, *whole(named(len(v.shape) - len(lead), f"{letter}{i}_"))])
                       for i, v in enumerate(side)) for letter, side in (("s", op.inputs), ("o", op.outputs))]
    return " -> ".join(sides)


register((aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default), Rule(_maximum_text))
register((aten.avg_pool1d.default, aten.avg_pool2d.default, aten.avg_pool3d.default),
         Rule(_mean_text, linear=True, expand=_expand_mean))
register((aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default, aten.adaptive_avg_pool3d.default),
         Rule(_mean_text, linear=True, localize=_local_adaptive, expand=_expand_mean))
register((aten.max_pool1d_with_indices.default, aten.max_pool2d_with_indices.default,
          aten.max_pool3d_with_indices.default, aten.adaptive_max_pool1d.default, aten.adaptive_max_pool2d.default,
          aten.adaptive_max_pool3d.default, aten.fractional_max_pool2d.default, aten.fractional_max_pool3d.default,
          aten.max_unpool2d.default, aten.max_unpool3d.default), Rule(_plane_text))
