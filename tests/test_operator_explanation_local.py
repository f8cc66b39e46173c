"""Alternatives priced while nothing else changes are those that a full explanation prices "alone"."""

from __future__ import annotations

import pytest
from pipeline_networks import Chain, setting
from test_html_report import gpt_plan
from torch import nn, ones

import shardwright as sw
from shardwright.identity_tables import IdentityMap
from shardwright.operator_explanation import explained, local_alternatives
from shardwright.planners.plan_search import Search
from shardwright.report.plan_diff import strategy_text


@pytest.mark.parametrize("mode", ["semi_auto", "dynamic_programming"])
def test_prices_are_those_of_a_full_explanation(mode: str) -> None:
    plan, searches = gpt_plan(mode, layers=1, devices=8 if mode == "semi_auto" else 4), IdentityMap()
    for name in sorted(plan.decisions, key=lambda n: -plan.price.by_operator.get(n, 0.0))[:3]:
        found = local_alternatives(plan, name, 50)
        theirs = {strategy_text(a.decision): a for a in explained(plan, name, 50, searches=searches).alternatives}
        assert found and [a.alone for a in found] == sorted(a.alone for a in found)
        both = [(a, theirs[strategy_text(a.decision)]) for a in found if strategy_text(a.decision) in theirs]
        assert any(mine.alone == pytest.approx(other.alone) and mine.holder == other.holder for mine, other in both)
        for mine, other in both:  # of ways to cut that read alike, theirs is the one that costs least in all
            assert mine.alone <= other.alone + 1e-9 * plan.cost and other.total <= mine.total + 1e-9
            assert mine.more == pytest.approx(mine.alone) and mine.total == pytest.approx(plan.cost + mine.alone, 1e-6)


def test_other_operators_have_one_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = gpt_plan("dynamic_programming", layers=1, devices=4)
    sizes: list[list[int]] = []
    made = Search.cost_graph
    monkeypatch.setattr(
        Search,
        "cost_graph",
        lambda self, options, *a, **k: sizes.append(list(map(len, options.values()))) or made(self, options, *a, **k),
    )
    local_alternatives(plan, max(plan.decisions, key=lambda n: plan.price.by_operator.get(n, 0.0)))
    (sizes_of_one,) = sizes
    assert sum(size > 1 for size in sizes_of_one) == 1


def test_pipelines_and_plans_without_choice() -> None:
    x = ones(32, 16)
    how = {"pipeline": setting("1f1b", 4), "parallel_mode": "data_parallel", "devices": 8}
    staged = sw.plan(Chain(), (x,), nn.MSELoss(), x, **how)
    assert local_alternatives(staged, next(iter(staged.stages[1].plan.decisions)))
    alone = sw.plan(nn.Linear(16, 16), (x,), parallel_mode="stand_alone", devices=8)
    assert local_alternatives(alone, next(iter(alone.decisions))) == ()
