"""Exact reductions of a problem: states that cannot be, or need not be, chosen, and nodes that are easy to eliminate.

1. Arc consistency (`consistent`). A state of i is removed where its own cost is infinite, or where an edge (i, j)
   forbids it with every remaining state of j; until nothing changes.

2. Dominance (`undominated`). State a of i is removed where b is never worse, whatever the neighbours' states:

    c_i(b) - c_i(a) + Σ_j max_t (e_ij(b, t) - e_ij(a, t)) <= 0        t: states of j that a allows

   and, with a memory limit, where b needs no more memory at any moment.

3. Elimination of nodes with at most two neighbours (`core`), which leaves a pairwise problem (`elimination`). With a
   memory limit, a node whose state decides memory stays.

4. Merging of a node into a neighbour that leaves it few states (`candidates`, `merged`): an equal problem, in which
   elimination has less to do. A node a whose edge to b allows few pairs, for instance because a only says whether
   something of b's state is saved, enlarges the joints of both by all of its states. The merged node's states are
   the allowed pairs:

    c_ab(s, t) = c_a(s) + c_b(t) + e_ab(s, t)       (s, t) with e_ab(s, t) < inf

5. `contradiction` explains a problem without an assignment by a smallest set of nodes whose states contradict one
   another. The method is QuickXplain: halve the nodes; the nodes needed of one half, given the other, are found by
   halving again. For k nodes of n it asks about k·log2(n/k) times whether some nodes alone can be satisfied. Arc
   consistency answers, and elimination of its 0/∞ tables where arc consistency says yes.

Dominance with c_i = (0, 0) and e_ij = ((0, ∞), (0, 2)): state 0 of i is removed, because it allows only state 0 of j,
where state 1 of i costs the same. State 1 stays: with state 1 of j, state 0 of i is forbidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import PlanError
from ..identity_tables import IdentityCache
from .elimination import Eliminated, Tables, eliminate, elimination_order
from .problem import MemoryUsage, Problem

__all__ = [
    "Core",
    "Merged",
    "ReducedProblem",
    "RestrictedProblem",
    "Wiped",
    "arcs",
    "candidates",
    "consistent",
    "contradiction",
    "core",
    "interned",
    "merged",
    "reduced",
    "restrict",
    "undominated",
]

MOST_COMPARED = 2**26  # most differences in comparing a node's states over one edge; about 0.2 s
MOST_STATES = 512  # most states of a node whose states are compared, each with each
COLUMNS = 4  # states of a neighbour that are compared first, to rule pairs out
AT_ONCE = 2**17  # differences computed at once: 1 MiB


@dataclass(frozen=True)
class RestrictedProblem:
    """A problem with fewer states.

    Attributes:
        problem: with the remaining states.
        state_numbers: by node, the numbers of these states in the larger problem.
    """

    problem: Problem
    state_numbers: tuple[np.ndarray, ...]

    def lift(self, states: Sequence[int]) -> list[int]:
        """States of the smaller problem as states of the larger."""
        return [int(numbers[state]) for numbers, state in zip(self.state_numbers, states)]


def interned(problem: Problem) -> Problem:
    """The same problem with equal tables as one object: operations on them are then computed once."""
    known: dict[tuple[Hashable, ...], np.ndarray] = {}
    once = IdentityCache().once

    def one(table: np.ndarray) -> np.ndarray:
        key = lambda: (table.shape, table.dtype.str, table.tobytes())
        return once("one", (table,), lambda: known.setdefault(key(), table))

    return replace(
        problem,
        costs=tuple(one(node_costs) for node_costs in problem.costs),
        edges={pair: one(table) for pair, table in problem.edges.items()},
    )


def restrict(problem: Problem, alive: Sequence[np.ndarray]) -> RestrictedProblem:
    """The problem with the states that are marked alive (bool, by node). Equal cuts of one table are one table."""
    marks = [mark.tobytes() for mark in alive]
    full = [bool(mark.all()) for mark in alive]
    once, numbers = IdentityCache().once, dict[bytes, np.ndarray]()
    for text, mark in zip(marks, alive):
        if text not in numbers:
            numbers[text] = np.flatnonzero(mark)
    costs = []
    for node_costs, text, whole in zip(problem.costs, marks, full):
        costs.append(node_costs if whole else once(text, (node_costs,), lambda: node_costs[numbers[text]]))
    edges = {}
    for (i, j), table in problem.edges.items():
        if not (full[i] and full[j]):
            edges[i, j] = once(
                (marks[i], marks[j]), (table,), lambda: _among(table, (numbers[marks[i]], numbers[marks[j]]))
            )
        else:
            edges[i, j] = table

    def one_of(use: MemoryUsage) -> np.ndarray:
        texts = tuple(marks[v] for v in use.nodes)
        return once(texts, (use.amount,), lambda: _among(np.asarray(use.amount), [numbers[text] for text in texts]))

    usages = tuple(
        use
        if full[use.node] and (use.other is None or full[use.other])
        else MemoryUsage(use.node, use.start, use.stop, one_of(use), use.what, use.other)
        for use in problem.usages
    )
    return RestrictedProblem(
        replace(problem, costs=tuple(costs), edges=edges, usages=usages), tuple(numbers[text] for text in marks)
    )


def _among(table: np.ndarray, numbers: Sequence[np.ndarray]) -> np.ndarray:
    """The entries of these rows, and columns where given."""
    return table[numbers[0]] if len(numbers) == 1 else table[numbers[0][:, None], numbers[1]]


@dataclass(frozen=True)
class Wiped:
    """A node without any state left, and the nodes whose states removed its own, itself included."""

    node: int
    causes: tuple[int, ...]


def _supported(allowed: np.ndarray, alive: np.ndarray, axis: int) -> np.ndarray:
    """The states that some living state of the node of `axis` allows."""
    return np.asarray((allowed[alive] if axis == 0 else allowed[:, alive]).any(axis=axis))


def arcs(problem: Problem) -> list[np.ndarray] | Wiped:
    """The states that arc consistency leaves (bool, by node), or the node that has none."""
    alive = [np.isfinite(node_costs) for node_costs in problem.costs]
    once = IdentityCache().once
    near: list[list[tuple[int, np.ndarray, int]]] = [[] for _ in alive]  # (other node, allowed, this node's axis)
    for (i, j), table in problem.edges.items():
        allowed = once("allowed", (table,), lambda: np.isfinite(table))
        if not once("all", (allowed,), allowed.all):
            near[i].append((j, allowed, 0))
            near[j].append((i, allowed, 1))
    causes: list[set[int]] = [set() for _ in alive]

    def wiped(node: int) -> Wiped:
        found, todo = {node}, [node]
        while todo:
            for cause in causes[todo.pop()] - found:
                found.add(cause)
                todo.append(cause)
        return Wiped(node, tuple(sorted(found)))

    for v, mark in enumerate(alive):
        if not mark.any():
            return Wiped(v, (v,))
    queue = deque(v for v in range(len(alive)) if near[v])
    waiting = [bool(arc) for arc in near]
    while queue:
        v = queue.popleft()
        waiting[v] = False
        text = alive[v].tobytes()
        for u, allowed, axis in near[v]:
            mark = once((axis, text), (allowed,), lambda: _supported(allowed, alive[v], axis))
            lost = alive[u] & ~mark
            if lost.any():
                alive[u] = alive[u] & mark
                causes[u].add(v)
                if not alive[u].any():
                    return wiped(u)
                if not waiting[u]:
                    waiting[u] = True
                    queue.append(u)
    return alive


def consistent(problem: Problem) -> RestrictedProblem:
    """The problem without the states that arc consistency forbids.

    Raises:
        PlanError: a node has no state left; the error names the nodes that contradict one another.
    """
    found = arcs(problem)
    if isinstance(found, Wiped):
        raise contradiction(problem, found.causes)
    return restrict(problem, found)


def _stay(node_costs: np.ndarray, tables: Sequence[np.ndarray], amounts: Sequence[np.ndarray]) -> np.ndarray:
    """The states (bool) of a node that stay: those that no other staying state dominates.

    A few states of each neighbour rule most pairs out; the remaining pairs are compared over all states.

    Args:
        node_costs: its costs.
        tables: by edge, (its states, the neighbour's).
        amounts: by usage, the memory of each state.
    """
    gain = node_costs[:, None] - node_costs  # gain of b over a, at (b, a)
    least = gain.copy()
    stays = np.ones(len(node_costs), bool)
    with np.errstate(invalid="ignore"):  # inf - inf, where both forbid, says nothing: fmax skips it
        larger = [np.maximum if np.isfinite(table).all() else np.fmax for table in tables]
        for table, most in zip(tables, larger):
            some = np.full(gain.shape, -np.inf)
            for column in np.ascontiguousarray(table.T[:: -(-table.shape[1] // COLUMNS)]):
                most(some, column[:, None] - column, out=some)
            least += some
        possible = least <= 0
        for amount in amounts:
            possible &= amount[:, None] <= amount
        np.fill_diagonal(possible, False)
        b, a = np.nonzero(possible)
        if len(b) * max((table.shape[1] for table in tables), default=0) > MOST_COMPARED:
            return stays
        exact = gain[b, a]
        for table, most in zip(tables, larger):
            count = max(1, AT_ONCE // table.shape[1])
            for first in range(0, len(b), count):
                part = slice(first, first + count)
                exact[part] += most.reduce(table[b[part]] - table[a[part]], axis=1)
    beats = np.zeros(gain.shape, bool)
    won = exact <= 0
    beats[b[won], a[won]] = True
    for state in np.flatnonzero(beats.any(axis=0))[::-1]:
        if (beats[:, state] & stays).any():
            stays[state] = False
    return stays


def undominated(problem: Problem, *, rounds: int = 3) -> RestrictedProblem:
    """The problem without dominated states. The first of several states that are always equal stays.

    Memory counts where the problem has a limit.

    Args:
        problem: a consistent problem.
        rounds: passes over the nodes at most.
    """
    near: list[list[int]] = [[] for _ in problem.costs]
    for i, j in problem.edges:
        near[i].append(j)
        near[j].append(i)
    # by node: (amounts, the node's axis of them, the other node that decides them)
    uses: list[list[tuple[np.ndarray, int, int | None]]] = [[] for _ in problem.costs]
    for use in problem.usages if problem.limit is not None else ():
        for axis, v in enumerate(use.nodes):
            uses[v].append((np.asarray(use.amount), axis, None if use.other is None else use.nodes[1 - axis]))
    once = IdentityCache().once  # the states that stay; equal layers are compared once
    total = RestrictedProblem(problem, tuple(np.arange(len(node_costs)) for node_costs in problem.costs))
    changed: Collection[int] = range(len(problem.costs))
    for _ in range(rounds):
        now = total.problem
        alive = [np.ones(len(node_costs), bool) for node_costs in now.costs]
        less: list[int] = []
        for v in set(changed):
            node_costs = now.costs[v]
            sides = tuple(int(v > u) for u in near[v])
            tables = tuple(now.edges[u, v] if side else now.edges[v, u] for u, side in zip(near[v], sides))
            if not 1 < len(node_costs) <= MOST_STATES:
                continue
            amounts = []
            for amount, axis, other in uses[v]:
                mine = amount.T[total.state_numbers[v]] if axis else amount[total.state_numbers[v]]
                amounts += [mine] if other is None else list(mine[:, total.state_numbers[other]].T)
            stay = once(
                (node_costs.tobytes(), sides, *(amount.tobytes() for amount in amounts)),
                tables,
                lambda: _stay(node_costs, [table.T if side else table for table, side in zip(tables, sides)], amounts),
            )
            if not stay.all():
                alive[v] = stay
                less.append(v)
        if not less:
            break
        step = restrict(now, alive)
        total = RestrictedProblem(
            step.problem, tuple(numbers[more] for numbers, more in zip(total.state_numbers, step.state_numbers))
        )
        changed = {u for v in less for u in near[v]} | set(less)
    return total


@dataclass(frozen=True)
class Core:
    """A problem without its easy nodes.

    Attributes:
        problem: of the remaining nodes.
        nodes: by node of the core, its number in the whole.
        constant: the difference between the whole's cost and the core's.
    """

    problem: Problem
    nodes: tuple[int, ...]
    constant: float
    _eliminated: Eliminated
    _count: int

    def lift(self, states: Sequence[int]) -> list[int]:
        """States of the core as states of the whole: the best for them."""
        out = [0] * self._count
        for v, state in zip(self.nodes, states):
            out[v] = int(state)
        return self._eliminated.complete(out)


def core(problem: Problem, *, made: Tables | None = None) -> Core:
    """The problem without its nodes of at most two neighbours; with a memory limit, nodes with usages stay.

    Args:
        problem: any problem.
        made: tables of earlier eliminations, to be used and added to.
    """
    sizes = [len(node_costs) for node_costs in problem.costs]
    keep = () if problem.limit is None else {v for use in problem.usages for v in use.nodes}
    order = elimination_order(sizes, problem.edges, degree=2, keep=keep)
    result = eliminate(problem.costs, problem.edges, order, made=made)
    number = {v: n for n, v in enumerate(order.remaining)}
    edges = {(number[scope[0]], number[scope[1]]): table for scope, table in result.tables.items() if len(scope) == 2}
    names = (
        tuple(problem.names[v] for v in order.remaining) if problem.names else tuple(str(v) for v in order.remaining)
    )
    usages = tuple(
        replace(use, node=number[use.node], other=None if use.other is None else number[use.other])
        for use in problem.usages
        if use.node in number
    )
    remaining = Problem(tuple(result.tables[v,] for v in order.remaining), edges, names, usages, problem.limit)
    return Core(remaining, order.remaining, result.constant, result, len(sizes))


@dataclass(frozen=True)
class ReducedProblem:
    """A problem after all reductions: restricted, then without its easy nodes.

    Attributes:
        problem: the reduced problem.
        constant: the difference between the whole's cost and the reduced problem's.
    """

    problem: Problem
    constant: float
    _lifts: tuple[RestrictedProblem | Core, ...]

    def lift(self, states: Sequence[int]) -> list[int]:
        """States of the reduced problem as states of the whole."""
        for step in reversed(self._lifts):
            states = step.lift(states)
        return list(states)


def reduced(problem: Problem, *, made: Tables | None = None, compare: bool = True) -> ReducedProblem:
    """The problem after cases 1 to 3 of this file, in turns, until little changes.

    Args:
        problem: any problem.
        made: tables of earlier eliminations, to be used and added to.
        compare: remove dominated states too, which takes longest; False: a single turn without that.

    Raises:
        PlanError: arc consistency leaves a node without a state.
    """
    lifts: list[RestrictedProblem | Core] = []
    constant = 0.0
    while True:
        before = sum(len(node_costs) for node_costs in problem.costs)
        # an eliminated node may make its neighbours forbid more pairs: hence `consistent` once more
        for step in (consistent, lambda now: core(now, made=made), consistent, undominated)[: 4 if compare else 3]:
            found = step(problem)
            lifts.append(found)
            problem = found.problem
            constant += getattr(found, "constant", 0.0)
        if not compare or not problem.costs or sum(len(node_costs) for node_costs in problem.costs) > 0.9 * before:
            return ReducedProblem(problem, constant, tuple(lifts))


# -- contradictions --

NAMED = 12  # most nodes that the message names


def _allowed(problem: Problem, nodes: Sequence[int]) -> bool:
    """True where these nodes alone have states that allow one another, or where that is not known."""
    number = {v: n for n, v in enumerate(nodes)}
    edges = {(number[i], number[j]): table for (i, j), table in problem.edges.items() if i in number and j in number}
    part = Problem(tuple(problem.costs[v] for v in nodes), edges)
    alive = arcs(part)
    if isinstance(alive, Wiped):
        return False
    part = restrict(part, alive).problem
    order = elimination_order([len(cost) for cost in part.costs], part.edges)
    return bool(order.remaining) or bool(np.isfinite(eliminate(part.costs, part.edges, order).constant))


def _needed(problem: Problem, required: list[int], changed: bool, nodes: list[int]) -> list[int]:
    """The nodes that, with the given ones, are a smallest contradiction."""
    if changed and not _allowed(problem, sorted(required)):
        return []
    if len(nodes) == 1:
        return nodes
    first, second = nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :]
    of_second = _needed(problem, required + first, True, second)
    of_first = _needed(problem, required + of_second, bool(of_second), first)
    return of_first + of_second


def contradiction(problem: Problem, among: Sequence[int] | None = None) -> PlanError:
    """The error that names a set of nodes whose states contradict one another, none of which can be left out.

    Args:
        problem: a problem without an allowed assignment.
        among: nodes that are known to contradict one another; None: all nodes.
    """
    nodes = list(range(len(problem.costs)) if among is None else among)
    # A contradiction that is too large to be proved with these nodes alone names all of them.
    found = nodes if _allowed(problem, nodes) else sorted(_needed(problem, [], False, nodes))
    names = [problem.names[v] if problem.names else f"node {v}" for v in found]
    listed = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    if len(found) == 1:
        return PlanError(
            f"each of its {len(problem.costs[found[0]])} strategies is forbidden",
            operator=names[0],
            legal="at least one strategy of finite cost",
        )
    pairs = [f"{names[a]} and {names[b]}" for a, b in _pairs(problem, found)]
    return PlanError(
        f"no strategies of {listed} fit one another, whatever the rest of the network does; "
        f"what is forbidden between: {'; '.join(pairs[:NAMED])}",
        operator=names[0],
        legal="other strategies (or fewer marks) for one of them",
    )


def _pairs(problem: Problem, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """The positions of those pairs of nodes that forbid each other something."""
    number = {v: n for n, v in enumerate(nodes)}
    return [
        (number[i], number[j])
        for (i, j), table in problem.edges.items()
        if i in number and j in number and not np.isfinite(table).all()
    ]


# -- merged nodes --

GROWN = 2.5  # factor by which merging may multiply the states of a node
MANY = 256  # most states of a merged node


@dataclass(frozen=True)
class Merged:
    """A problem in which nodes are merged.

    Attributes:
        problem: with the same nodes; a node that was merged into another has one state without costs.
    """

    problem: Problem
    _into: Mapping[int, int]
    _states: Mapping[int, np.ndarray]

    def lift(self, states: Sequence[int]) -> list[int]:
        """States of the merged problem as states of the given one."""
        out = [int(state) for state in states]
        for a, b in self._into.items():
            at = int(states[b])
            out[a], out[b] = int(self._states[a][at]), int(self._states[b][at])
        return out


def candidates(problem: Problem, allowed: Mapping[tuple[int, int], float], degree: int) -> dict[int, int]:
    """Nodes of at least so many neighbours, each with a neighbour that it may be merged into.

    Args:
        problem: the problem.
        allowed: by pair, the share of its entries that is finite.
        degree: the least number of neighbours.

    Returns:
        Node -> the node to merge it into; no node takes part twice.
    """
    sizes = [len(node_costs) for node_costs in problem.costs]
    near: list[set[int]] = [set() for _ in sizes]
    for i, j in problem.edges:
        near[i].add(j)
        near[j].add(i)
    best: dict[int, tuple[int, float, int]] = {}
    for pair, share in allowed.items():
        small, large = sorted(pair, key=lambda v: (sizes[v], v))
        count = share * sizes[small] * sizes[large]
        if sizes[small] > 1 and len(near[small]) >= degree and count <= min(MANY, GROWN * sizes[large]):
            # the most common neighbours first, then the fewest states of the merged node; of equal candidates the last
            found = -len(near[small] & near[large]), count, -large
            best[small] = min(best.get(small, found), found)
    out: dict[int, int] = {}
    for a, b in ((a, -b) for a, (*_, b) in sorted(best.items())):
        if a not in out.values() and b not in out and b not in out.values():
            out[a] = b
    return out


def merged(problem: Problem, into: Mapping[int, int]) -> Merged:
    """The problem with each of these nodes merged into a neighbour.

    Args:
        problem: the problem.
        into: node -> the neighbour to merge it into; a node takes part once.
    """
    once = IdentityCache().once
    target = list(range(len(problem.costs)))
    index: dict[int, np.ndarray] = {}
    costs = list(problem.costs)
    for a, b in into.items():
        pair = (a, b) if a < b else (b, a)
        table = problem.edges[pair]
        both = once("pairs", (table,), lambda: np.nonzero(np.isfinite(table)))
        index[pair[0]], index[pair[1]] = both
        target[a] = b
        pair_costs = problem.costs[a], problem.costs[b]
        costs[b] = once(
            "costs",
            (table, *pair_costs),
            lambda: table[both] + problem.costs[pair[0]][both[0]] + problem.costs[pair[1]][both[1]],
        )
        costs[a] = np.zeros(1)

    def spread(table: np.ndarray, nodes: Sequence[int]) -> np.ndarray:
        """A table of these nodes as one of the merged nodes."""
        chosen = [index.get(v) for v in nodes]
        if all(rows is None for rows in chosen):
            return table

        def make() -> np.ndarray:
            out = np.asarray(table)
            for axis, rows in enumerate(chosen):
                out = out if rows is None else np.take(out, rows, axis=axis)
            return np.ascontiguousarray(out)

        return once("spread", (table, *chosen), make)

    edges: dict[tuple[int, int], np.ndarray] = {}
    for (i, j), table in problem.edges.items():
        if i not in index and j not in index:
            edges[i, j] = table
            continue
        if target[i] == target[j]:
            continue
        table, pair = spread(table, (i, j)), (target[i], target[j])
        if pair[0] > pair[1]:
            table, pair = once("turned", (table,), lambda: np.ascontiguousarray(table.T)), pair[::-1]
        before = edges.get(pair)
        if before is not None:
            one, other = before, table
            table = once("sum", (one, other), lambda: one + other)
        edges[pair] = table
    usages = []
    for use in problem.usages:
        if use.node not in index and use.other not in index:
            usages.append(use)
            continue
        nodes = tuple(target[v] for v in use.nodes)
        amount = np.asarray(use.amount)
        if len(nodes) == 2 and nodes[0] == nodes[1]:
            rows = [index[v] for v in use.nodes]
            amount = once("both", (use.amount, *rows), lambda: np.asarray(use.amount)[rows[0], rows[1]])
            nodes = nodes[:1]
        else:
            amount = spread(use.amount, use.nodes)
            if len(nodes) == 2 and nodes[0] > nodes[1]:
                amount = once("turned", (amount,), lambda: np.ascontiguousarray(amount.T))
                nodes = nodes[::-1]
        usages.append(
            MemoryUsage(nodes[0], use.start, use.stop, amount, use.what, nodes[1] if len(nodes) == 2 else None)
        )
    return Merged(replace(problem, costs=tuple(costs), edges=edges, usages=tuple(usages)), into, index)
