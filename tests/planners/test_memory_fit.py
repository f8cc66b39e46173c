"""Within a memory limit too, no planner finds a plan cheaper than the exact search, nor one where that finds none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_search_space import MODELS, cluster
from torch import nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cost.cost_model import CostModel
from shardwright.cost.memory_timeline import MemoryTimeline
from shardwright.errors import PlanError
from shardwright.partition.local_program import Decisions, place_inputs
from shardwright.planners import dynamic_programming as searching
from shardwright.planners.dynamic_programming import dynamic_programming
from shardwright.planners.memory_fit import MOST_TRIES, TooLittleMemoryError, _Fitting, fit, fits
from shardwright.planners.memory_problem import add_memory
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import CUT, PlanningProblem
from shardwright.planners.recursive_programming import recursive_programming
from shardwright.planners.search_space import EdgeCosts, strategy_of
from shardwright.solver.problem import Problem, Solution
from shardwright.solver.solve import solve

DEVICES = 4


def chain():
    """Layers of one width, whose activations are most of what is held."""
    return (
        nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.GELU()))),
        (torch.randn(64, 16),),
        nn.MSELoss(),
        torch.randn(64, 16),
    )


NETS = {name: MODELS[name] for name in ("mlp", "tied", "convolutions")} | {"chain": chain}


class Case:
    """A model, its plans without a limit, and the least memory in which the recursion finds one."""

    def __init__(self, name: str) -> None:
        net, inputs, loss, targets = NETS[name]()
        graph = capture(net, (*inputs, targets), None, loss_fn=loss)
        self.given = graph, DEVICES, place_inputs(graph, DEVICES, "full_batch")
        self.costs = CostModel(cluster(DEVICES), DEVICES)
        self.problem = PlanningProblem(*self.given, cost_model=self.costs, deliveries=EdgeCosts(self.costs))
        self.search = Search.of(self.problem)
        self.free, self.recursed = self.of(dynamic_programming), self.of(recursive_programming)
        with pytest.raises(TooLittleMemoryError) as refused:
            self.of(recursive_programming, memory=1.0)
        self.least = refused.value.least
        self.most = max(self.peak(self.free), self.least)

    def of(self, planner, **given) -> Decisions:
        return planner(replace(self.problem, **given))

    def peak(self, decided: Decisions) -> float:
        return self.plan(decided).peak

    def plan(self, decided: Decisions) -> sw.Plan:
        graph, devices, input_placement = self.given
        ops = {name: decision.op for name, decision in decided.decisions.items()}
        graph = graph.with_ops(tuple(ops[op.name] for op in graph.ops))  # with what is computed again
        return sw.Plan(
            graph,
            devices,
            "",
            input_placement,
            decided.decisions,
            decided.batch_dims,
            None,
            decided.hsdp,
            cluster=self.costs.cluster,
            found=decided.found,
        )

    def limit(self, share: float) -> float:
        return self.least + share * (self.most - self.least)


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    return Case(name)


@pytest.mark.parametrize(
    "name, share",
    [
        *((name, share) for name in ("mlp", "chain") for share in (0.95, 0.8, 0.6, 0.0)),
        ("tied", 0.6),
        ("tied", 0.0),
        ("convolutions", 0.6),
    ],
)
def test_no_other_planner_is_cheaper_within_a_limit(name: str, share: float) -> None:
    given = case(name)
    limit = given.limit(share)
    exact, other = given.of(dynamic_programming, memory=limit), given.of(recursive_programming, memory=limit)
    for decided in (exact, other):
        assert given.peak(decided) <= limit and decided.found.limit == limit
    assert exact.found.cost <= other.found.cost
    assert given.plan(exact).cost <= given.plan(other).cost * (1 + 1e-9)
    assert exact.found.bound is None or exact.found.bound <= exact.found.cost


@pytest.mark.parametrize("name", ("mlp", "tied"))
def test_a_limit_that_does_not_bind_changes_neither(name: str) -> None:
    given = case(name)
    for planner, free in ((dynamic_programming, given.free), (recursive_programming, given.recursed)):
        wide = given.of(planner, memory=1e12)
        assert wide.found.cost == free.found.cost and wide.found.limit == 1e12 and free.found.limit is None
        assert {n: strategy_of(d) for n, d in wide.decisions.items()} == {
            n: strategy_of(d) for n, d in free.decisions.items()
        }


def test_a_search_that_ends_with_a_dearer_plan_gives_way(monkeypatch) -> None:
    """The bound stays: the gap that is reported falls with the cost."""
    given, real, weak = case("mlp"), searching.fit, []
    limit = given.limit(0.5)

    def dearer(search, made, memory, optimizer):
        found = real(search, made, memory, optimizer)
        weak.append(found._replace(found=replace(found.found, cost=1.1 * found.found.cost)))
        return weak[-1]

    monkeypatch.setattr(searching, "fit", dearer)
    found = given.of(dynamic_programming, memory=limit).found
    other = given.of(recursive_programming, memory=limit).found
    assert found.cost == other.cost < weak[0].found.cost and "recursion" in found.notes[0]
    assert found.bound == min(weak[0].found.bound, found.cost)


@pytest.mark.parametrize("operators", [0, 600], ids=["a large network", "a small one"])
def test_a_search_that_finds_none_gives_way(monkeypatch, operators: int) -> None:
    given = case("mlp")
    monkeypatch.setattr(searching, "RECURSED", operators)
    limit = given.limit(0.5)

    def none(*_):
        error = TooLittleMemoryError("no plan fits", legal="more")
        error.least = 1.01 * limit
        raise error

    monkeypatch.setattr(searching, "fit", none)
    found = given.of(dynamic_programming, memory=limit)
    assert found.found.cost == given.of(recursive_programming, memory=limit).found.cost and given.peak(found) <= limit


def test_what_the_recursion_chooses_within_the_limit_may_be_chosen(monkeypatch) -> None:
    given, real, seen = case("mlp"), searching.fit, []
    monkeypatch.setattr(searching, "fit", lambda search, made, *rest: seen.append(made) or real(search, made, *rest))
    limit = given.limit(0.5)
    given.of(dynamic_programming, memory=limit)
    recursion = given.of(recursive_programming, memory=limit)
    assert all(strategy_of(decision) in seen[0].options[name] for name, decision in recursion.decisions.items())


def test_where_neither_fits_the_least_memory_of_both_is_named() -> None:
    given = case("mlp")
    with pytest.raises(PlanError, match="no plan fits") as refused:
        given.of(dynamic_programming, memory=0.1 * given.least)
    least = int(refused.value.legal.split("memory=")[1].split()[0])
    assert least <= given.least
    found = given.of(dynamic_programming, memory=least)
    assert given.peak(found) <= least and not fits(given.search, given.free, least)


def test_of_a_large_network_the_recursion_is_made_within_a_limit_that_the_search_just_misses(monkeypatch) -> None:
    given, calls, real = case("mlp"), [], searching.recursion
    monkeypatch.setattr(
        searching, "recursion", lambda search, memory=None, *rest: calls.append(memory) or real(search, memory, *rest)
    )
    monkeypatch.setattr(searching, "RECURSED", len(given.given[0].ops) - 1)
    limit = given.limit(0.5)
    assert given.peak(given.of(dynamic_programming, memory=limit)) <= limit and calls == [None]
    with pytest.raises(PlanError, match="no plan fits") as refused:
        given.of(dynamic_programming, memory=1.0)
    assert calls == [None, None]
    just_below = 0.99 * refused.value.least
    with pytest.raises(PlanError, match="no plan fits"):
        given.of(dynamic_programming, memory=just_below)
    monkeypatch.setattr(searching, "RECURSED", len(given.given[0].ops))
    given.of(dynamic_programming, memory=limit)
    assert calls == [None, None, None, just_below, None, limit]


def test_a_limit_is_tried_again_between_what_holds_too_much_and_what_nothing_keeps() -> None:
    """An example is a search that reckons with less than a plan holds."""
    given, asked = case("mlp"), []
    limit = given.limit(0.5)
    made = given.search.cost_graph(given.search.options([given.free.decisions]), [given.free.decisions], cut=CUT)

    def solver(problem: Problem) -> Solution:
        if problem.limit is not None:
            asked.append(problem.limit)
            if len(asked) == 1:
                return solve(replace(problem, limit=None, usages=()))  # which does not fit
            if len(asked) == 2:
                raise PlanError("nothing keeps it")
        return solve(problem)

    found = fit(given.search, made, limit, solver=solver)
    assert given.peak(found) <= limit == asked[0] and asked[1] < asked[2] < asked[0] and len(asked) == 3

    def never(problem: Problem) -> Solution:
        asked.append(problem.limit)
        return solve(replace(problem, limit=None, usages=()))

    asked.clear()
    with pytest.raises(TooLittleMemoryError, match="no plan was found that fits") as refused:
        fit(given.search, made, limit, solver=never)
    assert (refused.value.legal or "").startswith('hsdp={"optimizer_level": "level3"} (--hsdp level3)')
    assert refused.value.least > limit and all(a > b for a, b in zip(asked, asked[1:MOST_TRIES]))


class Attention(nn.Module):
    """By heads, and then not: what is sent to the last product is not what the attention's backward keeps."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        split = (f(h).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return x + self.out(F.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2))


def test_what_runs_again_reads_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Attention()
    sw.shard(net.out, ((2, 1, 1), (1, 1)))
    given = dict(devices=4, cluster="h100x8", parallel_mode="dynamic_programming")
    free, seen = sw.plan(net, (torch.randn(16, 32, 32),), **given), []
    decided = _Fitting.decided

    def spied(self: _Fitting, solution: Solution) -> tuple[Decisions, MemoryTimeline]:
        made = decided(self, solution)
        seen.append((made[1].peak, self.memory_problem.peak(solution.states)))
        return made

    monkeypatch.setattr(_Fitting, "decided", spied)
    plan = sw.plan(net, (torch.randn(16, 32, 32),), memory=0.7 * free.peak, **given)
    assert plan.peak <= 0.7 * free.peak and seen and any(op.recompute for op in plan.graph.ops)
    assert all(held <= reckoned for held, reckoned in seen)


class Rerun(nn.Module):
    """A chain that runs again, whose additions save nothing: of a buffer, or of a value with several consumers."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.first, self.last, self.shared = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), shared
        self.register_buffer("table", torch.randn(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.shared:
            return self.last(torch.cat([torch.sin(h + float(n)) for n in range(1, 5)], 1)[:, :8])
        return self.last(torch.cos(torch.sin(h + self.table) + self.table))


@pytest.mark.parametrize("shared", [False, True], ids=["a buffer", "a shared value's copies"])
def test_what_an_operator_that_runs_again_reads_is_kept_though_its_backward_needs_none(shared: bool) -> None:
    """Whatever the strategies: what may run again does, and the program holds no more than the problem counts."""
    graph = capture(Rerun(shared), (torch.randn(64, 8), torch.randn(64, 8)), None, loss_fn=nn.MSELoss())
    input_placement = place_inputs(graph, DEVICES, "full_batch")
    search = Search.of(
        PlanningProblem(graph, DEVICES, input_placement, cost_model=CostModel(cluster(DEVICES), DEVICES))
    )
    held = add_memory(search.cost_graph(search.options(), cut=CUT), input_placement, search.batch_dims, 1e12, 8.0)
    fitting = _Fitting(search, held, 1e12, "adam", "search", solve)
    free, draw = replace(held.cost_graph.problem, limit=None, usages=()), np.random.default_rng(0)
    edges = {pair: np.where(np.isfinite(table), 0.0, np.inf) for pair, table in free.edges.items()}
    for _ in range(20):
        costs = [draw.random(len(node_costs)) for node_costs in free.costs]
        for value, node in held.remat_nodes.items():
            costs[node] -= [2.0 * (state.how == "recomputed") for state in held.states[value]]
        solution = solve(replace(free, costs=tuple(costs), edges=edges))
        assert held.recomputed(solution.states)
        assert fitting.decided(solution)[1].peak <= held.peak(solution.states)


class Residual(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Dropout(0.0),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def test_what_gives_its_input_back_runs_again_with_what_reads_it() -> None:
    """A dropout of nothing is no view by its schema: left out, what it gives back would be kept."""
    net = nn.Sequential(*(Residual() for _ in range(2)))
    graph = capture(net, (torch.randn(64, 16), torch.randn(64, 16)), None, loss_fn=nn.MSELoss())
    input_placement = place_inputs(graph, 2, "full_batch")
    search = Search.of(PlanningProblem(graph, 2, input_placement, cost_model=CostModel(cluster(2), 2)))
    held = add_memory(search.cost_graph(search.options(), cut=CUT), input_placement, search.batch_dims, 1e12, 8.0)
    dropouts = {op.name for op in graph.ops if "dropout" in op.name}
    again = [names for names in held.recompute_sets.values() if any(name.startswith("add") for name in names)]
    assert again and all(dropouts & set(names) for names in again)
