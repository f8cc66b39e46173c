"""Equal layers stay equal in a search: they have one set of options and share their tables, whatever a known plan
decides in one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from llama import Llama
from torch import nn
from torch.nn import functional as F

from shardwright.capture.export import capture
from shardwright.cost.cost_model import CostModel
from shardwright.partition.local_program import Decision, place_inputs
from shardwright.planners import graph_problem
from shardwright.planners.memory_problem import add_memory
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import PlanningProblem, PriceBook
from shardwright.planners.recursive_programming import recursion
from shardwright.planners.search_space import op_cost, strategy_of
from shardwright.planners.semi_auto import semi_auto
from shardwright.planning import make_plan
from shardwright.settings import Settings
from shardwright.solver.memory_rows import binding, period, shorter
from shardwright.solver.presolve import consistent

LAYERS = 12


@pytest.fixture(scope="module")
def search() -> Search:
    """Llama of 12 equal layers on 4 devices."""
    with torch.device("meta"):
        net, tokens = Llama(64, 16, LAYERS, 32, 4, 2, 64), torch.zeros(8, 16, dtype=torch.long)
    graph = capture(
        net, (tokens, tokens), None, loss_fn=lambda logits, t: F.cross_entropy(logits.flatten(0, 1), t.flatten())
    )
    input_placement = place_inputs(graph, 4, "full_batch")
    return Search.of(PlanningProblem(graph, 4, input_placement, cost_model=CostModel("h100x8", 4)))


def uneven_layers(search: Search) -> dict[str, Decision]:
    """A plan that decides one layer in its own way: there every operator is whole."""
    graph = search.described.graph
    along, few = semi_auto(search.problem).decisions, len(graph.ops) // LAYERS
    own = {op.name for op in graph.ops[5 * few : 6 * few]}
    return {
        name: replace(one, assignment=one.bound.whole(4), cause="batch") if name in own else one
        for name, one in along.items()
    }


def test_equal_operators_have_the_same_options(search: Search) -> None:
    plan = uneven_layers(search)
    options = search.options([plan, recursion(search).decisions])
    by_kind: dict[Any, tuple[Any, ...]] = {}
    for op in search.described.graph.ops:
        mine = options[op.name]
        assert strategy_of(plan[op.name]) in mine
        assert by_kind.setdefault(search.described.kinds[op.name], mine) is mine
    assert len(by_kind) < len(options) / 4


@pytest.mark.parametrize("share", [None, 0.6])
def test_equal_layers_share_their_tables_and_a_known_plan_keeps_its_cost(search: Search, share: float | None) -> None:
    plans: list[Mapping[str, Decision]] = [uneven_layers(search), recursion(search).decisions]
    made = search.cost_graph(search.options(plans), plans)
    problem = made.problem
    if share is not None:
        held = add_memory(made, search.input_placement, search.batch_dims, 1.0, 2.0)
        problem = held.cost_graph.problem
        problem = replace(problem, limit=share * held.peak([0] * len(problem.costs)))
        problem = binding(consistent(problem).problem)[0]
        assert problem.usages
    size = period(problem.costs, problem.edges)
    short = None if size is None else shorter(problem.costs, problem.edges, size)
    assert short is not None and len(short.nodes) < 0.6 * len(problem.costs)
    assert len({id(states) for states in made.shares.values()}) < len(made.shares) / 3
    if share is None:
        for plan in plans:
            alone = search.cost_graph(search.options([plan]), [plan])
            strategies = {name: strategy_of(one) for name, one in plan.items()}
            assert made.cost(strategies) == pytest.approx(alone.cost(strategies), rel=1e-12)


@pytest.mark.parametrize("mode", ["sharding_propagation", "dynamic_programming"])
def test_plans_with_one_book_of_prices_price_an_operator_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    priced: list[str] = []

    def counted(decision: Decision, costs: CostModel) -> Any:
        priced.append(decision.op.name)
        return op_cost(decision, costs)

    monkeypatch.setattr(graph_problem, "op_cost", counted)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    graph, settings, prices = capture(net, (torch.zeros(8, 8),)), Settings(mode, cluster="h100x8"), PriceBook()
    first = make_plan(graph, 4, settings, prices=prices)
    once = len(priced)
    second = make_plan(graph, 4, settings, prices=prices)
    assert once and len(priced) == once
    alone = make_plan(graph, 4, settings)
    assert len(priced) == 2 * once
    assert {made.cost for made in (second, alone)} == {first.cost} and second.fingerprint == first.fingerprint
    uneven = make_plan(graph, 4, replace(settings, uneven=True), prices=prices)  # other strategies are legal
    assert len(priced) > 2 * once and uneven.cost <= first.cost
