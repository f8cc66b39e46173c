"""A lower bound, and from it states, where elimination is too large: sequential tree-reweighted message passing.

    V. Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", 2006. For nodes in order, with
    θ_v = c_v + Σ_u m_uv  and  γ_v = 1 / max(neighbours before v, neighbours after v):

        m_vw(t) = min_s (γ_v θ_v(s) - m_wv(s) + e_vw(s, t))        for the neighbours w after v

    then the same backwards. After a sweep each edge costs e'_vw(s, t) = γ_v θ_v(s) - m_wv(s) + e_vw(s, t) - m_vw(t),
    whose least over s is 0 for every t, and each node costs r_v = (1 - γ_v · neighbours after v) θ_v; their sum is the
    cost, so

        bound = Σ_v min r_v                                         which no sweep lowers

    While v is being swept everything between v and its neighbours is in θ_v. Another node u has min r_u, and, where it
    is still to come, the amount that the sweep has already brought it, which for each edge is at least min_t of the
    new message and of what u had given that edge. So any assignment with state s at v costs at least

        θ_v(s) + Σ_(u != v) (min r_u + brought to u)

    and where that is above the cost of states that are known, s is not considered again (reduced-cost fixing).

States come from the sweep itself: v takes the state that is best given the states taken before it and the messages
from the nodes after it.

1. `Messages` sweeps node by node, in any order.
2. `Sweeps` does the same colour by colour. Nodes of one colour share no edge: none of them needs the messages of
   another, so they are swept at once, and all edges between nodes of two colours with equally many states are one
   operation on arrays. Its bounds are those of `Messages` in that order. A sweep brings less than one in program
   order, in which a message reaches from one end to the other in one sweep, but takes a small part of the time.

`elimination` is exact but needs large joints; the tables of a sweep are no larger than an edge's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..identity_tables import IdentitySet
from .problem import Problem
from .search_memory import current

__all__ = ["Messages", "Sweeps", "colours"]

ROUNDING = 1e-9  # share of the best cost known by which a bound must exceed it before a state is removed,
UNIT = 1e-12  # and of the largest single cost, where the best is the difference of large costs


@dataclass
class _Side:
    """The neighbours of a node on one side of the order.

    Attributes:
        nodes: their numbers.
        rows: by neighbour, the row of its incoming messages that is this node's.
        starts: by neighbour, its first column in `tables`.
        ends: by neighbour, the column after its last.
        counts: by neighbour, the number of its states.
        tables: the edges side by side, (own states, all states of the neighbours).
        incoming: the messages from the neighbours, (neighbours, own states).
        given: the node's share for each edge at its last sending, less the message that had come over the edge.
    """

    nodes: np.ndarray
    rows: list[int]
    starts: np.ndarray
    ends: list[int]
    counts: np.ndarray
    tables: np.ndarray
    incoming: np.ndarray
    outgoing: np.ndarray


class Messages:
    """The messages of a problem, swept forwards and backwards.

    Args:
        problem: every state finite, and with some finite state of each neighbour (see `presolve.consistent`).
        order: of the nodes; None: as they are numbered.
        best: the cost of the best states known.
        dtype: of the messages and of the copies of the tables. With float32 a sweep takes half the time and memory,
            and `bound` is rounded.

    Attributes:
        bound: a lower bound on the cost of every assignment.
        alive: by node, the states (bool) that may still be part of an assignment of cost at most `best`.
        best: the cost of the best states known; the caller lowers it.
        states: the states of the last forward sweep.
    """

    def __init__(
        self,
        problem: Problem,
        order: Sequence[int] | None = None,
        best: float = np.inf,
        dtype: type[np.float32] | type[np.float64] = np.float64,
    ) -> None:
        self.problem, self.best, self.bound, self.dtype = problem, best, -np.inf, dtype
        self.order = list(range(len(problem.costs))) if order is None else list(order)
        self.alive = [np.ones(len(node_costs), bool) for node_costs in problem.costs]
        self.states = np.zeros(len(problem.costs), np.int64)
        self._retained = [0.0] * len(problem.costs)  # min r_v of the last sweep over v, and the amounts since
        self._swept = 0
        tables = IdentitySet((*problem.costs, *problem.edges.values()))
        most = (float(np.abs(table[np.isfinite(table)]).max(initial=0.0)) for table in tables)
        self._slack = UNIT * max(most, default=0.0)
        place = {v: n for n, v in enumerate(self.order)}
        near: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.order]
        for (i, j), table in problem.edges.items():
            near[i].append((j, table))
            near[j].append((i, table.T))
        sides: list[list[list[tuple[int, np.ndarray]]]] = [[[], []] for _ in self.order]
        for v in self.order:
            for u, table in sorted(near[v], key=lambda arc: place[arc[0]]):
                sides[v][place[u] > place[v]].append((u, table))
        row = [{u: n for two in sides[v] for n, (u, _) in enumerate(two)} for v in range(len(self.order))]
        stacked: dict[tuple[Hashable, ...], np.ndarray] = {}
        budget = current()
        self._sides = []
        for v, two in enumerate(sides):
            made = []
            for arcs in two:
                counts = np.array([table.shape[1] for _, table in arcs], np.int64)
                ends = counts.cumsum()
                key = tuple((table.__array_interface__["data"][0], table.shape, table.strides) for _, table in arcs)
                if key not in stacked:
                    budget.ask(np.dtype(dtype).itemsize * len(problem.costs[v]) * int(counts.sum()))
                    stacked[key] = (
                        np.concatenate([table for _, table in arcs], axis=1, dtype=dtype)
                        if arcs
                        else np.empty((len(problem.costs[v]), 0), dtype)
                    )
                made.append(
                    _Side(
                        np.array([u for u, _ in arcs], np.int64),
                        [row[u][v] for u, _ in arcs],
                        ends - counts,
                        ends.tolist(),
                        counts,
                        stacked[key],
                        *np.zeros((2, len(arcs), len(problem.costs[v])), dtype),
                    )
                )
            self._sides.append(made)

    def received(self) -> dict[tuple[int, int], np.ndarray]:
        """The current messages by (from, to)."""
        return {
            (u, v): two.incoming[n]
            for v, sides in enumerate(self._sides)
            for two in sides
            for n, u in enumerate(two.nodes.tolist())
        }

    def begin(self, messages: Mapping[tuple[int, int], np.ndarray]) -> None:
        """Take messages by (from, to), one entry by state of the latter node; any are valid."""
        for v, sides in enumerate(self._sides):
            for two in sides:
                for n, u in enumerate(two.nodes.tolist()):
                    if (u, v) in messages:
                        two.incoming[n] = messages[u, v]

    def sweep(self) -> float:
        """One sweep forwards and one backwards; the bound."""
        self._pass(1)
        self._pass(0)
        return self.bound

    def _pass(self, to: int) -> None:
        """One sweep; `to` 1: forwards, 0: backwards."""
        retained, states, sides = self._retained, self.states, self._sides
        ahead = sum(retained)  # sum over the nodes still to come; meaningless before the first sweep's end
        behind = 0.0
        fixing = self._swept > 0 and np.isfinite(self.best)
        worst = self.best + ROUNDING * abs(self.best) + self._slack
        for v in self.order if to else reversed(self.order):
            two = sides[v]
            behind_side, ahead_side = two[1 - to], two[to]
            node_costs = self.problem.costs[v]
            coming = ahead_side.incoming.sum(axis=0)
            theta = node_costs + behind_side.incoming.sum(axis=0)
            theta += coming
            ahead -= retained[v]
            if fixing:
                self.alive[v] &= ~(theta > worst - behind - ahead)
            if to:
                choice = node_costs + coming
                if len(behind_side.nodes):
                    taken = behind_side.tables[:, behind_side.starts + states[behind_side.nodes]]
                    before = taken.sum(axis=1)
                    if not np.isfinite(before.min()):  # contradictions among these: choose the fewest
                        forbidden = np.isinf(taken).sum(axis=1)
                        allowed = np.where(taken < np.inf, taken, 0.0).sum(axis=1)
                        before = np.where(forbidden == forbidden.min(), allowed, np.inf)
                    choice += before
                states[v] = choice.argmin()
            many = len(ahead_side.nodes)
            share = 1.0 / max(len(behind_side.nodes), many, 1)
            if many:
                ahead_side.outgoing = (share * theta - ahead_side.incoming).astype(self.dtype, copy=False)
                message = _message(ahead_side.outgoing.T, ahead_side.counts, ahead_side.tables)
                start = 0
                for u, row, end in zip(ahead_side.nodes.tolist(), ahead_side.rows, ahead_side.ends):
                    side, part = sides[u][1 - to], message[start:end]
                    side.incoming[row] = part
                    brought = float((part + side.outgoing[row]).min())
                    retained[u] += brought
                    ahead += brought
                    start = end
            least = float(theta.min())
            # where all of it is shared out, the rest is 0, without rounding
            retained[v] = 0.0 if many and many >= len(behind_side.nodes) else (1.0 - many * share) * least
            behind += retained[v]
        self._swept += 1
        self.bound = max(self.bound, behind)

    def at_first(self) -> np.ndarray:
        """Lower bounds on every assignment with a state of the order's first node, by that state; after a whole
        sweep."""
        first = self.order[0]
        node_costs = self.problem.costs[first] + sum(side.incoming.sum(axis=0) for side in self._sides[first])
        return node_costs + (sum(self._retained) - self._retained[first])

    def thetas(self) -> list[np.ndarray]:
        """By node, its costs and all its incoming messages: the relative costs of its states."""
        return [
            c + two[0].incoming.sum(axis=0) + two[1].incoming.sum(axis=0)
            for c, two in zip(self.problem.costs, self._sides)
        ]

    def sent(self) -> dict[tuple[int, int], np.ndarray]:
        """The messages by (from, to) after a whole sweep: an edge's share for the states of the latter node, less
        what these gave the edge."""
        out = {}
        for v, (before, _) in enumerate(self._sides):
            for n, u in enumerate(before.nodes.tolist()):
                out[u, v] = -before.outgoing[n]
                out[v, u] = self._sides[u][1].incoming[before.rows[n]]
        return out

    def cut(self, problem: Problem, state_numbers: Sequence[np.ndarray]) -> Messages:
        """The messages of the same problem with fewer states (see `presolve.RestrictedProblem`), continued from the
        current ones.

        Args:
            problem: the smaller problem, consistent again.
            state_numbers: by node, the numbers of the states that stay.
        """
        out = Messages(problem, self.order, self.best, self.dtype)
        for new, old, states in zip(out._sides, self._sides, state_numbers):
            for a, b in zip(new, old):
                a.incoming, a.outgoing = b.incoming[:, states], b.outgoing[:, states]
        out.bound, out._retained, out._swept = self.bound, list(self._retained), self._swept
        return out


ROWS = 2**17  # entries of sums made at once by `Messages`: 512 KiB of float32; measured


def _message(outgoing: np.ndarray, counts: np.ndarray, tables: np.ndarray) -> np.ndarray:
    """min_s outgoing(s, neighbour) + tables(s, t), for the states t of all neighbours side by side.

    Args:
        outgoing: by own state and neighbour.
        counts: by neighbour, the number of its states.
        tables: (own states, all states of the neighbours).
    """
    many, message = max(1, ROWS // max(1, tables.shape[1])), None
    for first in range(0, len(tables), many):
        sent = np.repeat(outgoing[first : first + many], counts, axis=1)
        sent += tables[first : first + many]
        least = sent.min(axis=0)
        message = least if message is None else np.minimum(message, least, out=message)
    assert message is not None
    return message


# -- colour by colour --

AT_ONCE = 2**15  # entries of sums made at once; above it state by state: 256 KiB; measured


def colours(count: int, pairs: Sequence[tuple[int, int]]) -> np.ndarray:
    """By node, a number that no neighbour has: the least one, for the nodes of most neighbours first."""
    near: list[list[int]] = [[] for _ in range(count)]
    for i, j in pairs:
        near[i].append(j)
        near[j].append(i)
    out = [-1] * count
    for v in sorted(range(count), key=lambda v: (-len(near[v]), v)):
        taken = {out[u] for u in near[v]}
        out[v] = next(number for number in range(len(near[v]) + 1) if number not in taken)
    return np.array(out, np.int64)


class _ColourSide:
    """The messages to nodes of one colour from neighbours of lower colours, or of higher ones.

    Attributes:
        begin, end: their place in the messages of that direction.
        at: by entry, the state of the colour's nodes that it is for.
        share: by state of the colour's nodes, the share that each edge to the other side gets.
    """

    def __init__(self, begin: int, end: int, at: np.ndarray, share: np.ndarray) -> None:
        self.begin, self.end, self.at, self.share = begin, end, at, share


class _Between:
    """Edges between nodes of a lower and a higher colour, with equally many states each.

    Attributes:
        pairs: the edges.
        turned: True where the node of the higher colour has the lower number.
        ends: the nodes of the lower colour, and of the higher.
        colours, sizes: the two colours, and the numbers of states.
        tables: (states below, states above, edges).
        at: the beginning of the messages to either side.
    """

    def __init__(self, key: tuple[int, ...], pairs: Sequence[tuple[int, int]]) -> None:
        lower, upper, *sizes, turned = key
        self.colours, self.sizes, self.turned, self.pairs = (lower, upper), sizes, bool(turned), pairs
        ends = np.array(pairs, np.int64).T
        self.ends = (ends[1], ends[0]) if turned else (ends[0], ends[1])
        self.tables = np.empty((*sizes, len(pairs)))
        self.at = [0, 0]

    def part(self, flat: np.ndarray, end: int) -> np.ndarray:
        """The messages to the nodes at one end of the edges: (states, edges)."""
        begin, shape = self.at[end], (self.sizes[end], len(self.pairs))
        return flat[begin : begin + shape[0] * shape[1]].reshape(shape)


class _Way:
    """The edges from one colour to those above (`to` 1) or below, with the places of what is sent along them.

    Attributes:
        ends: by edge, the node at its other end.
        brought: by edge, the least that its message brings.
        steps: by group of edges, its tables (own state first), the outgoing costs, the messages, what had come back
            from there, and its part of `brought`.
    """

    def __init__(
        self, messages: Sequence[np.ndarray], outgoing: Sequence[np.ndarray], to: int, groups: Sequence[_Between]
    ) -> None:
        self.ends = np.concatenate([np.empty(0, np.int64), *(group.ends[to] for group in groups)])
        self.brought = np.empty(len(self.ends))
        at = np.cumsum([0, *(len(group.pairs) for group in groups)]).tolist()
        self.steps = [
            (
                group.tables if to else group.tables.swapaxes(0, 1),
                group.part(outgoing[to], 1 - to),
                group.part(messages[1 - to], to),
                group.part(outgoing[1 - to], to),
                self.brought[begin:end],
            )
            for group, begin, end in zip(groups, at, at[1:])
        ]


class Sweeps:
    """The messages of a problem, swept through its colours upwards and downwards.

    Args:
        problem: the cost graph; a memory limit is ignored.
        best: the cost of states that are known.

    Attributes:
        bound: a lower bound on the cost of every assignment.
        best: the cost of states that are known; the caller lowers it.
        alive: by node, the states (bool) that may still be part of an assignment of cost at most `best`.
    """

    def __init__(self, problem: Problem, best: float = np.inf) -> None:
        self.best, self.bound = best, -np.inf
        sizes = np.array([len(node_costs) for node_costs in problem.costs], np.int64)
        colour = colours(len(sizes), list(problem.edges))
        self._nodes = [np.flatnonzero(colour == c) for c in range(colour.max(initial=-1) + 1)]
        self._starts = [np.cumsum(sizes[mine]) - sizes[mine] for mine in self._nodes]
        self._sizes = [sizes[mine] for mine in self._nodes]
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for i, j in problem.edges:
            turned = colour[i] > colour[j]
            a, b = (j, i) if turned else (i, j)
            groups.setdefault((colour[a], colour[b], sizes[a], sizes[b], turned), []).append((i, j))
        self._groups = [_Between(tuple(map(int, key)), mine) for key, mine in sorted(groups.items())]
        self._lay(sizes, colour)
        self.alive = [np.ones(size, bool) for size in sizes.tolist()]
        self._retained = np.zeros(len(sizes))  # min r_v of the last sweep over v, and the amounts since
        self._swept = 0
        self.load(problem)

    def _lay(self, sizes: np.ndarray, colour: np.ndarray) -> None:
        """Lay the messages out so that those of one colour's nodes are side by side."""
        first = np.zeros(len(sizes), np.int64)  # by node, its first place among the states of its colour
        count = np.zeros((2, len(sizes)), np.int64)  # neighbours of lower colours, of higher ones
        for mine, starts in zip(self._nodes, self._starts):
            first[mine] = starts
        for group in self._groups:
            np.add.at(count[1], group.ends[0], 1)
            np.add.at(count[0], group.ends[1], 1)
        most = np.maximum(count.max(axis=0), 1)
        self._sides: list[list[_ColourSide]] = []
        self._sources: list[list[list[_Between]]] = []
        ends = [0, 0]
        for c, mine in enumerate(self._nodes):
            two, sources = [], []
            for side in (0, 1):  # from below, from above
                begin, parts = ends[side], [np.empty(0, np.int64)]
                groups = [group for group in self._groups if group.colours[1 - side] == c]
                for group in groups:
                    group.at[1 - side] = ends[side]
                    at = first[group.ends[1 - side]] + np.arange(group.sizes[1 - side])[:, None]
                    parts.append(at.ravel())
                    ends[side] += at.size
                share = np.repeat(1.0 / most[mine], sizes[mine])
                two.append(_ColourSide(begin, ends[side], np.concatenate(parts), share))
                sources.append(groups)
            self._sides.append(two)
            self._sources.append(sources)
        self._retained_shares = [[1.0 - count[side][mine] / most[mine] for side in (0, 1)] for mine in self._nodes]
        self._messages = [np.zeros(end) for end in ends]  # from below, from above
        self._outgoing = [np.zeros(end) for end in ends]  # to below, to above: less what had come from there
        self._ways = [[_Way(self._messages, self._outgoing, to, two[to]) for to in (0, 1)] for two in self._sources]

    def load(self, problem: Problem) -> None:
        """Take other costs of the same nodes and edges; the messages stay."""
        self._node_costs = [np.concatenate([problem.costs[v] for v in mine]) for mine in self._nodes]
        for group in self._groups:
            tables = np.array([problem.edges[pair] for pair in group.pairs])
            np.copyto(group.tables, tables.transpose((2, 1, 0) if group.turned else (1, 2, 0)))
        self.bound, self._swept = -np.inf, 0
        self.alive = [np.ones(len(allowed), bool) for allowed in self.alive]
        finite = (
            np.abs(array[np.isfinite(array)]).max(initial=0.0)
            for array in (*self._node_costs, *(group.tables for group in self._groups))
        )
        self._slack = UNIT * float(max(finite, default=0.0))

    def sweep(self) -> float:
        """One sweep up and one down; the bound."""
        self._pass(1)
        self._pass(0)
        return self.bound

    def _pass(self, to: int) -> None:
        """One sweep; `to` 1: upwards, 0: downwards."""
        retained, behind, ahead = self._retained, 0.0, float(self._retained.sum())
        fixing = self._swept > 0 and np.isfinite(self.best)
        worst = self.best + ROUNDING * abs(self.best) + self._slack
        order = range(len(self._nodes))
        for c in order if to else reversed(order):
            mine, theta = self._nodes[c], self._theta(c)
            least = np.minimum.reduceat(theta, self._starts[c])
            ahead -= float(retained[mine].sum())
            if fixing:
                room = worst - behind - ahead - float(least.sum())
                self._fix(c, theta - np.repeat(least, self._sizes[c]) <= room)
            ahead += self._send(c, to, theta)
            retained[mine] = self._retained_shares[c][to] * least
            behind += float(retained[mine].sum())
        self._swept += 1
        self.bound = max(self.bound, behind)

    def _theta(self, c: int) -> np.ndarray:
        """A colour's costs and all messages to its nodes."""
        theta = self._node_costs[c].copy()
        for side, messages in zip(self._sides[c], self._messages):
            theta += np.bincount(side.at, messages[side.begin : side.end], len(theta))
        return theta

    def _send(self, c: int, to: int, theta: np.ndarray) -> float:
        """Send the messages of a colour to the colours above (`to` 1) or below; the least that they bring in all is
        returned."""
        side = self._sides[c][to]
        outgoing = self._outgoing[to][side.begin : side.end]
        with np.errstate(invalid="ignore"):
            np.subtract((side.share * theta)[side.at], self._messages[to][side.begin : side.end], out=outgoing)
        outgoing[np.isnan(outgoing)] = np.inf  # a state that all neighbours forbid: inf - inf
        total, way = 0.0, self._ways[c][to]
        for tables, mine, message, returned, brought in way.steps:
            _least(tables, mine, message)
            np.minimum.reduce(message + returned, axis=0, out=brought)
            total += float(np.add.reduce(brought))
        np.add.at(self._retained, way.ends, way.brought)
        return total

    def _fix(self, c: int, stays: np.ndarray) -> None:
        if not stays.all():
            for v, start, size in zip(self._nodes[c].tolist(), self._starts[c].tolist(), self._sizes[c].tolist()):
                self.alive[v] &= stays[start : start + size]

    def states(self) -> np.ndarray:
        """States: each colour's are the best given those of lower colours and the messages from higher ones."""
        out = np.zeros(len(self.alive), np.int64)
        for c, mine in enumerate(self._nodes):
            above = self._sides[c][1]
            choice = self._node_costs[c] + np.bincount(
                above.at, self._messages[1][above.begin : above.end], len(self._node_costs[c])
            )
            forbidden = np.zeros(len(choice))
            for group in self._sources[c][0]:
                taken = group.tables[out[group.ends[0]], :, np.arange(len(group.pairs))].T.ravel()
                at = self._sides[c][0].at[group.at[1] - self._sides[c][0].begin :][: len(taken)]
                finite = np.isfinite(taken)
                choice += np.bincount(at, np.where(finite, taken, 0.0), len(choice))
                forbidden += np.bincount(at, ~finite, len(choice))
            # where the states taken contradict one another: the fewest contradictions
            fewest = np.repeat(np.minimum.reduceat(forbidden, self._starts[c]), self._sizes[c])
            choice = np.where(forbidden == fewest, choice, np.inf)
            least = np.repeat(np.minimum.reduceat(choice, self._starts[c]), self._sizes[c])
            first = np.where(choice == least, np.arange(len(choice)), len(choice))
            out[mine] = np.minimum.reduceat(first, self._starts[c]) - self._starts[c]
        return out


def _least(tables: np.ndarray, costs: np.ndarray, out: np.ndarray) -> None:
    """min_s tables(s, t, edge) + given(s, edge)."""
    if tables.size <= AT_ONCE:
        np.minimum.reduce(tables + costs[:, None], axis=0, out=out)
        return
    np.add(tables[0], costs[0], out=out)
    some = np.empty(out.shape)
    for table, node_costs in zip(tables[1:], costs[1:]):
        np.minimum(out, np.add(table, node_costs, out=some), out=out)
