"""Products of groups of rows, each with a matrix of its own: what mixtures of experts are made of.

    out[i, n] = Σk x[i, k] · w[group of i, k, n]          where each group ends is data, one number a group

The widths k and n may be cut, k leaves a partial sum. Rows stay whole where groups are made of them, and so do groups.
"""

from __future__ import annotations

import torch

from ..graph import Op
from .dims import all_whole
from .registry import Rule, register
from ..torch_private import operators

__all__ = ["FLOPS"]

aten = torch.ops.aten

#: Bytes that torch's kernel wants the strides of its operands to be multiples of.
_ALIGNED = 16


def _grouped(op: Op) -> str | tuple[str, dict[str, int]]:
    """Groups are rows of the first operand, columns of the second, what is contracted, or matrices side by side. Widths are
    cut into parts of whole units that the kernel's alignment allows."""
    x, w = op.inputs[:2]
    if op.argument("bias") is not None:
        return all_whole(op)
    ranks, sizes = (len(x.shape), len(w.shape)), {}

    def width(name: str, size: int) -> str:
        unit = max(_ALIGNED // x.dtype.itemsize, 1)
        if size % unit:
            return f"{name}!"
        sizes[name], sizes[f"{name}unit"] = size // unit, unit
        return f"({name} {name}unit!)"

    k, n = width("k", x.shape[-1]), width("n", w.shape[-1])
    m = width("m", x.shape[-2]) if ranks == (2, 2) else "m"
    text = {(2, 3): f"rows! {k}, e! {k} {n}, e! -> rows! {n}",
            (3, 2): f"e! m {k}, {k} columns!, e! -> m columns!",
            (2, 2): f"{m} rows!, rows! {n}, e! -> e! {m} {n}",
            (3, 3): f"e {m} {k}, e {k} {n} -> e {m} {n}"}.get(ranks)
    if text is None or text.count(",") + 1 != len(op.inputs):
        return all_whole(op)
    return text, {name: size for name, size in sizes.items() if name in text.replace("(", " ").replace("!", " ")
                  .replace(")", " ").split()}


def _flops(x: torch.Tensor, w: torch.Tensor, *args: object, **kwargs: object) -> int:
    """Each row meets one matrix."""
    rows = x.shape[0] * x.shape[1] if x.dim() == w.dim() == 3 else x.shape[-2]
    return 2 * rows * x.shape[-1] * w.shape[-1]


_FALLBACK = "transformers::grouped_mm_fallback"

#: By an operator's name: its flops of its arguments, of which torch's own table does not know.
FLOPS = {"aten::_grouped_mm": _flops, _FALLBACK: _flops,
         f"{_FALLBACK}_backward": lambda *args, **kwargs: 2 * _flops(*args, **kwargs)}

register(operators("_grouped_mm"), Rule(_grouped, neutral=0))
register((_FALLBACK,), Rule("rows! k, e! k n, e! -> rows! n", neutral=0))
