"""Names for the dims of a call: what rules that are written as a function of the call have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ..graph import Op, Value
from .notation import Assignment, Bound

__all__ = ["all_whole", "compound", "cut_size", "dims_of", "lent", "listed", "named", "normal", "operand", "operands",
           "refine", "whole", "wide"]


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
    return math.prod(digit.size for factor, digits in zip(bound.factors, assignment.digits)
                     if wanted is None or factor.name in wanted for digit in digits)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that terms are summed in, so that no term is rounded before the sum is complete."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def all_whole(op: Op) -> str:
    """The notation of a call of which nothing can be split."""
    sides = [", ".join(operand(whole(named(len(v.shape), f"{side}{i}_"))) for i, v in enumerate(values))
             for side, values in (("i", op.inputs), ("o", op.outputs))]
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
