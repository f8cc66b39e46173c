"""Convolutions and transposed ones.

Factors stand in the device matrix in the order n, groups, c_in, h, w, c_out. Cut input channels leave a partial sum;
the bias is added once, to the finished sum. Channels of groups are ``(g ci)`` and ``(g co)``: cuts fall between groups
first, and a rank convolves the groups that it holds. The kernel stays whole; spatial dims are as `window` says, and a
transposed convolution is its mirror image.
"""

from __future__ import annotations

import torch

from ..graph import Op
from .dims import compound, cut_size, named, operand, operands
from .notation import Assignment, Bound
from .registry import Expansion, Local, Rule, register
from .window import windowed

aten = torch.ops.aten


def _is_transposed(op: Op) -> bool:
    return op.kind.startswith("conv_transpose") or bool(op.argument("transposed", False))


def _text(op: Op) -> tuple[str, dict[str, int]]:
    x, weight, out = op.argument("input").shape, op.argument("weight").shape, op.outputs[0].shape
    count, groups, is_transposed = len(weight) - 2, op.argument("groups"), _is_transposed(op)
    lie, slide = (out, x) if is_transposed else (x, out)
    lies, slides, sizes = windowed(op, lie[-count:], slide[-count:], weight[2:])
    before, after = (slides, lies) if is_transposed else (lies, slides)
    group = ["g"] * (groups > 1)
    inward, outward = compound([*group, "ci"]), compound([*group, "co"])
    filters = [inward, "co"] if is_transposed else [outward, "ci"]
    batch = ["n"] * (len(x) - count - 1)
    texts = operands(op, input=operand([*batch, inward, *before]),
                     weight=operand([*filters, *(f"{k}!" for k in named(count, "k"))]),
                     bias=compound([*group, "co?"]))
    channels = {"g": groups, "ci": x[-count - 1] // groups, "co": out[-count - 1] // groups}
    return f"{texts} -> {operand([*batch, outward, *after])}", channels | sizes


def _local(op: Op, bound: Bound, assignment: Assignment) -> Local:
    args, kwargs = op.with_arguments(groups=op.argument("groups") // cut_size(bound, assignment, ["g"]))
    return Local(op.target, args, kwargs)


def _bias_after(op: Op, bound: Bound, assignment: Assignment) -> Expansion | None:
    bias = op.argument("bias")
    if bias is None or cut_size(bound, assignment, ["ci"]) == 1:
        return None
    args, kwargs = op.with_arguments(bias=None)
    beside = [*bias.shape, *(1 for _ in op.argument("weight").shape[2:])]
    return lambda b: b.call(aten.add.Tensor, b.call(op.target, *args, **kwargs),
                            b.call(aten.view.default, bias, beside))


register((aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default,
          aten.conv3d.padding, aten.conv_transpose1d.default, aten.conv_transpose2d.input,
          aten.conv_transpose3d.input, aten.convolution.default),
         Rule(_text, localize=_local, expand=_bias_after, neutral=0))
