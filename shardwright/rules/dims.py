"""Dims of a call: names, positions in a slice, and padding, shared by rules that are functions of the call.

1. *Names*: the factor names of the dims, and the text of an operand.

2. *Positions*: the place of a rank's slice in a dim, as data. The program is the same on all ranks; the numbers that it
   computes with differ.

       positions   0, 1, …, size-1                cut like the dim: each rank gets the positions of its slice
       starts      0, n, 2n, …   n = ⌈size / cut⌉ one entry a part: each rank gets the start of its part

   A local operator on a part of a dim names the dim ``(p q!)`` in its notation and the starts ``p``. There are as many
   parts as starts, and the starts are cut like the dim. With all starts, the operator reads the first, 0, and its part
   is the whole dim: it then equals the operator that it replaces.

3. *Padding*: a dim whose cut does not divide it is padded to parts of one length, the last of which are not full.
   Padding elements are undefined; `unpadded` fills them with one number and lets no gradient out of them.

4. *send*: the identity at which a value leaves a stage of a pipeline; it moves nothing, and completes partial sums.

Example: a dim of 10 cut in 4 has parts of ⌈10 / 4⌉ = 3 elements, 12 in all: the starts are 0, 3, 6 and 9, the last rank
has the positions 9, 10 and 11, and the last two of them are padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from ..graph import Op, Value
from ..layout import digits_size
from ..torch_private import assert_async
from .notation import Assignment, Bound
from .registry import Builder, Local, Rule, register

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
    """The names of the same dims, kept whole."""
    return [name if name == "1" else f"{name}!" for name in names]


def lent(shape: Sequence[int], used: Sequence[int]) -> list[str]:
    """Factor names for a tensor of which only the dtype is read, beside a tensor of shape `used` with `named` dims.

    Dims of equal size share a factor, so that the tensor need not be gathered.
    """
    return [f"d{i}" if i < len(used) and used[i] == size else f"lent{i}!" for i, size in enumerate(shape)]


def operand(names: Sequence[str]) -> str:
    """The text of one operand. A scalar is written ``...``, since an empty text means no operand."""
    return " ".join(names) or "..."


def operands(op: Op, **texts: str) -> str:
    """The texts of an operator's tensor arguments, given by their schema names, in the order of its inputs."""
    arguments = [*zip(op.argument_names, op.args), *op.kwargs.items()]
    return ", ".join(texts[name] for name, argument in arguments if isinstance(argument, Value))


def normal(dim: int, rank: int) -> int:
    """A dim counted from 0."""
    return dim % rank if rank else 0


def dims_of(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """The dims named by an argument, counted from 0 and ascending; all dims where it names none."""
    if dims is None or (not isinstance(dims, int) and not dims):
        return tuple(range(rank))
    dims = (dims,) if isinstance(dims, int) else dims
    return tuple(sorted({normal(d, rank) for d in dims})) if rank else ()


def listed(op: Op, name: str = "dim") -> tuple[int, ...]:
    """The dims of the first input that an operator's argument names; all where it names none or does not exist."""
    return dims_of(op.argument(name), len(op.inputs[0].shape))


def cut_size(bound: Bound, assignment: Assignment, names: Iterable[str] | None = None) -> int:
    """The number of parts into which the named factors are cut together; all factors where none are named."""
    wanted = None if names is None else set(names)
    return math.prod(
        digit.size
        for factor, digits in zip(bound.factors, assignment.digits)
        if wanted is None or factor.name in wanted
        for digit in digits
    )


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which terms are summed, so that no term is rounded before the sum is complete."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def all_whole(op: Op) -> str:
    """The notation of a call in which no dim can be split."""
    sides = [
        ", ".join(operand(whole(named(len(v.shape), f"{side}{i}_"))) for i, v in enumerate(values) if v is not None)
        for side, values in (("i", op.inputs), ("o", op.outputs))
    ]
    return " -> ".join(sides)


def compound(factors: Sequence[str]) -> str:
    """The text of a dim made of several factors, the first major."""
    return "1" if not factors else factors[0] if len(factors) == 1 else f"({' '.join(factors)})"


def refine(before: Sequence[int], after: Sequence[int]) -> tuple[list[str], list[str], dict[str, int]]:
    """The common factors of two shapes of the same elements in the same order, major first.

    (32, 16, 4) and (512, 4) are ``f0 f1 f2`` and ``(f0 f1) f2``. Where two dims have no common refinement, their
    leading common factor can be split and the rest stays whole: (6, 4) and (8, 3) are ``(f0 w0!) w2!`` and
    ``(f0 w1!) w3!`` with f0 = 2.

    Returns:
        The text of each dim of both shapes, and the sizes of the factors.
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
        fetch(0)
        fetch(1)
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
            keep(0, rest[0])
            keep(1, rest[1])
            while rest[0] != rest[1]:
                short = 0 if rest[0] < rest[1] else 1
                at[short] += 1
                keep(short, sides[short][at[short]])
                rest[short] *= sides[short][at[short]]
            rest[:] = [1, 1]


# -- positions

_LIBRARY = torch.library.Library("shardwright", "FRAGMENT")


def local_operator(schema: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Define an operator ``torch.ops.shardwright.…`` by torch's own operators, which give its gradient."""
    name = schema[: schema.index("(")]

    def define(function: Callable[..., object]) -> Callable[..., object]:
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
        operator: Callable[..., object] = getattr(torch.ops.shardwright, name).default
        return operator

    return define


@local_operator("count(Tensor like, int size, int step) -> Tensor")
def count(like: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """0, step, 2 step, …: `size` numbers, on the device of `like`."""
    return torch.arange(0, size * step, step, device=like.device)


def _count_text(op: Op) -> str:
    return f"{operand(named(len(op.inputs[0].shape)))} -> count!"


def positions(b: Builder, like: Value, value: Value, dim: int) -> Value:
    """The positions of a dim of `value`, cut like the dim. `like` gives the device."""
    made = b.call(count, like, value.shape[dim], 1)
    return b.lay(made, [b.layouts[value.name].tensor_dims[dim]])


def starts(b: Builder, like: Value, value: Value, dim: int) -> Value:
    """The starts of the parts of a dim of `value`, one for each part. `like` gives the device."""
    digits = b.layouts[value.name].tensor_dims[dim]
    parts = digits_size(digits)
    return b.lay(b.call(count, like, parts, part_length(value.shape[dim], parts)), [digits])


def part_length(size: int, parts: int) -> int:
    """The length of the parts of a dim; where they do not divide the dim, the last parts are shorter or empty."""
    return -(-size // parts)


def within(index: torch.Tensor, starts: torch.Tensor, length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask of the indices in this rank's part of a dim, and the places of the indices in the part (0 outside).

    Args:
        index: indices into a dim of `size`.
        starts: the start of this rank's part, first.
        length: the length of the part.
        size: the size of the whole dim.

    Raises:
        RuntimeError: an index outside of the dim (on an accelerator when it is next waited for).
    """
    assert_async(((index >= 0) & (index < size)).all(), f"an index is out of range: the dim has size {size}")
    place = index - starts[0]
    inside = (place >= 0) & (place < length)
    return inside, torch.where(inside, place, 0)


register((count,), Rule(_count_text, reduction="none", neutral=0))


# -- padding


@local_operator("unpadded(Tensor x, Tensor starts, int dim, int size, Scalar fill) -> Tensor")
def unpadded(x: torch.Tensor, starts: torch.Tensor, dim: int, size: int, fill: float) -> torch.Tensor:
    """`x` where its position in a dim is below `size`, `fill` beyond; this rank's part begins at ``starts[0]``."""
    places = torch.arange(x.shape[dim], device=x.device).view(-1, *[1] * (x.dim() - 1 - dim))
    return torch.where(places < size - starts[0], x, fill)


def filling(dtype: torch.dtype, neutral: float) -> float | int | bool:
    """A number in a dtype; an infinity becomes the end of the range of an integer dtype."""
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


# -- the end of a stage


@torch.library.custom_op("shardwright::send", mutates_args=())
def _send(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@_send.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


#: The operator as recorded in graphs.
send = torch.ops.shardwright.send.default


def _alias(op: Op, bound: Bound, assignment: Assignment) -> Local:
    return Local(torch.ops.aten.alias.default, (op.inputs[0],), {})


register((send,), Rule("... -> ...", view=True, localize=_alias))
