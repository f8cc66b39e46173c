"""recursive_programming: every level is the best of its strategies, marks stay, and it computes what one device
computes."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import gpt
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, note, settings
from one_device import close, parallel, squares
from small_networks import D, Marked, draw, labels
from test_parallel_random_networks import marked, networks
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cluster import Cluster, Level
from shardwright.cost.cost_model import CostModel
from shardwright.layout import Digit
from shardwright.partition.local_program import place_inputs
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import PlanningProblem
from shardwright.planners.recursive_programming import recursive_programming
from shardwright.planners.search_space import options_among, strategy_of
from shardwright.rules import bound_rule

MODE = "recursive_programming"


def slow_devices(*sizes: int) -> Cluster:
    """Devices so slow, and links so quick to answer, that small models are worth splitting."""
    levels = tuple(Level(f"level {i}", size, 1e9 / 10**i, 1e-9) for i, size in enumerate(sizes))
    return Cluster("slow", levels, 1e9, {"float64": 1e8, "float32": 1e8}, 1e9, 1e-9)


def clusters(devices: int) -> Cluster:
    return slow_devices(2, devices // 2) if devices in (4, 8) else slow_devices(devices)


def running(net: nn.Module, loss_fn: Any, plan: sw.Plan) -> sw.AutoParallel:
    """The model under a plan that was made for another cluster than this machine: by its document."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        plan.save(path)
        return parallel(net, loss_fn, devices=plan.devices).load_operator_strategy_file(path)


def as_one_device(net: nn.Module, batch: tuple, loss_fn: Any, plan: sw.Plan) -> None:
    """Loss and gradients of a plan are those of one device."""
    one = loss_fn(net(*batch[:-1]), batch[-1])
    expected = torch.autograd.grad(one, list(net.parameters()))
    model = running(net, loss_fn, plan)
    got = model(*batch)
    assert {n: strategy_of(d) for n, d in model.plan.decisions.items()} == {
        n: strategy_of(d) for n, d in plan.decisions.items()
    }
    got.backward()
    close(got, one, "loss")
    close([p.grad for p in net.parameters()], list(expected), "gradients")


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self, mark: Any = None) -> None:
        super().__init__()
        self.tokens, self.up = nn.Embedding(48, 24, dtype=D), nn.Linear(24, 24, dtype=D)
        self.head = nn.Linear(24, 48, bias=False, dtype=D)
        self.head.weight = self.tokens.weight
        if mark is not None:
            sw.shard(self.head, mark)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.up(self.tokens(tokens))))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 24, 3, padding=1, dtype=D),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 24, 3, padding=1, dtype=D),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24 * 16, 8, dtype=D),
    )


def over_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


MODELS: dict[str, Any] = {
    "mlp": lambda: (
        nn.Sequential(nn.Linear(24, 96, dtype=D), nn.ReLU(), nn.Linear(96, 24, dtype=D)),
        (draw(24, 24), draw(24, 24, seed=1)),
        nn.MSELoss(),
    ),
    "wide": lambda: (
        nn.Sequential(nn.Linear(96, 384, dtype=D), nn.GELU(), nn.Linear(384, 96, dtype=D)),
        (draw(3, 96), draw(3, 96, seed=1)),
        nn.MSELoss(),
    ),
    "convolutions": lambda: (convolutions(), (draw(24, 4, 8, 8), labels(24)), nn.CrossEntropyLoss()),
    "gpt": lambda: (
        gpt.GPT(vocabulary=48, width=48, layers=1, heads=12, length=12).to(D),
        (labels(12 * 12, 48).view(12, 12), labels(12 * 12, 48, seed=1).view(12, 12)),
        over_classes,
    ),
    "tied": lambda: (Tied(), (labels(24, 48).view(24, 1), labels(24, 48, seed=1).view(24, 1)), over_classes),
    "marked": lambda: (Marked(), (draw(16, 8), labels(16)), nn.CrossEntropyLoss()),
}


@pytest.mark.parametrize(
    "name,devices", [(name, devices) for name in MODELS for devices in (2, 4, 6, 8) if name != "marked" or devices == 8]
)  # what its marks are for
def test_as_one_device(name: str, devices: int) -> None:
    net, batch, loss_fn = MODELS[name]()
    plan = sw.plan(net, batch[:-1], loss_fn, batch[-1], parallel_mode=MODE, devices=devices, cluster=clusters(devices))
    assert any(any(d.assignment.digits) for d in plan.decisions.values() if d.cause == "search")
    assert plan.bound is None
    as_one_device(net, batch, loss_fn, plan)


def test_in_the_wrapper() -> None:
    net, batch, loss_fn = MODELS["mlp"]()
    model = parallel(net, loss_fn, mode=MODE)
    model(*batch).backward()
    assert model.plan.mode == MODE and {d.cause for d in model.plan.decisions.values()} == {"search"}


def search_of(name: str, devices: int, cluster: Any) -> Search:
    net, batch, loss_fn = MODELS[name]()
    graph = capture(net, batch, None, loss_fn=loss_fn)
    input_placement = place_inputs(graph, devices, "full_batch")
    return Search.of(PlanningProblem(graph, devices, input_placement, cost_model=CostModel(cluster, devices)))


def test_each_level_is_the_best_of_its_strategies() -> None:
    """By trying all of them, level by level, from nothing cut."""
    search = search_of("mlp", 6, slow_devices(2, 3))
    graph, devices = search.described.graph, 6
    chosen = {op.name: search.described.rules[op.name][1].whole(devices) for op in graph.ops}
    levels = (Digit(3, 2), Digit(2, 1))
    for level in levels:

        def grown(op: Any, bound: Any) -> tuple:
            before = chosen[op.name]
            ways = [before]
            for i, factor in enumerate(bound.factors):
                digits = dict(enumerate(before.digits)) | {i: (*before.digits[i], level)}
                cut = bound.cut_by(devices, digits)
                if factor.splittable and factor.size > 1 and bound.divides(cut) and bound.is_consistent(cut):
                    ways.append(cut)
            return tuple(ways)

        made = search.cost_graph(options_among(search.described, grown))
        names = [op.name for op in graph.ops]
        every = [dict(zip(names, ways)) for ways in product(*(made.options[name] for name in names))]
        best = min(every, key=made.cost)
        chosen = {name: strategy.assignment for name, strategy in best.items()}
    found = recursive_programming(search.problem)
    assert found.found.cost == pytest.approx(made.cost(best), rel=1e-12)


@pytest.mark.parametrize("name", ["mlp", "wide", "tied", "convolutions"])
def test_no_level_makes_it_dearer(name: str) -> None:
    """Half of the devices are a level of all of them: what more of them are given for makes nothing dearer. And the
    cost is that of the program of one rank."""
    search = search_of(name, 8, slow_devices(2, 2, 2))
    whole = {op.name: search.described.rules[op.name][1].whole(8) for op in search.described.graph.ops}
    made = search.cost_graph(options_among(search.described, lambda op, bound: (whole[op.name],)))
    nothing = made.problem.cost([0] * len(made.problem.costs))
    decided = recursive_programming(search.problem)
    assert decided.found.cost < 0.9 * nothing
    plan = sw.Plan(search.described.graph, 8, MODE, search.input_placement, decided.decisions, decided.batch_dims)
    assert search.costs.plan(plan).total == pytest.approx(decided.found.cost, rel=1e-9)


def test_the_outermost_level_comes_first() -> None:
    """Between nodes goes what sends little, within them what sends much: with a slow outer level the outer digit cuts
    the batch of a small model's products, and no sum of activations crosses it."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.empty(8192, 64)
    plan = sw.plan(net, (x,), nn.MSELoss(), x, parallel_mode=MODE, devices=8, cluster=slow_devices(4, 2))
    outer = Digit(2, 4)
    for name in ("linear", "linear_1", "relu"):
        digits = plan.decisions[name].assignment.digits[0]
        assert digits and digits[0].span == outer.span, name


def test_marks_stay_and_a_shared_weight_follows_them() -> None:
    net = Tied(((1, 1, 2), (4, 2)))
    tokens = labels(24, 48).view(24, 1)
    plan = sw.plan(net, (tokens,), over_classes, tokens, parallel_mode=MODE, devices=8, cluster=slow_devices(8))
    assert plan.operator("head").in_strategy == ((1, 1, 2), (4, 2)) and plan.operator("head").cause == "mark"
    assert plan.operator("tokens").in_layouts[0] == plan.operator("head").in_layouts[1]
    assert plan.parameters["tokens.weight"].layout.cuts == (4, 2)


def test_within_the_memory() -> None:
    """A limit is kept at every moment, at the price of time, and the plan still computes the same."""
    net = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(24, 24, dtype=D), nn.GELU())))
    batch, loss_fn = (draw(48, 24), draw(48, 24, seed=1)), nn.MSELoss()

    def planned(memory: float | None) -> sw.Plan:
        return sw.plan(
            net,
            batch[:-1],
            loss_fn,
            batch[-1],
            parallel_mode=MODE,
            devices=4,
            cluster=slow_devices(2, 2),
            memory=memory,
        )

    free = planned(None)
    limit = 0.85 * free.timeline.peak
    kept = planned(limit)
    assert kept.timeline.peak <= limit and kept.cost > free.cost and kept.found.limit == limit
    as_one_device(net, batch, loss_fn, kept)
    with pytest.raises(sw.PlanError, match="no plan fits") as refused:
        planned(0.1 * limit)
    least = float(refused.value.legal.split("=")[1].split()[0])
    assert planned(least).timeline.peak <= least


def test_marks_that_contradict_one_another_are_an_error() -> None:
    net = Tied(((1, 1, 2), (4, 2)))
    sw.shard(net.tokens, ((8, 1), (1, 1)))
    tokens = labels(24, 48).view(24, 1)
    with pytest.raises(sw.ShardwrightError, match="tokens"):
        sw.plan(net, (tokens,), over_classes, tokens, parallel_mode=MODE, devices=8)


def test_an_out_strategy_stays() -> None:
    x = draw(16, 8)
    net = Marked(out=((4, 2),))
    plan = sw.plan(net, (x,), parallel_mode=MODE, devices=8, cluster=slow_devices(8))
    assert plan.operator("matmul2").out_strategy == ((4, 2),)


def test_devices_that_nothing_divides_by() -> None:
    """7 devices and a model of sizes 24: there is nothing to search, and a count that could do something is named."""
    net, batch, loss_fn = MODELS["mlp"]()
    for mode in (MODE, "dynamic_programming"):
        with pytest.raises(sw.PlanError, match="divides by 7") as caught:
            sw.plan(net, batch[:-1], loss_fn, batch[-1], parallel_mode=mode, devices=7, cluster=slow_devices(7))
        assert caught.value.legal == "6, 4, 3 devices"
        assert sw.plan(
            net, batch[:-1], loss_fn, batch[-1], parallel_mode=mode, devices=6, cluster=slow_devices(6)
        ).operators


def test_nothing_is_cut_where_it_does_not_pay() -> None:
    """On links that take a second to answer each device does everything: a digit may go to none."""
    net, batch, loss_fn = MODELS["mlp"]()
    far = Cluster("far", (Level("phone", 8, 1e9, 1.0),), 1e9, {"float64": 1e8}, 1e9, 1e-9)
    plan = sw.plan(net, batch[:-1], loss_fn, batch[-1], parallel_mode=MODE, devices=8, cluster=far)
    assert not plan.collectives(0) and not any(d.assignment.used for d in plan.decisions.values())


def test_one_device() -> None:
    net, batch, loss_fn = MODELS["mlp"]()
    plan = sw.plan(net, batch[:-1], loss_fn, batch[-1], parallel_mode=MODE, devices=1)
    assert not plan.collectives(0)


@pytest.mark.parametrize("layers", [1, 2])
def test_many_devices(layers: int) -> None:
    """4,096 devices, 12 levels; the strategies that are looked at grow with layers and with levels, no faster."""
    with torch.device("meta"):
        net = gpt.GPT(vocabulary=512, width=1024, layers=layers, heads=16, length=256)
        tokens = torch.zeros((1024, 256), dtype=torch.long)
    plan = sw.plan(net, (tokens,), over_classes, tokens, parallel_mode=MODE, devices=4096)
    assert plan.found.strategies <= 12 * plan.found.operators * 10
    assert plan.cost < sw.plan(net, (tokens,), over_classes, tokens, devices=4096).cost


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(networks(), st.sampled_from([4, 6, 8, 12]), st.data())
def test_random_networks(made: Any, devices: int, data: Any) -> None:
    """Some operators marked at random: they stay, and outputs and gradients are those of one device."""
    net, shape = made
    x, y = (draw(*shape).requires_grad_() for _ in range(2))
    for operator in net.operators:
        operator.shard(())  # so that every operator of the graph has its mark's name
    bounds = {op.name: bound_rule(op) for op in capture(net, (x,)).ops if op.mark is not None}
    marks = set()
    for i, operator in enumerate(net.operators):
        strategy = out = None
        if not data.draw(st.integers(0, 2)):
            strategy, out = marked(data.draw, bounds[f"operators.{i}"], devices)
        operator.shard(strategy, out)
        note(f"{net.steps[i]}: {strategy} -> {out}")
        marks |= {f"operators.{i}"} if strategy is not None else set()
    plan = sw.plan(net, (x,), parallel_mode=MODE, devices=devices, cluster=slow_devices(devices))
    assert {d.op.name for d in plan.decisions.values() if d.cause == "mark"} == marks
    got, expected = running(net, None, plan)(x), net(y)
    close(got, expected, "outputs")
    if squares(expected).requires_grad:
        gradients = torch.autograd.grad(squares(expected), [y, *net.parameters()], allow_unused=True)
        close(torch.autograd.grad(squares(got), [x, *net.parameters()], allow_unused=True), gradients, "gradients")
