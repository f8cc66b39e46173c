"""sharding_propagation: what follows from a few marks, at what price, and that it computes what one device computes."""

from __future__ import annotations

import math
import sys
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from networks import D, Apply, Marked, draw, labels
from one_device import assert_as_one_device, close, parallel, squares
from test_random_networks import MATRICES, marked, networks
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.cluster import Cluster
from shardwright.layout import Digit, Layout
from shardwright.plan import demands, propagation
from shardwright.plan.costs import Costs
from shardwright.plan.demands import MOST, demands_of, legal, passes_through, project
from shardwright.plan.problem import Solution
from shardwright.plan.propagation import path_from_mark
from shardwright.rules import assignment_of, bound_rule

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import gpt  # noqa: E402
from language import Loss  # noqa: E402

MODE = "sharding_propagation"


def seconds(plan: sw.Plan) -> float:
    return Costs(Cluster.of(None, plan.devices), plan.devices).plan(plan).total


def planned(net: nn.Module, *inputs: Tensor, mode: str = MODE, **options: Any) -> sw.Plan:
    return sw.plan(net, inputs, parallel_mode=mode, **options)


class Chain(nn.Module):
    """product, ReLU, product; any of them marked."""

    def __init__(self, first: Any = None, relu: Any = None, second: Any = None, out: Any = None) -> None:
        super().__init__()
        self.w, self.w2 = nn.Parameter(draw(32, 16, seed=1)), nn.Parameter(draw(16, 16, seed=2))
        self.matmul, self.relu = sw.Operator(torch.matmul), sw.Operator(torch.relu)
        self.matmul2 = sw.Operator(torch.matmul)
        for operator, strategy in ((self.matmul, first), (self.relu, relu)):
            if strategy is not None:
                operator.shard(strategy)
        if second is not None or out is not None:
            self.matmul2.shard(second, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul2(self.relu(self.matmul(x, self.w)), self.w2)


FIRST = ((2, 4), (4, 1))


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
    assert path_from_mark(plan.decisions, second.op.name) == ("matmul", relu.op.name, second.op.name)
    assert strategies(plan)[1][0][0] == 2


def test_backwards() -> None:
    plan = planned(Chain(second=((2, 4), (4, 1))), torch.empty(16, 32, dtype=D), cluster="a100x8")
    matmul, relu, second = plan.decisions.values()
    assert (relu.origin, matmul.origin) == ("matmul2", "matmul2")
    assert path_from_mark(plan.decisions, matmul.op.name) == ("matmul2", relu.op.name, matmul.op.name)
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
        return {decision.bound.in_strategy(d.assignment) for d in asked[decision.op.name]
                if d.aggressive is aggressive}
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
    note, = (n for n in plan.notes if n == relu.note)
    assert note.count("asks for") == 2 and note.count("µs") == 2 and "taken" in note
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
                y = y + y.sum(1, keepdim=True)     # dear where the columns are cut
            for _ in range(self.after):
                y = y + y.sum(0, keepdim=True)     # dear where the rows are
            return self.last(y)

    x = torch.empty(1024, 1024)
    rows = planned(Between(3, 0), x, cluster="a100x8")
    columns = planned(Between(0, 3), x, cluster="a100x8")
    assert {d.origin for d in of_kind(rows, "add")} == {"first"}
    assert {d.origin for d in of_kind(columns, "add")} == {"last"}


def test_no_mark() -> None:
    with pytest.raises(sw.SettingError, match="no operator") as raised:
        planned(Chain(), torch.empty(16, 32, dtype=D))
    assert "sw.shard" in raised.value.legal and "dynamic_programming" in raised.value.legal


def test_a_limit_of_memory_is_not_for_this_mode() -> None:
    with pytest.raises(sw.SettingError, match="memory"):
        planned(Chain(FIRST), torch.empty(16, 32, dtype=D), memory="1GB")


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
    assert "test_propagation.py" in str(raised.value)


@pytest.mark.parametrize("first", [((1, 8), (8, 1)), ((1, 1), (1, 8)), ((2, 4), (4, 1)), ((8, 1), (1, 1))])
def test_users_of_one_parameter_have_one_layout(first: tuple) -> None:
    """In semi_auto an unmarked user wants it whole, which is an error; here it follows."""
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
    monkeypatch.setattr(demands, "MOST", 0)
    plan = planned(Twice(((1, 8), (8, 1)), None), torch.empty(16, 16, dtype=D))
    assert plan.operators[-1].in_layouts[1] == plan.operators[0].in_layouts[1]


def test_what_is_heard_is_bounded(monkeypatch) -> None:
    plan = planned(Chain(FIRST), torch.empty(16, 32, dtype=D))
    monkeypatch.setattr(demands, "MOST", 1)
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
            self.w, self.w2 = (nn.Parameter(torch.empty([n * width for n in w.shape], device="meta"))
                               for w in (self.w, self.w2))

    def price(*strategies: Any, mode: str) -> float:
        inputs = torch.empty(16 * width, 32 * width, device="meta"), torch.empty(16 * width, 16 * width, device="meta")
        plan = sw.plan(Quick(*strategies), inputs[:1], nn.MSELoss(), inputs[1], parallel_mode=mode, cluster=cluster,
                       dataset_strategy="data_parallel")
        return Costs(Cluster.of(cluster, 8), 8).plan(plan).total

    ours = price(FIRST, mode=MODE)
    for relu, second in PUBLISHED:
        for mode in (MODE, "semi_auto"):
            assert ours <= price(FIRST, relu, second, mode=mode) * (1 + 1e-12)


def test_the_plan_along_the_batch_where_no_mark_is_worth_following(monkeypatch) -> None:
    def worst(problem: Any) -> Solution:
        states = max((s for s in product(*(range(len(c)) for c in problem.costs)) if problem.cost(s) < math.inf),
                     key=problem.cost)
        return Solution(states, problem.cost(states), 0.0)

    x = torch.empty(16, 32, dtype=D)
    monkeypatch.setattr(propagation, "solve", worst)
    plan = planned(Chain(FIRST), x)
    assert strategies(plan) == strategies(planned(Chain(FIRST), x, mode="semi_auto"))
    assert any("no operator follows a mark" in note for note in plan.notes)


# -- runs --------------------------------------------------------------------------------------------------------------


def marked_gpt(*names: str) -> gpt.GPT:
    """A GPT with tied embeddings, of which these operators are marked by columns in every block."""
    torch.manual_seed(3)
    net = gpt.GPT(vocabulary=32, length=16, layers=2, width=16, heads=4).to(D)
    for block in net.blocks:
        for name in names:
            sw.shard(block.get_submodule(name), ((2, 1, 1), (4, 1), (4,)))
    return net


class Convolutions(nn.Module):
    """A stem, of which the convolution is marked, a residual block, a head."""

    def __init__(self, stem: tuple) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False, dtype=D), nn.BatchNorm2d(8, dtype=D)
        self.inner, self.head = nn.Conv2d(8, 8, 3, padding=1, dtype=D), nn.Linear(8, 8, dtype=D)
        sw.shard(self.stem, stem)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        return self.head(torch.relu(x + self.inner(x)).mean((2, 3)))


class Views(nn.Module):
    """Dims split, moved, merged and sliced between two products."""

    def __init__(self, first: Any = None, middle: Any = None, second: Any = None) -> None:
        super().__init__()
        self.w, self.w2 = nn.Parameter(draw(16, 32, seed=1)), nn.Parameter(draw(32, 8, seed=2))
        self.first, self.middle, self.second = (sw.Operator(f) for f in (torch.matmul, torch.softmax, torch.matmul))
        for operator, strategy in ((self.first, first), (self.middle, middle), (self.second, second)):
            if strategy is not None:
                operator.shard(strategy)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x, self.w).reshape(2, 8, 4, 8).transpose(1, 2)           # [2, 4, 8, 8]
        y = self.middle(y @ y.transpose(-1, -2), -1) @ y
        return self.second(y.transpose(1, 2).flatten(2).flatten(0, 1), self.w2)[:8]


class Ends(nn.Module):
    """Marked at its end alone: everything flows backwards, through a residual and two tied products."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(draw(16, 16, seed=1)), sw.shard(torch.matmul, ((2, 4), (4, 1)))
        self.w2 = nn.Parameter(draw(16, 8, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(x @ self.w)
        return self.head(x @ self.w.t(), self.w2)


TOKENS, NEXT = labels(8 * 16, 32, seed=1).reshape(8, 16), labels(8 * 16, 32, seed=2).reshape(8, 16)
MEGATRON = ("attention.query", "attention.key", "attention.value", "up")
RUNS = {
    "one of two products": (lambda: Chain(FIRST), (draw(16, 32),), None),
    "the last of two products": (lambda: Chain(second=FIRST), (draw(16, 32),), None),
    "in the middle": (lambda: Chain(relu=((2, 4),)), (draw(16, 32),), None),
    "a result": (lambda: Chain(out=((2, 4),)), (draw(16, 32),), None),
    "two at odds": (lambda: Chain(FIRST, None, ((1, 8), (8, 1))), (draw(16, 32),), None),
    "a biased layer left": (Marked, (draw(16, 8),), None),
    "products of a GPT": (lambda: marked_gpt(*MEGATRON), (TOKENS, NEXT), Loss()),
    "one product of a GPT": (lambda: marked_gpt("up"), (TOKENS, NEXT), Loss()),
    "a stem along the batch": (lambda: Convolutions(((8, 1, 1, 1), (1, 1, 1, 1))), (draw(8, 3, 8, 8),), None),
    "a stem by channels": (lambda: Convolutions(((2, 1, 1, 1), (4, 1, 1, 1))), (draw(8, 3, 8, 8),), None),
    "views after": (lambda: Views(first=((2, 1), (1, 4))), (draw(16, 16),), None),
    "views around": (lambda: Views(middle=((2, 4, 1, 1),)), (draw(16, 16),), None),
    "views before": (lambda: Views(second=((2, 4), (4, 1))), (draw(16, 16),), None),
    "at the end": (Ends, (draw(16, 16),), None),
}


@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel"])
@pytest.mark.parametrize("name", RUNS)
def test_as_one_device(name: str, dataset: str) -> None:
    make, batch, loss = RUNS[name]
    model = assert_as_one_device(make(), batch, batch, loss_fn=loss, mode=MODE, dataset=dataset)
    assert any(d.cause == "propagated" for d in model.plan.decisions.values())


def test_dims_that_cuts_do_not_divide() -> None:
    plan = assert_as_one_device(Chain(((8, 1), (1, 1))), (draw(12, 32),), mode=MODE, uneven=True).plan
    relu = plan.operators[1].name
    assert plan.operators[0].in_strategy == ((8, 1), (1, 1))
    assert [d.assignment.digits for d in demands_of(plan.graph, plan.decisions, 8)[relu]] == [((Digit(8, 1),), ())]


def test_another_batch_finds_parameters_as_they_lie() -> None:
    model = assert_as_one_device(Chain(FIRST), (draw(16, 32),), (draw(8, 32, seed=3),), mode=MODE)
    assert model.plan.operator("matmul").in_strategy == FIRST


def test_optimizer_parallel() -> None:
    plan = planned(Chain(((8, 1), (1, 1))), torch.empty(16, 32, dtype=D), hsdp={"threshold": 0})
    assert plan.parameters["w"].layout.is_replicated and plan.parameters["w"].storage.cuts == (8, 1)


def test_one_device() -> None:
    plan = planned(Chain(((1, 1), (1, 1))), torch.empty(16, 32, dtype=D), devices=1)
    assert plan.sent == 0


def test_what_a_mark_keeps_whole_stays_whole_where_that_is_cheaper() -> None:
    """A sum over all devices leaves the same on each: cutting tiny work again takes longer than repeating it."""
    plan = planned(Chain(((1, 8), (8, 1))), torch.empty(16, 32, dtype=D), cluster="a100x8")
    relu = plan.decisions[plan.operators[1].name]
    assert plan.operators[1].in_strategy == ((1, 1),) and (relu.cause, relu.origin) == ("propagated", "matmul")


@pytest.mark.parametrize("dataset", ["full_batch", "data_parallel"])
@pytest.mark.parametrize("name", RUNS)
def test_not_dearer_than_semi_auto(name: str, dataset: str) -> None:
    make, batch, loss = RUNS[name]
    inputs, targets = (batch, None) if loss is None else (batch[:1], batch[1])
    ours, theirs = (seconds(sw.plan(make(), inputs, loss, targets, parallel_mode=mode, dataset_strategy=dataset))
                    for mode in (MODE, "semi_auto"))
    assert ours <= theirs * (1 + 1e-12)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks(), st.sampled_from(sorted(MATRICES)), st.data())
def test_random_networks_with_one_or_two_marks(made, devices, data) -> None:
    net, shape = made
    x, y = (draw(*shape).requires_grad_() for _ in range(2))
    for operator in net.operators:
        operator.shard(())
    bounds = {op.name: bound_rule(op) for op in capture(net, (x,)).ops if op.mark is not None}
    chosen = data.draw(st.lists(st.sampled_from(range(len(net.operators))), min_size=1, max_size=2, unique=True))
    given_ = {}
    for i, operator in enumerate(net.operators):
        strategy, out = marked(data.draw, bounds[f"operators.{i}"], devices) if i in chosen else (None, None)
        operator.shard(strategy, out)
        if strategy is not None or out is not None:
            given_[f"operators.{i}"] = strategy
    model = parallel(net, devices=devices, mode=MODE)
    if not given_:
        with pytest.raises(sw.SettingError):
            model(x)
        return
    got, expected = model(x), net(y)
    close(got, expected, "outputs")
    if squares(expected).requires_grad:
        gradients = torch.autograd.grad(squares(expected), [y, *net.parameters()], allow_unused=True)
        close(torch.autograd.grad(squares(got), [x, *net.parameters()], allow_unused=True), gradients, "gradients")
    for name, strategy in given_.items():
        if strategy is not None:
            assert model.plan.decisions[name].assignment == assignment_of(bounds[name], strategy, devices)


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
