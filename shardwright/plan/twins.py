"""Two captures of one model, of batches of unlike sizes, operator by operator.

They are one program. But an operator that gives back what it is given is not there where torch leaves it out: what is
contiguous as it is, what is expanded to the shape it has. Where a batch has one row there are fewer of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..graph import Graph, Op, map_values

__all__ = ["differences", "pairs"]

aten = torch.ops.aten

#: Operators that may be left out.
_LEFT_OUT = (aten.contiguous.default, aten.expand.default)

#: Arguments that the shapes of the results tell.
_SIZES = ("size", "shape", "sizes", "repeats")


def pairs(graph: Graph, wide: Graph, refused: Callable[[Op, str], Exception]) -> Iterator[tuple[Op, Op | None]]:
    """Each operator of the one with its twin of the other; None for one that is left out there.

    Twins are called at the same line. Where the two captures were made by calls of the model at different lines of the user's
    loop, the loss's operators have those lines: then lines are not compared.

    Args:
        refused: the error for an operator and what is wrong with it, raised where the two are not one program.
    """
    try:
        found = list(_pairs(graph, wide, refused, _alike))
    except _Unlike as unlike:
        try:
            found = list(_pairs(graph, wide, refused, _alike_anywhere))
        except _Unlike:
            raise unlike.error from None
    yield from found


class _Unlike(Exception):
    """Two captures that are not one program."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def _pairs(graph: Graph, wide: Graph, refused: Callable[[Op, str], Exception], alike: Callable[[Op, Op], bool]
           ) -> Iterator[tuple[Op, Op | None]]:
    twins = list(reversed(wide.ops))
    for op in graph.ops:
        while twins and not alike(op, twins[-1]) and twins[-1].target in _LEFT_OUT:
            twins.pop()
        if twins and alike(op, twins[-1]):
            yield op, twins.pop()
        elif op.target in _LEFT_OUT:
            yield op, None
        else:
            raise _Unlike(refused(op, f"with more rows the model calls {twins[-1].kind if twins else 'nothing'} here"))
    if further := [twin for twin in twins if twin.target not in _LEFT_OUT]:
        raise _Unlike(refused(further[-1], "it is called with more rows alone"))


def _alike(op: Op, twin: Op) -> bool:
    return repr(op.target) == repr(twin.target) and (op.module, op.source) == (twin.module, twin.source)


def _alike_anywhere(op: Op, twin: Op) -> bool:
    return repr(op.target) == repr(twin.target) and op.module == twin.module


def differences(op: Op, twin: Op) -> list[tuple[str, Any, Any]]:
    """The arguments, but for sizes that the shapes of the results tell, in which two captures of a call differ: their
    name and both."""
    sliced = op.kind in ("slice", "narrow") and op.inputs[0].shape == op.outputs[0].shape  # all of a dim
    found = []
    names = op.argument_names or tuple(str(i) for i in range(len(op.args)))
    mine, theirs = (map_values({**dict(zip(names, o.args)), **o.kwargs}, lambda v: "") for o in (op, twin))
    for name in {**mine, **theirs}:
        a, b = mine.get(name), theirs.get(name)
        if name in _SIZES and isinstance(a, (list, tuple)) or sliced and name in ("start", "end", "length"):
            continue
        if type(a) is not type(b) or repr(a) != repr(b):
            found.append((name, a, b))
    return found
