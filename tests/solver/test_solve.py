"""The exact solver against enumeration and against HiGHS."""

import sys
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from cost_graphs import SHAPES, assignments, held_most, layered, random_energy, with_usages
from hypothesis import example, given, settings, strategies as st

from shardwright.errors import PlanError
from shardwright.solver.anytime import _Search, bounded
from shardwright.solver.elimination import Tables, elimination_order, shared_work
from shardwright.solver.milp import milp, moments
from shardwright.solver.problem import MemoryUsage, Problem
from shardwright.solver.solve import marginals, solve
from shardwright.solver.tree_reweighted import Messages

small = st.builds(
    random_energy,
    st.integers(0, 10**6),
    st.sampled_from(SHAPES),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.2, 0.5)),
    st.booleans(),
)
larger = st.one_of(
    *(
        st.builds(
            random_energy,
            st.integers(0, 10**6),
            st.sampled_from(shapes),
            st.integers(7, nodes),
            st.integers(1, states),
            st.sampled_from((0.0, 0.1, 0.4)),
            st.booleans(),
        )
        # what is dense takes HiGHS minutes where it is any larger
        for shapes, nodes, states in ((("tree", "cycle", "grid"), 25, 7), (("dense", "sparse"), 9, 4))
    )
)


def least(problem, keeps=lambda states: True):
    return min((problem.cost(states) for states in assignments(problem) if keeps(states)), default=np.inf)


def answer(solver, problem):
    """The cost that a solver finds, inf where it says that nothing is allowed; what it says of itself is checked."""
    try:
        found = solver(problem)
    except PlanError:
        return np.inf
    assert found.cost == problem.cost(found.states) < np.inf
    assert found.bound <= found.cost
    return found.cost


@pytest.fixture
def joints(monkeypatch):
    """Sets how many entries a joint may have, for all that searches."""

    def set_most(most):
        for module in ("shardwright.solver.anytime", "shardwright.solver.solve"):
            monkeypatch.setattr(sys.modules[module], "elimination_order", partial(elimination_order, most=most))

    return set_most


@settings(max_examples=150, deadline=None)
@given(small)
def test_elimination_and_milp_find_what_enumeration_finds(problem):
    truth = least(problem)
    assert answer(solve, problem) == pytest.approx(truth)
    assert answer(milp, problem) == pytest.approx(truth)
    assert answer(partial(solve, merge=True), problem) == pytest.approx(truth)


@settings(max_examples=40, deadline=None)
@given(larger)
def test_elimination_finds_what_milp_finds(problem):
    assert answer(solve, problem) == pytest.approx(answer(milp, problem), abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.one_of(small, larger), st.sampled_from((1, 30, 300)))
def test_bounds_find_it_where_elimination_is_too_large(problem, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules["shardwright.solver.anytime"], "elimination_order", partial(elimination_order, most=most)
        )
        found = answer(solve, problem)
    assert found == pytest.approx(answer(solve, problem), abs=1e-9)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(8))
def test_bounds_find_it_where_most_is_forbidden(seed, joints):
    """States that are given up leave the rest consistent: messages between states without a partner are no numbers."""
    joints(200)
    problem = random_energy(seed, ("grid", "sparse")[seed % 2], (49, 16)[seed % 2], 8, 0.5, whole=False)
    for table in (*problem.costs, *problem.edges.values()):
        table[(-1,) * table.ndim] = 5e-4  # one assignment is allowed at least
    assert solve(problem).cost == pytest.approx(milp(problem).cost, rel=1e-6)


def test_what_loses_its_partners_by_a_bound_goes_too():
    """State 0 of node 1 fits state 0 of node 0 alone, and state 0 of node 2 that one alone."""
    only = np.array([[0.0, 1.0], [np.inf, 2.0]])
    problem = Problem((np.zeros(2),) * 3, {(0, 1): only, (1, 2): only})
    search = _Search(problem, Tables(), float("inf"))
    messages = Messages(problem)
    messages.sweep()
    messages.alive[0][0] = False
    kept = search.keep(messages)
    assert [len(own) for own in search.core.costs] == [1, 1, 1]
    assert kept.sweep() == pytest.approx(problem.cost((1, 1, 1)))
    kept.alive[2][0] = False
    search.offer((0, 0, 0))
    assert search.keep(kept) is None and search.bound == search.cost == problem.cost((1, 1, 1))


def test_a_core_that_cannot_be_eliminated_has_a_true_bound(joints):
    """Nothing is left to HiGHS either: what is reported is states, and a bound that is one."""
    joints(1)
    problem = random_energy(3, "dense", 12, 6, whole=False)
    truth = milp(problem).cost
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["shardwright.solver.anytime"], "MILP_ENTRIES", -1)
        found = bounded(problem, Tables(), float("inf"))
    assert found.bound <= truth * (1 + 1e-6) and truth <= found.cost * (1 + 1e-6)
    assert found.cost <= 1.05 * truth and found.gap < 0.5


def test_no_clock_decides_where_no_time_is_given(monkeypatch):
    """A clock that leaps a day at each look changes nothing; the work of the sweeps ends the search."""
    for name in ("LARGEST", "MILP_ENTRIES"):
        monkeypatch.setattr(sys.modules["shardwright.solver.anytime"], name, -1)
    problem = random_energy(3, "dense", 12, 6, whole=False)
    before = solve(problem)
    days = iter(range(0, 10**9, 86_400))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(days)))
    assert answer_of(solve(problem)) == answer_of(before)
    with pytest.raises(PlanError, match="in the time given"):
        solve(problem, seconds=1)
    monkeypatch.setattr(sys.modules["shardwright.solver.anytime"], "MOST_SWEPT", 1)
    short = solve(problem)
    assert short.gap > before.gap and short.bound <= before.cost <= short.cost * (1 + 1e-9)


def answer_of(found):
    return found.states, found.cost, found.bound


@pytest.mark.parametrize("kind", [{}, {"hub": 5}, {"tied": True}, {"same": False}])
@pytest.mark.parametrize("layers", [3, 10])
def test_layered_networks_equal_milp(layers, kind):
    problem = layered(layers, 30, 6, **kind)
    assert len(problem.costs) in (layers * 30, layers * 30 + 1)
    assert solve(problem).cost == pytest.approx(milp(problem).cost, rel=1e-6)


def test_equal_layers_are_computed_once():
    """The work for 16 times the layers is not even twice as much, and nothing is lost by it."""

    def work(layers, copied):
        problem = layered(layers, 12, 20, tied=True)
        if copied:
            problem = replace(problem, edges={pair: table.copy() for pair, table in problem.edges.items()})
        order = elimination_order([len(own) for own in problem.costs], problem.edges)
        return shared_work(problem.costs, problem.edges, order), problem

    few, many = work(8, False)[0], work(128, False)[0]
    assert many < 2 * few
    apart, problem = work(128, True)
    assert apart > 10 * many
    merged = solve(problem, merge=True)
    assert merged.cost == pytest.approx(solve(problem).cost)
    assert merged.bound == merged.cost and "different tables" in merged.notes[0]


@settings(max_examples=60, deadline=None)
@given(small, st.sampled_from((2**24, 1)))
def test_marginals(problem, most):
    truth = [np.full(len(own), np.inf) for own in problem.costs]
    for states in assignments(problem):
        cost = problem.cost(states)
        for v, s in enumerate(states):
            truth[v][s] = min(truth[v][s], cost)
    if not np.isfinite(truth[0]).any():
        with pytest.raises(PlanError):
            marginals(problem, 0)
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules["shardwright.solver.solve"], "elimination_order", partial(elimination_order, most=most)
        )
        found = [marginals(problem, v) for v in range(len(problem.costs))]
    for one, true in zip(found, truth, strict=True):
        assert one.exact or most == 1
        if one.exact:
            assert one.costs == pytest.approx(true)
        else:
            assert (one.costs <= true + 1e-9).all()
            assert one.costs.min() > -np.inf


@settings(max_examples=60, deadline=None)
@given(small, st.integers(0, 10**6), st.sampled_from((0.1, 0.3, 0.6)))
def test_milp_keeps_the_limit(problem, seed, limit):
    problem = with_usages(problem, seed, limit)
    truth = least(problem, lambda states: held_most(problem, states) <= problem.limit)
    assert answer(milp, problem) == pytest.approx(truth)
    if np.isfinite(truth):
        assert held_most(problem, milp(problem).states) <= problem.limit * (1 + 1e-9)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=8))
@example([(0, 1), (1, 1)])  # one ends where the next begins: they never live at once
def test_moments_are_the_largest_sets_that_live_at_once(lives):
    problem = Problem((np.zeros(1),), {}, (), tuple(MemoryUsage(0, a, a + n, np.zeros(1)) for a, n in lives))
    at = [frozenset(n for n, use in enumerate(problem.usages) if use.start <= t < use.stop) for t in range(14)]
    largest = {one for one in at if one and not any(one < other for other in at)}
    assert {frozenset(one) for one in moments(problem)} == largest


def test_what_cannot_be_chosen_is_named():
    """The error about a large network names the two that contradict one another, and the value between them."""
    problem = layered(4, 12, 6, forbidden=0.0)
    costs, edges = list(problem.costs), dict(problem.edges)
    edges[20, 21] = np.full((6, 6), np.inf)
    edges[20, 21][:3, :3] = 0.0
    edges[21, 22] = np.full((6, 6), np.inf)
    edges[21, 22][3:, :] = 0.0
    problem = Problem(tuple(costs), edges, tuple(f"op{v}" for v in range(len(costs))))
    for solver in (solve, partial(marginals, node=3)):
        with pytest.raises(PlanError, match="op20, op21, op22 fit") as error:
            solver(problem)
        assert error.value.legal
    costs[30] = np.full(6, np.inf)
    with pytest.raises(PlanError, match="op30: each of its 6 strategies is forbidden"):
        solve(replace(problem, costs=tuple(costs)))


def test_what_only_elimination_sees_to_be_impossible_is_named():
    """Three nodes of two states that must all differ, among others."""
    differ = np.where(np.eye(2) > 0, np.inf, 0.0)
    problem = layered(2, 12, 4, forbidden=0.0)
    n = len(problem.costs)
    edges = {**problem.edges, (n, n + 1): differ, (n + 1, n + 2): differ, (n, n + 2): differ, (5, n): np.zeros((4, 2))}
    problem = Problem((*problem.costs, *[np.zeros(2)] * 3), edges, tuple(f"op{v}" for v in range(n + 3)))
    with pytest.raises(PlanError, match="op24, op25, op26 fit"):
        solve(problem)


def test_no_nodes_at_all():
    assert solve(Problem((), {})).states == ()
    assert milp(Problem((np.array([2.0, 1.0]),), {})).states == (1,)
