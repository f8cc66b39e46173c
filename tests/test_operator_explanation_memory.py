"""A plan that was searched within a limit of memory: its document says the limit, and explain keeps it."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import shardwright as sw
from shardwright.cli import main
from shardwright.operator_explanation import explained
from shardwright.partition.rematerialization import with_recompute
from shardwright.planfile.document_writer import head_digest, written
from shardwright.planfile.encoding import packed, unpacked
from shardwright.planners.limited_alternatives import without_search
from shardwright.report.operator_names import OperatorNames
from shardwright.report.plan_diff import difference

MODE, DEVICES = "dynamic_programming", 2

#: A model as a user has it in a file, for the command line.
MODEL = """
import torch
from torch import nn

def made():
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    return net, (torch.empty(128, 32),), torch.empty(128, 16), nn.MSELoss()
"""


def planned(memory: float | None = None, **given_: Any) -> sw.Plan:
    scope: dict[str, Any] = {}
    exec(MODEL, scope)
    with torch.device("meta"):
        net, inputs, targets, loss_fn = scope["made"]()
    return sw.plan(net, inputs, loss_fn, targets, parallel_mode=MODE, devices=DEVICES, memory=memory, **given_)


@cache
def free() -> sw.Plan:
    """Memory not looked at."""
    return planned()


@cache
def limit() -> float:
    """Below what the best plan holds, and above the least that a plan can do with."""
    return float(round(0.7 * free().peak))


@cache
def limited() -> sw.Plan:
    return planned(limit())


def saved(path: Path, plan: sw.Plan, **changes: Any) -> int:
    """Write a plan with other fields in its head; the line of the first of them. None takes a field out."""
    text = written(plan)
    for name, value in changes.items():
        line = re.search(rf'^  "{name}": .*\n', text, re.M)
        assert line is not None
        text = text.replace(line[0], "" if value is None else f'  "{name}": {json.dumps(value)},\n')
    path.write_text(text)
    return written(plan)[: written(plan).index(f'\n  "{next(iter(changes))}": ')].count("\n") + 2 if changes else 0


def words_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# -- what is asked of the command line ---------------------------------------------------------------------------------


def test_a_user_s_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Planned within a limit by command, explained from the file alone."""
    (tmp_path / "model.py").write_text(MODEL)
    path, wide = str(tmp_path / "plan.json"), str(tmp_path / "wide.json")
    given_ = ["--devices", str(DEVICES), "--mode", MODE]
    target = f"{tmp_path / 'model.py'}:made"
    assert main.main(["plan", *given_, "--memory", str(limit()), "--output", path, target]) == 0
    assert main.main(["plan", *given_, "--output", wide, target]) == 0
    assert words_of(Path(path))["memory"] == limit() and "memory" not in words_of(Path(wide))
    plan = sw.Plan.load(path)
    changed = next(
        name
        for name, d in plan.decisions.items()
        if d.assignment != free().decisions[name].assignment and d.op.kind == "linear"
    )
    capsys.readouterr()

    assert main.main(["explain", path]) == 0
    assert "it was searched within" in capsys.readouterr().out
    assert main.main(["explain", path, changed]) == 0
    out = " ".join(capsys.readouterr().out.split())
    held = explained(plan, changed).unlimited
    assert "at least" not in out, "a bound that does not look at the memory"
    assert "the search decided; held there by memory: without the limit" in out
    half, _, operator = held.over.moment.rpartition(" of ")
    assert f"but then {half} of {OperatorNames(plan).path(operator)} would hold" in out and "chosen anew within" in out

    assert main.main(["plan", "diff", wide, path]) == 1
    assert f"memory: no limit -> {limit():.0f} bytes a device" in capsys.readouterr().out
    assert main.main(["explain", wide, changed]) == 0
    assert "memory:" not in capsys.readouterr().out
    assert main.main(["explain", wide, changed, "--memory", str(limit())]) == 0
    assert "this plan itself does not fit" in capsys.readouterr().out


# -- what alternatives cost --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["gelu", "linear_1"])
def test_an_alternative_costs_what_the_search_finds_with_it(operator: str) -> None:
    """Within the same limit, the operator marked so; and none that is not shown is better."""
    plan = limited()
    explanation = explained(plan, operator, 20)
    assert (
        explanation.limit == limit()
        and explanation.exact
        and explanation.over is None
        and explanation.cost == plan.found.cost
    )
    assert explanation.tried[0] == explanation.tried[1] >= len(explanation.alternatives)
    assert {bool(a.refused) for a in explanation.alternatives} == {True, False}, "some fit, and some do not"
    for other in explanation.alternatives:
        marks = {operator: other.decision.assignment}
        assert other.aside == pytest.approx(planned(marks=marks).cost, rel=1e-9)
        if other.refused:
            assert math.isinf(other.total)
            with pytest.raises(sw.PlanError, match="no plan fits"):
                planned(limit(), marks=marks)
            continue
        marked = planned(limit(), marks=marks)
        assert marked.peak <= limit()
        # Each is within the search's own gap of the best.
        assert other.total == pytest.approx(marked.found.cost, rel=2e-3)
        assert other.bound <= other.total and other.bound <= marked.found.cost * (1 + 1e-9)
        assert other.more >= -1e-3 * explanation.cost, "better than the plan that was searched"
    totals = [a.total for a in explanation.alternatives if not a.refused]
    assert [bool(a.refused) for a in explanation.alternatives] == sorted(
        bool(a.refused) for a in explanation.alternatives
    )
    few = [a.total for a in explained(plan, operator, 2).alternatives if not a.refused]
    assert totals == sorted(totals) and few == pytest.approx(totals[:2], rel=2e-3)


def test_what_the_operator_would_be_without_the_limit() -> None:
    """The alternative is that of the free plan, where that differs; and the moment is that plan's."""
    plan, changed = limited(), 0
    for name in ("linear", "gelu", "linear_1"):
        held = explained(plan, name).unlimited
        bound = plan.decisions[name].bound
        now, then = (bound.in_strategy(p.decisions[name].assignment) for p in (plan, free()))
        if held is None:
            continue
        changed += 1
        assert held.aside <= free().cost * (1 + 1e-9) and bound.in_strategy(held.decision.assignment) != now
        assert held.over.allocated > held.over.limit == limit()
        if bound.in_strategy(held.decision.assignment) == then:
            totals = free().timeline.totals()
            assert held.over.allocated == pytest.approx(max(totals))
    assert changed
    roomy = planned(2 * free().peak)
    explanation = explained(roomy, "linear")
    assert (
        explanation.unlimited is None
        and explanation.limit == 2 * free().peak
        and all(a.over is None for a in explanation.alternatives)
    )
    totals = [a.total for a in explained(free(), "linear").alternatives]
    assert [a.total for a in explanation.alternatives] == pytest.approx(totals)


def test_what_the_search_chose_beside_strategies_is_chosen_anew() -> None:
    """Recomputation and the storage of parameters are chosen anew; a user's own choice is kept."""
    plan = planned(0.7 * free().peak)
    assert plan.hsdp is not None, "parameters are stored cut"
    again = with_recompute(plan.graph, frozenset({"gelu"}), {"gelu": 0})
    assert any(op.recompute is not None for op in again.ops)
    graph, hsdp = without_search(replace(plan, graph=again))
    assert hsdp is None and all(op.recompute is None for op in graph.ops)
    mine = planned(2 * free().peak, hsdp={"threshold": 0}, recompute=["linear"])
    graph, hsdp = without_search(mine)
    assert hsdp == mine.hsdp is not None
    assert [op.recompute for op in graph.ops] == [op.recompute for op in mine.graph.ops]
    assert any(op.recompute is not None for op in graph.ops)


def test_a_limit_that_nothing_keeps() -> None:
    explanation = explained(free(), "linear", 3, 1000.0)
    assert explanation.over is not None and math.isinf(explanation.least) and explanation.alternatives
    assert all(
        a.refused and math.isinf(a.total) and "no plan fits in 1.00 KB" in a.refused for a in explanation.alternatives
    )


def test_other_errors_are_no_missing_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error while alternatives are priced is told as it is."""

    def broken(*_: Any, **__: Any) -> None:
        raise sw.PlanError("broken")

    monkeypatch.setattr(sys.modules[explained.__module__], "marginals", broken)
    with pytest.raises(sw.PlanError, match="broken"):
        explained(free(), "linear")


# -- the document ------------------------------------------------------------------------------------------------------


def test_the_limit_is_in_the_document(tmp_path: Path) -> None:
    plan, path = limited(), tmp_path / "plan.json"
    plan.save(path)
    head = [line.split('"')[1] for line in path.read_text().splitlines() if line.startswith('  "')]
    assert head[: head.index("total")][-3:] == ["optimizer", "memory", "cluster"]
    loaded = sw.Plan.load(path)
    assert loaded.found == plan.found and loaded.found.limit == limit() and written(loaded) == path.read_text()
    assert difference(plan, loaded).equal
    assert difference(plan, replace(plan, found=replace(plan.found, limit=limit() + 1))).settings == (
        f"memory: {limit():.0f} bytes a device -> {limit() + 1:.0f} bytes a device",
    )


def test_a_document_from_before_there_was_such_a_field(tmp_path: Path) -> None:
    """The limit was among what the last line holds."""
    plan, path = limited(), tmp_path / "plan.json"
    plan.save(path)
    words = words_of(path)
    del words["memory"]
    held = unpacked(words["captured"])
    held["said"]["head"] = head_digest(words)
    path.write_text(json.dumps(words | {"captured": packed(held)}))
    loaded = sw.Plan.load(path)
    assert loaded.found == plan.found and loaded.bound == plan.bound


def test_an_edited_limit_is_heeded_and_proves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    saved(path, limited(), memory=2 * limit())
    loaded = sw.Plan.load(path)
    assert loaded.found.limit == 2 * limit() and loaded.bound is None and loaded.cost == limited().cost
    assert explained(loaded, "linear").limit == 2 * limit()
    loaded.save(path)
    assert sw.Plan.load(path).found == loaded.found
    saved(path, limited(), memory=None)
    assert sw.Plan.load(path).found is None


def test_an_edited_line_leaves_the_limit(tmp_path: Path) -> None:
    plan, path = limited(), tmp_path / "plan.json"
    name = next(n for n in ("linear", "linear_1") if plan.decisions[n].assignment.used)
    words = json.loads(written(plan))
    line = next(line for line in words["operators"] if line["name"] == name)
    for key in ("device_matrix", "alias_name", "leaves", "open"):
        line.pop(key, None)
    line["in_strategy"] = [[1] * len(v.shape) for v in plan.decisions[name].op.inputs]
    path.write_text(json.dumps(words))
    loaded = sw.Plan.load(path)
    assert loaded.operator(name).cause == "mark" and loaded.bound is None and loaded.found.limit == limit()
    explanation = explained(loaded, name)
    assert (explanation.over is not None) == (loaded.peak > limit()) and explanation.limit == limit()


@pytest.mark.parametrize("value", [0, -1, "2MB", True, [], math.nan, math.inf])
def test_a_limit_that_is_none_names_its_line(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    line = saved(path, limited(), memory=value)
    says = (
        {math.inf: "at memory: Infinity"}.get(value, "at memory: NaN")
        if isinstance(value, float)
        else f"memory: {value!r}"
    )
    with pytest.raises(sw.PlanError, match=re.escape(says)) as raised:
        sw.Plan.load(path)
    assert raised.value.source == f"{path}:{line}" and path.read_text().splitlines()[line - 1].startswith('  "memory"')
    assert raised.value.legal


@given(part=st.floats(0.5, 1e9))
def test_any_limit_comes_back(part: float) -> None:
    plan = replace(free(), found=replace(free().found, limit=part))
    words = json.loads(written(plan))
    assert words["memory"] == part and head_digest(words) == unpacked(words["captured"])["said"]["head"]
