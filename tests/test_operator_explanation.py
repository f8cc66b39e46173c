"""Why a plan is as it is: shares add up, alternatives are the best there are, and what holds an operator is named."""

from __future__ import annotations

import io
import math
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from one_device import parallel
from small_networks import D, Marked, draw, labels
from test_parallel_random_networks import networks
from test_recursive_programming import MODELS, slow_devices
from torch import Tensor, nn

import shardwright as sw
from shardwright.cli import main
from shardwright.cost.cost_model import CostModel
from shardwright.operator_explanation import Holder, SearchesOfPlan, _Neighbourhood, explained, partial_sums, shares_of
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import PlanningProblem
from shardwright.planners.search_space import strategy_of
from shardwright.report import explanations
from shardwright.report.format import time_text
from shardwright.report.operator_names import OperatorNames
from shardwright.report.plan_figures import operator_figures
from shardwright.solver.elimination import elimination_order
from shardwright.solver.problem import Problem
from shardwright.solver.solve import solve

MODE = "dynamic_programming"


def planned(name: str, mode: str = MODE, devices: int = 4, **options: Any) -> sw.Plan:
    net, batch, loss_fn = MODELS[name]()
    return sw.plan(
        net,
        batch[:-1],
        loss_fn,
        batch[-1],
        parallel_mode=mode,
        devices=devices,
        cluster=slow_devices(2, devices // 2),
        **options,
    )


def text(explained_operator: Any) -> str:
    file = io.StringIO()
    (explanations.costs if isinstance(explained_operator, sw.Plan) else explanations.explanation)(
        explained_operator, file
    )
    return file.getvalue()


# -- what it costs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name,mode,options",
    [
        ("mlp", "semi_auto", {}),
        ("mlp", MODE, {}),
        ("gpt", "semi_auto", {}),
        ("convolutions", "semi_auto", {}),
        ("gpt", "semi_auto", {"hsdp": {"threshold": 0}}),
        ("gpt", "semi_auto", {"recompute": ["linear"]}),
        ("mlp", "semi_auto", {"hsdp": {"threshold": 0, "optimizer_level": "level3"}}),
    ],
    ids=str,
)
def test_shares_add_up_to_the_plan(name: str, mode: str, options: dict) -> None:
    """Traffic between two operators is a share of both; all else is a share of one."""
    plan = planned(name, mode, **options)
    costs, total, computing = CostModel(plan.cluster, plan.devices), 0.0, 0.0
    for operator in plan.operators:
        for share in shares_of(plan, operator.name, costs):
            total += share.seconds if share.what != "asked" or not share.other else 0.0
            computing += share.seconds if share.what == "computing" else 0.0
            assert bool(share.sends) == (share.what != "computing")
        mine = sum(share.own for share in shares_of(plan, operator.name, costs))
        assert mine == pytest.approx(plan.price.by_operator[operator.name], rel=1e-9, abs=1e-15), "one cost everywhere"
    assert total == pytest.approx(plan.price.total, rel=1e-9)
    assert computing == pytest.approx(plan.price.compute, rel=1e-9)


def test_the_two_ends_of_a_conversion() -> None:
    net = Marked(second=((2, 4), (4, 1)))
    x = draw(16, 8)
    plan = sw.plan(net, (x,), devices=8, cluster=slow_devices(8))
    costs = CostModel(plan.cluster, 8)
    out = {s.other: s for s in shares_of(plan, "relu1", costs) if s.what == "handed on"}
    asked = {s.other: s for s in shares_of(plan, "matmul2", costs) if s.what == "asked"}
    assert (out["matmul2"].seconds, out["matmul2"].sends) == (asked["relu1"].seconds, asked["relu1"].sends) != (0.0, ())


def test_weights_are_gathered_and_their_gradients_summed() -> None:
    net, x = nn.Linear(8, 8, bias=False), torch.empty(16, 8)
    plan = sw.plan(net, (x,), nn.MSELoss(), torch.empty(16, 8), devices=4, hsdp={"threshold": 0})
    (weights,) = (s for s in shares_of(plan, "linear", CostModel(None, 4)) if s.what == "weights")
    assert weights.value == "weight" and weights.forward > 0 < weights.backward
    assert weights.sends == ("all_gather(4@1)", "reduce_scatter(4@1)")


# -- what else it could be ---------------------------------------------------------------------------------------------


def problem_of(plan: sw.Plan) -> tuple[Any, dict]:
    """The search's problem and the plan's strategies."""
    costs = CostModel(plan.cluster, plan.devices)
    search = Search.of(PlanningProblem(plan.graph, plan.devices, plan.input_placement, cost_model=costs))
    return search.cost_graph(search.options([plan.decisions])), {n: strategy_of(d) for n, d in plan.decisions.items()}


def held(problem: Problem, node: int, state: int) -> Problem:
    """The same problem with the node in one state."""
    costs = list(problem.costs)
    costs[node] = np.where(np.arange(len(costs[node])) == state, costs[node], np.inf)
    return Problem(tuple(costs), problem.edges, problem.names)


@pytest.mark.parametrize(
    "name,operator", [("mlp", "linear"), ("mlp", "relu"), ("tied", "linear_1"), ("wide", "linear_1")]
)
def test_alternatives_are_the_best_there_are(name: str, operator: str) -> None:
    """By solving the whole once for each strategy of the operator."""
    plan = planned(name)
    explained_operator = explained(plan, operator)
    made, chosen = problem_of(plan)
    bound, node, options = plan.decisions[operator].bound, made.operators[operator], made.options[operator]
    best: dict[tuple, float] = {}
    for state, strategy in enumerate(options):
        form = bound.in_strategy(strategy.assignment), strategy.partial
        try:
            best[form] = min(best.get(form, math.inf), solve(held(made.problem, node, state)).cost)
        except sw.PlanError:
            continue  # nothing allows it
    own = plan.decisions[operator].assignment
    assert explained_operator.exact and explained_operator.strategies == len(options)
    assert explained_operator.least == pytest.approx(
        best.pop((bound.in_strategy(own), chosen[operator].partial)), rel=1e-9
    )
    assert [a.total for a in explained_operator.alternatives] == pytest.approx(sorted(best.values())[:3], rel=1e-9)
    for other in explained_operator.alternatives:
        form = bound.in_strategy(other.decision.assignment), other.decision.partial
        assert other.total == pytest.approx(best[form], rel=1e-9)
        assert other.more == pytest.approx(other.total - plan.found.cost, abs=1e-15) and other.more >= -1e-15
        alone = made.cost(chosen | {operator: strategy_of(other.decision)}) - made.cost(chosen)
        assert other.alone == pytest.approx(alone, rel=1e-9) and other.alone >= other.more - 1e-15


def test_as_many_alternatives_as_asked_for() -> None:
    plan = planned("mlp")
    assert [len(explained(plan, "relu", count).alternatives) for count in (1, 2, 5)] == [1, 2, 5]


def test_an_alternative_as_a_mark_costs_what_is_said() -> None:
    plan = planned("mlp")
    for other in explained(plan, "linear_1").alternatives:
        marked = planned("mlp", marks={"linear_1": other.decision.assignment})
        assert marked.decisions["linear_1"].assignment == other.decision.assignment
        assert marked.cost == pytest.approx(other.total, rel=1e-9)


def test_a_plan_that_is_not_the_best() -> None:
    """The search's alternatives are better than a plan along the batch."""
    plan = planned("wide", "semi_auto")
    explained_operator = explained(plan, "linear")
    assert explained_operator.cost == pytest.approx(plan.cost, rel=1e-9)
    assert explained_operator.alternatives[0].more < 0 and explained_operator.alternatives[0].total == pytest.approx(
        planned("wide").cost, rel=1e-9
    )


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks(), st.sampled_from((4, 6)), st.sampled_from((2**24, 1)), st.data())
def test_no_alternative_is_said_to_be_below_the_proved_bound(made: Any, devices: int, most: int, data: Any) -> None:
    """Random networks, also where the problem around an operator is too large to be eliminated (`most` = 1)."""
    net, shape = made
    inputs, target = (torch.empty(*shape, dtype=D),), torch.zeros(1, dtype=D)
    loss = lambda results, _: sum((one * one).sum() for one in results)
    try:
        plan = sw.plan(net, inputs, loss, target, parallel_mode=MODE, devices=devices, cluster=slow_devices(devices))
    except sw.PlanError:  # no dim divides
        return
    name = data.draw(st.sampled_from(sorted(plan.decisions)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules["shardwright.solver.solve"], "elimination_order", partial(elimination_order, most=most)
        )
        explained_operator = explained(plan, name, 5)
    least = plan.bound * (1 - 1e-12)
    assert (
        explained_operator.bound is not None and explained_operator.bound >= least and explained_operator.least >= least
    )
    for other in explained_operator.alternatives:
        assert other.total >= least and other.more >= -plan.gap * plan.cost - 1e-12 * plan.cost
        if explained_operator.is_better(other):
            assert (
                min(other.total if explained_operator.exact else math.inf, explained_operator.cost + other.alone)
                < explained_operator.cost
            )
    out = " ".join(text(explained_operator).split())
    assert ("better by the search" in out) == any(map(explained_operator.is_better, explained_operator.alternatives))
    assert explained_operator.exact or not explained_operator.alternatives or "in all, at least" in out
    assert not re.search(r"-0 us|e\+0|\d%", out)
    figures = operator_figures(explained_operator)
    assert figures["bound"] == explained_operator.bound and figures["exact"] == explained_operator.exact
    assert all(one["total"] >= least for one in figures["alternatives"])


class Detached(nn.Module):
    """Products whose gradients end at a `detach`, beside one whose gradient does not."""

    def __init__(self, beside: bool) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(draw(2, 2)), nn.Parameter(draw(2, 2))
        self.beside = beside

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = torch.matmul(torch.relu(x), self.w)
        out = torch.mul(torch.relu(torch.detach(torch.relu(hidden))), 0.5)
        return [out, torch.matmul(hidden, self.v)] if self.beside else [out]


@pytest.mark.parametrize("beside", [False, True])
def test_the_search_prices_no_gradient_that_a_detach_ends(beside: bool) -> None:
    """The search's price of its plan is that of the program, so that no mode that searches less has a cheaper one."""
    plan = sw.plan(
        Detached(beside),
        (torch.empty(4, 2, dtype=D),),
        lambda results, _: sum((one * one).sum() for one in results),
        torch.zeros(1, dtype=D),
        parallel_mode=MODE,
        devices=4,
        cluster=slow_devices(4),
    )
    assert not any("the search found" in note for note in plan.found.notes)
    assert bool(plan.backward) == beside and plan.gap == pytest.approx(0.0, abs=1e-12)
    for name in plan.decisions:
        assert _Neighbourhood(SearchesOfPlan(plan), name, None).cost == pytest.approx(plan.cost, rel=1e-12)
        explanation = explained(plan, name)
        assert explanation.cost == explanation.least == pytest.approx(plan.cost, rel=1e-12)
        for other in explanation.alternatives:
            assert other.more == other.total - explanation.cost >= -1e-12 * plan.cost and not explanation.is_better(
                other
            )


def test_a_plan_that_costs_less_than_the_cost_graph_says() -> None:
    """Differences are those to the cost of the plan, of which the bound is."""
    plan = planned("wide")
    less = 0.9 * plan.found.cost
    plan = replace(plan, found=replace(plan.found, cost=less, bound=less))
    explained_operator = explained(plan, "linear")
    assert explained_operator.cost == explained_operator.least == less
    assert explained_operator.alternatives and all(
        a.more == a.total - less > 0 for a in explained_operator.alternatives
    )


def test_a_lower_bound_is_no_better_plan() -> None:
    """Bounds of the problem around an operator are below the proved bound of the whole, which this plan reaches."""
    plan = planned("wide")
    explained_operator = explained(plan, "linear")
    low = replace(
        explained_operator,
        exact=False,
        alternatives=tuple(replace(a, total=plan.cost, more=0.0) for a in explained_operator.alternatives),
    )
    out = " ".join(text(low).split())
    assert "next best: " in out and "at least +0 us a step if all else is chosen anew, not proved to be reached" in out
    assert "better" not in out and f"none below that of all plans, {time_text(plan.bound)}" in out
    less = replace(low.alternatives[0], more=-1e-3 * plan.cost)
    out = text(replace(low, alternatives=(less,)))
    assert "perhaps better: " in out and "better by the search" not in out
    found = replace(less, alone=-1e-4 * plan.cost, holder=None)
    assert "better by the search: " in text(replace(low, alternatives=(found,)))


def test_a_mark_that_is_lifted_may_cost_more_than_the_bound() -> None:
    """The bound of a plan is proved under its marks."""
    plan = between(((1, 4), (4, 1)))
    explained_operator = explained(plan, "first")
    assert plan.bound == pytest.approx(plan.cost) and explained_operator.bound is None
    assert (
        explained_operator.is_better(explained_operator.alternatives[0])
        and explained_operator.alternatives[0].total < plan.bound
    )
    assert "better by the search: " in text(explained_operator)


def test_differences_are_times_with_units() -> None:
    explained_operator = explained(planned("wide"), "linear")
    for seconds, shown in ((1.33e-3, "+1.33 ms"), (-9.02e-5, "-90.2 us"), (2.0, "+2 s"), (-1e-21, "+0 us")):
        other = replace(explained_operator.alternatives[0], more=seconds)
        assert shown in text(replace(explained_operator, alternatives=(other,)))


# -- what holds it there -----------------------------------------------------------------------------------------------


class Between(nn.Module):
    """A ReLU between two products."""

    def __init__(self, strategy: Any = None) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(draw(16, 16)), nn.Parameter(draw(16, 16))
        self.first, self.second = sw.Operator(torch.matmul), sw.Operator(torch.matmul)
        if strategy is not None:
            self.first.shard(strategy), self.second.shard(strategy)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x, self.w1)), self.w2)


def between(strategy: Any = None, mode: str = MODE) -> sw.Plan:
    net, x = Between(strategy), draw(64, 16)
    return sw.plan(net, (x,), F.mse_loss, x, parallel_mode=mode, devices=4, cluster=slow_devices(4))


def test_marked_neighbours_hold_it() -> None:
    explained_operator = explained(between(((4, 1), (1, 1))), "relu")
    assert explained_operator.decision.bound.in_strategy(explained_operator.decision.assignment) == ((4, 1),)
    columns = next(
        a for a in explained_operator.alternatives if a.decision.bound.in_strategy(a.decision.assignment) != ((1, 1),)
    )
    assert columns.holder.operators and set(columns.holder.operators) <= {"first", "second"}
    assert columns.holder.marked == columns.holder.operators and columns.holder.more > 0
    assert "(marked)" in text(explained_operator)


def test_its_own_work_holds_it() -> None:
    """Not to cut a ReLU of a replicated input saves nothing but costs its own work."""
    net, x = nn.ReLU(), draw(64, 64)
    plan = sw.plan(
        net, (x.requires_grad_(),), squares_of, x.detach(), parallel_mode=MODE, devices=4, cluster=slow_devices(4)
    )
    explained_operator = explained(plan, "relu")
    whole = next(a for a in explained(plan, "relu", 20).alternatives if not a.decision.assignment.used)
    assert whole.holder.value == "" and whole.holder.more > 0
    assert explained_operator.decision.assignment.used


def squares_of(x: Tensor, y: Tensor) -> Tensor:
    return ((x - y) ** 2).mean()


def test_a_shared_weight_holds_it() -> None:
    """Under another layout of the weight that the embedding shares, the head cannot be alone."""
    explained_operator = explained(planned("tied", "semi_auto"), "linear_1")
    first = explained_operator.alternatives[0]
    assert math.isinf(first.alone) and math.isinf(first.holder.more)
    assert first.holder.value == "tokens.weight" and first.holder.operators == ("embedding",)
    assert explained_operator.holder == first.holder and "cannot be" in text(explained_operator)


def test_a_mark_holds_it() -> None:
    plan = between(((1, 4), (4, 1)))
    explained_operator = explained(plan, "first")
    assert (
        explained_operator.decision.cause == "mark" and explained_operator.alternatives[0].more < 0
    )  # rows would be better
    assert "the mark holds it there" in text(explained_operator) and "test_operator_explanation.py" in text(
        explained_operator
    )
    assert explained_operator.alternatives[0].decision.bound.in_strategy(
        explained_operator.alternatives[0].decision.assignment
    ) != ((1, 4), (4, 1))


def test_memory_holds_it() -> None:
    """The plan may hold no more than it does; the alternatives that alone hold more say at which moment."""
    plan = planned("wide")
    limit = plan.timeline.peak
    explained_operator = explained(plan, "linear", 8, limit)
    assert explained_operator.exact and all(a.row is None for a in explained(plan, "linear", 8).alternatives)
    rows = 0
    for other in explained_operator.alternatives:
        if math.isinf(other.alone):
            assert other.row is None
            continue
        walked = replace(plan, decisions=plan.decisions | {"linear": other.decision}).timeline
        assert (other.row is not None) == (walked.peak > limit)
        if other.row is not None:
            rows += 1
            assert other.row.allocated == walked.peak and other.row.limit == limit
            assert other.row.moment.removeprefix("the forward of ").removeprefix("the backward of ") in walked.moments
    assert rows and "does not fit" in text(explained_operator)


def test_a_plan_that_cannot_be_compared_says_why() -> None:
    """The plan has a strategy that is none of the search's."""
    plan = planned("mlp")
    neighbourhood = _Neighbourhood(SearchesOfPlan(plan), "relu", None)
    assert neighbourhood.missing() is None
    options = neighbourhood.made.options
    lost = tuple(s for s in options["linear"] if s != neighbourhood.chosen["linear"])
    neighbourhood.made = replace(neighbourhood.made, options=options | {"linear": lost})
    assert neighbourhood.missing() == f"the strategy of linear is not among the {len(lost)} of the search"


def test_an_out_strategy_is_kept() -> None:
    plan = sw.plan(Marked(out=((4, 2),)), (draw(16, 8),), parallel_mode=MODE, devices=8, cluster=slow_devices(8))
    explained_operator = explained(plan, "matmul2")
    assert explained_operator.alternatives and all(
        a.decision.out == plan.decisions["matmul2"].out for a in explained_operator.alternatives
    )


# -- plans of every mode -----------------------------------------------------------------------------------------------


def test_sums_that_pass_through() -> None:
    """A plan that does not say which sums stay open is explained with those that do."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(draw(16, 16))
            self.product = sw.shard(torch.matmul, ((1, 4), (4, 1)))

        def forward(self, x: Tensor) -> Tensor:
            return self.product(x, self.w).reshape(16, 4, 4).transpose(0, 1)

    plan = sw.plan(Net(), (draw(16, 16),), devices=4, cluster=slow_devices(4))
    passing = partial_sums(plan)
    assert passing["reshape"] and passing["transpose"] and not passing["product"]
    explained_operator = explained(plan, "transpose")
    assert explained_operator.missing is None and explained_operator.cost == pytest.approx(plan.cost, rel=1e-9)


@pytest.mark.parametrize("mode", ["data_parallel", "recursive_programming", "sharding_propagation", "stand_alone"])
def test_every_mode(mode: str) -> None:
    x = draw(16, 8)
    plan = sw.plan(Marked(first=((8, 1), (1, 1))), (x,), parallel_mode=mode, devices=8, cluster=slow_devices(8))
    explained_operator = explained(plan, "matmul1")
    assert explained_operator.missing is None and explained_operator.cost == pytest.approx(plan.cost, rel=1e-9)
    assert text(explained_operator) and text(plan)


def test_what_runs_as_it_stands_has_no_alternatives() -> None:
    plan = sw.plan(nn.Linear(8, 8), (torch.empty(16, 8),), parallel_mode="hybrid_parallel", devices=4)
    explained_operator = explained(plan, "linear")
    assert (
        not explained_operator.alternatives
        and explained_operator.missing
        and explained_operator.missing in text(explained_operator)
    )


def test_a_value_that_several_read_is_named_with_its_producer_and_its_readers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.q, self.k, self.v = nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.act(x)
            return self.q(x) + self.k(x) + self.v(x)

    plan = sw.plan(Net(), (torch.empty(16, 8),), parallel_mode="dynamic_programming", devices=4)
    explained_operator = explained(plan, "q")
    act = plan.operator("act").name
    value = next(name for name, op in plan.graph.producers().items() if op.name == act)
    for readers, named in ((("k", "v"), "k, v read too"), (("v",), "v reads too")):
        operators = tuple(plan.operator(name).name for name in (*readers, "act"))  # the producer need not be the first
        held = replace(explained_operator.alternatives[0], alone=1e-4, holder=Holder(value, operators, (), 1e-4))
        out = " ".join(text(replace(explained_operator, alternatives=(held,))).split())
        assert f"held there by the result of act, which {named}: +100 us" in out
        assert f"since the redistribution of the result of act, which {named}, takes +100 us" in out


def test_an_unknown_operator() -> None:
    with pytest.raises(sw.PlanError, match="nosuch"):
        explained(planned("mlp"), "nosuch")


# -- what is read ------------------------------------------------------------------------------------------------------


def test_command_line(tmp_path: Path, capsys: Any) -> None:
    plan, path = planned("mlp"), str(tmp_path / "plan.json")
    plan.save(path)
    assert main.main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "lower bound" in out and "gap 0.000%" in out
    dearest = max(plan.price.by_operator, key=plan.price.by_operator.get)
    lines = [line.split() for line in out[out.index("decided by") :].splitlines()]
    order = [line[0] for line in lines if line]
    assert order.index(OperatorNames(plan).path(dearest).split()[0]) < order.index(
        OperatorNames(plan).path("relu").split()[0]
    )
    assert main.main(["explain", path, "relu", "--alternatives", "2"]) == 0
    out = capsys.readouterr().out
    explained_operator = explained(plan, "relu", 2)
    assert "the search decided; held there by" in out and out.count("+") >= 2
    for other in explained_operator.alternatives:
        assert explanations.strategy_text(other.decision) in out
    assert main.main(["explain", path, "nosuch"]) == 2 and "nosuch" in capsys.readouterr().err
    assert main.main(["explain", str(tmp_path / "none.json")]) == 2 and "none.json" in capsys.readouterr().err
    for wrong in (
        ["explain"],
        ["explain", path, "relu", "--alternatives", "0"],
        ["explain", path, "--import", "no_such_one"],
    ):
        with pytest.raises(SystemExit) as left:
            main.main(wrong)
        assert left.value.code == 2


def test_from_python(capsys: Any) -> None:
    net, x, y = nn.Linear(8, 8, dtype=D), draw(16, 8), labels(16)
    model = parallel(net, nn.CrossEntropyLoss(), devices=4)
    model(x, y)
    model.explain("linear")
    shown = capsys.readouterr().out
    assert shown.startswith("linear, ") and "along the batch" in shown
    model.explain()
    assert "linear" in capsys.readouterr().out
