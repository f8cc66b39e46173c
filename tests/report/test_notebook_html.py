"""Values as a notebook shows them: tables and pictures that say what the value is."""

from __future__ import annotations

import re
from html import unescape

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.cluster import format_bytes
from shardwright.report.format import size_text, time_text
from shardwright.report.notebook_html import html_table

AXES = sw.Layout((2, 2, 2), ("dp", "sp", "mp"))


def cells(html: str) -> list[list[str]]:
    """The texts of a table, line by line."""
    lines = re.findall(r"<tr>(.*?)</tr>", html)
    found = [re.findall(r"<t[hd] .*?>(.*?)</t[hd]>", line) for line in lines]
    return [[unescape(re.sub(r"<svg.*?</svg>", "picture", cell)) for cell in line] for line in found]


def test_a_table_escapes_texts_and_leaves_empty_columns_out() -> None:
    html = html_table("a<b", ("one", "two"), [("<x>", ""), ("y", "")], ["c&d"])
    assert html.startswith("<div><b>a&lt;b</b>") and html.endswith("c&amp;d</div>")
    assert cells(html) == [["one"], ["<x>"], ["y"]]
    assert "<table>" not in html_table("title", ("one",), [])


@pytest.mark.parametrize("dims", [("dp", "mp"), ("mp", "None"), (("sp", "dp"), "mp"), ("None", "None")])
def test_a_pointer_on_a_device_shows_its_slice(dims: tuple[object, ...]) -> None:
    layout, shape = AXES(*dims), (8, 8)
    html = layout._repr_html_()
    said = dict(re.findall(r"<title>rank (\d+): (.*?)</title>", html))
    assert sorted(map(int, said)) == list(range(8))
    for rank in range(8):
        held = enumerate(zip(layout.slice(shape, rank), layout.cuts))
        parts = [f"part {piece.start * cut // 8} of {cut} of dim {dim}" for dim, (piece, cut) in held if cut > 1]
        assert said[str(rank)] == (", ".join(parts) or "the whole tensor")
    assert [line[1] for line in cells(html)[1:]] == [f"{cut} parts" if cut > 1 else "whole" for cut in layout.cuts]


def test_a_layout_without_dims_shows_its_axes() -> None:
    assert cells(AXES._repr_html_())[1:] == [["dp", "2", "(0, 4)"], ["sp", "2", "(0, 2)"], ["mp", "2", "(0, 1)"]]


def test_a_plan_its_operators_and_a_mark() -> None:
    net, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU()), torch.zeros(8, 16)
    mark = sw.shard(torch.matmul, ((2, 4), (4, 1)), priority=3)
    sw.shard(net[0], ((2, 1), (4, 1)))
    plan = sw.plan(net, (x,), devices=8)
    html = plan._repr_html_()
    assert f"a step {time_text(plan.cost)} by the cost model; a device holds {size_text(plan.peak)}" in html
    assert f"a rank sends {size_text(plan.sent)}" in html
    assert "on 8 devices, dim 0 in 2 parts, of which rank r has number r // 4 % 2" in plan.operators[0]._repr_html_()
    shown = cells(plan.operators[0]._repr_html_())
    assert [line[:4] for line in shown[1:]] == [
        ["in 0 input", "(8, 16)", "(2, 1)", "(4, 16)"],
        ["in 1 0.weight", "(32, 16)", "(4, 1)", "(8, 16)"],
        ["in 2 0.bias", "(32,)", "(4,)", "(8,)"],
        ["out 0", "(8, 32)", "(2, 4)", "(4, 8)"],
    ]
    assert all(line[5] == "picture" for line in shown[1:])
    html = mark._repr_html_()
    assert cells(html)[1:] == [["in 0", "(2, 4)"], ["in 1", "(4, 1)"]] and "priority 3" in html
    assert "not marked" in sw.Operator(torch.matmul)._repr_html_()


@pytest.mark.parametrize("piped", [False, True])
def test_values_of_a_plan_do_not_flood_a_prompt(piped: bool) -> None:
    """Price, timeline, graph, operators and their like have reprs of at most three lines, for any model."""
    net = nn.Sequential(*(nn.Linear(16, 16) for _ in range(60)))
    x = torch.zeros(8, 16)
    if piped:
        for number, layer in enumerate(net):
            sw.set_stage(layer, number // 30)
        plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=4, pipeline={"stages": 2, "micro_batches": 4})
        values = [plan.simulation, plan.operators, plan.graph, plan.stages[0].plan.price, plan.stages[0].plan.timeline]
    else:
        plan = sw.plan(net, (x,), nn.MSELoss(), x, devices=4)
        values = [plan.price, plan.timeline, plan.unscheduled, plan.graph, plan.operators, plan.program, plan.schedule]
        values += [plan.in_time, plan]
    for value in values:
        text = repr(value)
        assert len(text.splitlines()) <= 3 and len(text) <= 300 and text.startswith("<"), text[:300]
    assert repr(plan.operators).endswith(f" and {len(plan.operators) - 12} more>")
    assert plan.operators == tuple(plan.operators) and plan.operators[1:3] == tuple(plan.operators)[1:3]
    html = plan.operators._repr_html_()
    assert len(cells(html)) == 41 and f"and {len(plan.operators) - 40} more: plan.explain()" in html


def test_what_the_reprs_say() -> None:
    x = torch.zeros(8, 16)
    plan = sw.plan(nn.Linear(16, 16), (x,), nn.MSELoss(), x, devices=4)
    assert repr(plan.graph) == f"<Graph: {len(plan.graph.ops)} operators, 2 parameters, 2 inputs>"
    assert f"a step {plan.price.total * 1e3:.4g} ms: forward " in repr(plan.price)
    assert f"at most {format_bytes(plan.timeline.peak)} (inputs " in repr(plan.timeline)
