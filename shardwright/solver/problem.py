"""What every search solves: a pairwise energy over the states of nodes, with memory limited at every moment.

    cost(s) = Σ_i c_i(s_i) + Σ_(i,j) e_ij(s_i, s_j)
    subject to, at every moment t,   Σ_(u: start_u <= t < stop_u) m_u(s) <= limit

What a usage u holds, m_u, depends on the state of one node, or of two that share an edge. A node is an operator, a
parameter, a value that several operators read or what is kept of a value. What is forbidden costs infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["MemoryUsage", "Problem", "Solution"]


@dataclass(frozen=True)
class MemoryUsage:
    """Memory that a node holds from one moment to another.

    Args:
        node: whose state decides how much.
        start, stop: the moments, in [start, stop).
        amount: by state, in bytes; where another node has a say, by (state of the node, state of the other).
        what: of which kind it is ("parameters", "activations", ...), for reports.
        other: a node of a higher number, which shares an edge with the first; None: it is decided by one.
    """

    node: int
    start: int
    stop: int
    amount: np.ndarray
    what: str = ""
    other: int | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """Whose states decide."""
        return (self.node,) if self.other is None else (self.node, self.other)

    def held(self, states: Sequence[int]) -> float:
        """How much it is."""
        at = states[self.node] if self.other is None else (states[self.node], states[self.other])
        return float(self.amount[at])


@dataclass(frozen=True)
class Problem:
    """A pairwise energy.

    Args:
        costs: by node, its cost in each state (float64, one dim).
        edges: by (i, j) with i < j, the cost of each pair of states, shape (states of i, states of j).
        names: of the nodes, for errors and reports; empty: their numbers.
        usages: what the nodes hold when; a node may have several.
        limit: of the memory at every moment, in the unit of the usages; None: none.
    """

    costs: tuple[np.ndarray, ...]
    edges: dict[tuple[int, int], np.ndarray]
    names: tuple[str, ...] = ()
    usages: tuple[MemoryUsage, ...] = ()
    limit: float | None = None

    def cost(self, states: Sequence[int]) -> float:
        """The cost of an assignment; infinite where it is forbidden. The limit is not looked at."""
        return float(
            sum(c[s] for c, s in zip(self.costs, states))
            + sum(e[states[i], states[j]] for (i, j), e in self.edges.items())
        )


@dataclass(frozen=True)
class Solution:
    """What a solver found.

    Attributes:
        states: of each node.
        cost: of the states.
        bound: no assignment that keeps the limit costs less.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    notes: tuple[str, ...] = field(default=())

    @property
    def gap(self) -> float:
        """How far the cost is from the bound, relative to the cost."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / abs(self.cost) if self.cost else 0.0
