"""A plan as a document: what is loaded is what was saved, any strategy can be written, and two plans are compared."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from document_schemas import faults
from hypothesis import given, settings, strategies as st
from plan_documents import DEVICES, PLANS, made, meta, sent, tutorial
from torch import nn

import shardwright as sw
from shardwright.layout import Digit
from shardwright.planfile.document_writer import written
from shardwright.planfile.encoding import (
    fingerprint,
    packed,
    read_assignment,
    read_graph,
    read_layout,
    spell_assignment,
    spell_layout,
    unpacked,
    write_graph,
)
from shardwright.report.plan_diff import difference

NAMES = [pytest.param(name, marks=pytest.mark.long) if name == "gpt, searched" else name for name in PLANS]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_loaded_is_what_was_saved(name: str, tmp_path: Path) -> None:
    plan, path = made(name), tmp_path / "plan.json"
    plan.save(path)
    loaded = sw.Plan.load(path)
    assert loaded.fingerprint == plan.fingerprint
    for rank in (0, plan.devices - 1):
        assert loaded.collectives(rank) == plan.collectives(rank)
    assert loaded.parameters == plan.parameters and loaded.operators == plan.operators
    assert (loaded.cost, loaded.bound, loaded.gap, loaded.notes) == (plan.cost, plan.bound, plan.gap, plan.notes)
    assert [loaded.memory(r) for r in (0, plan.devices - 1)] == [plan.memory(r) for r in (0, plan.devices - 1)]
    for name in (
        "devices",
        "mode",
        "input_placement",
        "batch_dims",
        "stored",
        "hsdp",
        "own",
        "cluster",
        "found",
        "optimizer",
        "comm_memory",
        "regions",
    ):
        assert getattr(loaded, name) == getattr(plan, name), name
    for decision, same in zip(plan.decisions.values(), loaded.decisions.values(), strict=True):
        for field in fields(decision):
            if field.name not in ("op", "rule"):
                assert getattr(same, field.name) == getattr(decision, field.name), field.name
    assert written(loaded) == written(plan) == path.read_text(), "the same text again"
    assert faults("plan", json.loads(path.read_text())) == []


@pytest.mark.parametrize("name", [name for name in PLANS if "searched" not in name])
def test_graphs_come_back(name: str) -> None:
    graph = made(name).graph
    back = read_graph(unpacked(packed(write_graph(graph))))
    assert fingerprint(back) == fingerprint(graph)
    for op, same in zip(graph.ops, back.ops, strict=True):
        for field in ("name", "kind", "inputs", "outputs", "module", "source", "number"):
            assert getattr(op, field) == getattr(same, field)
        assert repr((op.args, op.kwargs)) == repr((same.args, same.kwargs))
        assert getattr(op.target, "described_as", op.target) is getattr(same.target, "described_as", same.target)
    assert (back.inputs, back.parameters, back.buffers, back.outputs) == (
        graph.inputs,
        graph.parameters,
        graph.buffers,
        graph.outputs,
    )
    assert (back.updates, back.aliases, back.in_spec, back.out_spec) == (
        graph.updates,
        graph.aliases,
        graph.in_spec,
        graph.out_spec,
    )
    assert {n: (t.shape, t.dtype) for n, t in back.constants.items()} == {
        n: (t.shape, t.dtype) for n, t in graph.constants.items()
    }


def test_a_document_has_all_that_a_plan_has() -> None:
    """Whatever is added to one is asked for in `test_what_is_loaded_is_what_was_saved`."""
    assert {f.name for f in fields(sw.Plan)} == {
        "graph",
        "devices",
        "mode",
        "input_placement",
        "decisions",
        "batch_dims",
        "stored",
        "hsdp",
        "own",
        "cluster",
        "found",
        "optimizer",
        "comm_memory",
    }


def test_one_operator_a_line_in_the_order_of_the_program() -> None:
    plan = made("gpt, marked")
    lines = written(plan).splitlines()
    begin, end = lines.index('  "operators": ['), lines.index('  "parameters": [')
    names = [json.loads(line.strip().rstrip(","))["name"] for line in lines[begin + 1 : end - 1]]
    assert names == [op.name for op in plan.graph.ops]
    line = next(line for line in lines if '"blocks.0.up"' in line or '"name": "blocks.0.attention.query"' in line)
    text = json.loads(line.strip().rstrip(","))
    operator = plan.operator(text["name"])
    assert tuple(map(tuple, text["in_strategy"])) == operator.in_strategy
    assert text["seconds"] == pytest.approx(plan.price.by_operator[text["name"]], rel=1e-3)
    head = json.loads("\n".join(lines))
    assert head["total"] == {
        "seconds": plan.cost,
        "bound": None,
        "gap": None,
        "memory": plan.memory(0),
        "peak": plan.peak,
    }
    assert head["schema"] == 1 and head["graph"] == fingerprint(plan.graph)


def test_a_graph_s_fingerprint_is_of_shapes_and_operators_alone() -> None:
    def of(batch: int, width: int = 16, layer: type[nn.Module] = nn.ReLU, seed: int = 0) -> str:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(8, width), layer())
        return fingerprint(sw.plan(net, (meta(batch, 8),), devices=1).graph)

    assert of(4) == of(4, seed=1) and len({of(4), of(8), of(4, width=32), of(4, layer=nn.GELU)}) == 4


# -- strategies in words -----------------------------------------------------------------------------------------------


class Broadcasts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(1).expand(24, 24, 24).reshape(24, 576) @ torch.ones(576, 24)


@cache
def bounds() -> list[Any]:
    net = nn.Sequential(nn.Conv2d(24, 48, 3), nn.BatchNorm2d(48), nn.Flatten(), nn.Linear(48 * 100, 24))
    plans = [
        made("gpt"),
        made("resnet"),
        sw.plan(net, (meta(24, 24, 12, 12),), devices=1),
        sw.plan(Broadcasts(), (meta(24, 24),), devices=1),
    ]
    return [d.bound for plan in plans for d in plan.decisions.values()]


@st.composite
def assignments(drawn: st.DrawFn) -> tuple[Any, Any]:
    """An operator and any digits for its factors, a few of them in any order: not only those that cuts can say."""
    bound = drawn(st.sampled_from(bounds()))
    atoms, stride = [], 1
    for size in drawn(st.lists(st.sampled_from([2, 2, 3]), min_size=1, max_size=5)):
        atoms.append(Digit(size, stride))
        stride *= size
    given_: dict[int, list[Digit]] = {}
    for atom in drawn(st.permutations(atoms)):
        factor = drawn(st.integers(-1, len(bound.factors) - 1))
        if factor >= 0:
            before = given_.setdefault(factor, [])
            before.append(atom)
            if not bound.is_consistent(bound.cut_by(stride, {i: tuple(d) for i, d in given_.items()})):
                before.pop()
    return bound, bound.cut_by(stride, {i: tuple(d) for i, d in given_.items()})


@given(assignments())
@settings(max_examples=300)
def test_every_strategy_can_be_written(case: tuple[Any, Any]) -> None:
    bound, assignment = case
    if not bound.is_consistent(assignment):
        return  # nothing was cut, and the operator is made of a dim in parts
    words = json.loads(json.dumps(spell_assignment(bound, assignment)))
    assert read_assignment(bound, words, assignment.devices) == assignment
    for i, shape in enumerate(bound.in_shapes):
        layout = bound.input_layout(i, assignment)
        assert read_layout(json.loads(json.dumps(spell_layout(layout))), assignment.devices, shape) == layout


def test_a_strategy_is_cuts_where_cuts_say_it() -> None:
    text = {line["name"]: line for line in json.loads(written(made("tutorial")))["operators"]}
    assert text["matmul1"]["in_strategy"] == [[2, 4], [4, 1]] and "device_matrix" not in text["matmul1"]
    text = {line["name"]: line for line in json.loads(written(made("tutorial by Layouts")))["operators"]}
    assert text["matmul1"]["device_matrix"] == [2, 2, 2] and text["matmul1"]["alias_name"] == ["a", "b", "c"]
    assert text["matmul1"]["in_strategy"] == [["c", ["b", "a"]], [["b", "a"], "None"]]


# -- two plans ---------------------------------------------------------------------------------------------------------


def test_the_difference_of_two_plans(tmp_path: Path) -> None:
    plan = made("tutorial")
    assert difference(plan, made("tutorial")).equal
    other = tutorial(marks={"matmul_2": ((2, 4), (4, 1))})
    found = difference(plan, other)
    assert not found.equal and not found.settings
    assert [(change.sign, change.names) for change in found.operators] == [("~", ("matmul_2",))]
    assert "((8, 1), (1, 1))" in found.operators[0].before and "((2, 4), (4, 1))" in found.operators[0].after
    assert str(found.operators[0]).count(" us") == 2, "both prices"
    assert [str(change).split(":")[0] for change in found.parameters] == ["~ parameter w3"]
    assert "1 operator and 1 parameter differ" in found.lines[-1]


def test_the_difference_of_plans_of_different_models() -> None:
    def of(*layers: nn.Module, **given: Any) -> sw.Plan:
        return sw.plan(nn.Sequential(*layers), (meta(16, 8),), devices=DEVICES, **given)

    found = difference(of(nn.Linear(8, 8), nn.ReLU()), of(nn.Linear(8, 16), nn.Tanh(), hsdp={}, cluster="a100x8"))
    assert [str(change).split(":")[0] for change in found.operators] == ["~ 0 (linear)", "~ 1 (relu)"]
    assert "relu" in found.operators[1].before and "tanh" in found.operators[1].after
    assert [line.split(":")[0] for line in found.settings] == ["hsdp", "cluster"]
    assert "f32[8, 8]" in found.operators[0].before and "f32[16, 8]" in found.operators[0].after
    assert [change.path for change in found.parameters] == ["parameter 0.weight", "parameter 0.bias"]


class Passing(nn.Module):
    """A sum that may stay open through a view, until slices of it are wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(64, 64))
        self.matmul, self.relu = sw.shard(torch.matmul, ((1, 8), (8, 1))), sw.shard(torch.relu, ((8, 1, 1),))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.matmul(x, self.w).reshape(64, 8, 8))


def closed(plan: sw.Plan) -> sw.Plan:
    """The same, with every sum completed where it is made."""
    return replace(plan, decisions={name: replace(d, partial=()) for name, d in plan.decisions.items()})


def test_sums_that_stay_open_are_a_difference_where_there_are_some(tmp_path: Path) -> None:
    assert difference(made("gpt"), closed(made("gpt"))).operators == ()
    plan, path = sw.plan(Passing(), (meta(64, 64),), devices=DEVICES), tmp_path / "plan.json"
    assert sent(plan)[0][0] == "reduce_scatter" and sent(closed(plan))[0][0] == "all_reduce"
    found = difference(plan, closed(plan))
    assert [change.path for change in found.operators] == ["reshape"] and "open ['a']" in found.operators[0].before
    closed(plan).save(path)
    assert sent(sw.Plan.load(path)) == sent(closed(plan))
    assert sent(sw.plan(Passing(), (meta(64, 64),), devices=DEVICES, strategies=path)) == sent(closed(plan))
    words = json.loads(path.read_text())
    assert words["open"] == [] and not any("open" in line for line in words["operators"]), "said once"
    words["operators"][1]["open"] = None
    path.write_text(json.dumps(words))
    assert sent(sw.Plan.load(path)) == sent(plan)
