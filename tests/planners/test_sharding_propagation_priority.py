"""Priorities of marks: whose neighbours follow whom, whatever that costs, and what the plan says of the loser."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from one_device import assert_as_one_device, close, parallel, squares
from small_networks import draw
from test_parallel_random_networks import MATRICES, marked, networks
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.planners import layout_demands
from shardwright.planners.layout_demands import demands_of, within
from shardwright.rules import assignment_of, bound_rule

MODE = "sharding_propagation"
A = sw.Layout((8,), ("a",))
AB = sw.Layout((2, 4), ("a", "b"))


def planned(net: nn.Module, *inputs: Tensor, **options: Any) -> sw.Plan:
    return sw.plan(net, inputs, parallel_mode=MODE, cluster="a100x8", **options)


class Between(nn.Module):
    """Rows are cut before, columns after: in between are sums that are dear where the columns are cut, or the rows."""

    def __init__(self, dear_columns: int = 0, dear_rows: int = 0, first: int = 0, last: int = 0) -> None:
        super().__init__()
        self.first = sw.shard(torch.relu, (A("a", "None"),), priority=first)
        self.last = sw.shard(torch.tanh, (A("None", "a"),), priority=last)
        self.sums = [1] * dear_columns + [0] * dear_rows

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for dim in self.sums:
            y = y + y.sum(dim, keepdim=True)
        return self.last(y)


X = torch.empty(1024, 1024)
ROWS, COLUMNS = (8, 1), (1, 8)


def adds(plan: sw.Plan) -> list[Any]:
    return [plan.decisions[o.name] for o in plan.operators if o.op == "add"]


def cuts(plan: sw.Plan) -> set:
    return {o.in_strategy[0] for o in plan.operators if o.op == "add"}


@pytest.mark.parametrize("shape, cheaper, dearer", [((3, 0), "first", "last"), ((0, 3), "last", "first")])
def test_priority_reverses_what_cost_decides(shape: tuple, cheaper: str, dearer: str) -> None:
    won = {"first": ROWS, "last": COLUMNS}
    for equal in (0, 5):
        plan = planned(Between(*shape, first=equal, last=equal), X)
        assert cuts(plan) == {won[cheaper]} and {d.origin for d in adds(plan)} == {cheaper}
        assert not any("priority" in note for note in plan.notes)
    other = planned(Between(*shape, **{cheaper: 1}), X)
    assert cuts(other) == {won[dearer]} and {d.origin for d in adds(other)} == {dearer}
    assert other.cost > plan.cost, "whatever it costs"
    kept = planned(Between(*shape, **{dearer: 7}), X)
    assert cuts(kept) == {won[cheaper]}


def test_the_notes_name_the_loser_and_why() -> None:
    plan = planned(Between(3, 0, first=4), X)
    last = adds(plan)[-1]
    notes = [note for note in plan.notes if "priority" in note]
    assert notes and all("first asks for" in note and "after last: priority 4 against 0" in note for note in notes)
    met = next(note for note in notes if note.startswith("sum"))
    assert "last asks for ((1, 8),)" in met and "taken" in met and "first asks for ((8, 1),)" in met
    assert last.origin == "last"


def test_the_batch_does_not_win_over_a_mark_of_higher_priority() -> None:
    """Along the batch is how the loser cuts, and what the mode does where following is not worth it."""
    free, bound = (planned(Between(3, 0, last=1 - last, first=1 if last else 0), X) for last in (0, 1))
    assert cuts(free) == {ROWS} and cuts(bound) == {COLUMNS}


def test_what_does_not_contradict_joins() -> None:
    """Rows of one mark, columns of another of lower priority: both are followed."""

    class Meet(nn.Module):
        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            self.rows = sw.shard(torch.relu, (AB("a", "None"),), priority=rows)
            self.columns = sw.shard(torch.tanh, (AB("None", "b"),), priority=columns)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.rows(x) @ self.columns(y)

    for priorities in ((0, 1), (1, 0)):
        net = Meet(*priorities)
        plan = planned(net, torch.empty(512, 512), torch.empty(512, 512))
        matmul = plan.operators[-1]
        assert matmul.in_strategy == ((2, 1), (1, 4)) and not plan.notes
        asked = demands_of(plan.graph, plan.decisions, 8)[matmul.name]
        assert not any(d.outranked for d in asked) and {d.priority for d in asked} == {0, 1}


def test_a_mark_of_low_priority_has_its_way_where_no_other_asks() -> None:
    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = sw.shard(torch.relu, (A("a", "None"),))
            self.two = sw.shard(torch.relu, (A("None", "a"),), priority=9)

        def forward(self, x: Tensor, y: Tensor) -> tuple:
            return torch.tanh(self.one(x)), torch.tanh(self.two(y))

    plan = planned(Apart(), X, X)
    assert [o.in_strategy[0] for o in plan.operators if o.op == "tanh"] == [ROWS, COLUMNS]
    assert [d.origin for d in plan.decisions.values() if d.op.kind == "tanh"] == ["one", "two"]


# -- user priority, then the kind of operator, then basic or aggressive --


def asked_of(plan: sw.Plan, kind: str) -> list[tuple]:
    """The demands on the first operator of a kind, as it heard them: the mark, the cuts, how."""
    found = next(d for d in plan.decisions.values() if d.op.kind == kind)
    return [
        (d.mark, found.bound.in_strategy(d.assignment)[0], "aggressive" if d.aggressive else "basic", d.outranked)
        for d in demands_of(plan.graph, plan.decisions, 8)[found.op.name]
    ]


@pytest.mark.parametrize("most", [layout_demands.MOST, 1])
def test_user_priority_comes_before_the_kind_of_operator(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demand that comes through a product, which has heard the other side first, is followed before what would flow
    straight in, if its mark has the priority; even where an operator listens to one of them alone."""

    class Net(nn.Module):
        def __init__(self, far: int, near: int) -> None:
            super().__init__()
            self.far = sw.shard(torch.relu, (A("None", "a"),), priority=far)
            self.near = sw.shard(torch.tanh, (A("a", "None"),), priority=near)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.near(torch.neg(x @ self.far(y)))

    monkeypatch.setattr(layout_demands, "MOST", most)
    plan = planned(Net(0, 1), X, X)
    assert asked_of(plan, "neg") == [("far", COLUMNS, "basic", False), ("near", ROWS, "basic", True)]
    assert plan.operator("neg").in_strategy == (COLUMNS,) and plan.decisions["neg"].origin == "far"
    assert any("near asks for ((8, 1),), after far: priority 1 against 0" in note for note in plan.notes)
    other = planned(Net(1, 0), X, X)
    assert other.operator("neg").in_strategy == (ROWS,) and other.decisions["neg"].origin == "near"


def test_the_kind_of_operator_comes_before_basic_or_aggressive(monkeypatch: pytest.MonkeyPatch) -> None:
    """An aggressive demand that is heard alone is the one that pointwise operators have passed on, however far, and not
    that of a product which has heard its mark basically and stands next to it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.passed_on = sw.shard(torch.matmul, ((1, 8), (8, 1)))  # its open sum may be left as columns
            self.next_to = sw.shard(torch.relu, (AB("None", "a"),))  # four devices to spare for a product's rows

        def forward(self, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
            return torch.neg(torch.exp(torch.sin(self.passed_on(x, w)))) @ self.next_to(v)

    monkeypatch.setattr(layout_demands, "MOST", 1)
    with torch.device("meta"):  # rows that eight devices cannot share
        plan = planned(Net(), torch.empty(1020, 1024), torch.empty(1024, 8192), torch.empty(8192, 1024))
    assert asked_of(plan, "neg") == [("passed_on", (1, 1), "basic", False), ("passed_on", COLUMNS, "aggressive", False)]
    assert plan.operator("neg").in_strategy == (COLUMNS,) and plan.decisions["neg"].origin == "passed_on"
    product = plan.operators[-1]
    assert product.in_strategy == ((4, 1), (1, 2)), "what the product itself is asked for aggressively, by the other"


def test_basic_comes_before_aggressive() -> None:
    """Two marks ask for columns, the earlier one aggressively: they count as asked for basically, and so hold against a
    third mark of lower priority, whose rows would be cheaper."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.open = sw.shard(torch.matmul, ((1, 8), (8, 1)))
            self.consumer = sw.shard(torch.relu, (A("None", "a"),))
            self.lower = sw.shard(torch.tanh, (A("a", "None"),), priority=1)

        def forward(self, x: Tensor, w: Tensor) -> tuple:
            y = self.open(x, w)
            for _ in range(3):
                y = y + y.sum(1, keepdim=True)  # dear where the columns are cut
            return self.consumer(y), self.lower(y)

    plan = planned(Net(), X, X)
    asked = asked_of(plan, "add")
    assert [entry for entry in asked if entry[1] == COLUMNS] == [("consumer", COLUMNS, "basic", False)]
    assert ("open", ROWS, "aggressive", False) in asked and asked.index(
        ("consumer", COLUMNS, "basic", False)
    ) < asked.index(("open", ROWS, "aggressive", False))
    assert cuts(plan) == {COLUMNS} and {d.origin for d in adds(plan)} == {"consumer"}
    net = Net()
    sw.shard(net.lower, (A("a", "None"),), priority=0)
    sw.shard(net.consumer, (A("None", "a"),), priority=1)
    cheaper = planned(net, X, X)
    assert cuts(cheaper) == {ROWS} and cheaper.cost < plan.cost


class Twice(nn.Module):
    """One parameter whose marked user lays it out, and an unmarked user that another mark would have otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(draw(16, 16, seed=1))
        self.settles = sw.shard(torch.matmul, ((1, 8), (8, 1)), priority=1)
        self.consumer = sw.shard(torch.tanh, (A("None", "a"),))

    def forward(self, x: Tensor) -> Tensor:
        return self.consumer(self.settles(x, self.w) @ self.w)


def test_a_parameter_that_a_mark_has_laid_out_stays_so() -> None:
    """No priority overrides a mark; where that is in the way, the plan says so."""
    plan = assert_as_one_device(Twice(), (draw(16, 16),), mode=MODE, cluster="a100x8").plan
    free = next(o for o in plan.operators if o.op == "matmul" and o.cause != "mark")
    assert plan.operators[0].in_strategy == ((1, 8), (8, 1))
    assert free.in_layouts[1] == plan.parameters["w"].layout == plan.operators[0].in_layouts[1]
    assert any("consumer asks for" in note and "in spite of its priority 0" in note for note in plan.notes)


@pytest.mark.parametrize("priority", [-1, 1.0, "0", None, True])
def test_what_is_no_priority(priority: Any) -> None:
    marked_module = sw.shard(nn.Linear(8, 8), ((1, 1), (1, 1)))
    for mark in (
        lambda: sw.shard(torch.relu, ((8, 1),), priority=priority),
        lambda: sw.shard(nn.Linear(8, 8), ((8, 1), (1, 1)), priority=priority),
        lambda: marked_module.shard(((8, 1), (1, 1)), priority=priority),
    ):
        with pytest.raises(sw.SettingError, match="priority=") as raised:
            mark()
        assert raised.value.source.startswith("test_sharding_propagation_priority.py:")
        assert raised.value.operator in ("relu", "Linear") and "whole number from 0" in raised.value.legal


def test_a_mark_made_anew_has_the_priority_of_the_last_call() -> None:
    net = Between(3, 0, first=1)
    assert cuts(planned(net, X)) == {COLUMNS}
    sw.shard(net.first, (A("a", "None"),))
    assert cuts(planned(net, X)) == {ROWS}
    linear = sw.shard(nn.Linear(8, 8), ((1, 1), (1, 1)), priority=3)
    (use,) = (op.mark for op in capture(linear, (torch.empty(8, 8),)).ops if op.mark is not None)
    assert use.priority == 3


def test_other_modes_do_not_read_it() -> None:
    net, other = Between(2, 0), Between(2, 0, first=3)
    for mode in ("semi_auto", "recursive_programming"):
        one, two = (sw.plan(n, (X,), parallel_mode=mode, cluster="a100x8") for n in (net, other))
        assert one.fingerprint == two.fingerprint


@settings(max_examples=10, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks(), st.sampled_from(sorted(MATRICES)), st.data())
def test_random_networks(made, devices, data) -> None:
    """Results are those of one device; marks stay; a cut asked by the first mark is made, or its note says why not."""
    net, shape = made
    x, y = (draw(*shape).requires_grad_() for _ in range(2))
    for operator in net.operators:
        operator.shard(())
    bounds = {op.name: bound_rule(op) for op in capture(net, (x,)).ops if op.mark is not None}
    chosen = data.draw(
        st.lists(st.sampled_from(range(len(net.operators))), min_size=2, max_size=3, unique=True)
        if len(net.operators) > 1
        else st.just([0])
    )
    strategies = {}
    for i, operator in enumerate(net.operators):
        if i not in chosen:
            operator.shard()
            continue
        strategies[f"operators.{i}"], out = marked(data.draw, bounds[f"operators.{i}"], devices)
        operator.shard(strategies[f"operators.{i}"], out, chosen.index(i))
    if all(o.in_strategy is None and o.out_strategy is None for o in net.operators):
        return
    model = parallel(net, devices=devices, mode=MODE)
    got, expected = model(x), net(y)
    close(got, expected, "outputs")
    if squares(expected).requires_grad:
        gradients = torch.autograd.grad(squares(expected), [y, *net.parameters()], allow_unused=True)
        close(torch.autograd.grad(squares(got), [x, *net.parameters()], allow_unused=True), gradients, "gradients")
    plan = model.plan
    for name, strategy in strategies.items():
        if strategy is not None:
            assert plan.decisions[name].assignment == assignment_of(bounds[name], strategy, devices)
    for name, of_operator in demands_of(plan.graph, plan.decisions, devices).items():
        decision, cutting = (
            plan.decisions[name],
            [d for d in of_operator if d.assignment.used and not d.aggressive and not d.outranked],
        )
        levels = sorted(
            {
                op.mark.priority
                for op in plan.graph.ops
                if op.mark is not None and (op.mark.in_strategy is not None or op.mark.out_strategy is not None)
            }
        )
        first = [d for d in cutting if d.priority == min(e.priority for e in cutting)]
        if first and first[0].priority < levels[-1]:
            followed = any(within(d.assignment, decision.assignment) for d in first)
            assert followed or "in spite of" in (decision.note or "")
