"""Why nothing is allowed: a smallest set of nodes whose states already contradict one another.

QuickXplain: halve the nodes; what is needed of one half, given the other, is found by halving again. With k nodes in
the answer out of n it asks about k·log2(n/k) times whether some nodes alone can be satisfied, which arc consistency
answers, and elimination of its 0/∞ tables where that says yes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import PlanError
from ..problem import Problem
from .elimination import eliminate
from .order import elimination_order
from .reduce import Wiped, arcs, restrict

__all__ = ["contradiction"]

NAMED = 12  # nodes that the message names


def _allowed(problem: Problem, nodes: Sequence[int]) -> bool:
    """Whether these nodes alone have states that allow one another; True where that is not known."""
    number = {v: n for n, v in enumerate(nodes)}
    edges = {(number[i], number[j]): table for (i, j), table in problem.edges.items() if i in number and j in number}
    own = Problem(tuple(problem.costs[v] for v in nodes), edges)
    alive = arcs(own)
    if isinstance(alive, Wiped):
        return False
    own = restrict(own, alive).problem
    order = elimination_order([len(cost) for cost in own.costs], own.edges)
    return bool(order.left) or bool(np.isfinite(eliminate(own.costs, own.edges, order).constant))


def _needed(problem: Problem, given: list[int], changed: bool, nodes: list[int]) -> list[int]:
    """The nodes that, with the given ones, are a smallest contradiction."""
    if changed and not _allowed(problem, sorted(given)):
        return []
    if len(nodes) == 1:
        return nodes
    first, second = nodes[:len(nodes) // 2], nodes[len(nodes) // 2:]
    of_second = _needed(problem, given + first, True, second)
    of_first = _needed(problem, given + of_second, bool(of_second), first)
    return of_first + of_second


def contradiction(problem: Problem, among: Sequence[int] | None = None) -> PlanError:
    """The error that names a set of nodes, none of which can be left out, whose states contradict one another.

    Args:
        problem: one of which no assignment is allowed.
        among: nodes that are known to contradict one another already; None: all.
    """
    nodes = list(range(len(problem.costs)) if among is None else among)
    if _allowed(problem, nodes):  # too large to be proved with these alone: they are named as they are
        found = nodes
    else:
        found = sorted(_needed(problem, [], False, nodes))
    names = [problem.names[v] if problem.names else f"node {v}" for v in found]
    listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    if len(found) == 1:
        return PlanError(f"each of its {len(problem.costs[found[0]])} strategies is forbidden", operator=names[0],
                         legal="at least one strategy of finite cost")
    pairs = [f"{names[a]} and {names[b]}" for a, b in _pairs(problem, found)]
    return PlanError(f"no strategies of {listed} fit one another, whatever the rest of the network does; "
                     f"what is forbidden between: {'; '.join(pairs[:NAMED])}", operator=names[0],
                     legal="other strategies (or fewer marks) for one of them")


def _pairs(problem: Problem, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """The positions of those two that forbid each other something."""
    number = {v: n for n, v in enumerate(nodes)}
    return [(number[i], number[j]) for (i, j), table in problem.edges.items()
            if i in number and j in number and not np.isfinite(table).all()]
