"""The problem of every search: a pairwise cost graph over the states of nodes, with memory limited at every moment.

    cost(s) = Σ_i c_i(s_i) + Σ_(i,j) e_ij(s_i, s_j)
    subject to, at every moment t,   Σ_(u: start_u <= t < stop_u) m_u(s) <= limit

The memory m_u of a usage u depends on the state of one node, or of two nodes that share an edge. A node is an
operator, a parameter, a value with several consumers, or the choice between saving and recomputing a value. A
forbidden state or pair costs infinity.

Example: nodes with costs (0, 3) and (0, 0) and the edge ((5, 1), (0, 0)) have their least cost 1 in the states (0, 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

__all__ = ["MemoryUsage", "Problem", "Solution", "StoppedSearch", "stopping"]


@dataclass(frozen=True)
class MemoryUsage:
    """Memory that a node takes from one moment to another.

    Args:
        node: the node whose state decides the amount.
        start, stop: the moments, in [start, stop).
        amount: bytes by state; with `other`, by (state of the node, state of the other).
        what: the kind of memory ("parameters", "activations", ...), for reports.
        other: a node of a higher number that shares an edge with the first and also decides; None: one node decides.
    """

    node: int
    start: int
    stop: int
    amount: np.ndarray
    what: str = ""
    other: int | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes whose states decide the amount."""
        return (self.node,) if self.other is None else (self.node, self.other)

    def amount_in(self, states: Sequence[int]) -> float:
        """The amount under these states of all nodes."""
        at = states[self.node] if self.other is None else (states[self.node], states[self.other])
        return float(self.amount[at])


@dataclass(frozen=True)
class Problem:
    """A pairwise cost graph.

    Args:
        costs: by node, its cost in each state (float64, one dim).
        edges: by (i, j) with i < j, the cost of each pair of states, shape (states of i, states of j).
        names: of the nodes, for errors and reports; empty: their numbers.
        usages: the memory of the nodes; a node may have several usages.
        limit: of the memory at every moment, in the unit of the usages; None: no limit.
    """

    costs: tuple[np.ndarray, ...]
    edges: dict[tuple[int, int], np.ndarray]
    names: tuple[str, ...] = ()
    usages: tuple[MemoryUsage, ...] = ()
    limit: float | None = None

    def cost(self, states: Sequence[int]) -> float:
        """The cost of an assignment; infinite where it is forbidden. The limit is ignored."""
        return float(
            sum(c[s] for c, s in zip(self.costs, states))
            + sum(e[states[i], states[j]] for (i, j), e in self.edges.items())
        )


@dataclass(frozen=True)
class Solution:
    """A solver's result.

    Attributes:
        states: by node.
        cost: the cost of the states.
        bound: a lower bound on the cost of every assignment within the limit.
        notes: remarks on the way it was found.
    """

    states: tuple[int, ...]
    cost: float
    bound: float
    notes: tuple[str, ...] = field(default=())

    @property
    def gap(self) -> float:
        """The distance of the cost from the bound, relative to the cost."""
        return 0.0 if self.cost <= self.bound else (self.cost - self.bound) / abs(self.cost) if self.cost else 0.0


class StoppedSearch(KeyboardInterrupt):
    """Ctrl-C during a search.

    Attributes:
        found: the best result so far, of the kind that the search returns; None: there is none.
    """

    def __init__(self, found: object) -> None:
        super().__init__()
        self.found = found


@contextmanager
def stopping(best: Callable[[object], object]) -> Iterator[None]:
    """Let Ctrl-C inside the ``with`` block carry the best result so far.

    Args:
        best: from the result that Ctrl-C brings from a search inside the block (None: it brings none) to that of the
            block, or None.

    Raises:
        StoppedSearch: at Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        found = best(stop.found if isinstance(stop, StoppedSearch) else None)
        raise StoppedSearch(found).with_traceback(stop.__traceback__) from None
