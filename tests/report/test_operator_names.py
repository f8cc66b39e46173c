"""Operators by their paths, found by the ends of paths; tables that fold equal layers and fit their width."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from test_description import column_row, gpt, tower, transformer
from torch import nn

import shardwright as sw
from shardwright.cli import main
from shardwright.identity_tables import IdentityMap
from shardwright.operator_explanation import SearchesOfPlan, explained, seconds_of
from shardwright.report.console_tables import table
from shardwright.report.explanations import costs, tell
from shardwright.report.operator_names import OperatorNames
from shardwright.report.tables import explain, summary


def shown(what: Any, *args: Any, **how: Any) -> str:
    file = io.StringIO()
    what(*args, file=file, **how)
    return file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return transformer(gpt)


def test_every_operator_has_a_path_of_its_own(plan: sw.Plan) -> None:
    names = OperatorNames(plan)
    assert len(set(names.paths.values())) == len(plan.operators)
    for name, path in names.paths.items():
        assert names.find(path).operators == (name,) == names.find(name).operators
        module = plan.operator(name).module
        assert path == name or path.startswith(module)
    assert names.paths["layer_norm"] == "blocks.0.norm1" and names.paths["dropout_1"] == "blocks.0.drop.dropout#1"


@pytest.mark.parametrize(
    ("given", "path", "alike"),
    [
        ("query", "blocks.{0-2}.attention.query", 3),
        ("attention.query", "blocks.{0-2}.attention.query", 3),
        ("1.attention.query", "blocks.1.attention.query", 1),
        ("norm1", "blocks.{0-2}.norm1", 3),
        ("head", "head", 1),
    ],
)
def test_the_end_of_a_path(plan: sw.Plan, given: str, path: str, alike: int) -> None:
    found = OperatorNames(plan).find(given)
    assert (found.path, found.alike, len(found.operators)) == (path, alike, 1)


def test_a_module_is_all_its_operators(plan: sw.Plan) -> None:
    names = OperatorNames(plan)
    found = names.find("blocks.1.attention")
    assert set(found.operators) == {o.name for o in plan.operators if o.module.startswith("blocks.1.attention")}
    assert names.find("attention").alike == 3 and names.find("attention").path == "blocks.{0-2}.attention"
    assert len(names.find("blocks").operators) == 3 * len(names.find("blocks.0").operators)


def test_near_names_are_suggested(plan: sw.Plan) -> None:
    with pytest.raises(sw.PlanError, match="no operator or module is called 'qurey'") as raised:
        OperatorNames(plan).find("qurey")
    assert "blocks.0.attention.query" in raised.value.legal and len(raised.value.legal) < 300
    with pytest.raises(sw.PlanError, match="no operator is called 'qurey'") as raised:
        plan.operator("qurey")
    assert "blocks.0.attention.query" in raised.value.legal
    with pytest.raises(sw.PlanError, match="'query' is the end of 3 names"):
        plan.operator("query")
    assert plan.operator("0.attention.query").name == "blocks.0.attention.query"


def test_ends_that_are_split_differently_are_told_apart() -> None:
    mixed = tower(column_row(2, 1, 4), column_row(2, 1, 4), column_row(8, 1, 1))
    with pytest.raises(sw.PlanError, match="'up' is the end of several paths, which are not split alike") as raised:
        OperatorNames(mixed).find("up")
    assert raised.value.legal == "blocks.{0-1}.up (2); blocks.2.up"
    assert OperatorNames(mixed).find("blocks.{0-1}.up").operators == ("blocks.0.up",)
    assert OperatorNames(mixed).find("blocks.{1, 2}").path == "blocks.1"


# -- one cost ----------------------------------------------------------------------------------------------------------


def test_a_layer_has_one_cost_in_all_tables(plan: sw.Plan) -> None:
    """The cost of an operator in its explanation is that in the table of the plan, and those of a layer add up."""
    assert sum(plan.price.by_operator.values()) == pytest.approx(plan.cost)
    searches: IdentityMap[sw.Plan, SearchesOfPlan] = IdentityMap()
    for name in ("blocks.1.up", "blocks.1.down", "blocks.1.attention.out"):
        assert (
            explained(plan, name, searches=searches).seconds
            == plan.price.by_operator[name]
            == seconds_of(plan, (name,))
        )
    text = words(shown(costs, plan, width=200))
    inside = [o.name for o in plan.operators if o.module.startswith("blocks.")]
    together = re.search(r"blocks 0-2 .*? 3 ([\d.]+) (us|ms)", text)
    assert together is not None
    message = float(together[1]) * {"us": 1e-6, "ms": 1e-3}[together[2]]
    assert message == pytest.approx(seconds_of(plan, inside), rel=1e-2)
    module = shown(tell, plan, "blocks.1.attention", width=200)
    mine = [n for n in inside if n in OperatorNames(plan).find("blocks.1.attention").operators]
    assert f"{len(mine)} operators, {seconds_of(plan, mine) * 1e6:.3g} us of" in module


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 100, 140])
def test_tables_fit_their_width_and_fold_layers(plan: sw.Plan, width: int) -> None:
    for text in (
        shown(explain, plan, width=width),
        shown(costs, plan, width=width),
        shown(summary, plan, width=width),
        shown(tell, plan, "blocks.1.attention", width=width),
        shown(tell, plan, "up", width=width),
    ):
        assert max(map(len, text.splitlines())) <= width
        assert not re.search(r"\b(linear|layer_norm|dropout)_\d", text), "paths, not names in the graph"
    table = shown(explain, plan, width=width)
    assert "blocks.{0-2}.attention" in table and "blocks.1.attention" not in table


def test_without_a_terminal_tables_are_100_wide(plan: sw.Plan) -> None:
    for text in (shown(explain, plan), shown(costs, plan)):
        rows = [line for line in text.splitlines() if line.startswith(" ") and line.rstrip() != line]
        assert rows and max(map(len, rows)) <= 100


def test_long_plans_are_short() -> None:
    layers = [len(shown(explain, transformer_of(count)).splitlines()) for count in (2, 6)]
    assert layers[0] == layers[1]


def transformer_of(layers: int) -> sw.Plan:
    net, tokens = gpt.GPT(layers=layers), torch.zeros(8, 64, dtype=torch.long)
    return sw.plan(net, (tokens,), parallel_mode="data_parallel", devices=8)


def test_the_next_best_choice_is_a_difference(plan: sw.Plan) -> None:
    searched = tower({}, {}, parallel_mode="dynamic_programming", cluster="a100x8")
    message = explained(searched, OperatorNames(searched).find("blocks.0.up").operators[0])
    best = min(message.alternatives, key=lambda other: other.total)
    text = words(shown(tell, searched, "blocks.0.up", width=300))
    assert f"{best.more * 1e6:+.3g} us a step if all else is chosen anew" in text
    assert best.holder is None or "since " in text
    for word in ("asked:", "handed on:", "counts:", "held by:", "in all:", "alone:", "all_gather(4@2):"):
        assert word in text, "a legend for each word"


# -- from the command line ---------------------------------------------------------------------------------------------


def test_commands(plan: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = str(tmp_path / "plan.json")
    plan.save(path)
    described = str(plan.describe()).splitlines()[1:]
    assert main.main(["explain", path]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1 : 1 + len(described)] == described
    assert main.main(["explain", path, "blocks.2.attention"]) == 0
    assert capsys.readouterr().out.startswith("blocks.2.attention: 13 operators, ")
    assert main.main(["explain", path, "query"]) == 0
    assert "blocks.{0-2}.attention.query: the first of 3 operators that are split alike" in capsys.readouterr().out
    assert main.main(["explain", path, "qurey"]) == 2
    assert "blocks.0.attention.query" in capsys.readouterr().err


def test_a_plan_explains_itself(plan: sw.Plan, capsys: pytest.CaptureFixture) -> None:
    plan.explain("blocks.2.attention", width=90)
    assert capsys.readouterr().out.startswith("blocks.2.attention: 13 operators, ")
    plan.explain()
    assert "blocks 0-2: data 2 x tensor 4" in capsys.readouterr().out


def test_a_path_that_is_too_long_for_its_column_is_cut_behind_a_dot() -> None:
    """A word without a dot, and a column that must not wrap, are as before."""
    made = table("for", "strategy", wraps=("for",))
    made.add_row("layers.{0-27}.mlp.gate_proj, layers.{0-26}.mlp.up_proj and 1 more", Text("((8, 1), (1, 1))"))
    made.add_row("a_name_without_any_dot_in_it", "")
    file = io.StringIO()
    Console(file=file, width=37).print(made)
    lines = [line.rstrip() for line in file.getvalue().splitlines()[3:]]
    assert lines == [
        " layers.{0-27}.     ((8, 1), (1, 1))",
        " mlp.gate_proj,",
        " layers.{0-26}.",
        " mlp.up_proj and",
        " 1 more",
        " a_name_without_a",
        " ny_dot_in_it",
        "",
    ]


def test_another_name_of_a_result_is_that_result() -> None:
    """An input that the model changes has a last value of its own in the graph, which is another name of a result."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            seen.add_(1)
            return self.up(x) + seen

    plan = sw.plan(Net(), (torch.zeros(8, 16), torch.zeros(8, 16)), devices=4)
    (alias,) = (op for op in plan.graph.ops if op.kind == "alias")
    assert OperatorNames(plan).value(alias.outputs[0].name) == "result of add"
