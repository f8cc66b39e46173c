"""A lower bound where memory is limited: the limit's price at each moment (Lagrangian multipliers).

    L(λ) = min_s [cost(s) + Σ_t λ_t (used_t(s) - limit)],   λ >= 0

L(λ) is a lower bound on every assignment within the limit, for each λ. The inner minimum has no limit. One moment, a
limit of 10, states of (cost, memory) (0, 15) and (4, 5): L(0) = 0, and L(0.4) = min(0 + 0.4 · 5, 4 - 0.4 · 5) = 2,
the best bound.

The file has four parts:

1. `Pricing`: L and its states exactly, by elimination; `Part`: the same of a part of the states.

2. `SweptPricing`: a bound on L by sweeps (`tree_reweighted`), where elimination is too large:

    L(λ) >= Σ_v min θ_v + Σ_(u,v) min e'_uv      θ_v = c_v + Σ_u m_uv,   e'_uv(s, t) = e_uv(s, t) - m_vu(s) - m_uv(t)

   for any messages m. The messages are those of sweeps over a shorter problem of few equal layers
   (`memory_rows.shorter`). Where equal layers are many, most of θ and e' are then the same, and are computed once. A
   bound of the whole then takes the time and memory of a few layers, and is as true as if all had been swept.

3. `Batched`: elimination of nodes with at most two neighbours, again for each new costs of the nodes:

    one neighbour:   c_u(t)     += min_s c_v(s) + e_vu(s, t)
    two:             e_ab(t, r) += min_s c_v(s) + e_va(s, t) + e_vb(s, r)

   Steps of one level (none needs the result of another) and of one shape are one operation on arrays.

4. `PricedProblem` and `Ascent`: nodes of at most two neighbours are eliminated, the rest is swept
   (`tree_reweighted.Sweeps`), and the messages are kept from one λ to the next. λ grows where the states of the sweep
   take more memory than the limit, in proportion, and falls where they take less.

`cutting_planes` finds the best λ with parts 1 and 2; part 4 climbs step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from ..errors import PlanError
from ..identity_tables import IdentityCache
from .elimination import Facts, Order, Script, Tables, elimination_order, shared_work
from .memory_rows import Pair, Rows, Shorter, period, shorter
from .presolve import Merged, candidates, consistent, merged, restrict
from .problem import Problem
from .search_memory import OutOfBudgetError, current
from .tree_reweighted import Messages, Sweeps

__all__ = ["Ascent", "Batched", "Cut", "Part", "PricedProblem", "Pricing", "SweptPricing", "bound_of"]


# -- by elimination --

MOST = 2**26  # entries of a joint, of those that its tables allow
WORK = 2**31  # entries of all joints, equal ones once, above which elimination is too large; about 3 s
RESULTS = 3 * 2**26  # entries of the results of one elimination, equal ones once: 1.5 GiB, which takes about 4 s
ROOM = 64  # entries of a joint's result that count as one of fill; measured
DEGREE = 3  # least neighbours of a node that is merged into another
ORDERS = 6  # orders that are remembered


@dataclass(frozen=True)
class Cut:
    """States, and their upper bound on L at every λ: L(λ) <= cost + Σ_t λ_t (used_t - limit).

    Attributes:
        states: of the problem.
        cost: the cost of the states, without memory.
        used: by moment, the memory of the states.
    """

    states: tuple[int, ...]
    cost: float
    used: np.ndarray


class _Ordered:
    """An elimination order, and its script for the edges that it was made for.

    Attributes:
        order: the order.
    """

    def __init__(self, sizes: tuple[int, ...], pairs: tuple[Pair, ...], order: Order) -> None:
        self.order, self._sizes, self._pairs = order, sizes, pairs

    @cached_property
    def script(self) -> Script:
        """The script, which costs as much as the order."""
        return Script(self._sizes, self._pairs, self.order)


@lru_cache(maxsize=ORDERS)
def _ordered(
    sizes: tuple[int, ...],
    pairs: tuple[Pair, ...],
    allowed: tuple[tuple[Pair, float], ...],
    few: tuple[tuple[Pair, int], ...],
    most: int,
) -> _Ordered:
    """The order of a problem of these sizes; the levels of a recursion often have the same one."""
    order = elimination_order(sizes, pairs, most=most, allowed=dict(allowed), few=dict(few), room=ROOM)
    return _Ordered(sizes, pairs, order)


class Pricing:
    """A problem that elimination can do at any prices of memory.

    Args:
        problem: of `memory_rows.binding`, consistent.
        rows: its usages.
    """

    def __init__(self, problem: Problem, rows: Rows, merges: Merged, ordered: _Ordered, facts: Facts) -> None:
        self.problem, self.rows = problem, rows
        self._merged, self._order, self.facts = merges, ordered.order, facts
        self._script = ordered.script
        self._inside = Rows.of(merges.problem, rows.count)

    @classmethod
    def of(cls, problem: Problem, rows: Rows, most: int = MOST) -> Pricing | None:
        """The pricing of a problem; None where elimination is too large.

        Args:
            problem: of `memory_rows.binding`, consistent.
            rows: its usages.
            most: entries of a joint.
        """
        facts = Facts()
        best: tuple[int, Merged, _Ordered] | None = None
        for into in ({}, candidates(problem, facts.sparse(problem.edges), DEGREE)):
            if best is not None and not into:
                break
            step = merged(problem, into)
            edges = step.problem.edges
            ordered = _ordered(
                tuple([len(node_costs) for node_costs in step.problem.costs]),
                tuple(edges),
                tuple(facts.sparse(edges).items()),
                tuple(facts.few(edges).items()),
                most,
            )
            work = ordered.order.work
            if not ordered.order.remaining and (best is None or work < best[0]):
                best = work, step, ordered
        if best is None:
            return None
        work, step, ordered = best
        if work > WORK and shared_work(step.problem.costs, step.problem.edges, ordered.order, facts) > WORK:
            return None
        return cls(problem, rows, step, ordered, facts)

    @property
    def work(self) -> int:
        """Entries of all joints."""
        return self._order.work

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        """L at these multipliers, and states that reach it.

        Args:
            multipliers: by moment, the price of a unit of memory.

        Raises:
            OutOfBudgetError: elimination is too large at these prices, which make equal tables differ.
        """
        merged_problem, rows = self._merged.problem, self._inside
        costs, edges = (
            rows.priced(merged_problem.costs, multipliers),
            rows.priced_edges(merged_problem.edges, multipliers),
        )
        result = self._script.run(costs, edges, made=Tables(self.facts, RESULTS))
        cut = self.cut(self._merged.lift(result.complete([0] * len(merged_problem.costs))))
        return result.constant - float(multipliers.sum()) * self.rows.limit, cut

    def cut(self, states: Sequence[int]) -> Cut:
        states = tuple(map(int, states))
        return Cut(states, self.problem.cost(states), self.rows.used(states))


class Part:
    """A part of a problem's states, minimised like the whole; its results are states of the whole.

    Args:
        problem, rows: the whole.
        alive: the states (bool, by node) of the part.

    Raises:
        PlanError: the part's states exclude one another, or elimination is too large for them.
    """

    def __init__(self, problem: Problem, rows: Rows, alive: Sequence[np.ndarray]) -> None:
        self.rows = rows
        first = restrict(problem, alive)
        self._steps = [first, consistent(first.problem)]
        restricted = self._steps[-1].problem
        self.size = sum(map(len, restricted.costs))
        found = Pricing.of(restricted, Rows.of(restricted, rows.count))
        if found is None:
            raise PlanError("a part of the problem is larger than the whole")
        self._pricing = found

    def least(self, multipliers: np.ndarray) -> tuple[float, Cut]:
        value, cut = self._pricing.least(multipliers)
        states: Sequence[int] = cut.states
        for step in reversed(self._steps):
            states = step.lift(states)
        return value, Cut(tuple(states), cut.cost, cut.used)


# -- by sweeps --

SWEEPS = 48  # most sweeps of the shorter problem
LOOK = 4  # sweeps between two checks of the bound
STALLED = 3e-5  # relative change of the bound between two checks below which the sweeps end
ENTRIES = 2**29  # entries of tables in all sweeps together; about 2 s
NEAR_PRICES = 0.3  # relative change of the prices up to which sweeps begin with the last messages; measured
BEST = 6  # states of a node that the sweeps propose


class SweptPricing:
    """A problem that sweeps bound at any prices of memory.

    Args:
        problem: of `memory_rows.binding`, consistent.
        rows: its usages.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self._period = period(problem.costs, problem.edges)
        #: The last sweeps: their problem, the prices by usage, their messages.
        self._last: tuple[Shorter, np.ndarray, dict[Pair, np.ndarray]] | None = None

    def least(self, multipliers: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """A lower bound of L at these multipliers, and by node the states (bool) that look best at them.

        Args:
            multipliers: by moment, the price of a unit of memory.
        """
        costs = self.rows.priced(self.problem.costs, multipliers)
        edges = self.rows.priced_edges(self.problem.edges, multipliers)
        short = None if self._period is None else shorter(costs, edges, self._period)
        if short is None:
            nodes = tuple(range(len(costs)))
            short = Shorter(nodes, edges, np.array(nodes), {pair: pair for pair in edges})
        short_problem = Problem(tuple(costs[v] for v in short.nodes), short.edges)
        try:
            messages = Messages(short_problem, dtype=np.float32)  # `bound_of` does not round
        except OutOfBudgetError:
            return self._unswept(costs, edges, short) - float(multipliers.sum()) * self.rows.limit, self._nearest(
                short_problem, short
            )
        budget = current()
        prices = self.rows.prices(multipliers)
        messages.begin(self._carried(short, prices))
        once = max(1, sum(table.size for table in short.edges.values()))
        value = before = -np.inf
        most = max(LOOK, min(SWEEPS, ENTRIES // once))
        for turn in range(most):
            budget.watch()
            messages.sweep()
            if turn % LOOK == LOOK - 1 or turn == most - 1:
                found = bound_of(costs, edges, short, messages.sent())
                value = max(value, found)
                if found - before <= STALLED * abs(found):
                    break
                before = found
        self._last = short, prices, messages.received()
        looks = [self._look(theta, state) for theta, state in zip(messages.thetas(), messages.states.tolist())]
        return value - float(multipliers.sum()) * self.rows.limit, [looks[v] for v in short.stands.tolist()]

    def _carried(self, short: Shorter, prices: np.ndarray) -> dict[Pair, np.ndarray]:
        """The messages of the last sweeps as messages of another shorter problem; none where its prices are far from
        the last ones."""
        out: dict[Pair, np.ndarray] = {}
        if self._last is None:
            return out
        before, old, messages = self._last
        if float(np.abs(prices - old).sum()) > NEAR_PRICES * float(prices.sum()):
            return out
        for pair, (x, y) in short.pairs.items():
            if (x, y) not in out:
                a, b = before.pairs[pair]
                out[x, y], out[y, x] = messages[a, b], messages[b, a]
        return out

    def forget(self) -> None:
        """Release the messages of the last sweeps, from which the next sweeps would begin."""
        self._last = None

    @staticmethod
    def _unswept(costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray], short: Shorter) -> float:
        """The bound without any messages, which take memory."""
        zeros = {size: np.zeros(size) for size in {len(node_costs) for node_costs in costs}}
        sent = {}
        for (x, y), table in short.edges.items():
            sent[x, y], sent[y, x] = zeros[table.shape[1]], zeros[table.shape[0]]
        return bound_of(costs, edges, short, sent)

    def _nearest(self, short_problem: Problem, short: Shorter) -> list[np.ndarray]:
        """By node, the states (bool) that look best by their own costs plus the least of each of their edges."""
        once = IdentityCache().once
        totals = list(short_problem.costs)
        for pair, table in short_problem.edges.items():
            for axis, v in enumerate(pair):
                totals[v] = totals[v] + once(axis, (table,), lambda: table.min(axis=1 - axis))
        looks = [self._look(total, int(total.argmin())) for total in totals]
        return [looks[v] for v in short.stands.tolist()]

    @staticmethod
    def _look(theta: np.ndarray, state: int) -> np.ndarray:
        """The states (bool) of a node that look best, and the one that the sweep took."""
        mark = np.zeros(len(theta), bool)
        mark[np.argsort(theta, kind="stable")[:BEST]] = True
        mark[state] = True
        return mark


def bound_of(
    costs: Sequence[np.ndarray], edges: Mapping[Pair, np.ndarray], short: Shorter, sent: Mapping[Pair, np.ndarray]
) -> float:
    """The bound that messages give.

    Args:
        costs, edges: of the whole problem.
        short: the problem that was swept.
        sent: its messages by (from, to), one entry by state of the latter node.
    """
    thetas: list[list[np.ndarray]] = [[] for _ in costs]
    once = IdentityCache().once
    total = 0.0
    for (i, j), table in edges.items():
        x, y = short.pairs[i, j]
        up, down = sent[x, y], sent[y, x]  # to j, to i
        thetas[j].append(up)
        thetas[i].append(down)
        total += once("edge", (table, up, down), lambda: float((table - down[:, None] - up).min()))
    for node_costs, mine in zip(costs, thetas):
        total += once(node_costs.tobytes(), tuple(mine), lambda: float(sum(mine, node_costs).min()))
    return total


# -- easy nodes --

AT_ONCE = 2**20  # entries of joints made at once; above it state by state


#: An eliminated node, its neighbours, the places of the tables between, and that of the table that is added to, or -1.
_Step: TypeAlias = tuple[int, tuple[int, ...], list[int], int]

#: The level of a step, the states of its node and of its neighbours, and which tables are transposed.
_Shape: TypeAlias = tuple[int, int, tuple[int, ...], tuple[bool, ...]]

#: The table of one neighbour: see `_Steps.near`.
_Near: TypeAlias = tuple[np.ndarray, np.ndarray, tuple[int, int], np.ndarray, bool]


@dataclass
class _Steps:
    """Steps of equal shape.

    Attributes:
        size: states of the eliminated nodes.
        around: states of their neighbours: none, one or two.
        nodes: the eliminated nodes.
        at: their places among the nodes of their size.
        near: by neighbour: the nodes, their places among those of their size, the key of the tables between, the
            places of these tables, and True where they are transposed.
        out: with two neighbours, the key and the places of the tables that are added to.
        single: True where no table or node is added to twice.
    """

    size: int
    around: tuple[int, ...]
    nodes: np.ndarray
    at: np.ndarray
    near: list[_Near]
    out: tuple[tuple[int, int], np.ndarray] | None
    single: bool


class Batched:
    """A problem whose nodes of at most two neighbours are eliminated.

    Args:
        problem: with its edges; its costs are given anew each time.
        order: of `elimination_order(..., degree=2)`.

    Attributes:
        constant: the constant of the last elimination.
    """

    def __init__(self, problem: Problem, order: Order) -> None:
        self.order = order
        self.sizes = sizes = [len(node_costs) for node_costs in problem.costs]
        count = len(sizes)
        self._members: dict[int, np.ndarray] = {}
        self._at = np.zeros(count, np.int64)
        by_size: dict[int, list[int]] = {}
        for v, size in enumerate(sizes):
            mine = by_size.setdefault(size, [])
            self._at[v] = len(mine)
            mine.append(v)
        self._members = {size: np.array(mine) for size, mine in by_size.items()}
        slots: dict[tuple[int, int], int] = {}
        tables: dict[tuple[int, int], list[np.ndarray | None]] = {}

        def slot(a: int, b: int) -> int:
            if (a, b) not in slots:
                mine = tables.setdefault((sizes[a], sizes[b]), [])
                slots[a, b] = len(mine)
                mine.append(problem.edges.get((a, b)))
            return slots[a, b]

        for a, b in problem.edges:
            slot(a, b)
        level_of: dict[Hashable, int] = {}  # by node or pair, the level of its last change
        found: dict[_Shape, list[_Step]] = {}
        for v, around in order.steps:
            if sizes[v] == 1:  # no joint is made: each neighbour is a step
                for u in around:
                    self._step(found, level_of, slot, v, (u,))
                self._step(found, level_of, slot, v, ())
            else:
                self._step(found, level_of, slot, v, around)
        self._steps = [self._packed(key, mine) for key, mine in sorted(found.items(), key=lambda item: item[0][0])]
        self._stacked = {}
        for shape, some in tables.items():
            self._stacked[shape] = stacked = np.zeros((len(some), *shape))
            for n, table in enumerate(some):
                if table is not None:
                    stacked[n] = table
        self._tables = {shape: stacked.copy() for shape, stacked in self._stacked.items()}
        remaining = set(order.remaining)
        number = {v: n for n, v in enumerate(order.remaining)}
        self._pairs = [
            ((number[a], number[b]), (sizes[a], sizes[b]), at)
            for (a, b), at in sorted(slots.items())
            if a in remaining and b in remaining
        ]

    def _step(
        self,
        found: dict[_Shape, list[_Step]],
        level_of: dict[Hashable, int],
        slot: Callable[[int, int], int],
        v: int,
        around: tuple[int, ...],
    ) -> None:
        """Add one step to those of its level and shape."""
        sizes = self.sizes
        pairs = [(v, u) if v < u else (u, v) for u in around]
        level = 1 + max([level_of.get(v, 0), *(level_of.get(pair, 0) for pair in pairs)])
        out = around if len(around) == 2 else around[0] if around else None
        if out is not None:
            level_of[out] = max(level_of.get(out, 0), level)
        key = (level, sizes[v], tuple(sizes[u] for u in around), tuple(v > u for u in around))
        found.setdefault(key, []).append(
            (v, around, [slot(*pair) for pair in pairs], slot(*around) if len(around) == 2 else -1)
        )

    def _packed(self, key: _Shape, mine: list[_Step]) -> _Steps:
        _, size, around, turned = key
        nodes = np.array([step[0] for step in mine])
        near = []
        for n, (other, turn) in enumerate(zip(around, turned)):
            them = np.array([step[1][n] for step in mine])
            near.append(
                (
                    them,
                    self._at[them],
                    (other, size) if turn else (size, other),
                    np.array([step[2][n] for step in mine]),
                    turn,
                )
            )
        out = (around, np.array([step[3] for step in mine])) if len(around) == 2 else None
        written = out[1] if out else near[0][0] if near else nodes
        return _Steps(size, around, nodes, self._at[nodes], near, out, len(np.unique(written)) == len(written))

    def eliminate(self, costs: Sequence[np.ndarray]) -> Problem:
        """The remaining problem with these costs of the nodes; its tables are the same memory each time."""
        costs_of_size = {size: np.stack([costs[v] for v in mine]) for size, mine in self._members.items()}
        for shape, stacked in self._stacked.items():
            np.copyto(self._tables[shape], stacked)
        self._costs_of_size, tables, constant = costs_of_size, self._tables, 0.0
        for step in self._steps:
            mine = costs_of_size[step.size][step.at]
            if not step.near:
                constant += float(mine.min(axis=1).sum())
                continue
            parts = [self._between(near) for near in step.near]
            if step.out is None:
                # a node with one state adds its own cost once
                least = (parts[0] + (mine[:, :, None] if step.size > 1 else 0.0)).min(axis=1)
                target, where = costs_of_size[step.around[0]], step.near[0][1]
            else:
                first, second = parts[0] + mine[:, :, None], parts[1]
                target, where = tables[step.out[0]], step.out[1]
                if len(mine) * step.size * step.around[0] * step.around[1] <= AT_ONCE:
                    least = (first[:, :, :, None] + second[:, :, None, :]).min(axis=1)
                else:
                    least = first[:, 0, :, None] + second[:, 0, None, :]
                    for s in range(1, step.size):
                        np.minimum(least, first[:, s, :, None] + second[:, s, None, :], out=least)
            if step.single:
                target[where] += least
            else:
                np.add.at(target, where, least)
        self.constant = constant
        return Problem(
            tuple(costs_of_size[self.sizes[v]][self._at[v]] for v in self.order.remaining),
            {pair: tables[shape][at] for pair, shape, at in self._pairs},
        )

    def _between(self, near: _Near) -> np.ndarray:
        """The tables between a step's nodes and one neighbour each: (steps, own states, its states)."""
        _, _, shape, at, turn = near
        tables = self._tables[shape][at]
        return tables.swapaxes(1, 2) if turn else tables

    def complete(self, states: np.ndarray) -> np.ndarray:
        """Fill in the best states of the eliminated nodes, in place."""
        for step in reversed(self._steps):
            costs = self._costs_of_size[step.size][step.at]
            for near in step.near:
                _, _, shape, at, turn = near
                tables, theirs = self._tables[shape], states[near[0]]
                costs = costs + (tables[at, theirs] if turn else tables[at, :, theirs])
            states[step.nodes] = costs.argmin(axis=1)
        return states


FIRST = 20  # sweeps before there is any price
FIXING = 20  # sweeps that find the states that may be part of an assignment as good as the best known
NEAR = 0.1  # share of the limit: a moment this far below the fullest one starts without a price


class PricedProblem:
    """A problem whose memory is paid for.

    Args:
        problem: of `memory_rows.binding`, consistent.
        rows: its usages.

    Attributes:
        multipliers: by moment, the price of a unit of memory.
        bound: the best lower bound so far on the cost of an assignment within the limit.
        best: the multipliers of that bound.
    """

    def __init__(self, problem: Problem, rows: Rows) -> None:
        self.problem, self.rows = problem, rows
        self.order = elimination_order([len(node_costs) for node_costs in problem.costs], problem.edges, degree=2)
        self.multipliers = self.best = np.zeros(rows.count)
        self.bound = -np.inf
        self.easy = Batched(problem, self.order)
        self._messages: Sweeps | None = None
        self._fresh = False

    def price(self, multipliers: np.ndarray) -> None:
        """Set the multipliers; `core` and `constant` are then at these."""
        self.multipliers = multipliers
        if self.rows.paired:  # the prices change the tables themselves
            edges = self.rows.priced_edges(self.problem.edges, multipliers)
            self.easy = Batched(replace(self.problem, edges=edges), self.order)
        self.core = self.easy.eliminate(self.rows.priced(self.problem.costs, multipliers))
        self.constant = self.easy.constant - float(multipliers.sum()) * self.rows.limit
        self._fresh = False

    @property
    def messages(self) -> Sweeps:
        """The messages of the core, kept from one price to the next."""
        if self._messages is None:
            self._messages = Sweeps(self.core)
        elif not self._fresh:
            self._messages.load(self.core)
        self._fresh = True
        return self._messages

    def sweep(self, times: int = 1) -> float:
        """The bound at these multipliers after so many sweeps."""
        self.messages.bound = -np.inf  # the bound at earlier prices does not hold at these
        for _ in range(times):
            self.messages.sweep()
        now = self.messages.bound + self.constant
        if now > self.bound:
            self.bound, self.best = now, self.multipliers
        return now

    def lift(self, states: Sequence[int]) -> list[int]:
        """States of the core as states of the problem: the best for them at these prices."""
        out = np.zeros(len(self.problem.costs), np.int64)
        out[list(self.order.remaining)] = states
        return self.easy.complete(out).tolist()

    def alive(self, cost: float) -> list[np.ndarray]:
        """The states (bool, by node) that may be part of an assignment within the limit that costs at most `cost`."""
        self.price(self.best)
        self.messages.best = cost - self.constant
        self.sweep(FIXING)
        out = [np.ones(len(node_costs), bool) for node_costs in self.problem.costs]
        for v, mark in zip(self.order.remaining, self.messages.alive):
            out[v] = mark
        return out


class Ascent:
    """Multipliers that improve step by step.

    They start at `start`, or at the moments where the least memory of every plan comes nearest to the limit. A step
    has two halves: an amount added to each multiplier, in all a share of the multipliers' sum, and a factor on each.
    After several steps without a better bound, the ascent returns to the best multipliers with shorter steps.

    Args:
        priced: the problem.
        start: the first multipliers; None: as above.
        step: the share of the multipliers' sum that a step moves.
    """

    def __init__(self, priced: PricedProblem, start: np.ndarray | None = None, *, step: float = 0.2) -> None:
        self.priced, self.step = priced, step
        self._over: np.ndarray | None = None
        self._failed = 0
        rows = priced.rows
        least = rows.least() / rows.unit
        near = np.maximum(least - least.max() + NEAR, 0.0) ** 2
        priced.price(np.zeros(rows.count))
        self._scale = max(abs(priced.sweep(FIRST)), 1.0) / rows.unit
        priced.price(near / near.sum() * self._scale if start is None else start)

    def advance(self, sweeps: int) -> list[int]:
        """Sweep at the current multipliers, then move to the next ones.

        Args:
            sweeps: the number of sweeps.

        Returns:
            The states of the sweeps.
        """
        priced = self.priced
        now = priced.sweep(sweeps)
        states = priced.lift(priced.messages.states().tolist())
        over = priced.rows.over(states)
        self._over = over if self._over is None else 0.6 * self._over + 0.4 * over
        multipliers = priced.multipliers
        if now >= priced.bound:
            self._failed = 0
        else:
            self._failed += 1
            if self._failed > 5:
                self.step, self._failed = 0.8 * self.step, 0
                multipliers, self._over = priced.best, over
        change = np.where((multipliers <= 0) & (self._over < 0), 0.0, np.clip(self._over, -1.0, 1.0))
        total = max(float(multipliers.sum()), 1e-3 * self._scale)
        added = 0.5 * self.step * total * change / max(float(np.abs(change).sum()), 1e-12)
        factor = 1.0 + 0.5 * self.step * np.clip(5.0 * self._over, -1.0, 1.0)
        priced.price(np.maximum(multipliers * factor + added, 0.0))
        return states
