"""Values with several consumers: every way to serve them has a state, at the price of the partitioner's program."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from two_hosts import CLUSTER

from shardwright.capture.export import capture
from shardwright.cost.cost_model import CostModel
from shardwright.errors import LayoutError
from shardwright.graph import Graph, Value
from shardwright.layout import Digit, Layout
from shardwright.partition.local_program import InputPlacement, Redistribute, place_inputs
from shardwright.partition.parameter_sharding import OptimizerParallel
from shardwright.partition.partitioner import Partitioner, Use
from shardwright.planners import dynamic_programming as planner, graph_problem
from shardwright.planners.dynamic_programming import dynamic_programming
from shardwright.planners.plan_search import SOME_SHARED, Search
from shardwright.planners.planning_problem import PlanningProblem
from shardwright.planners.search_space import EdgeCosts
from shardwright.planners.semi_auto import semi_auto
from shardwright.planners.shared_values import SharedValue
from shardwright.sharded_plan import Plan
from shardwright.solver.problem import Problem, Solution
from shardwright.solver.solve import solve

DEVICES = 4
DIGITS = (Digit(2, 2), Digit(2, 1))
COSTS = CostModel(CLUSTER, DEVICES)
PLACES = (0, 1, None)
#: Every layout of a matrix on four devices, each of the two digits on a dim or on none.
LAYOUTS = tuple(
    Layout.of(DEVICES, [[d for d, at in zip(DIGITS, places) if at == dim] for dim in (0, 1)])
    for places in product(PLACES, repeat=2)
)


def partial(layout: Layout) -> Layout:
    """The layout with a partial sum over its replicas; without replicas, itself."""
    return layout.with_partial(layout.replicas)


def use_of(draw: random.Random) -> Use:
    layout = draw.choice(LAYOUTS)
    return Use(layout, layout.replicas if draw.random() < 0.5 else (), "")


def program_cost(source: Layout, uses: list[Use], end: Use | None, value: Value) -> float:
    """Seconds of the partitioner's own program that serves these consumers."""
    graph = Graph((value,), {}, {}, {}, (), ())
    partitioner = Partitioner(graph, {}, InputPlacement((), False), DEVICES, {}, {}, None)
    partitioner.enter(value, source)
    partitioner.producer[value.name] = "producer"
    everything = [use._replace(operator=f"consumer {i}") for i, use in enumerate(uses)] + ([end] if end else [])
    partitioner.uses[value.name] = everything
    for use in everything:
        partitioner.obtain(value, use)
    total = 0.0
    for move in partitioner.out:
        assert isinstance(move, Redistribute)
        total += COSTS.redistribution(move.forward, value.nbytes)
        total += 0.0 if move.backward is None else COSTS.redistribution(move.backward, value.nbytes)
    return total


def shared_moves(asking: list[Use], closed: Layout) -> int:
    """The number of redistributions of a value in the layout `closed` that several of these uses share."""
    out = 0
    for layout in {use.input_layout for use in asking}:
        times = Counter(use.partial for use in asking if use.input_layout == layout)
        forward = layout != closed and times.total() > 1
        backward = sum(n > 1 for digits, n in times.items() if digits)
        out += backward if backward and len(times) == 1 else forward + backward
    return out


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**31), st.integers(1, 4), st.booleans(), st.booleans())
def test_the_best_state_costs_what_the_program_does(seed: int, count: int, gradient: bool, ended: bool) -> None:
    """For random layouts and uses, the cost of the best state is the price of the partitioner's redistributions. Where
    uses differ in the backward it may be less, because the program follows a rule; where the program shares several
    redistributions, more."""
    draw = random.Random(seed)
    if count == 1 and not ended:
        ended = True
    value = Value("value", (64, 128), torch.float32, gradient)
    outputs = tuple(dict.fromkeys((*LAYOUTS, *map(partial, LAYOUTS))))
    pool = [use_of(draw) for _ in range(draw.randint(1, 4))]
    if not gradient:
        pool = [use._replace(partial=()) for use in pool]
    asked = [
        tuple(dict.fromkeys(frozenset((use,)) for use in draw.sample(pool, draw.randint(1, len(pool)))))
        for _ in range(count)
    ]
    end = Use(draw.choice(LAYOUTS), (), "output") if ended else None
    shared = SharedValue(value, outputs, asked, frozenset((end,)) if end else frozenset(), EdgeCosts(COSTS))
    produced, consumed = shared.producer_costs(), [shared.consumer_costs(value, uses) for uses in asked]
    for _ in range(12):
        i, picks = draw.randrange(len(outputs)), [draw.randrange(len(uses)) for uses in asked]
        uses = [next(iter(some[k])) for some, k in zip(asked, picks)]
        best = float((produced[i] + sum(table[:, k] for table, k in zip(consumed, picks))).min())
        try:
            true = program_cost(outputs[i], uses, end, value)
        except LayoutError:
            continue
        asking = [*uses, *([end] if end else [])]
        several = shared_moves(asking, outputs[i].without_partial()) > 1
        if not several:
            assert best <= true * (1 + 1e-9), "the program is not cheaper than the best state"
        if not several and len({use.partial for use in asking}) == 1:
            assert best == pytest.approx(true, rel=1e-9, abs=1e-15)


class Gated(nn.Module):
    """One value that three products read: two of the same size, and a small one."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.router, self.down = nn.Linear(width, 2, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.down(F.silu(self.gate(y)) * self.up(y)) * self.router(y).softmax(-1).sum(-1, keepdim=True)


def searched(hsdp: OptimizerParallel | None, devices: int = DEVICES) -> Search:
    with torch.device("meta"):
        net, x = Gated(128, 512), torch.empty(64, 128)
    graph = capture(net, (x, x), None, loss_fn=nn.MSELoss())
    placement = place_inputs(graph, devices, "full_batch")
    problem = PlanningProblem(graph, devices, placement, cost_model=CostModel(CLUSTER, devices), hsdp=hsdp)
    return Search.of(problem).check()


@pytest.mark.parametrize("hsdp", [None, OptimizerParallel(threshold=0, optimizer_level="level3")])
def test_a_use_that_is_dear_to_serve_is_found(hsdp: OptimizerParallel | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`gate` and `up` share a use that is not among the cheapest to serve, and `router` reads what is produced: the
    search finds it where all uses are tried, and where few are."""
    search = searched(hsdp)
    whole = search.cost_graph(search.options())
    least = solve(whole.problem).cost
    every = dynamic_programming(search.problem).found
    assert not whole.limited and every is not None and SOME_SHARED not in every.notes
    monkeypatch.setattr(graph_problem, "MOST_ENTRIES", 0)
    few = search.cost_graph(search.options())
    assert few.limited and sum(map(len, few.shares.values())) < sum(map(len, whole.shares.values()))
    assert solve(few.problem).cost > 1.1 * least, "the case is not one"
    found = dynamic_programming(search.problem).found
    assert found is not None and SOME_SHARED in found.notes
    assert found.cost == pytest.approx(least, rel=1e-9) == every.cost


def test_a_search_goes_on_near_its_own_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second search has the plan of the first among the known ones, where few uses are tried; there is none where all
    are."""
    search = searched(None)
    known: list[int] = []
    build = Search.cost_graph

    def counted(self: Search, options: Any, plans: Any = (), cut: Any = None) -> graph_problem.CostGraph:
        known.append(len(plans))
        return build(self, options, plans, cut)

    monkeypatch.setattr(Search, "cost_graph", counted)
    dynamic_programming(search.problem)
    assert known[-1:] == [2] and known.count(2) == 1
    monkeypatch.setattr(graph_problem, "MOST_ENTRIES", 0)
    dynamic_programming(search.problem)
    assert known[-2:] == [2, 3], "and the second has found nothing cheaper"
    dynamic_programming(replace(search.problem, memory=1e12))
    assert known[-2:] == [2, 3]


def test_a_search_ends_at_a_plan_that_is_not_proved_or_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that has not proved its plan has taken all of its time; within a limit, another search follows."""
    monkeypatch.setattr(graph_problem, "MOST_ENTRIES", 0)
    search = searched(None)
    known = [semi_auto(search.problem).decisions]
    best, fitting = planner._unlimited(search, known, lambda plan: False)
    assert not fitting and best.found is not None and len(known) == 2

    def unproved(problem: Problem) -> Solution:
        found = solve(problem)
        return replace(found, bound=0.9 * found.cost)

    monkeypatch.setattr(planner, "solve", unproved)
    known = known[:1]
    best, fitting = planner._unlimited(search, known, lambda plan: True)
    assert fitting and best.found is not None and len(known) == 2


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_is_priced_below_the_bound(seed: int) -> None:
    """Random plans, and for each the cost graph's own best states: the program takes no less than the bound."""
    search, draw = searched(None), random.Random(seed)
    made = search.cost_graph(search.options())
    bound = solve(made.problem).bound
    priced = 0
    for _ in range(40):
        chosen = {name: draw.choice(options) for name, options in made.options.items()}
        states = made.states(chosen)
        if made.problem.cost(states) == float("inf"):
            continue
        decided = search.decided(made, Solution(states, made.problem.cost(states), 0.0), "search")
        plan = Plan(
            search.described.graph,
            DEVICES,
            "dynamic_programming",
            search.input_placement,
            decided.decisions,
            decided.batch_dims,
            cluster=CLUSTER,
        )
        assert plan.cost >= bound * (1 - 1e-9)
        priced += 1
    assert priced
