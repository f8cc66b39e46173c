"""What stands in the padding of a dim, made to be what an operator needs there.

A dim whose cut does not divide it is padded to parts of one length, of which the last are not full. Whatever operators
leave in the padding, `unpadded` puts one number there, and lets no gradient out of it.
"""

from __future__ import annotations

import torch

from ..graph import Op
from .dims import named, operand
from .positions import local_operator
from .registry import Rule, register

__all__ = ["filling", "unpadded"]


@local_operator("unpadded(Tensor x, Tensor starts, int dim, int size, Scalar fill) -> Tensor")
def unpadded(x: torch.Tensor, starts: torch.Tensor, dim: int, size: int, fill: float) -> torch.Tensor:
    """`x` where its place in a dim lies below `size`, `fill` beyond; this rank's part begins at ``starts[0]``."""
    places = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim))
    return torch.where(places < size - starts[0], x, fill)


def filling(dtype: torch.dtype, neutral: float) -> float | int | bool:
    """A number as a type has it: in place of an infinity the end of its range."""
    if dtype.is_floating_point or dtype.is_complex:
        return float(neutral)
    if dtype == torch.bool:
        return neutral > 0
    ends = torch.iinfo(dtype)
    return int(min(max(neutral, ends.min), ends.max))


def _text(op: Op) -> tuple[str, dict[str, int]]:
    x, starts = op.inputs
    names, dim, parts = named(len(x.shape)), op.argument("dim"), starts.shape[0]
    names[dim] = "(p q!)"
    return f"{operand(names)}, p -> {operand(names)}", {"p": parts, "q": x.shape[dim] // parts}


register((unpadded,), Rule(_text))
