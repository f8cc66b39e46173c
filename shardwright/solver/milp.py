"""The same problem as a mixed integer linear program through HiGHS: the oracle of the other solvers.

    least  Σ_i Σ_s c_i(s) x_is + Σ_(ij) Σ_(S,T) e'_ij(S, T) y_ijST
    with   Σ_s x_is = 1                                              x binary
           Σ_T y_ijST = Σ_(s in S) x_is,  Σ_S y_ijST = Σ_(t in T) x_jt     y >= 0
           Σ_(living usages u) Σ_s m_u(s) x_is + Σ_(S,T) m_u(S, T) y_ijST <= limit     at each moment with a row

S and T are classes of states. The states of a class have equal edge costs except for a constant, which is added to c,
and equal memory together with every state of the other node. A forbidden pair has no y. A moment has a row where its
live usages are not part of those of another moment, and where it can bind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import PlanError
from ..identity_tables import IdentityCache
from .problem import Problem, Solution

if TYPE_CHECKING:
    import highspy

__all__ = ["WORK", "NoAssignmentError", "milp", "moments", "quiet_highs"]

#: Entries of HiGHS's matrix times nodes of its tree: about ten seconds.
WORK = 2e7
#: Least nodes of the tree that the work has to suffice for: HiGHS takes longer for the first node than for many
#: others.
FEWEST = 100


class NoAssignmentError(PlanError):
    """A problem without any allowed assignment, as HiGHS has proved."""


def moments(problem: Problem) -> list[tuple[int, ...]]:
    """The sets of usages that live at once and lie in no other such set.

    Returns:
        By moment, the numbers of its usages, ascending.
    """
    uses = problem.usages
    events = sorted(
        [(use.start, 1, n) for n, use in enumerate(uses) if use.start < use.stop]
        + [(use.stop, 0, n) for n, use in enumerate(uses) if use.start < use.stop]
    )
    living: set[int] = set()
    found, grew = [], False
    for _, starts, n in events:
        if starts:
            living.add(n)
            grew = True
        else:
            if grew:
                found.append(tuple(sorted(living)))
            living.discard(n)
            grew = False
    return found


def _classes(table: np.ndarray, amounts: Sequence[np.ndarray] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(class by row, constant by row, a row of each class). Rows of one class are equal except for a constant, and
    their rows in the further tables are equal."""
    finite = np.isfinite(table)
    least = np.where(finite, table, np.inf).min(axis=1, initial=np.inf)
    shift = np.where(np.isfinite(least), least, 0.0)
    # 12 digits of the table's own size: rows that differ by rounding alone are one class
    digits = float(np.abs(table[finite]).max(initial=0.0)) * 1e-12 or 1.0
    level = np.where(finite, np.round((np.where(finite, table, 0.0) - shift[:, None]) / digits), np.inf)
    _, first, number = np.unique(
        np.concatenate([level, *amounts], axis=1), axis=0, return_index=True, return_inverse=True
    )
    return number.reshape(-1), shift, first


def quiet_highs() -> highspy.Highs:
    """A new HiGHS that prints nothing. HiGHS prints its banner while it is made, as it switches its callbacks on."""
    import highspy  # noqa: PLC0415  4 MiB a process, and few plans need it

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    made = Quiet()
    made.setOptionValue("output_flag", False)  # of a highspy that switches no callbacks on
    return made


class _Rows:
    """The rows of a sparse matrix, as HiGHS takes them."""

    def __init__(self) -> None:
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.starts: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []

    def add(self, lower: float, upper: float, columns: Sequence[int], values: Sequence[float]) -> None:
        self.lower.append(lower)
        self.upper.append(upper)
        self.starts.append(len(self.columns))
        self.columns.extend(columns)
        self.values.extend(values)


def milp(problem: Problem, *, seconds: float | None = None, work: float | None = None) -> Solution:
    """The best assignment within the limit, proved by HiGHS.

    Args:
        problem: the problem.
        seconds: HiGHS ends after this time with the best assignment found and its bound; None: no limit.
        work: HiGHS ends likewise after this many nodes of its tree times entries of its matrix; None: no limit.
            Unlike seconds, the work is the same on every machine.

    Raises:
        NoAssignmentError: there is no assignment.
        PlanError: none was found in time, or the matrix is too large for `FEWEST` nodes.
    """
    import highspy  # noqa: PLC0415  4 MiB a process, and few plans need it

    costs = [np.where(np.isfinite(node_costs), node_costs, 0.0).astype(float) for node_costs in problem.costs]
    column: list[np.ndarray] = []  # by node and state: the number of its x, -1 where forbidden
    count = 0
    for node_costs in problem.costs:
        allowed = np.isfinite(node_costs)
        column.append(np.where(allowed, count + np.cumsum(allowed) - 1, -1))
        count += int(allowed.sum())
    rows = _Rows()
    for where in column:
        mine = where[where >= 0].tolist()
        rows.add(1.0, 1.0, mine, [1.0] * len(mine))
    paid: list[float] = []  # by y
    once = IdentityCache().once
    between: dict[tuple[int, int], list[np.ndarray]] = {}  # by edge, the amounts that both nodes decide
    for use in problem.usages if problem.limit is not None else ():
        if use.other is not None:
            between.setdefault((use.node, use.other), []).append(np.asarray(use.amount, float))
    chosen: dict[tuple[int, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}  # by edge: y by pair of classes
    for (i, j), table in problem.edges.items():
        amounts = between.get((i, j), ())

        def reduced() -> tuple[np.ndarray, ...]:
            by_row, shift, first = _classes(table, amounts)
            by_column, across, second = _classes((table - shift[:, None])[first].T, [some[first].T for some in amounts])
            small = (table - shift[:, None] - across)[np.ix_(first, second)]
            return by_row, shift, by_column, across, small, first, second

        by_row, shift, by_column, across, small, first, second = once("reduced", (table, *amounts), reduced)
        costs[i] = costs[i] + shift
        costs[j] = costs[j] + across
        if small.size == 1 and np.isfinite(small[0, 0]) and not amounts:
            continue
        number = np.full(small.shape, -1)
        chosen[i, j] = number, first, second
        allowed = np.isfinite(small)
        number[allowed] = count + len(paid) + np.arange(int(allowed.sum()))
        paid.extend(small[allowed].tolist())
        for where, classes, pairs in ((column[i], by_row, number), (column[j], by_column, number.T)):
            for n, pair in enumerate(pairs):
                states = where[(classes == n) & (where >= 0)].tolist()
                both = pair[pair >= 0].tolist()
                if states or both:
                    rows.add(0.0, 0.0, both + states, [1.0] * len(both) + [-1.0] * len(states))
    limit = math.inf if problem.limit is None else problem.limit
    for living in moments(problem) if problem.limit is not None else ():
        own_amounts: dict[int, np.ndarray] = {}
        shared: dict[tuple[int, int], np.ndarray] = {}
        for n in living:
            use = problem.usages[n]
            if use.other is None:
                own_amounts[use.node] = own_amounts.get(use.node, 0) + np.asarray(use.amount, float)
            else:
                pair = (use.node, use.other)
                shared[pair] = shared.get(pair, 0) + np.asarray(use.amount, float)
        most = sum(float(amount[column[v] >= 0].max(initial=0.0)) for v, amount in own_amounts.items())
        most += sum(float(amount.max(initial=0.0)) for amount in shared.values())
        if most > limit:
            entries = [
                (int(c), float(m)) for v, amount in own_amounts.items() for c, m in zip(column[v], amount) if c >= 0
            ]
            for pair, amount in shared.items():
                number, first, second = chosen[pair]
                entries += [
                    (int(c), float(m))
                    for c, m in zip(number.ravel(), amount[np.ix_(first, second)].ravel())
                    if c >= 0 and m
                ]
            unit = max(abs(limit), 1.0)
            rows.add(-highspy.kHighsInf, limit / unit, [c for c, _ in entries], [m / unit for _, m in entries])
    if work is not None and FEWEST * len(rows.columns) > work:
        raise PlanError(
            f"no assignment was found: a matrix of {len(rows.columns):,} entries is more than HiGHS is asked"
        )
    objective = np.concatenate(
        [*(node_costs[where >= 0] for node_costs, where in zip(costs, column)), np.array(paid, float)]
    )
    scale = float(np.abs(objective).max(initial=0.0)) or 1.0
    scale = 1e3 / scale  # HiGHS's tolerances are absolute
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(objective), len(rows.lower)
    model.col_cost_ = objective * scale
    model.col_lower_, model.col_upper_ = np.zeros(len(objective)), np.ones(len(objective))
    model.integrality_ = [highspy.HighsVarType.kInteger] * count + [highspy.HighsVarType.kContinuous] * len(paid)
    model.row_lower_, model.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.array([*rows.starts, len(rows.columns)])
    model.a_matrix_.index_, model.a_matrix_.value_ = np.array(rows.columns), np.array(rows.values)
    highs = quiet_highs()
    for option, value in (("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-7)):
        highs.setOptionValue(option, value)
    if seconds is not None:
        highs.setOptionValue("time_limit", float(seconds))
    if work is not None:
        highs.setOptionValue("mip_max_nodes", min(int(work // max(len(rows.columns), 1)), 2**31 - 1))
    highs.passModel(model)
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        raise NoAssignmentError(
            "no assignment of strategies is allowed" + (" within the memory limit" if problem.limit is not None else "")
        )
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        raise PlanError(f"no assignment was found: {highs.modelStatusToString(status)}")
    x = np.array(highs.getSolution().col_value)
    states = tuple(int(np.where(where >= 0, x[where], -1.0).argmax()) for where in column)
    cost = problem.cost(states)
    bound = cost if status == highspy.HighsModelStatus.kOptimal else min(cost, info.mip_dual_bound / scale)
    return Solution(states, cost, bound, (f"HiGHS: {highs.modelStatusToString(status)}",))
