"""Where a rank's slice of a dim lies, as data: the program is the same on all ranks, the numbers it works on are not.

    positions   0, 1, …, size-1                cut as the dim is: each rank gets those of its slice
    starts      0, n, 2n, …   n = ⌈size / cut⌉ one entry a part: each rank gets where its own begins

An operator of ours that works on a part of a dim names it ``(p q!)`` in its notation and the starts ``p``: by as many
parts as there are starts, which are cut as the dim is. Given all starts it reads the first, 0, and all of the dim is
its part: whole, it is the operator that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..graph import Op, Value
from ..layout import digits_size
from ..torch_private import assert_async
from .dims import named, operand
from .registry import Rule, register

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")


def local_operator(schema: str) -> Callable[[Callable], Any]:
    """An operator ``torch.ops.shardwright.…`` written in torch's own ones, from which its gradient follows."""
    name = schema[:schema.index("(")]

    def define(function: Callable) -> Any:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        return getattr(torch.ops.shardwright, name).default
    return define


@local_operator("count(Tensor like, int size, int step) -> Tensor")
def count(like: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """0, step, 2 step, …: `size` numbers, on the device of `like`."""
    return torch.arange(0, size * step, step, device=like.device)


def _count_text(op: Op) -> str:
    return f"{operand(named(len(op.inputs[0].shape)))} -> count!"


def positions(b, like: Value, value: Value, dim: int) -> Value:
    """The positions of a dim of `value`, cut as it is. `like` lends its device."""
    made = b.call(count, like, value.shape[dim], 1)
    return b.lay(made, [b.layouts[value.name].dims[dim]])


def starts(b, like: Value, value: Value, dim: int) -> Value:
    """Where the parts of a dim of `value` begin, one a rank's part. `like` lends its device."""
    digits = b.layouts[value.name].dims[dim]
    parts = digits_size(digits)
    return b.lay(b.call(count, like, parts, part_length(value.shape[dim], parts)), [digits])


def part_length(size: int, parts: int) -> int:
    """The length of the parts of a dim: of all but the last, which are shorter, or empty, where they do not divide it."""
    return -(-size // parts)


def within(index: torch.Tensor, starts: torch.Tensor, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether an index into a dim of `size` lies in this rank's part of `length`, and its place there; 0 elsewhere.

    Raises:
        RuntimeError: an index that lies in no rank's part (on an accelerator when it is next waited for).
    """
    assert_async(((index >= 0) & (index < size)).all(), f"an index is out of range: the dim has size {size}")
    place = index - starts[0]
    inside = (place >= 0) & (place < length)
    return inside, torch.where(inside, place, 0)


register((count,), Rule(_count_text, reduction="none", neutral=0))
