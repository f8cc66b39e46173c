"""Names for the dims of a call: what rules that are written as a function of the call have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..graph import Op, Value
from ..layout import digits_size
from ..torch_private import assert_async
from .notation import Assignment, Bound
from .registry import Local, Rule, register

__all__ = [
    "all_whole",
    "compound",
    "cut_size",
    "dims_of",
    "filling",
    "lent",
    "listed",
    "named",
    "normal",
    "operand",
    "operands",
    "refine",
    "send",
    "unpadded",
    "whole",
    "wide",
]


def named(count: int, prefix: str = "d") -> list[str]:
    """Factor names for `count` dims."""
    return [f"{prefix}{i}" for i in range(count)]


def whole(names: Iterable[str]) -> list[str]:
    """The same dims, kept whole."""
    return [name if name == "1" else f"{name}!" for name in names]


def lent(shape: Sequence[int], used: Sequence[int]) -> list[str]:
    """Factor names for a tensor of which the dtype alone is read, beside one of shape `used` whose dims are `named`:
    dims of equal size share a factor, so that the tensor need not be gathered for nothing."""
    return [f"d{i}" if i < len(used) and used[i] == size else f"lent{i}!" for i, size in enumerate(shape)]


def operand(names: Sequence[str]) -> str:
    """The text of one operand. A scalar is written ``...``, since an empty text means that there is no operand."""
    return " ".join(names) or "..."


def operands(op: Op, **texts: str) -> str:
    """The texts of an operator's tensor arguments, by their schema names, in the order of its inputs."""
    given = [*zip(op.argument_names, op.args), *op.kwargs.items()]
    return ", ".join(texts[name] for name, argument in given if isinstance(argument, Value))


def normal(dim: int, rank: int) -> int:
    """A dim counted from 0."""
    return dim % rank if rank else 0


def dims_of(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """An argument that names dims, counted from 0 and ascending; none named means all."""
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(rank))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({normal(d, rank) for d in dims})) if rank else ()


def listed(op: Op, name: str = "dim") -> tuple[int, ...]:
    """The dims that an operator's argument names, of its first input; all where it names none or has no such one."""
    return dims_of(op.argument(name), len(op.inputs[0].shape))


def cut_size(bound: Bound, assignment: Assignment, names: Iterable[str] | None = None) -> int:
    """Into how many parts the named factors are cut together; all factors where none are named."""
    wanted = None if names is None else set(names)
    return math.prod(
        digit.size
        for factor, digits in zip(bound.factors, assignment.digits)
        if wanted is None or factor.name in wanted
        for digit in digits
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that terms are summed in, so that no term is rounded before the sum is complete."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def all_whole(op: Op) -> str:
    """The notation of a call of which nothing can be split."""
    sides = [
        ", ".join(operand(whole(named(len(v.shape), f"{side}{i}_"))) for i, v in enumerate(values))
        for side, values in (("i", op.inputs), ("o", op.outputs))
    ]
    return " -> ".join(sides)


def compound(factors: Sequence[str]) -> str:
    """The text of a dim made of several factors, the first major."""
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def refine(before: Sequence[int], after: Sequence[int]) -> tuple[list[str], list[str], dict[str, int]]:
    """The dims of two shapes of the same elements in the same order, in common factors, major first.

    (32, 16, 4) and (512, 4) are ``f0 f1 f2`` and ``(f0 f1) f2``. Where two dims have no common refinement, what they
    share in front can be split and what is left stays whole: (6, 4) and (8, 3) are ``(f0 w0!) w2!`` and
    ``(f0 w1!) w3!`` with f0 = 2.

    Returns:
        The text of each dim of both, and the sizes of the factors.
    """
    if math.prod(before) == 0:
        return whole(named(len(before), "b")), whole(named(len(after), "a")), {}
    sizes: dict[str, int] = {}
    sides = (tuple(before), tuple(after))
    texts: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    at, rest = [-1, -1], [1, 1]

    def fetch(side: int) -> None:
        while rest[side] == 1 and at[side] + 1 < len(sides[side]):
            at[side] += 1
            rest[side] = sides[side][at[side]]

    def keep(side: int, size: int) -> None:
        if size > 1:
            name = f"w{len(sizes)}"
            sizes[name] = size
            texts[side][at[side]].append(name + "!")

    while True:
        fetch(0), fetch(1)
        if rest == [1, 1]:
            return [compound(t) for t in texts[0]], [compound(t) for t in texts[1]], sizes
        shared = math.gcd(*rest)
        divides = shared in rest
        if shared > 1:
            name = f"f{len(sizes)}"
            sizes[name] = shared
            for side in (0, 1):
                texts[side][at[side]].append(name)
                rest[side] //= shared
        if not divides:
            keep(0, rest[0]), keep(1, rest[1])
            while rest[0] != rest[1]:
                short = 0 if rest[0] < rest[1] else 1
                at[short] += 1
                keep(short, sides[short][at[short]])
                rest[short] *= sides[short][at[short]]
            rest[:] = [1, 1]


# ----------------------------------------------------------------------------------------------------
# Where a rank's slice of a dim lies, as data: the program is the same on all ranks, the numbers it works on are not.
#
#     positions   0, 1, …, size-1                cut as the dim is: each rank gets those of its slice
#     starts      0, n, 2n, …   n = ⌈size / cut⌉ one entry a part: each rank gets where its own begins
#
# An operator of ours that works on a part of a dim names it ``(p q!)`` in its notation and the starts ``p``: by as many
# parts as there are starts, which are cut as the dim is. Given all starts it reads the first, 0, and all of the dim is
# its part: whole, it is the operator that it stands for.
# ----------------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")


def local_operator(schema: str) -> Callable[[Callable], Any]:
    """An operator ``torch.ops.shardwright.…`` written in torch's own ones, from which its gradient follows."""
    name = schema[: schema.index("(")]

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
    """The length of the parts of a dim: of all but the last, which are shorter, or empty, where they do not divide
    it."""
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


# ----------------------------------------------------------------------------------------------------
# What stands in the padding of a dim, made to be what an operator needs there.
#
# A dim whose cut does not divide it is padded to parts of one length, of which the last are not full. Whatever
# operators leave in the padding, `unpadded` puts one number there, and lets no gradient out of it.
# ----------------------------------------------------------------------------------------------------


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


# ----------------------------------------------------------------------------------------------------
# The operator at which a value leaves a stage of a pipeline: an identity that moves nothing and takes no open sum
# along. ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("shardwright::send", mutates_args=())
def _send(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_send.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


#: The operator, as it stands in graphs.
send = torch.ops.shardwright.send.default


def _alias(op: Op, bound: Bound, assignment: Assignment) -> Local:
    return Local(torch.ops.aten.alias.default, (op.inputs[0],), {})


register((send,), Rule("... -> ...", view=True, localize=_alias))
