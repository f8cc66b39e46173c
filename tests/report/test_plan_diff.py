"""Two plans compared: paths of modules, equal layers once, in a terminal, as JSON and on the page of two plans."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_description import column_row, gpt, tower, transformer
from test_pipeline_document import Chain, planned

import shardwright as sw
from shardwright.cli import main as cli
from shardwright.report import html_report
from shardwright.report.html_report import page
from shardwright.report.plan_diff import difference

#: Names of operators in a graph, which no reader knows.
NAMES = re.compile(r"\b(linear|relu|layer_norm|dropout|softmax)_\d|\bsend\.")


@pytest.fixture(scope="module")
def both() -> tuple[sw.Plan, sw.Plan]:
    return transformer(gpt), transformer(gpt, "data_parallel")


def test_lines_have_paths_and_fold_equal_layers(both: tuple[sw.Plan, sw.Plan]) -> None:
    found = difference(*both)
    assert not any(NAMES.search(line) for line in found.lines)
    (up,) = (change for change in found.operators if change.path.startswith("blocks.{0-2}.up"))
    assert len(up.names) == 3 and str(up) == f"~ blocks.{{0-2}}.up (linear): {up.before} -> {up.after}, each"
    (weight,) = (change for change in found.parameters if change.path.endswith("}.up.weight"))
    assert str(weight).startswith("~ parameter blocks.{0-2}.up.weight: [") and len(weight.names) == 3
    count = sum(len(change.names) for change in found.operators)
    assert f"{count} operators and " in found.lines[-1] and len(found.operators) < count / 2


def test_a_marked_operator_is_the_same_as_an_unmarked_one(both: tuple[sw.Plan, sw.Plan]) -> None:
    """A mark names the operator in the graph; its path is that of its module in both."""
    assert "blocks.0.up" in both[0].decisions and "blocks.0.up" not in both[1].decisions
    assert {change.sign for change in difference(*both).operators} == {"~"}


def test_layers_that_differ_are_told_apart() -> None:
    one = tower(*(column_row(2, 1, 4),) * 3)
    found = difference(one, tower(column_row(2, 1, 4), column_row(2, 1, 4), column_row(8, 1, 1)))
    assert {change.path.partition(".")[2].partition(".")[0] for change in found.operators} == {"2"}
    assert not any("each" in str(change) for change in found.operators)


def test_as_json(both: tuple[sw.Plan, sw.Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for plan, path in zip(both, paths, strict=True):
        plan.save(path)
    assert cli.main(["plan", "diff", *paths, "--json"]) == 1
    message = json.loads(capsys.readouterr().out)
    up = next(one for one in message["operators"] if one["path"] == "blocks.{0-2}.up (linear)")
    assert up["change"] == "~" and len(up["names"]) == 3 and up["before"] != up["after"]
    assert all(set(one) == {"change", "path", "names", "before", "after"} for one in message["parameters"])
    assert cli.main(["plan", "diff", *paths]) == 1
    out = capsys.readouterr().out
    assert "~ blocks.{0-2}.up (linear): " in out and not NAMES.search(out)


def test_settings_are_in_the_users_words() -> None:
    """No repr of a class of the package; the total stands once on the page, whose lines may be too many."""
    given = {"devices": 8, "parallel_mode": "data_parallel"}
    net, inputs = torch.nn.Linear(256, 256), (torch.ones(64, 256),)
    one = sw.plan(net, inputs, **given)
    other = sw.plan(net, inputs, **given, hsdp={"optimizer_level": "level3", "shard_size": 4, "threshold": 1})
    found = difference(one, other)
    assert "hsdp: none -> level3 over 4 replicas, from 1 KB on" in found.settings
    assert "OptimizerParallel" not in "\n".join(found.lines)
    text = page([one, other], explain=0)
    assert text.count(html.escape(found.total)) == 1
    equal = page([one, one], explain=0)
    assert equal.count(html.escape(difference(one, one).total)) == 1 and "Operator by operator" not in equal


def test_the_total_stands_before_differences_that_are_left_out(
    both: tuple[sw.Plan, sw.Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html_report, "MOST_LINES", 2)
    text, found = page(both, explain=0), difference(*both)
    assert f"<b>{html.escape(found.total)}</b>" in text and f"and {len(found.lines) - 3} more lines" in text


def test_the_page_of_two_plans_has_paths(both: tuple[sw.Plan, sw.Plan]) -> None:
    text = re.sub(r"<[^>]*>", " ", page(both, explain=0))
    assert "~ blocks.{0-2}.up (linear): " in text and not NAMES.search(text)


def test_tables_of_a_pipeline_have_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A border is crossed by the result of a module; the end of a stage is the sending of one."""
    plan: Any = planned(Chain())
    plan.save(tmp_path / "plan.json")
    shown = []
    for words in (["explain", "plan.json"], ["explain", "plan.json", "layers.1"], ["simulate", "plan.json"]):
        assert cli.main([words[0], str(tmp_path / words[1]), *words[2:]]) == 0
        shown.append(capsys.readouterr().out)
    assert (
        re.search(r"crosses +from +to ", shown[0])
        and re.search(r"\n result of +(stage|relu_1)", shown[0])
        and " send of relu_1 " in shown[0]
    )
    assert "send.relu" not in "".join(shown) + page([plan])
    assert re.search(
        r"~ send of relu|- send of relu", "\n".join(difference(plan, planned(Chain(), pipeline=None)).lines)
    )
