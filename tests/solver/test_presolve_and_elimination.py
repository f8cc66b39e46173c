"""The parts of the exact solver: orders, reductions, sweeps, descent."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from cost_graphs import SHAPES, assignments, held_most, layered, random_energy, with_usages
from hypothesis import assume, given, settings, strategies as st

from shardwright.errors import PlanError
from shardwright.solver import elimination, tree_reweighted
from shardwright.solver.anytime import descend
from shardwright.solver.elimination import Script, eliminate, elimination_order
from shardwright.solver.lagrangian import bound_of
from shardwright.solver.presolve import consistent, core, interned, reduced, restrict, undominated
from shardwright.solver.problem import Problem
from shardwright.solver.tree_reweighted import Messages, Sweeps, colours

small = st.builds(
    random_energy,
    st.integers(0, 10**6),
    st.sampled_from(SHAPES),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.2, 0.5)),
    st.booleans(),
)


def least(problem):
    return min(problem.cost(states) for states in assignments(problem))


@settings(max_examples=80, deadline=None)
@given(small, st.sampled_from((4, 30, 2**20)), st.sampled_from((None, 1, 2)), st.data())
def test_an_order_takes_everyone_once_and_keeps_its_word(problem, most, degree, data):
    sizes = [len(own) for own in problem.costs]
    keep = data.draw(st.sets(st.sampled_from(range(len(sizes)))))
    weights = data.draw(st.none() | st.just([1.0] * len(sizes)))
    order = elimination_order(sizes, problem.edges, most=most, degree=degree, keep=keep, cutset_weights=weights)
    eliminated = [v for v, _ in order.steps]
    assert sorted(eliminated + list(order.remaining)) == list(range(len(sizes)))
    assert keep <= set(order.remaining) - set(order.cutset) and set(order.cutset) <= set(order.remaining)
    assert order.largest <= most
    if weights is not None:
        assert set(order.remaining) == set(order.cutset) | keep
    if degree is not None:
        assert all(len(around) <= degree for v, around in order.steps if sizes[v] > 1)


@settings(max_examples=80, deadline=None)
@given(small, st.data())
def test_what_elimination_leaves_is_the_least_over_what_is_gone(problem, data):
    """For every assignment of the nodes that are kept; and going back finds an assignment that costs just that."""
    keep = data.draw(st.sets(st.sampled_from(range(len(problem.costs))), max_size=2))
    order = elimination_order([len(own) for own in problem.costs], problem.edges, keep=keep)
    eliminated = eliminate(problem.costs, problem.edges, order)
    truth = {}
    for states in assignments(problem):
        at = tuple(states[v] for v in sorted(keep))
        truth[at] = min(truth.get(at, np.inf), problem.cost(states))
    for at, cost in truth.items():
        states = [0] * len(problem.costs)
        for v, s in zip(sorted(keep), at):
            states[v] = s
        left = eliminated.constant + sum(
            table[tuple(states[v] for v in scope)] for scope, table in eliminated.tables.items()
        )
        assert left == pytest.approx(cost)
        assert problem.cost(eliminated.complete(states)) == pytest.approx(cost)
        assert [states[v] for v in sorted(keep)] == list(at)


@settings(max_examples=40, deadline=None)
@given(small, st.integers(0, 99))
def test_a_script_serves_other_costs_of_the_same_nodes(problem, seed):
    random = np.random.default_rng(seed)
    sizes = [len(own) for own in problem.costs]
    order = elimination_order(sizes, problem.edges)
    script = Script(sizes, problem.edges, order)
    for _ in range(2):
        costs = [random.integers(0, 9, size).astype(float) for size in sizes]
        edges = {pair: random.integers(0, 9, table.shape).astype(float) for pair, table in problem.edges.items()}
        found, again = script.run(costs, edges), eliminate(costs, edges, order)
        other = replace(problem, costs=tuple(costs), edges=edges)
        states = found.complete([0] * len(sizes))
        assert found.constant == again.constant == other.cost(states) == min(map(other.cost, assignments(other)))


def test_a_chain_is_halved_and_not_walked():
    """A chain of 64 equal links between two kept ends has as many kinds of tables as halvings, not as links."""
    link = np.random.default_rng(0).random((5, 5))
    problem = Problem((np.zeros(5),) * 65, {(i, i + 1): link for i in range(64)})
    order = elimination_order([5] * 65, problem.edges, keep=(0, 64))
    depth = dict.fromkeys(range(65), 0)
    for v, around in order.steps:
        for u in around:
            depth[u] = max(depth[u], depth[v] + 1)
    assert max(depth.values()) <= 7


@settings(max_examples=80, deadline=None)
@given(small)
def test_reductions_keep_the_best(problem):
    truth = least(problem)
    if not np.isfinite(truth):
        assume(False)
    for step in (consistent, lambda p: undominated(consistent(p).problem), core, reduced):
        found = step(problem)
        inner = found.problem
        best = min(assignments(inner), key=inner.cost, default=())
        assert inner.cost(best) + getattr(found, "constant", 0.0) == pytest.approx(truth)
        if step is not undominated and hasattr(found, "lift") and step in (consistent, core, reduced):
            assert problem.cost(found.lift(best)) == pytest.approx(truth)


@settings(max_examples=80, deadline=None)
@given(small, st.integers(0, 10**6), st.sampled_from((0.1, 0.3, 0.6)))
def test_reductions_keep_the_best_that_keeps_the_limit(problem, seed, limit):
    problem = with_usages(problem, seed, limit)
    every = {s: held_most(problem, s) for s in assignments(problem) if np.isfinite(problem.cost(s))}
    assume(every)
    problem = replace(problem, limit=max(problem.limit, min(every.values())))  # that something keeps
    truth = min(problem.cost(s) for s, held in every.items() if held <= problem.limit)
    found = reduced(problem)
    inner = found.problem
    best = min((s for s in assignments(inner) if held_most(inner, s) <= inner.limit), key=inner.cost)
    assert inner.cost(best) + found.constant == pytest.approx(truth)
    states = found.lift(best)
    assert held_most(problem, states) <= problem.limit and problem.cost(states) == pytest.approx(truth)


def test_reductions_of_a_restricted_problem_share_tables():
    problem = layered(5, 12, 6, forbidden=0.3)
    cut = restrict(problem, [np.arange(len(own)) != 2 for own in problem.costs])
    assert len({id(table) for table in cut.problem.edges.values()}) == len(
        {id(table) for table in problem.edges.values()}
    )
    assert all(s != 2 for s in cut.lift([2] * len(problem.costs)))
    copied = Problem(problem.costs, {pair: table.copy() for pair, table in problem.edges.items()})
    assert len({id(table) for table in interned(copied).edges.values()}) == len(
        {id(table) for table in problem.edges.values()}
    )


def test_a_dominated_state_goes_and_of_equal_ones_the_first_stays():
    costs = np.array([1.0, 1.0, 5.0, 0.0])
    edge = np.array([[2.0, 1.0], [2.0, 1.0], [1.0, 0.0], [0.0, 9.0]])
    found = undominated(Problem((costs, np.zeros(2)), {(0, 1): edge}))
    assert found.state_numbers[0].tolist() == [
        0,
        3,
    ]  # 2 gains 1 and pays 4; 3 gains 3 of one state and pays 8 of the other
    assert found.state_numbers[1].tolist() == [0, 1]
    edge[:3] = edge[:3, ::-1]  # now the neighbour has no reason for its second state, and without it 0 has none
    assert [
        numbers.tolist() for numbers in undominated(Problem((costs, np.zeros(2)), {(0, 1): edge})).state_numbers
    ] == [[3], [0]]


@settings(max_examples=80, deadline=None)
@given(small, st.integers(1, 6))
def test_sweeps(problem, iterations):
    """The bound never falls and is one, by the messages too; no state of a best assignment is given up."""
    truth = least(problem)
    assume(np.isfinite(truth))
    inner = consistent(problem)
    whole, (costs, edges) = inner.problem, (inner.problem.costs, inner.problem.edges)
    messages = Messages(whole, best=truth)
    bounds = [messages.sweep() for _ in range(iterations)]
    tolerance = 1e-9 * (abs(truth) + 1)
    assert bounds == sorted(bounds) and messages.bound == bounds[-1] <= truth + tolerance
    same = SimpleNamespace(pairs={pair: pair for pair in edges})
    assert bound_of(costs, edges, same, messages.sent()) == pytest.approx(messages.bound, abs=tolerance)
    for states in assignments(whole):
        if whole.cost(states) <= truth:
            assert all(mark[s] for mark, s in zip(messages.alive, states))


@pytest.mark.parametrize("rows", [1, 7, 60])
def test_sums_that_are_made_in_parts_give_the_same_messages(rows, monkeypatch):
    """A large table is read a few rows at a time, which stay in the cache."""
    problem = random_energy(5, "dense", 12, 6, whole=False)
    whole, parts = Messages(problem), Messages(problem)
    for _ in range(3):
        whole.sweep()
    monkeypatch.setattr(tree_reweighted, "ROWS", rows)
    for _ in range(3):
        parts.sweep()
    received = parts.received()
    assert parts.bound == whole.bound and all(
        np.array_equal(message, received[pair]) for pair, message in whole.received().items()
    )


def test_sweeps_go_on_with_fewer_states():
    problem = random_energy(5, "dense", 12, 6, whole=False)
    messages = Messages(problem)
    for _ in range(10):
        messages.sweep()
    # of each node the state that is dearest by itself
    step = restrict(problem, [np.arange(len(own)) != (own.argmax() if len(own) > 1 else -1) for own in problem.costs])
    cut = messages.cut(step.problem, step.state_numbers)
    assert cut.sweep() >= messages.bound
    fresh = Messages(step.problem)
    fresh.sweep()
    assert cut.bound > fresh.bound


@settings(max_examples=40, deadline=None)
@given(small, st.integers(0, 10**6), st.sampled_from((1, 8, 2**16)))
def test_descent_never_costs_more(problem, seed, most):
    states = [int(seed % len(own)) for own in problem.costs]
    found = descend(problem, states, most=most, seed=seed)
    assert problem.cost(found) <= problem.cost(states)
    if most == 2**16:  # nothing had to be held
        assert problem.cost(found) == least(problem)


def test_descent_finds_its_way_out_of_what_is_forbidden():
    """Towards the one corner of a network that is known to be allowed, among two thirds that are not."""
    problem = random_energy(1, "grid", 49, 6, 0.6)
    for own in problem.costs:
        own[-1] = 5.0
    for table in problem.edges.values():
        table[-1, -1] = 5.0
    states = [0] * 49
    assert problem.cost(states) == np.inf
    found = descend(problem, states, most=100)
    assert problem.cost(found) < np.inf


@settings(max_examples=80, deadline=None)
@given(small, st.integers(1, 6))
def test_sweeps_of_a_colour_at_once_are_those_of_its_nodes_one_by_one(problem, iterations):
    try:
        problem = consistent(problem).problem
    except PlanError:
        assume(False)
    together = Sweeps(problem)
    number = colours(len(problem.costs), list(problem.edges))
    assert all(number[i] != number[j] for i, j in problem.edges)
    order = np.argsort(number, kind="stable").tolist()
    alone = Messages(problem, order)
    truth = least(problem)
    together.best = truth
    for _ in range(iterations):
        states, above = together.states(), [side.incoming.sum(axis=0) for _, side in alone._sides]
        assert together.sweep() == pytest.approx(alone.sweep(), rel=1e-9, abs=1e-9)
        other = next((n for n, v in enumerate(order) if states[v] != alone.states[v]), None)
        if other is not None:  # two states are as good, and rounding chooses
            v = order[other]
            choice = (
                problem.costs[v]
                + above[v]
                + sum(
                    problem.edges[u, v][states[u]] if u < v else problem.edges[v, u][:, states[u]]
                    for u in order[:other]
                    if (min(u, v), max(u, v)) in problem.edges
                )
            )
            assert choice[states[v]] == pytest.approx(choice[alone.states[v]], rel=1e-9, abs=1e-9)
    for states in assignments(problem):
        if problem.cost(states) <= truth < np.inf:
            assert all(mark[s] for mark, s in zip(together.alive, states))


def test_sweeps_give_up_what_costs_too_much():
    problem = random_energy(5, "dense", 12, 6, whole=False)
    sweeps = Sweeps(problem)
    sweeps.best = problem.cost(descend(problem, sweeps.states().tolist()))
    for _ in range(30):
        sweeps.sweep()
    assert sum(int(mark.sum()) for mark in sweeps.alive) < sum(len(own) for own in problem.costs)


def test_sweeps_go_on_with_other_costs():
    problem = random_energy(5, "dense", 12, 6, whole=False)
    near = replace(problem, costs=tuple(1.01 * own for own in problem.costs))
    sweeps, fresh = Sweeps(problem), Sweeps(near)
    for _ in range(10):
        sweeps.sweep()
    sweeps.load(near)
    assert sweeps.sweep() > fresh.sweep()
    found = descend(near, sweeps.states().tolist())
    assert sweeps.bound <= near.cost(found)


def test_a_state_that_all_neighbours_forbid_spoils_no_bound():
    table = np.array([[1.0, np.inf], [2.0, np.inf]])
    sweeps = Sweeps(
        Problem(
            (np.zeros(2), np.zeros(2), np.array([3.0, 4.0])),
            {(0, 1): table, (1, 2): np.ones((2, 2)), (0, 2): np.ones((2, 2))},
        )
    )
    for _ in range(5):
        sweeps.sweep()
    assert sweeps.bound == pytest.approx(6.0) and sweeps.states().tolist() == [0, 0, 0]


def test_a_joint_made_in_blocks_is_the_same(monkeypatch):
    problem = random_energy(3, "dense", 6, 5, whole=False)
    order = elimination_order([len(own) for own in problem.costs], problem.edges)
    at_once = eliminate(problem.costs, problem.edges, order)
    monkeypatch.setattr(elimination, "AT_ONCE", 1)
    for block in (1, 7, 40):
        monkeypatch.setattr(elimination, "BLOCK", block)
        found = eliminate(problem.costs, problem.edges, order)
        assert found.constant == at_once.constant
        assert found.complete([0] * len(problem.costs)) == at_once.complete([0] * len(problem.costs))
