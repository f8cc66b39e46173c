"""No search answers with a plan that is dearer, at our own prices, than the plan of a mode that searches less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from resnet_like import ResNetLike, expanded_cross_entropy
from test_parallel_random_networks import Network, marked, networks
from torch import nn

import shardwright as sw
from shardwright import planning
from shardwright.capture.export import capture
from shardwright.partition.parameter_sharding import OptimizerParallel
from shardwright.planners.memory_fit import TooLittleMemoryError
from shardwright.planners.planning_problem import PriceBook
from shardwright.planning import make_plan
from shardwright.rules import bound_rule
from shardwright.settings import Settings

SEARCHES = ("recursive_programming", "dynamic_programming")
PROPAGATION = "sharding_propagation"


@pytest.mark.long
@settings(max_examples=12, suppress_health_check=list(HealthCheck))
@given(networks(), st.sampled_from([4, 8]), st.sampled_from(["a100x8", "h100x8", None]), st.data())
def test_random_networks(
    made: tuple[Network, tuple[int, ...]], devices: int, cluster: str | None, data: st.DataObject
) -> None:
    """With and without marks, with and without ZeRO sharding, fed whole or in parts, and within a limit of memory."""
    net, shape = made
    x = torch.zeros(shape, dtype=torch.float64).requires_grad_()
    share = data.draw(st.integers(0, 3), label="marked quarters")
    for op in capture(net, (x,)).ops:
        number = op.name.removeprefix("operators.")
        if number.isdigit() and data.draw(st.integers(0, 3)) < share:
            net.operators[int(number)].shard(*marked(data.draw, bound_rule(op), devices))
    feeds = ["full_batch"] + ["data_parallel"] * (shape[0] % devices == 0)
    how: dict[str, Any] = {"cluster": cluster, "dataset_strategy": data.draw(st.sampled_from(feeds))}
    how["hsdp"] = data.draw(st.sampled_from([None, None, OptimizerParallel(threshold=0)]))
    graph, prices = capture(net, (x,)), PriceBook()

    def planned(mode: str, memory: float | None = None) -> sw.Plan | None:
        """The plan; None where the mode has none."""
        try:
            return make_plan(graph, devices, Settings(mode, memory=memory, **how), prices=prices)
        except sw.PlanError:
            return None

    simple = [plan for mode in ("semi_auto", PROPAGATION) if (plan := planned(mode)) is not None]
    if len(simple) < 2:  # marks that contradict one another
        return
    assert simple[1].cost <= simple[0].cost * (1 + 1e-9), PROPAGATION
    search = data.draw(st.sampled_from(SEARCHES))
    found = planned(search)
    if found is None:  # no dim can be cut for so many devices
        return
    assert found.cost <= min(plan.cost for plan in simple) * (1 + 1e-9)
    memory = simple[0].peak * data.draw(st.sampled_from([0.7, 1.0, 1.5]))
    fitting = [plan.cost for plan in simple if plan.peak <= memory]
    within = planned(search, memory)
    event(f"{len(fitting)} fit, the search {'finds one' if within else 'finds none'}")
    if within is None:
        assert not fitting
    else:
        assert within.peak <= memory and (not fitting or within.cost <= min(fitting) * (1 + 1e-9))


def whole(monkeypatch: pytest.MonkeyPatch, search: str) -> None:
    """Let a search answer with every operator whole."""
    planner = planning.PLANNERS[search]

    def decide(problem: Any) -> Any:
        result = planner.decide(problem)
        decisions = {
            name: type(decision)(decision.op, decision.rule, decision.bound, decision.bound.whole(problem.devices))
            for name, decision in result.decisions.items()
        }
        return result._replace(decisions=decisions)

    monkeypatch.setitem(planning.PLANNERS, search, type(planner)(search, decide, True, True))


LAYERS = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
X = torch.zeros(4096, 64)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_cheaper_plan_of_another_mode_is_taken_and_named(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(monkeypatch, search)
    plan = sw.plan(LAYERS, X, devices=8, parallel_mode=search, cluster="a100x8")
    along = sw.plan(LAYERS, X, devices=8, parallel_mode="semi_auto", cluster="a100x8")
    assert plan.cost == along.cost and [op.in_strategy for op in plan.operators] == [
        op.in_strategy for op in along.operators
    ]
    (text,) = (note for note in plan.notes if "this is the plan of semi_auto" in note)
    assert f"{along.cost * 1e6:.4g} us a step: the search found nothing below" in text
    assert plan.bound is None or plan.bound <= plan.cost


def test_a_plan_below_the_bound_of_a_search_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of its own space alone proves nothing of the plan that a mode has outside of it."""
    net, x = (
        nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)),
        torch.empty(1024, 1024, device="meta"),
    )
    how: dict[str, Any] = {"devices": 8, "cluster": "a100x8"}
    best = sw.plan(net, x, parallel_mode="dynamic_programming", **how)
    whole(monkeypatch, SEARCHES[1])
    planner = planning.PLANNERS[SEARCHES[1]]
    one = sw.plan(net, x, devices=1, cluster="a100x8").cost

    def proved(problem: Any) -> Any:
        """Every operator whole, and the proof that no plan of this space costs less."""
        result = planner.decide(problem)
        return result._replace(found=replace(result.found, cost=one, bound=one))

    monkeypatch.setitem(planning.PLANNERS, SEARCHES[1], replace(planner, decide=proved))
    along = min(
        (sw.plan(net, x, parallel_mode=mode, **how) for mode in ("semi_auto", PROPAGATION)), key=lambda p: p.cost
    )
    plan = sw.plan(net, x, parallel_mode=SEARCHES[1], **how)
    assert best.cost < along.cost * 0.99 and plan.cost == along.cost < one
    assert plan.bound is None and plan.gap is None  # a gap of 0 was claimed, though the best plan is cheaper
    (text,) = (note for note in plan.notes if "this is the plan of" in note)
    assert f"and proved {one * 1e6:.4g} us of its own plans alone: nothing is proved of others" in text


def test_it_is_told_beside_the_plan_and_kept_in_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    whole(monkeypatch, SEARCHES[0])
    sw.init(devices=8)
    model = sw.AutoParallel(LAYERS, parallel_mode=SEARCHES[0], cluster="a100x8").dataset_strategy("full_batch")
    model(X)
    model.explain()
    assert capsys.readouterr().out.count("this is the plan of semi_auto") == 1
    model.plan.save(tmp_path / "plan.json")
    assert any("this is the plan of semi_auto" in note for note in sw.Plan.load(tmp_path / "plan.json").notes)


def test_a_cheaper_plan_of_propagation_is_taken_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is marked by its contracted dim, on weights that are dearer to gather than rows."""
    whole(monkeypatch, SEARCHES[1])
    net = nn.Sequential(sw.shard(nn.Linear(4096, 4096, bias=False), ((1, 1), (8, 1))), nn.ReLU(), nn.Linear(4096, 4096))
    how: dict[str, Any] = {"devices": 8, "cluster": "a100x8"}
    x = torch.empty(64, 4096, device="meta")
    along, following, plan = (
        sw.plan(net, x, parallel_mode=mode, **how) for mode in ("semi_auto", PROPAGATION, SEARCHES[1])
    )
    assert following.cost < along.cost and plan.cost == following.cost
    assert any(f"this is the plan of {PROPAGATION}" in note for note in plan.notes)


@pytest.mark.parametrize("search", SEARCHES)
def test_a_plan_that_fits_is_taken_where_the_search_finds_none(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planning.PLANNERS[search]

    def none(problem: Any) -> Any:
        raise TooLittleMemoryError("no plan fits")

    monkeypatch.setitem(planning.PLANNERS, search, type(planner)(search, none, True, True))
    along = sw.plan(LAYERS, X, devices=8, cluster="a100x8")
    plan = sw.plan(LAYERS, X, devices=8, cluster="a100x8", parallel_mode=search, memory=along.peak)
    assert plan.cost == along.cost and plan.peak <= along.peak and plan.found.limit == along.peak
    assert any("the search found none that fits in the memory" in note for note in plan.notes)
    with pytest.raises(sw.PlanError, match="no plan fits"):
        sw.plan(LAYERS, X, devices=8, cluster="a100x8", parallel_mode=search, memory=along.peak / 2)


def test_views_alone_fit_where_semi_auto_fits() -> None:
    """Found above: the search adds up what views of one tensor hold."""

    class Turns(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mT.mT.mT

    x, how = torch.zeros(4, 2).requires_grad_(), {"devices": 4, "dataset_strategy": "data_parallel"}
    limit = sw.plan(Turns(), x, **how).peak
    for search in SEARCHES:
        assert sw.plan(Turns(), x, parallel_mode=search, memory=limit, **how).peak <= limit


def test_the_resnet_of_the_goldens() -> None:
    net, x = ResNetLike(), torch.zeros(32, 3, 224, 224)
    graph = capture(net, (x, torch.zeros(32, dtype=torch.long)), loss_fn=expanded_cross_entropy)
    given, prices = (
        {"cluster": "a100x8", "sync_batch_norm": True},
        PriceBook(),
    )  # without, data_parallel is another model
    costs = {
        mode: make_plan(graph, 8, Settings(mode, **given), prices=prices).cost
        for mode in ("semi_auto", "data_parallel", PROPAGATION, *SEARCHES)
    }
    least = min(costs["semi_auto"], costs["data_parallel"])
    assert costs[PROPAGATION] <= least * (1 + 1e-9)
    assert all(costs[search] <= min(least, costs[PROPAGATION]) * (1 + 1e-9) for search in SEARCHES)


def test_a_bound_that_rounding_put_above_the_cost_is_the_cost() -> None:
    """The search and the program add the same seconds in different orders."""
    plan = sw.plan(LAYERS, X, devices=2, parallel_mode="dynamic_programming", cluster="a100x8")
    above = plan.cost * (1 + 1e-12)
    rounded = replace(plan, found=replace(plan.found, cost=above, bound=above))
    assert above > plan.cost == rounded.bound
    far = plan.cost * 1.01
    assert replace(plan, found=replace(plan.found, cost=far, bound=far)).bound == far
