"""sharding_propagation: what follows from a few marks, and at what price."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import gpt
import pytest
import torch
from one_device import assert_as_one_device, close
from propagation_networks import FIRST, MODE, Chain, planned
from small_networks import Apply, D, draw
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cluster import Cluster
from shardwright.cost.cost_model import CostModel
from shardwright.layout import Digit, Layout
from shardwright.planners import layout_demands, sharding_propagation
from shardwright.planners.layout_demands import MOST, demands_of, legal, passes_through, project
from shardwright.planners.planning_problem import planners
from shardwright.rules import bound_rule
from shardwright.solver.problem import Solution


def of_kind(plan: sw.Plan, kind: str) -> list[Any]:
    return [d for d in plan.decisions.values() if d.op.kind == kind]


# -- what flows --------------------------------------------------------------------------------------------------------


def strategies(plan: sw.Plan) -> list[tuple]:
    return [o.in_strategy for o in plan.operators]


def test_forwards_and_where_from() -> None:
    plan = planned(Chain(FIRST), torch.empty(16, 32, dtype=D))
    matmul, relu, second = plan.decisions.values()
    assert matmul.cause == "mark" and not matmul.origin
    assert (relu.cause, relu.origin, relu.via) == ("propagated", "matmul", "matmul")
    assert (second.cause, second.origin, second.via) == ("propagated", "matmul", relu.op.name)
    assert strategies(plan)[1][0][0] == 2


def test_backwards() -> None:
    plan = planned(Chain(second=((2, 4), (4, 1))), torch.empty(16, 32, dtype=D), cluster="a100x8")
    matmul, relu, _second = plan.decisions.values()
    assert (relu.origin, relu.via) == ("matmul2", "matmul2")
    assert (matmul.origin, matmul.via) == ("matmul2", relu.op.name)
    # what the second product contracts, the first has as its columns
    assert strategies(plan)[:2] == [((2, 1), (1, 4)), ((2, 4),)]
    assert plan.parameters["w"].layout == Layout.of(8, [(), (Digit(4, 1),)])


def test_a_mark_on_a_result() -> None:
    plan = planned(Chain(out=((2, 4),)), torch.empty(16, 32, dtype=D))
    second = plan.operators[2]
    assert second.out_strategy == ((2, 4),)
    assert all(d.origin == "matmul2" for d in list(plan.decisions.values())[:2])
    asked = demands_of(plan.graph, plan.decisions, 8)[second.name]
    bound = plan.decisions[second.name].bound
    assert bound.in_strategy(asked[0].assignment) == ((2, 1), (1, 4)), "its columns are cut as its result is to be"


def test_marks_are_kept() -> None:
    net = Chain(FIRST, ((8, 1),), ((1, 8), (8, 1)))
    assert strategies(planned(net, torch.empty(16, 32, dtype=D))) == [FIRST, ((8, 1),), ((1, 8), (8, 1))]


def test_what_no_mark_reaches_goes_along_the_batch() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.marked = sw.shard(torch.relu, ((1, 4),))

        def forward(self, x: Tensor, y: Tensor) -> tuple:
            return self.marked(x), torch.tanh(y)

    plan = planned(Two(), torch.empty(16, 32), torch.empty(16, 32))
    tanh = of_kind(plan, "tanh")[0]
    assert (tanh.cause, tanh.origin) == ("batch", "") and plan.operators[1].in_strategy == ((8, 1),)


def test_factors_of_two_operands_meet_in_a_product() -> None:
    """Rows from one, columns from the other, neither knows of both."""

    class Meet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layout = sw.Layout((2, 4), ("a", "b"))
            self.rows = sw.shard(torch.relu, (layout("a", "None"),))
            self.columns = sw.shard(torch.tanh, (layout("None", "b"),))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.rows(x) @ self.columns(y)

    net = Meet()
    graph = capture(net, (torch.empty(512, 512), torch.empty(512, 512)))
    plan = planned(net, torch.empty(512, 512), torch.empty(512, 512), cluster="a100x8")
    matmul = of_kind(plan, "matmul")[0]
    asked = demands_of(graph, plan.decisions, 8)[matmul.op.name]
    assert [matmul.bound.in_strategy(d.assignment) for d in asked if not d.aggressive] == [((2, 1), (1, 4))]
    assert matmul.bound.in_strategy(matmul.assignment) == ((2, 1), (1, 4))


def test_aggressive_demands() -> None:
    """An open sum left as slices, and digits that would repeat the work: the two published results are among them."""
    net, x = Chain(FIRST), torch.empty(16, 32, dtype=D)
    plan = planned(net, x)
    asked = demands_of(plan.graph, plan.decisions, 8)
    relu, second = list(plan.decisions.values())[1:]

    def cuts(decision: Any, aggressive: bool) -> set:
        return {decision.bound.in_strategy(d.assignment) for d in asked[decision.op.name] if d.aggressive is aggressive}

    assert cuts(relu, False) == {((2, 1),)} and ((2, 4),) in cuts(relu, True)
    assert cuts(second, False) == {((2, 1), (1, 1))}
    assert {((2, 4), (4, 1)), ((2, 1), (1, 4))} <= cuts(second, True)


def test_only_what_fits_of_a_layout_flows_on() -> None:
    """A dim of 6 takes two of four ways; a dim that may not be split takes none."""

    def op(f: Any, *shapes: tuple) -> Any:
        return capture(Apply(lambda m, *xs: f(*xs)), tuple(torch.empty(s, dtype=D) for s in shapes)).ops[-1]

    bound = bound_rule(op(torch.relu, (6, 4)))
    four, two = (Digit(4, 2),), (Digit(2, 1),)
    assert project(bound, bound.inputs[0], Layout.of(8, [four, two])) == {0: (Digit(2, 4),), 1: two}
    along = bound_rule(op(lambda x: x.select(1, 0), (8, 8)))
    assert project(along, along.inputs[0], Layout.of(8, [four, two])) == {0: four}
    merged = bound_rule(op(lambda x: x.flatten(), (4, 8)))
    found = project(merged, merged.outputs[0], Layout.of(8, [(Digit(8, 1),)]))
    assert found == {0: (Digit(4, 2),), 1: (Digit(2, 1),)}
    assert legal(merged, {1: four}, 8) is None, "a minor part alone is no layout of the merged dim"
    assert legal(merged, {0: two, 1: four}, 8) == merged.cut_by(8, {0: two}), "the major part alone is"


def test_what_passes_layouts_through() -> None:
    def passes(f: Any, *shapes: tuple) -> bool:
        net = Apply(lambda m, *xs: f(*xs))
        return passes_through(bound_rule(capture(net, tuple(torch.empty(s, dtype=D) for s in shapes)).ops[-1]))

    assert passes(torch.add, (8, 8), (8,)) and passes(lambda x: x.reshape(4, 16), (8, 8))
    assert not passes(torch.matmul, (8, 8), (8, 8)) and not passes(lambda x: x.sum(0), (8, 8))


# -- conflicts ---------------------------------------------------------------------------------------------------------


def test_the_loser_is_reported_with_both_prices() -> None:
    plan = planned(Chain(FIRST, None, ((1, 8), (8, 1))), torch.empty(16, 32, dtype=D))
    relu = list(plan.decisions.values())[1]
    assert {relu.origin} < {"matmul", "matmul2"}
    (note,) = (n for n in plan.notes if n == relu.note)
    assert note.count("asks for") == 2 and note.count(" us") == 2 and "taken" in note
    assert note.index(relu.origin + " asks for") < note.index("taken")
    assert "((2, 1),)" in note and "((1, 8),)" in note


def test_the_dearer_demand_loses() -> None:
    """The same two demands at one operator: whose conversion is smaller depends on what the other product makes."""

    class Between(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            layout = sw.Layout((8,), ("a",))
            self.first = sw.shard(torch.relu, (layout("a", "None"),))
            self.last = sw.shard(torch.tanh, (layout("None", "a"),))
            self.before, self.after = before, after

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            for _ in range(self.before):
                y = y + y.sum(1, keepdim=True)  # dear where the columns are cut
            for _ in range(self.after):
                y = y + y.sum(0, keepdim=True)  # dear where the rows are
            return self.last(y)

    x = torch.empty(1024, 1024)
    rows = planned(Between(3, 0), x, cluster="a100x8")
    columns = planned(Between(0, 3), x, cluster="a100x8")
    assert {d.origin for d in of_kind(rows, "add")} == {"first"}
    assert {d.origin for d in of_kind(columns, "add")} == {"last"}


@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel", ((1, 1),)])
def test_without_a_mark_the_batch_leads(dataset: Any) -> None:
    x = torch.empty(16, 32, dtype=D)
    plan = planned(Chain(), x, dataset_strategy=dataset)
    along = planned(Chain(), x, dataset_strategy=dataset, mode="semi_auto")
    assert [o.in_strategy for o in plan.operators] == [((8, 1), (1, 1)), ((8, 1),), ((8, 1), (1, 1))]
    assert plan.cost == along.cost and plan.collectives(3) == along.collectives(3)
    assert {o.cause for o in plan.operators} == {"batch"} and not plan.notes


def test_without_a_mark_operators_follow_the_layout_in_which_the_batch_is_fed(capsys) -> None:
    """Rows and columns of x are cut: so is the contracted dim of the first product, and what follows keeps the rows."""
    x = torch.empty(16, 1024, dtype=D)
    net = Chain()
    net.w = nn.Parameter(draw(1024, 16))
    plan = planned(net, x, dataset_strategy=((2, 4),), cluster="a100x8")
    along = planned(net, x, dataset_strategy=((2, 4),), cluster="a100x8", mode="semi_auto")
    first, relu, _ = plan.decisions.values()
    assert plan.cost < along.cost and plan.operator("matmul").in_strategy == ((2, 4), (4, 1))
    assert plan.operator("relu").in_strategy[0][0] == 2
    assert (first.cause, first.origin) == ("propagated", "input x") == (relu.cause, relu.origin)
    assert not [c for c in plan.collectives(0) if c.operator == "matmul" and c.cause == "conversion"]
    sw.init(devices=8)
    model = sw.AutoParallel(net, parallel_mode=MODE, cluster="a100x8").dataset_strategy(((2, 4),))
    close(model(draw(16, 1024)), net(draw(16, 1024)))
    model.explain("matmul")
    assert "it follows input x" in capsys.readouterr().out


@pytest.mark.parametrize(
    "mode, why",
    [
        (MODE, "follows marks, whatever memory that takes"),
        ("semi_auto", "searches nothing"),
        ("data_parallel", "searches nothing"),
    ],
)
def test_a_limit_of_memory_is_for_the_modes_that_fit_plans(mode: str, why: str) -> None:
    with pytest.raises(sw.SettingError, match=f"memory='1GB' .*{mode} {why}") as raised:
        planned(Chain(FIRST), torch.empty(16, 32, dtype=D), mode=mode, memory="1GB")
    fitting = "parallel_mode='recursive_programming' or 'dynamic_programming'"
    assert raised.value.legal == f'no memory=, or {fitting}, or hsdp(optimizer_level="auto")'
    for name in planners(fits_memory=True):
        assert planned(Chain(FIRST), torch.empty(16, 32, dtype=D), mode=name, memory="1GB").peak <= 1e9


class Twice(nn.Module):
    """One parameter, two users."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(16, 16, seed=1))
        self.first, self.second = sw.Operator(torch.matmul), sw.Operator(torch.matmul)
        for operator, strategy in ((self.first, first), (self.second, second)):
            if strategy is not None:
                operator.shard(strategy)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x, self.w)), self.w)


def test_contradictory_marks_are_the_error_they_are() -> None:
    with pytest.raises(sw.PlanError, match="'w' .* is wanted in two layouts") as raised:
        planned(Twice(((1, 8), (8, 1)), ((1, 1), (1, 8))), torch.empty(16, 16, dtype=D))
    assert "test_sharding_propagation.py" in str(raised.value)


@pytest.mark.parametrize("first", [((1, 8), (8, 1)), ((1, 1), (1, 8)), ((2, 4), (4, 1)), ((8, 1), (1, 1))])
def test_users_of_one_parameter_have_one_layout(first: tuple) -> None:
    """An unmarked user wants the parameter whole in semi_auto, which is an error; here the user follows."""
    plan = assert_as_one_device(Twice(first, None), (draw(16, 16),), mode=MODE).plan
    second = plan.operators[-1]
    assert second.in_layouts[1] == plan.operators[0].in_layouts[1] == plan.parameters["w"].layout


class Added(nn.Module):
    """A parameter that lies along the batch for one user, and is a weight of another."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.relu = nn.Parameter(draw(16, 16, seed=1)), sw.shard(torch.relu, ((1, 4),))

    def forward(self, x: Tensor) -> Tensor:
        return (self.relu(x) + self.w) @ self.w


def test_unmarked_users_of_one_parameter_agree() -> None:
    with pytest.raises(sw.PlanError, match="wanted in two layouts"):
        planned(Added(), torch.empty(16, 16, dtype=D), mode="semi_auto")
    assert_as_one_device(Added(), (draw(16, 16),), mode=MODE)


def test_a_shared_parameter_is_heard_of_however_much_else_is(monkeypatch) -> None:
    monkeypatch.setattr(layout_demands, "MOST", 0)
    plan = planned(Twice(((1, 8), (8, 1)), None), torch.empty(16, 16, dtype=D))
    assert plan.operators[-1].in_layouts[1] == plan.operators[0].in_layouts[1]


def test_what_is_heard_is_bounded(monkeypatch) -> None:
    plan = planned(Chain(FIRST), torch.empty(16, 32, dtype=D))
    monkeypatch.setattr(layout_demands, "MOST", 1)
    asked = demands_of(plan.graph, plan.decisions, 8)
    assert all([d.aggressive for d in found] in ([False], [False, True], [True, False]) for found in asked.values())


# -- never dearer ------------------------------------------------------------------------------------------------------

PUBLISHED = [(((2, 4),), ((2, 4), (4, 1))), (((2, 1),), ((2, 1), (1, 4)))]


@pytest.mark.parametrize("cluster", [None, "a100x8"])
@pytest.mark.parametrize("width", [1, 64])
def test_not_dearer_than_either_published_result(cluster: Any, width: int) -> None:
    class Quick(Chain):
        def __init__(self, *strategies: Any) -> None:
            super().__init__(*strategies)
            self.w, self.w2 = (
                nn.Parameter(torch.empty([n * width for n in w.shape], device="meta")) for w in (self.w, self.w2)
            )

    def price(*strategies: Any, mode: str) -> float:
        inputs = torch.empty(16 * width, 32 * width, device="meta"), torch.empty(16 * width, 16 * width, device="meta")
        plan = sw.plan(
            Quick(*strategies),
            inputs[:1],
            nn.MSELoss(),
            inputs[1],
            parallel_mode=mode,
            cluster=cluster,
            dataset_strategy="data_parallel",
        )
        return CostModel(Cluster.of(cluster, 8), 8).plan(plan).total

    ours = price(FIRST, mode=MODE)
    for relu, second in PUBLISHED:
        for mode in (MODE, "semi_auto"):
            assert ours <= price(FIRST, relu, second, mode=mode) * (1 + 1e-12)


def test_the_plan_along_the_batch_where_no_mark_is_worth_following(monkeypatch) -> None:
    def worst(problem: Any) -> Solution:
        states = max(
            (s for s in product(*(range(len(c)) for c in problem.costs)) if problem.cost(s) < math.inf),
            key=problem.cost,
        )
        return Solution(states, problem.cost(states), 0.0)

    x = torch.empty(16, 32, dtype=D)
    monkeypatch.setattr(sharding_propagation, "solve", worst)
    plan = planned(Chain(FIRST), x)
    assert strategies(plan) == strategies(planned(Chain(FIRST), x, mode="semi_auto"))
    assert any("no operator follows a mark" in note for note in plan.notes)


# -- size --------------------------------------------------------------------------------------------------------------


def test_demands_grow_with_the_operators_alone() -> None:
    def count(layers: int) -> tuple[int, int]:
        with torch.device("meta"):
            net = gpt.GPT(vocabulary=64, length=16, layers=layers, width=32, heads=8)
            x = torch.empty(128, 16, dtype=torch.int64)
        sw.shard(net.blocks[0].up, ((128, 1, 1), (8, 1), (8,)))
        plan = sw.plan(net, (x,), parallel_mode=MODE, devices=1024)
        asked = demands_of(plan.graph, plan.decisions, 1024)
        return sum(map(len, asked.values())), max(map(len, asked.values()))

    (one, _), (two, _), (three, most) = map(count, (1, 2, 3))
    assert three - two == two - one
    assert most <= 2 * MOST
