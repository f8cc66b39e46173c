"""What a search lets run again in the backward: operators by name, neighbours of one segment of the program together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from ..graph import Graph, Recompute

__all__ = ["segments_of", "with_recompute"]


def segments_of(graph: Graph) -> dict[str, int]:
    """Operator -> the segment of the program that it is in: numbered modules (such as "layers.3"), outermost, and what
    stands between them; joined until each has about √n of the n operators."""
    least, number, size, before = math.isqrt(len(graph.ops)), 0, 0, None
    out = {}
    for op in graph.ops:
        parts = op.module.split(".")
        first = next((k for k, part in enumerate(parts) if part.isdigit()), None)
        block = ".".join(parts[:first + 1]) if first is not None else ""
        if block != before and size >= least:
            number, size = number + 1, 0
        before, size = block, size + 1
        out[op.name] = number
    return out


def with_recompute(graph: Graph, names: frozenset[str], segments: Mapping[str, int]) -> Graph:
    """The graph with these operators computed again in the backward: neighbours of one segment together."""
    calls = 1 + max((op.recompute.call for op in graph.ops if op.recompute is not None), default=-1)
    ops, last = [], None
    for op in graph.ops:
        if op.name not in names:
            last = None
        elif op.recompute is None:
            calls += segments[op.name] != last
            last = segments[op.name]
            op = replace(op, recompute=Recompute(calls - 1, op.name, everywhere=True, mp_comm=False))
        ops.append(op)
    return graph.with_ops(tuple(ops))
