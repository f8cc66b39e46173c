"""What every search solves: a pairwise energy over the states of nodes, with memory limited at every moment.

    cost(s) = Σ_i c_i(s_i) + Σ_(i,j) e_ij(s_i, s_j)
    subject to, at every moment t,   Σ_(u: start_u <= t < stop_u) m_u(s_node(u)) <= limit

A node is an operator, a parameter or a value that several operators read; its states are its strategies. What is
forbidden costs infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

__all__ = ["Problem", "Solution", "Usage"]


@dataclass(frozen=True)
class Usage:
    """Memory that a node holds from one moment to another.

    Args:
        node: whose state decides how much.
        start, stop: the moments, in [start, stop).
        amount: by state, in bytes.
        what: of which kind it is ("parameters", "activations", ...), for reports.
    """

    node: int
    start: int
    stop: int
    amount: np.ndarray
    what: str = ""


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
    usages: tuple[Usage, ...] = ()
    limit: float | None = None

    def cost(self, states: Sequence[int]) -> float:
        """The cost of an assignment; infinite where it is forbidden. The limit is not looked at."""
        return float(sum(c[s] for c, s in zip(self.costs, states)) +
                     sum(e[states[i], states[j]] for (i, j), e in self.edges.items()))


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
