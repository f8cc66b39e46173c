"""Searched plans: what they cost is what runs, they are never dearer than others, and they compute what one device
does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import lru_cache

import gpt
import pytest
import torch
from one_device import assert_as_one_device
from ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.capture.export import capture
from shardwright.cost.cost_model import CostModel
from shardwright.errors import PlanError, SettingError
from shardwright.graph import Graph
from shardwright.partition.local_program import place_inputs
from shardwright.planners.plan_search import Search
from shardwright.planners.planning_problem import PlanningProblem, PriceBook
from shardwright.planners.search_space import Strategy, assignments, prime_axes, prime_factors, strategy_of
from shardwright.planners.semi_auto import semi_auto
from shardwright.planning import make_plan
from shardwright.settings import Settings
from shardwright.sharded_plan import Plan
from shardwright.solver.milp import milp
from shardwright.solver.problem import Solution
from shardwright.solver.solve import solve

SEARCHING = ("recursive_programming", "dynamic_programming")


class Block(nn.Module):
    """A residual block with attention, its projections sharing one input."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.again = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.again(x))))


class Tied(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.middle = nn.Linear(16, 16)

    def forward(self, tokens):
        return torch.tanh(self.middle(self.embed(tokens))) @ self.embed.weight.T


def mlp():
    return (
        nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 12)),
        (torch.randn(24, 24),),
        nn.CrossEntropyLoss(),
        torch.randint(12, (24,)),
    )


def block():
    return Block(), (torch.randn(8, 6, 32),), nn.MSELoss(), torch.randn(8, 6, 32)


def over_classes(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def tied():
    return Tied(), (torch.randint(64, (8, 6)),), over_classes, torch.randint(64, (8, 6))


def small_gpt(layers: int = 1):
    """The example's GPT, whose embedding is its head's weight."""
    net = gpt.GPT(vocabulary=48, length=6, layers=layers, width=24, heads=4)
    return net, (torch.randint(48, (12, 6)),), over_classes, torch.randint(48, (12, 6))


def convolutions():
    return (
        nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 4),
        ),
        (torch.randn(8, 3, 8, 8),),
        nn.CrossEntropyLoss(),
        torch.randint(4, (8,)),
    )


MODELS = {"mlp": mlp, "block": block, "tied": tied, "convolutions": convolutions, "gpt": small_gpt}

#: A cluster on which these little models are worth cutting: slow devices, quick links.
QUICK = {
    "schema": 1,
    "name": "quick links",
    "memory": 16e9,
    "memory_bandwidth": 1e9,
    "overhead": 1e-9,
    "peak": {"float32": 1e8, "float64": 1e8},
    "levels": [
        {"name": "near", "size": 2, "bandwidth": 1e9, "latency": 1e-7},
        {"name": "far", "size": 4, "bandwidth": 2e8, "latency": 1e-6},
    ],
}


def cluster(devices: int) -> dict:
    levels = [dict(QUICK["levels"][0]), dict(QUICK["levels"][1], size=max(devices // 2, 1))]
    return dict(QUICK, levels=levels if devices > 2 else [dict(levels[0], size=devices)])


PRICES = PriceBook()


@lru_cache
def graph_of(model: Callable[[], tuple]) -> Graph:
    """A model's graph with its loss, captured once."""
    net, inputs, loss, targets = model()
    return capture(net, (*inputs, targets), None, loss_fn=loss)


def planned(name: str, mode: str, devices: int = 4, **given) -> Plan:
    settings = Settings(mode, cluster=cluster(devices), **given)
    return make_plan(graph_of(MODELS[name]), devices, settings, prices=PRICES)


def marked(name: str, mode: str, marks: dict) -> Plan:
    net, inputs, loss, targets = MODELS[name]()
    return sw.plan(net, inputs, loss, targets, parallel_mode=mode, devices=4, cluster=cluster(4), marks=marks)


def searched(name: str, devices: int = 4) -> Search:
    return _searched(MODELS[name], devices)


@lru_cache
def _searched(model: Callable[[], tuple], devices: int) -> Search:
    graph = graph_of(model)
    return Search.of(
        PlanningProblem(
            graph, devices, place_inputs(graph, devices, "full_batch"), cost_model=CostModel(cluster(devices), devices)
        )
    )


# -- what may be chosen --


def test_atoms_are_the_whole_rank_and_keep_to_the_levels() -> None:
    for devices in (1, 2, 6, 7, 8, 12, 48, 1024, 16384):
        for sizes in ((), (8,), (8, 128), (4, 3)):
            atoms = prime_axes(devices, sizes)
            assert math.prod(a.size for a in atoms) == devices and len(atoms) <= 3
            assert all(a.stride == b.stride * b.size for a, b in zip(atoms, atoms[1:]))
    assert [a.size for a in prime_axes(16, (8, 2), most=9)] == [2, 2, 2, 2]
    assert 8 in {a.stride for a in prime_axes(1024, (8, 128))}, "no atom straddles nodes"
    assert prime_factors(360) == (2, 2, 2, 3, 3, 5)


def test_assignments_are_all_that_a_rule_allows() -> None:
    search = searched("mlp")
    _, bound, _ = search.described.rules["linear"]
    found = set(assignments(bound, 4, prime_axes(4)))
    assert len(found) == 16, "two atoms, each to m, k, n or none"
    assert all(bound.is_consistent(a) for a in found) and bound.whole(4) in found


# -- what is priced is what runs --


@pytest.mark.parametrize("name", MODELS)
def test_the_energy_of_a_plan_is_the_price_of_its_program(name: str) -> None:
    search = searched(name)
    made = search.cost_graph(search.options())
    found = solve(made.problem)
    decided = search.decided(made, found, "search")
    plan = Plan(
        search.described.graph,
        4,
        "dynamic_programming",
        search.input_placement,
        decided.decisions,
        decided.batch_dims,
        cluster=search.costs.cluster,
        found=decided.found,
    )
    assert plan.cost == pytest.approx(found.cost, rel=1e-9)
    assert made.cost({n: strategy_of(d) for n, d in decided.decisions.items()}) == pytest.approx(found.cost, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_so_is_that_of_any_other_plan_of_a_chain(seed: int) -> None:
    search = searched("mlp", 6)
    made, draw = search.cost_graph(search.options()), random.Random(seed)
    compared = 0
    for _ in range(20):
        chosen = {name: draw.choice([s for s in options if not s.partial]) for name, options in made.options.items()}
        states = made.states(chosen)
        if math.isinf(made.problem.cost(states)):
            continue
        decided = search.decided(made, Solution(states, made.problem.cost(states), 0.0), "search")
        plan = Plan(
            search.described.graph,
            6,
            "dynamic_programming",
            search.input_placement,
            decided.decisions,
            decided.batch_dims,
            cluster=search.costs.cluster,
        )
        assert plan.cost == pytest.approx(made.cost(chosen), rel=1e-9)
        compared += 1
    assert compared


@pytest.mark.parametrize("name", MODELS)
def test_and_that_of_a_plan_whose_operators_share_what_they_read(name: str) -> None:
    search = searched(name)
    given = semi_auto(search.problem).decisions
    made = search.cost_graph(search.options([given]), [given])
    plan = Plan(
        search.described.graph,
        4,
        "semi_auto",
        search.input_placement,
        given,
        search.batch_dims,
        cluster=search.costs.cluster,
    )
    assert made.cost({n: strategy_of(d) for n, d in given.items()}) == pytest.approx(plan.cost, rel=1e-9)


def test_a_strategy_that_is_no_option_is_named() -> None:
    search = searched("mlp")
    made = search.cost_graph(search.options())
    chosen = {name: options[0] for name, options in made.options.items()}
    chosen["relu"] = Strategy(chosen["relu"].assignment, (), ("nowhere",))
    with pytest.raises(PlanError, match="relu"):
        made.cost(chosen)


# -- what is found --


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", (4, 6))
def test_the_exact_search_proves_its_plan_and_no_other_planner_is_cheaper(name: str, devices: int) -> None:
    exact = planned(name, "dynamic_programming", devices)
    assert exact.gap == pytest.approx(0, abs=1e-9) and exact.bound == pytest.approx(exact.cost)
    for mode in ("recursive_programming", "semi_auto"):
        other = planned(name, mode, devices)
        assert exact.cost <= other.cost * (1 + 1e-9), (mode, exact.cost, other.cost)


#: `data_parallel` has each device normalise by its own part's statistics: of convolutions that is another computation.
BATCH_SPLIT = [name for name in MODELS if name != "convolutions"]


@pytest.mark.parametrize("name", BATCH_SPLIT)
@pytest.mark.parametrize("feed", ("full_batch", "data_parallel"))
def test_nor_is_splitting_the_batch_alone(name: str, feed: str) -> None:
    """Parameters whole, the batch split, however it is fed; all by the same costs."""
    exact = planned(name, "dynamic_programming", dataset_strategy=feed)
    split = planned(name, "data_parallel", dataset_strategy=feed)
    assert all(p.layout.is_replicated for p in split.parameters.values())
    assert any(max(map(max, o.in_strategy), default=1) == 4 for o in split.operators if o.in_strategy), "it is split"
    assert exact.cost < split.cost and exact.bound <= split.cost


@pytest.mark.parametrize(
    ("devices", "name"), [(n, name) for n in (2, 4, 6) for name in MODELS if n == 2 or name != "gpt"]
)
def test_the_exact_search_equals_the_oracle(name: str, devices: int) -> None:
    search = searched(name, devices)
    problem = search.cost_graph(search.options()).problem
    assert solve(problem).cost == pytest.approx(milp(problem).cost, rel=1e-7)


@pytest.mark.parametrize(("layers", "devices"), [(13, 2), (2, 4)])
def test_so_it_does_of_a_network_of_300_operators(layers: int, devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirteen layers, captured and priced as any model; and fewer, each operator of which has more strategies."""
    monkeypatch.setitem(MODELS, "gpt", lambda: small_gpt(layers))
    search = searched("gpt", devices)
    assert len(search.described.graph.ops) == 10 + 22 * layers, "296 of thirteen layers"
    problem = search.cost_graph(search.options()).problem
    found, truth = solve(problem), milp(problem)
    assert found.cost == found.bound == pytest.approx(truth.cost, rel=1e-7)
    assert problem.cost(found.states) == pytest.approx(found.cost)


def test_marks_stay_and_are_named_as_the_cause() -> None:
    strategy = ((1, 4), (1, 4), (1,))
    net, inputs, loss, targets = mlp()
    plan = sw.plan(
        net,
        inputs,
        loss,
        targets,
        parallel_mode="dynamic_programming",
        devices=4,
        cluster=cluster(4),
        marks={"linear_1": strategy},
    )
    assert plan.operator("linear_1").in_strategy == strategy and plan.operator("linear_1").cause == "mark"
    assert plan.operator("linear").cause == "search"
    free = sw.plan(net, inputs, loss, targets, parallel_mode="dynamic_programming", devices=4, cluster=cluster(4))
    assert free.cost <= plan.cost


#: One mark on each model, beside what the batch alone would do.
MARKS = {
    "mlp": {"linear_1": ((1, 4), (1, 4), (1,))},
    "block": {"linear_4": ((2, 1, 1), (2, 1), (2,))},
    "tied": {"linear": ((2, 1, 1), (2, 1), (2,))},
    "convolutions": {"linear": ((1, 4), (1, 4), (1,))},
    "gpt": {"linear_4": ((2, 1, 1), (2, 1), (2,))},
}


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_that_follows_the_same_marks_is_cheaper(name: str) -> None:
    marks = MARKS[name]
    exact = marked(name, "dynamic_programming", marks)
    for mode in ("sharding_propagation", "recursive_programming", "semi_auto"):
        other = marked(name, mode, marks)
        assert all(other.operator(n).in_strategy == s for n, s in marks.items())
        assert exact.cost <= other.cost * (1 + 1e-9), (mode, exact.cost, other.cost)


@pytest.mark.parametrize("mode", ("semi_auto", "sharding_propagation", *SEARCHING))
def test_marks_that_contradict_one_another_are_named_with_their_lines(mode: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(16, 16))
            self.first = sw.shard(torch.matmul, in_strategy=((1, 1), (1, 4)))
            self.second = sw.shard(torch.matmul, in_strategy=((1, 4), (4, 1)))

        def forward(self, x):
            return self.second(torch.relu(self.first(x, self.w)), self.w)

    with pytest.raises(PlanError, match=r"'w' .* two layouts: first \(test_search_space.py:\d+\).*second") as caught:
        sw.plan(Net(), (torch.randn(8, 16),), parallel_mode=mode, devices=4, cluster=cluster(4))
    assert "one layout on both" in caught.value.legal


def test_out_strategies_stay_too() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
            self.act = sw.shard(torch.relu, in_strategy=((4, 1),), out_strategy=((1, 4),))

        def forward(self, x):
            return self.second(self.act(self.first(x)))

    plan = sw.plan(Net(), (torch.randn(8, 16),), parallel_mode="dynamic_programming", devices=4, cluster=cluster(4))
    assert plan.operator("act").in_strategy == ((4, 1),) and plan.operator("act").out_strategy == ((1, 4),)


# -- what is computed --


@pytest.mark.parametrize("mode", SEARCHING)
@pytest.mark.parametrize("name", MODELS)
def test_searched_plans_compute_what_one_device_does(name: str, mode: str) -> None:
    torch.manual_seed(0)
    net, inputs, loss, targets = MODELS[name]()
    report = sw.verify(
        net.double(),
        tuple(x.double() if x.is_floating_point() else x for x in inputs),
        targets.double() if targets.is_floating_point() else targets,
        loss_fn=loss,
        devices=4,
        parallel_mode=mode,
        cluster=cluster(4),
        steps=2,
    )
    assert report.ok, report.summary()


def test_the_wrapper_searches_for_its_cluster() -> None:
    torch.manual_seed(0)
    net, (x,), loss, y = mlp()
    sw.init(devices=4)
    model = sw.AutoParallel(net, loss_fn=loss, parallel_mode="dynamic_programming", cluster=cluster(4))
    expected = loss(net(x), y)
    assert torch.allclose(model(x, y), expected, rtol=1e-5)
    assert model.plan.bound is not None and any(max(map(max, o.in_strategy)) > 1 for o in model.plan.operators)


def on_a_rank(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    net, (x,), loss, y = MODELS["block"]()
    sw.init()
    model = sw.AutoParallel(net, loss_fn=loss, parallel_mode="dynamic_programming", cluster=cluster(4))
    model.dataset_strategy("full_batch")
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        value = model(x, y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert any(max(map(max, o.in_strategy)) > 1 for o in model.plan.operators), "something is cut"
    return losses


def test_processes_each_find_the_same_plan_and_train_as_one_device_does() -> None:
    torch.manual_seed(0)
    net, (x,), loss, y = MODELS["block"]()
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(3):
        value = loss(net(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(value.item())
    for losses in run_ranks(on_a_rank, 4):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_limit_for_a_mode_that_searches_nothing_is_an_error() -> None:
    with pytest.raises(SettingError, match="memory"):
        planned("mlp", "semi_auto", memory="70GB")


# -- experts as one product --


class Experts(nn.Module):
    """Every token goes to every expert, in proportion; the experts are the batch of one product."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(experts, *shape) / shape[0] ** 0.5) for shape in ((width, hidden), (hidden, width))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sent = torch.einsum("ce,cd->ecd", self.router(x).softmax(-1), x)
        hidden = F.gelu(torch.einsum("ecd,edf->ecf", sent, self.up))
        return x + torch.einsum("ecf,efd->cd", hidden, self.down)


@pytest.mark.parametrize("mode", SEARCHING)
def test_a_product_of_experts_is_cut_between_experts_where_that_pays(mode: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(Experts(4, 16, 64), Experts(4, 16, 64)).double()
    batches = [(torch.randn(8, 16, dtype=torch.float64),) for _ in range(2)]
    model = assert_as_one_device(net, *batches, devices=4, mode=mode, cluster=cluster(4))
    products = {op.name: op.in_strategy for op in model.plan.operators if op.op == "einsum"}
    whole = [cuts for cuts in products.values() if len(cuts[0]) == 3]
    assert len(whole) == 4 and all(cuts == ((4, 1, 1), (4, 1, 1)) for cuts in whole), products
    experts = [p for name, p in model.plan.parameters.items() if name.endswith(("up", "down"))]
    assert all(p.local_shape(rank) == (1, *p.shape[1:]) for p in experts for rank in range(4))
    # many tokens of little width: their cut sends less than the experts' results
    many = sw.plan(Experts(4, 4, 4), (torch.zeros(4096, 4),), parallel_mode=mode, devices=4, cluster=cluster(4))
    assert all(p.local_shape(0) == p.shape for name, p in many.parameters.items()), many.parameters
