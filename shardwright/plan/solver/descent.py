"""Better states from given ones: a few nodes are held, all others chosen anew at once by elimination.

Which nodes are held is drawn anew in each pass, among those that keep the others' joints small; the others are
minimised exactly, so a pass never makes the cost higher. It ends when several in a row have found nothing. From states
that are forbidden it goes towards allowed ones: what is forbidden then costs more than all that is allowed can.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ..problem import Problem
from .elimination import eliminate
from .order import elimination_order

__all__ = ["descend"]

MOST_HERE = 2**16  # entries of a joint
SPREADS = (0.3, None, 1.0, None, 3.0, None)  # of the logarithm of the weights that say who is held; None: by distance
GRACE = 1.0  # seconds that a pass may go on for


def _allowed(problem: Problem) -> Problem:
    """The same with a finite cost for what is forbidden, above all that is allowed."""
    tables = [*problem.costs, *problem.edges.values()]
    known = {id(table): table for table in tables}
    most = {key: float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for key, table in known.items()}
    price = 1.0 + 2.0 * sum(most[id(table)] for table in tables)
    finite = {key: np.where(np.isfinite(table), table, price) for key, table in known.items()}
    return Problem(tuple(finite[id(own)] for own in problem.costs),
                   {pair: finite[id(table)] for pair, table in problem.edges.items()}, problem.names)


def _distances(near: Sequence[Sequence[int]], start: int) -> np.ndarray:
    """Of each node from the start, in edges; more than any where there is no way."""
    out = np.full(len(near), float(len(near)))
    out[start] = 0.0
    front = [start]
    while front:
        after = []
        for v in front:
            for u in near[v]:
                if out[u] == len(near):
                    out[u] = out[v] + 1
                    after.append(u)
        front = after
    return out


def descend(problem: Problem, states: Sequence[int], *, patience: int = len(SPREADS), most: int = MOST_HERE,
            until: float | None = None, seed: int = 0) -> list[int]:
    """States that cost no more than the given ones. The memory limit is not looked at.

    Args:
        problem, states: where from.
        patience: passes in a row that find nothing before it ends.
        most: entries of a joint.
        until: a time of time.monotonic() after which no pass begins.
        seed: of which nodes are held.
    """
    whole = problem
    if not np.isfinite(problem.cost(states)):
        problem = _allowed(problem)
    random = np.random.default_rng(seed)
    sizes = [len(own) for own in problem.costs]
    near: list[list[int]] = [[] for _ in sizes]
    for i, j in problem.edges:
        near[i].append(j)
        near[j].append(i)
    best, cost = [int(s) for s in states], problem.cost(states)
    failed = tried = 0
    while failed < patience and (until is None or time.monotonic() < until):
        spread = SPREADS[tried % len(SPREADS)]
        if spread is None:
            at = [v for v in range(len(best)) if np.isinf(whole.costs[v][best[v]])]
            at += [i for (i, j), table in whole.edges.items() if np.isinf(table[best[i], best[j]])]
            weights = _distances(near, int(random.choice(at or len(best)))) ** 2
        else:
            weights = np.exp(spread * random.standard_normal(len(best)))
        order = elimination_order(sizes, problem.edges, most=most, hold=weights.tolist())
        held = frozenset(order.held)
        costs, edges = list(problem.costs), {}
        for (i, j), table in problem.edges.items():
            if i in held:
                if j not in held:
                    costs[j] = costs[j] + table[best[i]]
            elif j in held:
                costs[i] = costs[i] + table[:, best[j]]
            else:
                edges[i, j] = table
        gone = eliminate(costs, edges, order, until=None if until is None else until + GRACE)
        if gone is None:
            break
        found = gone.complete(list(best))
        now, tried = problem.cost(found), tried + 1
        failed = 0 if now < cost else failed + 1
        if now < cost:
            best, cost = found, now
            if problem is not whole and np.isfinite(whole.cost(best)):
                problem, cost = whole, whole.cost(best)
        if not held:
            break
    return best
