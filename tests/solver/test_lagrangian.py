"""Memory that two nodes decide, prices of memory minimised exactly, and what is made of the states that they bring."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from work_clock import seconds_of_work

from shardwright.solver import lagrangian
from shardwright.solver.cutting_planes import Prices, cheapest
from shardwright.solver.elimination import Facts, Tables, eliminate, elimination_order
from shardwright.solver.lagrangian import Cut, Pricing
from shardwright.solver.memory_rows import Rows, Splicer, binding
from shardwright.solver.milp import NoAssignmentError, milp
from shardwright.solver.presolve import candidates, consistent, merged, reduced, restrict
from shardwright.solver.priced_search import _PricedSearch, priced_search
from shardwright.solver.problem import MemoryUsage, Problem
from shardwright.solver.search_memory import OutOfBudgetError
from shardwright.solver.solve import solve_limited


def chain(seed: int, nodes: int = 8, states: int = 3, tight: float = 0.5, forbidden: float = 0.25) -> Problem:
    """A chain with some shortcuts, in which pairs of neighbours hold memory together, and a limit between what is held
    at least and at most."""
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 30, int(rng.integers(1, states + 1))).astype(float) for _ in range(nodes)]
    pairs = [(v - 1, v) for v in range(1, nodes)] + [(v - 3, v) for v in range(3, nodes) if rng.random() < 0.4]
    edges, usages = {}, []
    for i, j in pairs:
        table = rng.integers(0, 30, (len(costs[i]), len(costs[j]))).astype(float)
        table[rng.random(table.shape) < forbidden] = np.inf
        table[0, 0] = 20.0
        edges[i, j] = table
        if rng.random() < 0.7:
            amount = rng.integers(0, 20, table.shape).astype(float)
            usages.append(MemoryUsage(i, i, int(rng.integers(j + 1, nodes + 2)), amount, "", j))
    for v, own in enumerate(costs):
        usages.append(MemoryUsage(v, v, v + 2, rng.integers(0, 20, len(own)).astype(float)))
    problem = Problem(tuple(costs), edges, (), tuple(usages))
    peaks = [
        held(problem, states)
        for states in product(*(range(len(own)) for own in costs))
        if np.isfinite(problem.cost(states))
    ]
    return replace(problem, limit=float(np.floor(min(peaks) + tight * (max(peaks) - min(peaks)))))


def held(problem: Problem, states) -> float:
    return max(
        sum(use.amount_in(states) for use in problem.usages if use.start <= t < use.stop)
        for t in {use.start for use in problem.usages}
    )


def best_of(problem: Problem) -> float:
    return min(
        problem.cost(states)
        for states in product(*(range(len(own)) for own in problem.costs))
        if held(problem, states) <= problem.limit
    )


small = st.builds(chain, st.integers(0, 10**6), st.integers(3, 7), tight=st.sampled_from([0.0, 0.2, 0.5]))


@settings(max_examples=25, deadline=None)
@given(small)
def test_what_two_nodes_hold_counts_in_every_way_to_the_best(problem):
    best = best_of(problem)
    assert milp(problem).cost == pytest.approx(best)
    found = solve_limited(problem)
    assert found.cost == pytest.approx(best) and held(problem, found.states) <= problem.limit
    assert found.bound <= best + 1e-9
    with seconds_of_work():
        found = solve_limited(problem, seconds=20)
    assert found.cost == pytest.approx(best) and held(problem, found.states) <= problem.limit


@settings(max_examples=25, deadline=None)
@given(small)
def test_reductions_keep_what_two_nodes_hold(problem):
    less = reduced(problem)
    found = milp(less.problem).states if less.problem.costs else ()
    states = less.lift(found)
    assert held(problem, states) <= problem.limit and problem.cost(states) == pytest.approx(best_of(problem))


@settings(max_examples=25, deadline=None)
@given(small)
def test_merged_nodes_are_the_same_problem(problem):
    problem = consistent(problem).problem
    pairs: dict[int, int] = {}
    for i, j in problem.edges:
        if not {i, j} & {*pairs, *pairs.values()}:
            pairs[i] = j
    step = merged(problem, pairs)
    try:
        found = milp(step.problem)
    except NoAssignmentError:
        pytest.fail("nothing is allowed any more")
    states = step.lift(found.states)
    assert problem.cost(states) == pytest.approx(found.cost) == pytest.approx(best_of(problem))
    assert held(problem, states) <= problem.limit
    assert set(candidates(problem, Facts().sparse(problem.edges), 1)) <= set(range(len(problem.costs)))


def test_a_node_that_few_pairs_are_allowed_of_is_merged():
    follows = np.full((6, 2), np.inf)
    follows[:3, 0] = follows[3:, 1] = 1.0
    problem = Problem((np.arange(6.0), np.zeros(2), np.zeros(3)), {(0, 1): follows, (1, 2): np.ones((2, 3))})
    into = candidates(problem, {(0, 1): 0.5}, 2)
    assert into == {1: 0} and [len(own) for own in merged(problem, into).problem.costs] == [6, 1, 3]


def priced(problem: Problem):
    inner = consistent(problem).problem
    bound, times = binding(inner)
    assume(bound.limit is not None)
    rows = Rows.of(bound, len(times))
    assume(not (rows.least() > bound.limit).any())
    return bound, rows


@settings(max_examples=25, deadline=None)
@given(small, st.integers(0, 10**6))
def test_the_least_at_any_prices(problem, seed):
    """Counted over all assignments; with the bound it gives, and the states it comes with."""
    bound, rows = priced(problem)
    multipliers = np.random.default_rng(seed).exponential(1.0, rows.count)
    value, cut = Pricing.of(bound, rows).least(multipliers)

    def at(states):
        return bound.cost(states) + float(multipliers @ (rows.used(states) - bound.limit))

    assert value == pytest.approx(min(at(s) for s in product(*(range(len(own)) for own in bound.costs))))
    assert at(cut.states) == pytest.approx(value) and value <= best_of(problem) + 1e-6


@settings(max_examples=20, deadline=None)
@given(small, st.booleans())
def test_a_priced_search_keeps_the_limit_and_its_bound(problem, parts):
    bound, rows = priced(problem)
    search = _PricedSearch(bound, rows, Pricing.of(bound, rows), 1e-9)
    found = search.run()
    best = best_of(problem)
    assert search.prices.bound <= best + 1e-6
    if found is not None:
        assert (rows.used(found.states) <= bound.limit).all() and found.cost >= best - 1e-6
        again, leanest, *_ = priced_search(bound, rows, Pricing.of(bound, rows), 1e-9)
        assert again.states == found.states, "the same each time"
        assert leanest.used.max() <= rows.used(found.states).max()


@settings(max_examples=25, deadline=None)
@given(small, st.integers(0, 10**6))
def test_a_splice_is_the_best_of_all_places(problem, seed):
    bound, rows = priced(problem)
    rng = np.random.default_rng(seed)
    a, b = ([int(rng.integers(len(own))) for own in bound.costs] for _ in range(2))
    found = Splicer(bound, rows).splice(a, b, np.inf)
    mixed = [first[:k] + second[k:] for first, second in ((a, b), (b, a)) for k in range(len(a) + 1)]
    costs = [bound.cost(s) for s in mixed if (rows.used(s) <= bound.limit).all()]
    best = min((cost for cost in costs if np.isfinite(cost)), default=None)
    assert (found is None) == (best is None)
    if found is not None:
        assert found[1] == pytest.approx(best) == pytest.approx(bound.cost(found[0]))


@settings(max_examples=25, deadline=None)
@given(small, st.integers(0, 10**6), st.integers(2, 9))
def test_even_splices_are_allowed_splices_at_their_cost(problem, seed, parts):
    bound, rows = priced(problem)
    rng = np.random.default_rng(seed)
    a, b = (tuple(int(rng.integers(len(own))) for own in bound.costs) for _ in range(2))
    mixed = {first[:k] + second[k:] for first, second in ((a, b), (b, a)) for k in range(len(a) + 1)}
    found = list(Splicer(bound, rows).evenly(a, b, parts))
    assert len(found) <= 2 * (parts - 1)
    for states, cost in found:
        assert states in mixed and cost == pytest.approx(bound.cost(states)) and np.isfinite(cost)
    if np.isfinite([bound.cost(states) for states in mixed]).all():
        assert len(found) == 2 * (parts - 1)


def test_a_mixture_has_splices_where_they_are_cheaper():
    """The first two nodes are above the limit in state 0, the others are not: state 1 of the latter is paid for
    nothing."""
    amounts = (7.5, 7.5, 5.0, 5.0)
    uses = tuple(MemoryUsage(v, v // 2, v // 2 + 1, np.array([amount, 2.5])) for v, amount in enumerate(amounts))
    problem = Problem(tuple(np.array([0.0, cost]) for cost in (1.0, 1.0, 4.0, 4.0)), {}, usages=uses, limit=10.0)
    rows, values = Rows.of(problem, 2), []
    cuts = [Cut(states, problem.cost(states), rows.used(states)) for states in ((0,) * 4, (1,) * 4)]
    for splicer in (None, Splicer(problem, rows)):
        prices = Prices(2, 10.0, splicer)
        assert all(prices.add(cut) for cut in cuts) and not prices.add(cuts[0]) and len(prices.cuts) == 2
        values.append(cheapest([*prices.cuts.values(), *prices.spliced.values()], 10.0, 1e3)[1])
    assert values == pytest.approx([5.0, 1.0]), "half of each; half of the first and half of (1, 1, 0, 0)"


@settings(max_examples=25, deadline=None)
@given(small)
def test_a_window_never_makes_it_worse_and_keeps_the_limit(problem):
    bound, rows = priced(problem)
    states = (*milp(problem).states, 0)
    inner = consistent(problem)
    assume(all(len(k) == len(own) for k, own in zip(inner.state_numbers, problem.costs)))
    dear = [
        list(s)
        for s in product(*(range(len(own)) for own in bound.costs))
        if (rows.used(s) <= bound.limit).all() and np.isfinite(bound.cost(s))
    ]
    worst = max(dear, key=bound.cost)
    alive = [np.ones(len(own), bool) for own in bound.costs]
    found = Splicer(bound, rows).window(worst, 0, len(worst), alive, np.zeros(rows.count), bound.cost(worst))
    if found is not None:
        assert found[1] < bound.cost(worst) and (rows.used(found[0]) <= bound.limit).all()
    assert bound.cost(states) <= (found or (None, bound.cost(worst)))[1] + 1e-9


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.6, 0.9]))
def test_sparse_tables_and_equal_columns_change_nothing(seed, forbidden):
    """Elimination goes through what tables allow, and through different columns only: the least is the same."""
    rng = np.random.default_rng(seed)
    problem = chain(seed, 6, 5, forbidden=forbidden)
    edges = {
        pair: table[:, rng.integers(0, table.shape[1], table.shape[1])] if rng.random() < 0.5 else table
        for pair, table in problem.edges.items()
    }
    problem = replace(problem, edges=edges, usages=(), limit=None)
    facts = Facts()
    sizes = [len(own) for own in problem.costs]
    order = elimination_order(sizes, edges, allowed=facts.sparse(edges), few=facts.few(edges))
    eliminated = eliminate(problem.costs, edges, order, made=Tables(facts))
    every = [problem.cost(s) for s in product(*(range(len(own)) for own in problem.costs))]
    assert eliminated.constant == pytest.approx(min(every)) or (
        not np.isfinite(min(every)) and not np.isfinite(eliminated.constant)
    )


def test_a_part_has_what_is_known_and_what_goes_with_it():
    problem = chain(5, 7, 3, tight=0.2)
    bound, times = binding(consistent(problem).problem)
    rows = Rows.of(bound, len(times))
    search = _PricedSearch(bound, rows, Pricing.of(bound, rows), 1e-9)
    search.look(np.zeros(rows.count))
    marks = search.marks()
    assert all(mark.all() for mark in marks), "nodes of few states have all"
    assert restrict(bound, marks).problem.cost(next(iter(search.known))) == search.prices.bound


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 400), st.sampled_from([60.0, 95.0, 105.0, 130.0]))
def test_prices_are_those_of_the_program_over_all_moments(seed, count, moments, limit):
    """No mixture of cuts within the limit at every moment is cheaper than the prices say, and one is as cheap."""
    rng = np.random.default_rng(seed)
    cuts = [
        Cut((k,), float(50 + rng.exponential(20)), 100 + 15 * rng.standard_normal(moments) - rng.exponential(5))
        for k in range(count)
    ]
    most = 500.0
    prices, value, shares = cheapest(cuts, limit, most)
    assert (prices >= 0).all() and prices.sum() * limit <= most * (1 + 1e-6)
    assert min(cut.cost + prices @ (cut.used - limit) for cut in cuts) == pytest.approx(value, rel=1e-6)
    assert dual(cuts, limit, most) == pytest.approx(value, rel=1e-6)
    mixed = sum(share * (cut.used - limit) for share, cut in zip(shares, cuts)) / limit
    costs = sum(share * cut.cost for share, cut in zip(shares, cuts))
    assert sum(shares) == pytest.approx(1.0) and (shares >= 0).all()
    assert costs + most * max(0.0, mixed.max()) == pytest.approx(value, rel=1e-6)


def dual(cuts: list[Cut], limit: float, most: float) -> float:
    """The cheapest mixture of cuts, with `most` paid for each limit's worth of memory above the limit."""
    import highspy

    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    share = [model.addVariable(lb=0.0, obj=cut.cost) for cut in cuts]
    above = model.addVariable(lb=0.0, obj=most)
    model.addConstr(sum(share) == 1)
    for over in zip(*((cut.used - limit) / limit for cut in cuts)):
        model.addConstr(sum(float(o) * s for o, s in zip(over, share)) <= above)
    model.run()
    return model.getInfo().objective_function_value


def test_a_search_goes_on_by_sweeps_where_prices_make_elimination_too_large(monkeypatch):
    """Equal layers are computed once without prices, and are not equal with them."""
    problem = chain(3, nodes=10)
    bound, times = binding(problem)
    rows = Rows.of(bound, len(times))
    pricing, least, calls = Pricing.of(bound, rows), Pricing.least, []
    with monkeypatch.context() as patched, pytest.raises(OutOfBudgetError):
        patched.setattr(lagrangian, "RESULTS", 0)
        pricing.least(np.zeros(rows.count))

    def once(self, multipliers):
        calls.append(multipliers)
        if len(calls) == 2:
            raise OutOfBudgetError("too large")
        return least(self, multipliers)

    monkeypatch.setattr(Pricing, "least", once)
    found = solve_limited(problem)
    assert len(calls) > 2 and held(problem, found.states) <= problem.limit
    assert found.bound <= best_of(problem) <= found.cost
