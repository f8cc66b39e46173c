"""Solving within a memory limit: against HiGHS on random layered graphs, its bound, and limits that nothing keeps."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from work_clock import seconds_of_work

from shardwright.errors import PlanError
from shardwright.solver import priced_search, solve
from shardwright.solver.anytime import wide
from shardwright.solver.elimination import eliminate, elimination_order
from shardwright.solver.lagrangian import Ascent, Batched, PricedProblem
from shardwright.solver.memory_rows import Rows, binding
from shardwright.solver.milp import NoAssignmentError, milp, moments
from shardwright.solver.presolve import consistent
from shardwright.solver.problem import MemoryUsage, Problem, Solution
from shardwright.solver.solve import InfeasibleMemoryError, least_memory, solve_limited


def layered(
    seed: int, layers: int = 6, width: int = 4, states: int = 4, tight: float = 1.2, skip: float = 0.2
) -> Problem:
    """A layered graph: each node reads some of the last layer and, at times, of an earlier one. A costly state holds
    little memory. The limit is so many times the least that is held at the fullest moment."""
    rng = np.random.default_rng(seed)
    costs, edges, usages = [], {}, []
    nodes = [[layer * width + n for n in range(width)] for layer in range(layers)]
    for layer, row in enumerate(nodes):
        for v in row:
            many = int(rng.integers(2, states + 1))
            amount = np.sort(rng.integers(1, 50, many))[::-1]
            costs.append(np.sort(rng.integers(0, 100, many)).astype(float))
            usages.append(MemoryUsage(v, layer, min(layers, layer + int(rng.integers(1, 3))), amount.astype(float)))
            if rng.random() < 0.3:
                usages.append(MemoryUsage(v, layer, layers, rng.integers(0, 10, many).astype(float)))
    for layer, row in enumerate(nodes[1:], start=1):
        for v in row:
            for u in {int(rng.choice(nodes[layer - 1])), int(rng.choice(nodes[layer - 1]))} | (
                {int(rng.choice(nodes[int(rng.integers(0, layer))]))} if rng.random() < skip else set()
            ):
                table = rng.integers(0, 60, (len(costs[u]), len(costs[v]))).astype(float)
                table[rng.random(table.shape) < 0.1] = np.inf
                table[0, 0] = 60.0  # and so something is always allowed
                table[-1, -1] = 60.0
                edges[u, v] = table
    least = max(
        sum(float(usages[n].amount.min()) for n in living)
        for living in moments(Problem(tuple(costs), edges, usages=tuple(usages)))
    )
    return Problem(tuple(costs), edges, usages=tuple(usages), limit=float(np.floor(tight * least)))


def peak(problem: Problem, states) -> float:
    """The most that is held at any moment, counted directly."""
    moments = {use.start for use in problem.usages}
    return max(
        sum(float(use.amount[states[use.node]]) for use in problem.usages if use.start <= t < use.stop) for t in moments
    )


def oracle(problem: Problem):
    try:
        return milp(problem)
    except NoAssignmentError:
        return None


def both(problem: Problem):
    """The answer, which keeps the limit, and HiGHS's; None: there is none, and both say so."""
    best = oracle(problem)
    if best is None:
        with pytest.raises(InfeasibleMemoryError):
            solve_limited(problem)
        return None
    found = solve_limited(problem)
    assert peak(problem, found.states) <= problem.limit
    return found, best


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    layers=st.integers(2, 6),
    width=st.integers(1, 4),
    tight=st.sampled_from([1.0, 1.1, 1.3, 2.0]),
)
def test_equals_highs_on_layered_graphs(seed, layers, width, tight):
    problem = layered(seed, layers, width, tight=tight)
    answers = both(problem)
    if answers is None:
        return
    found, best = answers
    assert found.cost == problem.cost(found.states) == pytest.approx(best.cost)
    assert found.bound <= best.cost + 1e-6 and found.gap <= 1e-9


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), tight=st.sampled_from([1.0, 1.2, 1.5, 3.0]), draw=st.integers(0, 10**6))
def test_binding_moments_say_the_same_as_all(seed, tight, draw):
    problem = layered(seed, 5, 3, tight=tight)
    bound, times = binding(problem)
    states = [int(np.random.default_rng(draw + v).integers(len(own))) for v, own in enumerate(problem.costs)]
    kept = peak(problem, states) <= problem.limit
    if bound.limit is None:
        assert kept
        return
    rows = Rows.of(bound, len(times))
    used = rows.used([*states, 0])
    assert (used.max() <= problem.limit) == kept
    for row, t in enumerate(times):
        assert used[row] == pytest.approx(
            sum(float(use.amount[states[use.node]]) for use in problem.usages if use.start <= t < use.stop)
        )


def within_seconds(problem: Problem) -> Solution:
    """The answer of a search that is given seconds, which are counted in its work here."""
    with seconds_of_work():
        return solve_limited(problem, seconds=5)


def test_moments_that_cannot_be_broken_are_no_rows():
    usages = (
        MemoryUsage(0, 0, 3, np.array([4.0, 1.0])),
        MemoryUsage(1, 2, 5, np.array([4.0, 1.0])),
        MemoryUsage(1, 5, 9, np.array([7.0, 7.0])),
    )
    problem = Problem((np.array([0.0, 3.0]), np.array([0.0, 5.0])), {(0, 1): np.zeros((2, 2))}, usages=usages, limit=7)
    _bound, times = binding(problem)
    assert times.tolist() == [2]
    assert within_seconds(problem).states == (1, 0)
    assert binding(replace(problem, limit=8))[0].limit is None
    assert within_seconds(replace(problem, limit=8)).states == (0, 0)


def test_a_limit_of_nothing():
    problem = Problem(
        (np.array([0.0, 3.0]), np.array([0.0, 5.0])),
        {(0, 1): np.zeros((2, 2))},
        (),
        (MemoryUsage(0, 0, 3, np.array([4.0, 0.0])),),
        0.0,
    )
    assert within_seconds(problem).states == (1, 0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_batched_elimination_equals_one_by_one(seed):
    problem, rng = layered(seed, 7, 3), np.random.default_rng(seed)
    order = elimination_order([len(own) for own in problem.costs], problem.edges, degree=2)
    batched = Batched(problem, order)
    for _ in range(2):  # a second time: nothing of the first is left
        costs = [rng.random(len(own)) for own in problem.costs]
        core, one = batched.eliminate(costs), eliminate(costs, problem.edges, order)
        assert batched.constant == pytest.approx(one.constant)
        for v, own in zip(order.remaining, core.costs):
            np.testing.assert_allclose(own, one.tables[v,])
        for (i, j), table in core.edges.items():
            np.testing.assert_allclose(table, one.tables[order.remaining[i], order.remaining[j]])
        states = np.zeros(len(problem.costs), np.int64)
        states[list(order.remaining)] = [int(rng.integers(len(own))) for own in core.costs]
        assert batched.complete(states.copy()).tolist() == one.complete(states.tolist())


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), most=st.sampled_from([20, 64, 2**12]))
def test_a_wide_search_never_makes_it_worse(seed, most):
    problem = layered(seed, 8, 4)
    states = [0] * len(problem.costs)
    before = problem.cost(states)
    for turn in range(3):
        states = wide(problem, states, most=most, seed=turn)
        assert problem.cost(states) <= before
        before = problem.cost(states)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_bounds_at_any_multipliers_hold(seed):
    problem = consistent(layered(seed, 5, 3, tight=1.2)).problem
    best = oracle(problem)
    bound, times = binding(problem)
    if best is None or bound.limit is None:
        return
    priced = PricedProblem(bound, Rows.of(bound, len(times)))
    ascent = Ascent(priced)
    for _ in range(30):
        ascent.advance(2)
    assert priced.bound <= best.cost + 1e-6
    for mark, state in zip(priced.alive(best.cost), best.states):
        assert mark[state]


@pytest.mark.parametrize("seed", [0, 21])
def test_a_large_problem_keeps_the_limit_and_is_near_its_bound(seed, monkeypatch):
    """The way of the largest problems, which no oracle solves, on one that HiGHS still does."""
    monkeypatch.setattr(solve, "MANY", 10)
    problem = layered(seed, 12, 5, tight=1.15)
    answers = both(problem)
    if answers is None:
        return
    found, best = answers
    assert found.bound <= best.cost + 1e-6 and best.cost - 1e-6 <= found.cost <= 1.1 * best.cost


def test_a_part_that_elimination_is_too_large_for_gives_way_to_the_known_states(monkeypatch):
    """The search goes on, and refuses nothing that there is (so of a Llama of 32 layers of transformers)."""
    refused = []

    class Large(priced_search.Part):
        def __init__(self, problem, rows, alive):
            if len(refused) % 2 == 0:
                refused.append(alive)
                raise PlanError("a part of the problem is larger than the whole")
            refused.append(alive)
            super().__init__(problem, rows, alive)

    monkeypatch.setattr(priced_search, "Part", Large)
    monkeypatch.setattr(priced_search, "DIRECT", 0)
    monkeypatch.setattr(priced_search, "FEW", 1)  # with all states of all nodes the part would be the whole
    monkeypatch.setattr(solve, "MANY", 10)
    found, best = both(layered(0, 12, 5, tight=1.15))
    sizes = [sum(mark.sum() for mark in alive) for alive in refused]
    assert len(sizes) > 1 and all(known <= whole for whole, known in zip(sizes[::2], sizes[1::2]))
    assert found.bound <= best.cost + 1e-6 and best.cost - 1e-6 <= found.cost <= 1.1 * best.cost


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), tight=st.sampled_from([1.0, 1.1, 1.3]), asked=st.sampled_from([0.0, 1e4]))
def test_what_highs_does_not_solve_keeps_the_limit_or_names_the_leanest_states(seed, tight, asked):
    """HiGHS is asked little or nothing: what prices and splicing find is the answer, with a bound that holds."""
    problem = layered(seed, 4, 3, tight=tight)
    truth = oracle(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "WORK", asked)
        try:
            found = solve_limited(problem)
        except InfeasibleMemoryError as error:
            assert error.states is None or peak(problem, error.states) == error.enough > problem.limit
            assert oracle(replace(problem, limit=np.ceil(error.least) - 1)) is None
            return
    assert truth is not None and peak(problem, found.states) <= problem.limit
    assert found.bound <= truth.cost + 1e-6 <= found.cost + 2e-6


def test_no_clock_decides_where_no_time_is_given(monkeypatch):
    """A clock that leaps a day at each look changes nothing."""
    problems = [layered(seed, 4, 3, tight=1.1) for seed in range(2)]
    before = [answer(problem) for problem in problems]
    days = iter(range(0, 10**9, 86_400))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(days)))
    assert [answer(problem) for problem in problems] == before


def answer(problem: Problem) -> tuple:
    """States, cost and bound; or what the refusal names."""
    try:
        found = solve_limited(problem)
        return found.states, found.cost, found.bound
    except InfeasibleMemoryError as error:
        return error.states, error.enough, error.least


def test_a_limit_that_one_moment_cannot_meet_names_it_and_the_least_limit():
    usages = (MemoryUsage(0, 0, 3, np.array([40.0, 10.0])), MemoryUsage(1, 2, 5, np.array([40.0, 20.0])))
    problem = Problem(
        (np.array([0.0, 3.0]), np.array([0.0, 5.0])), {(0, 1): np.zeros((2, 2))}, ("one", "other"), usages, 29.0
    )
    with pytest.raises(InfeasibleMemoryError, match="limit of 29.*moment 2 .*other") as caught:
        within_seconds(problem)
    assert caught.value.moments == (2,) and caught.value.enough == caught.value.least == 30
    assert "at least 30" in caught.value.legal
    assert within_seconds(replace(problem, limit=30.0)).cost == 8


def test_moments_that_cannot_be_met_together():
    """Each moment alone can be met; the edge asks for the greater of one of the two."""
    usages = (MemoryUsage(0, 0, 1, np.array([40.0, 10.0])), MemoryUsage(1, 1, 2, np.array([40.0, 20.0])))
    either = np.array([[0.0, 0.0], [0.0, np.inf]])
    problem = Problem((np.zeros(2), np.zeros(2)), {(0, 1): either}, (), usages, 30.0)
    with pytest.raises(InfeasibleMemoryError, match="cannot be met at moment") as caught:
        within_seconds(problem)
    assert 30 < caught.value.least <= caught.value.enough == 40 and len(caught.value.moments) == 1


def test_forbidden_whatever_the_memory_is_no_matter_of_memory():
    problem = Problem(
        (np.zeros(1), np.zeros(1)), {(0, 1): np.full((1, 1), np.inf)}, (), (MemoryUsage(0, 0, 1, np.array([5.0])),), 3.0
    )
    with pytest.raises(PlanError) as caught:
        within_seconds(problem)
    assert not isinstance(caught.value, InfeasibleMemoryError)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_least_memory_of_a_large_problem_lies_between_its_two_ends(seed):
    """Elimination is not asked about the whole: sweeps bound it, a part of its states is what holds little."""
    problem = layered(seed, 5, 4)
    truth = least_memory(problem)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solve, "MOST_WORK", 0)
        found = least_memory(problem)
    assert found.least <= truth.enough
    if found.states is not None:
        assert np.isfinite(problem.cost(found.states))
        assert truth.least <= found.enough == peak(problem, found.states) <= 2 * truth.enough


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_least_memory_lies_between_two_ends_and_the_upper_one_is_near(seed):
    problem = layered(seed, 4, 3)
    found = least_memory(problem)
    assert found.least <= found.enough == peak(problem, found.states)
    assert np.isfinite(problem.cost(found.states))
    assert oracle(replace(problem, limit=found.enough)) is not None
    assert oracle(replace(problem, limit=found.least - 1)) is None
    assert oracle(replace(problem, limit=np.floor(0.95 * found.enough))) is None


@pytest.mark.parametrize("size", ["WHOLE", "WHOLE_NODES"])
def test_highs_is_not_asked_for_the_whole_of_a_large_problem(size, monkeypatch):
    """Over thousands of nodes it takes minutes and gigabytes, also where their tables are small (so of a GPT of 96
    layers within 70 GB by recursive_programming)."""
    asked = []
    monkeypatch.setattr(solve, "_searched", lambda *call: asked.append(call) or None)
    monkeypatch.setattr(priced_search, "MIXED", 0)
    problems = [layered(6, 4, 3, tight=1.15), layered(7, 4, 3, tight=1.05)]  # the second: no states are known
    truth = oracle(problems[0])
    with pytest.raises(InfeasibleMemoryError):
        solve_limited(problems[1])
    assert solve_limited(problems[0]).gap > 0 and len(asked) == 2
    monkeypatch.setattr(solve, size, 0)
    with pytest.raises(InfeasibleMemoryError) as caught:
        solve_limited(problems[1])
    assert peak(problems[1], caught.value.states) == caught.value.enough
    found = solve_limited(problems[0])
    assert found.bound <= truth.cost + 1e-6 and truth.cost - 1e-6 <= found.cost and len(asked) == 2


@pytest.mark.parametrize("seed", [0, 2, 5])
def test_a_large_problem_that_nothing_keeps_names_the_leanest_states_it_saw(seed, monkeypatch):
    """The problem is priced at no more moments than the search needs: the whole of them takes too much memory."""
    problem = layered(seed, 4, 3)
    truth = least_memory(problem)
    monkeypatch.setattr(solve, "WHOLE", 0)
    monkeypatch.setattr(solve, "MOST_WORK", 0)
    least = solve.infeasible(problem).least
    bound, times = binding(replace(problem, limit=-1.0))
    rows = Rows.of(bound, len(times))
    refused = replace(problem, limit=float(rows.least().max()))  # each moment by itself can be met
    assert oracle(refused) is None, "but not all at once"
    with pytest.raises(InfeasibleMemoryError) as caught:
        solve_limited(refused)
    error = caught.value
    assert (1 - 1e-8) * least <= error.least <= truth.enough
    assert truth.least <= error.enough == peak(problem, error.states)
    assert refused.limit < truth.enough
    assert np.isfinite(problem.cost(error.states))
