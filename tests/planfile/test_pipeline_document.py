"""A pipeline's plan as a document: what is loaded is what was saved, an edited line is a mark, and what cannot be is
named with its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pipeline_networks import Chain, setting, staged
from small_networks import D, draw
from torch import nn

import shardwright as sw
from shardwright.capture.module_calls import ModelAndLoss
from shardwright.errors import PlanError, ShardwrightError
from shardwright.layout import Layout
from shardwright.pipeline.build import pipeline_plan
from shardwright.pipeline.schedules import schedule
from shardwright.planfile import read_document
from shardwright.planfile.document_writer import pipeline_written
from shardwright.planfile.encoding import packed, unpacked
from shardwright.planning import capture_micro, make_plan
from shardwright.report.plan_diff import difference
from shardwright.runtime.pipeline_step import local_pipeline
from shardwright.settings import Settings

TWO = dict(stages=2, micro_batches=4, stage_config=staged(2))


def planned(
    net: nn.Module | None = None, loss: Any = None, target: torch.Tensor | None = None, **given: Any
) -> sw.PipelinePlan:
    x = torch.empty(16, 16, dtype=D, device="meta")
    return sw.plan(
        net or Chain(),
        (x,),
        loss or nn.MSELoss(),
        torch.empty_like(x) if target is None else target,
        **{"devices": 8, "pipeline": TWO} | given,
    )


def saved(plan: sw.PipelinePlan, folder: Path, edit: Callable[[str], str] = lambda text: text) -> Path:
    path = folder / "plan.json"
    plan.save(path)
    text = path.read_text()
    edited = edit(text)
    path.write_text(edited)
    return path


def line_with(path: Path, text: str) -> int:
    return next(n for n, line in enumerate(path.read_text().split("\n"), 1) if text in line)


# -- there and back ----------------------------------------------------------------------------------------------------


class Unequal(nn.Module):
    """Means over what counts of the whole batch."""

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores, target, ignore_index=0)


class Noisy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(16, 16, dtype=D), nn.BatchNorm1d(16, dtype=D), nn.Dropout(0.5), nn.Linear(16, 16, dtype=D)
        )


NOISY = dict(stages=2, micro_batches=2, stage_config={"0": 0, "1": 0, "2": 1, "3": 1})

PLANS: dict[str, Callable[[Path], sw.PipelinePlan]] = {
    "plain": lambda _: planned(),
    "tied and skip": lambda _: planned(Chain(tied=True, skip=True), pipeline=setting("1f1b", 4)),
    "searched": lambda _: planned(
        parallel_mode="dynamic_programming", hsdp={"threshold": 0, "optimizer_level": "level3"}
    ),
    "recursive": lambda _: planned(parallel_mode="recursive_programming", cluster="h200x8x2", devices=16),
    "own part of the batch": lambda _: planned(dataset_strategy="data_parallel", parallel_mode="data_parallel"),
    "cuts of the batch": lambda _: planned(dataset_strategy=((2, 1), (2, 1))),
    "zbv": lambda _: planned(pipeline=setting("zbv", 4), recompute=lambda op: op.kind == "relu"),
    "csv": lambda folder: planned(pipeline=setting("csv", 4, folder)),
    "unequal": lambda _: planned(loss=Unequal(), target=torch.empty(16, dtype=torch.int64, device="meta")),
    "norms and random": lambda _: planned(Noisy(), pipeline=NOISY, parallel_mode="data_parallel", optimizer="momentum"),
    "whole batch's norms": lambda _: planned(Noisy(), pipeline=NOISY, uneven=True),
}


@pytest.mark.parametrize("name", PLANS)
def test_loaded_is_saved(name: str, tmp_path: Path) -> None:
    plan = PLANS[name](tmp_path)
    path = saved(plan, tmp_path)
    (tmp_path / "schedule.csv").unlink(missing_ok=True)  # it stands in the plan
    loaded = sw.Plan.load(path)
    assert isinstance(loaded, sw.PipelinePlan)
    assert loaded.fingerprint == plan.fingerprint and loaded.cost == plan.cost
    assert loaded.schedule == plan.schedule and loaded.transfers == plan.transfers
    assert loaded.micro.joins == plan.micro.joins
    assert [stage.ranks for stage in loaded.stages] == [stage.ranks for stage in plan.stages]
    assert {n: p.storage for n, p in loaded.parameters.items()} == {n: p.storage for n, p in plan.parameters.items()}
    for rank in range(plan.devices):
        assert loaded.collectives(rank) == plan.collectives(rank)
    assert pipeline_written(loaded) == path.read_text()
    assert difference(plan, loaded).equal
    for mine, theirs in zip(loaded.stages, plan.stages):
        assert mine.plan.bound == theirs.plan.bound and mine.plan.batch_dims == theirs.plan.batch_dims
        assert mine.plan.graph.batch == theirs.plan.graph.batch


def test_what_a_reader_sees(tmp_path: Path) -> None:
    plan = planned(Chain(tied=True))
    words = json.loads(saved(plan, tmp_path).read_text())
    assert words["schema"] == 2 and words["devices"] == 8 and words["dataset_strategy"] == "full_batch"
    assert words["pipeline"] == {
        "stages": 2,
        "scheduler": "1f1b",
        "micro_batches": 4,
        "placement": [0, 1],
        "split": [True, True],
    }
    assert words["total"]["seconds"] == plan.cost and words["total"]["bubble"] == plan.simulation.bubble
    assert [stage["ranks"] for stage in words["stages"]] == ["0-3", "4-7"]
    assert [[line["name"] for line in stage["operators"]] for stage in words["stages"]] == [
        [op.name for op in stage.plan.graph.ops] for stage in plan.stages
    ]
    assert [input_placement["from"] for input_placement in words["stages"][1]["fed"]] == [
        "the batch",
        "stage 0, a parameter",
        "stage 0",
    ]
    assert [[p["name"] for p in stage["parameters"]] for stage in words["stages"]] == [
        ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"],
        ["layers.2.bias", "layers.3.weight", "layers.3.bias"],
    ]
    assert all("cluster" not in stage and "optimizer" not in stage for stage in words["stages"])
    lines = saved(plan, tmp_path).read_text().split("\n")
    assert sum('"op": "linear"' in line for line in lines) == 4  # a line an operator


def test_a_plan_of_no_pipeline_is_written_as_ever(tmp_path: Path) -> None:
    plan = planned(pipeline=None)
    plan.save(tmp_path / "plan.json")
    words = json.loads((tmp_path / "plan.json").read_text())
    assert words["schema"] == 1 and isinstance(words["captured"], str) and "stages" not in words
    assert sw.Plan.load(tmp_path / "plan.json").fingerprint == plan.fingerprint


# -- edited lines ------------------------------------------------------------------------------------------------------


def test_an_edited_operator_is_a_mark_in_its_stage(tmp_path: Path) -> None:
    plan = planned()
    path = saved(
        plan,
        tmp_path,
        lambda text: text.replace(
            '{"name": "linear_1", "op": "linear", "in_strategy": [[4, 1], [1, 1], [1]]',
            '{"name": "linear_1", "op": "linear", "in_strategy": [[1, 1], [4, 1], [4]]',
        ),
    )
    loaded = sw.Plan.load(path)
    changed = loaded.operator("linear_1")
    assert (changed.cause, changed.in_strategy) == ("mark", ((1, 1), (4, 1), (4,)))
    assert loaded.parameters["layers.1.weight"].storage.cuts == (4, 1)
    assert [o.cause for o in loaded.operators if o.name != "linear_1"] == [
        o.cause for o in plan.operators if o.name != "linear_1"
    ]
    assert loaded.cost != plan.cost and loaded.fingerprint != plan.fingerprint
    assert [change.names for change in difference(plan, loaded).operators] == [("linear_1",)]
    assert saved(loaded, tmp_path).read_text() == pipeline_written(loaded)
    assert sw.Plan.load(path).fingerprint == loaded.fingerprint


def test_an_edited_crossing_changes_what_the_next_stage_is_fed(tmp_path: Path) -> None:
    plan = planned(parallel_mode="dynamic_programming")
    loaded = sw.Plan.load(
        saved(
            plan,
            tmp_path,
            lambda text: text.replace(
                '{"name": "send.relu_1", "op": "send", "in_strategy": [[1, 1]]',
                '{"name": "send.relu_1", "op": "send", "in_strategy": [[2, 2]]',
            ),
        )
    )
    two = Layout.from_cuts(4, (2, 2))
    assert [t.layout for t in loaded.transfers] == [two] and loaded.stages[1].plan.input_placement.inputs[1] == two
    assert [stage.plan.bound is None for stage in plan.stages] == [False, False]
    assert [stage.plan.bound for stage in loaded.stages] == [None, None]  # what was proved was proved of other stages


def test_what_was_proved_is_forgotten_with_what_it_was_proved_for(tmp_path: Path) -> None:
    plan = planned(parallel_mode="dynamic_programming")
    loaded = sw.Plan.load(saved(plan, tmp_path, lambda text: text.replace('"optimizer": null', '"optimizer": "sgd"')))
    assert loaded.cost == plan.cost and [stage.plan.bound for stage in loaded.stages] == [None, None]


class Masked(nn.Module):
    """A buffer that both stages use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, dtype=D), nn.Linear(16, 16, dtype=D)
        self.register_buffer("mask", torch.ones(16, dtype=D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.mask) * self.mask


def test_a_line_is_that_of_its_own_stage(tmp_path: Path) -> None:
    setting = dict(stages=2, micro_batches=2, stage_config={"first": 0, "second": 1})
    line = '{"name": "mask", "shape": [16], "dtype": "float64", "storage": [1]'

    def edited(text: str) -> str:
        first, second, rest = text.split(line)
        return first + line + second + line.replace("[1]", "[3]") + rest

    path = saved(planned(Masked(), pipeline=setting), tmp_path, edited)
    with pytest.raises(ShardwrightError) as caught:
        sw.Plan.load(path)
    wrong = line_with(path, '"storage": [3]')
    assert caught.value.source == f"{path}:{wrong}"


@settings(max_examples=15, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 4]),
    inner=st.sampled_from([1, 2, 4]),
    columns=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["linear", "linear_1", "linear_2", "linear_3"]),
)
def test_any_legal_line_is_taken_and_any_other_is_named(
    rows: int, inner: int, columns: int, name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    strategy = f"[[{rows}, {inner}], [{columns}, {inner}], [{columns}]]"
    path = saved(
        planned(),
        tmp_path_factory.mktemp("plans"),
        lambda text: text.replace(
            f'{{"name": "{name}", "op": "linear", "in_strategy": [[4, 1], [1, 1], [1]]',
            f'{{"name": "{name}", "op": "linear", "in_strategy": {strategy}',
        ),
    )
    if rows * inner * columns > 4:
        with pytest.raises(ShardwrightError) as caught:
            sw.Plan.load(path)
        line = line_with(path, f'{{"name": "{name}"')
        assert caught.value.source == f"{path}:{line}"
        return
    loaded = sw.Plan.load(path)
    assert loaded.operator(name).in_strategy == ((rows, inner), (columns, inner), (columns,))
    assert loaded.cost > 0 and pipeline_written(sw.Plan.load(saved(loaded, path.parent))) == path.read_text()


def test_another_schedule_may_be_written_in(tmp_path: Path) -> None:
    plan = planned()
    loaded = sw.Plan.load(saved(plan, tmp_path, lambda text: text.replace('"1f1b"', '"gpipe"')))
    assert loaded.schedule.name == "gpipe" and loaded.memory(0)["activations"] == 2 * plan.memory(0)["activations"]
    actions = json.dumps([row for row in loaded.schedule.to_csv().split()])
    again = sw.Plan.load(
        saved(
            plan,
            tmp_path,
            lambda text: text.replace('"scheduler": "1f1b"', f'"scheduler": "mine", "actions": {actions}'),
        )
    )
    assert again.schedule.name == "mine" and again.schedule.actions == loaded.schedule.actions


# -- bad documents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        (
            '"linear_2", "op": "linear", "in_strategy": [[4, 1]',
            '"linear_2", "op": "linear", "in_strategy": [[3, 1]',
            '"name": "linear_2"',
            "does not divide by 3",
        ),
        ('"name": "relu_2"', '"name": "relu_9"', '"name": "relu_9"', "stage 1 of the model has no operator 'relu_9'"),
        ('"name": "relu_2"', '"name": "linear_2"', '"name": "linear_2", "op": "relu"', "a second line for 'linear_2'"),
        ('"scheduler": "1f1b"', '"scheduler": "zbv"', '"pipeline"', "zbv on 2 groups has its stages on [0, 1, 1, 0]"),
        ('"scheduler": "1f1b"', '"scheduler": "2f2b"', '"pipeline"', "scheduler='2f2b'"),
        (
            '"micro_batches": 4',
            '"micro_batches": 8',
            '"pipeline"',
            "8 micro-batches, and the graph is that of one of 4",
        ),
        ('"placement": [0, 1]', '"placement": [1, 0]', '"pipeline"', "on [0, 1], the plan on [1, 0]"),
        ('"placement": [0, 1]', '"placement": "01"', '"pipeline"', "placement='01'"),
        ('"split": [true, true]', '"split": [true]', '"pipeline"', "true or false for each of the 2 inputs"),
        (
            '"scheduler": "1f1b"',
            '"scheduler": "m", "actions": ["0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3", "1B0,1F0,1F1,1F2,1F3,1B1,1B2,1B3"]',
            '"pipeline"',
            "1B0 comes before 1F0",
        ),
        ('"scheduler": "1f1b"', '"scheduler": "m", "actions": ["0F0,0X1", "1F0"]', '"pipeline"', "'0X1' is no action"),
        ('"scheduler": "1f1b"', '"scheduler": "m", "actions": [3]', '"pipeline"', "actions=[3]"),
        ('"devices": 8', '"devices": 16', None, "the groups have 4 + 4 devices, the plan has 16"),
        ('"size": 8', '"size": 2', None, "cluster: 'h100x8' has 2 devices, the plan"),
        ('"schema": 2', '"schema": 1', None, "a plan of schema 1"),
        ('"stage": 1', '"stage": 2', None, "stages[1] is stage 2"),
        ('"dataset_strategy": "full_batch"', '"dataset_strategy": "half"', None, "unknown dataset_strategy 'half'"),
    ],
)
def test_what_cannot_be_is_named(old: str, new: str, line: str | None, message: str, tmp_path: Path) -> None:
    path = saved(planned(), tmp_path, lambda text: text.replace(old, new, 1))
    assert new in path.read_text()
    with pytest.raises(ShardwrightError) as caught:
        sw.Plan.load(path)
    where = str(path) if line is None else f"{path}:{line_with(path, line)}"
    assert caught.value.source == where and caught.value.legal
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: w.pop("stages"), "no stages"),
        (lambda w: w["stages"].pop(), "not as many captured graphs"),
        (lambda w: w["stages"][1].pop("operators"), "no operators"),
        (lambda w: w["stages"][0]["operators"].pop(), "no line for send.relu_1"),
        (lambda w: w["captured"].__setitem__(2, w["captured"][1]), "captured graph cannot be read"),
        (lambda w: w["captured"].__setitem__(1, "x"), "captured graph cannot be read"),
        (lambda w: w.update(graph="0"), "the captured graph is"),
        (lambda w: w["stages"][1].update(graph="0"), "stage 1"),
        (lambda w: w["stages"][1].update(devices=2), "4 + 2 devices"),
        (lambda w: w["cluster"]["levels"][0].update(size=2), "plan.json"),
    ],
)
def test_documents_that_are_damaged(edit: Callable[[dict], Any], message: str, tmp_path: Path) -> None:
    path = saved(planned(), tmp_path)
    words = json.loads(path.read_text())
    edit(words)
    path.write_text(json.dumps(words))
    with pytest.raises(ShardwrightError, match=message.replace("+", r"\+")):
        sw.Plan.load(path)


def test_a_document_cut_short(tmp_path: Path) -> None:
    path = saved(planned(), tmp_path, lambda text: text[:-300])
    with pytest.raises(PlanError, match="cut short"):
        sw.Plan.load(path)


# -- on a model --------------------------------------------------------------------------------------------------------


def test_a_model_takes_the_strategies_of_a_file(tmp_path: Path) -> None:
    searched = planned(parallel_mode="dynamic_programming")
    path = saved(searched, tmp_path)
    again = planned(parallel_mode="dynamic_programming", strategies=path)
    assert again.fingerprint == searched.fingerprint and {o.cause for o in again.operators} == {"mark"}
    sw.init(devices=8)
    x, y = draw(16, 16), draw(16, 16, seed=1)
    net = Chain()
    expected = nn.MSELoss()(net(x), y)
    model = sw.AutoParallel(net, nn.MSELoss()).pipeline(**TWO).dataset_strategy("full_batch")
    model.load_operator_strategy_file(path).save_operator_strategy_file(tmp_path / "first.json")
    loss = model(x, y)
    torch.testing.assert_close(loss, expected)
    assert [o.in_strategy for o in model.plan.operators] == [o.in_strategy for o in searched.operators]
    model.save_operator_strategy_file(tmp_path / "later.json")
    assert (tmp_path / "first.json").read_text() == (tmp_path / "later.json").read_text()
    assert sw.Plan.load(tmp_path / "first.json").fingerprint == model.plan.fingerprint


def without_updates(text: str) -> str:
    """A plan as it was written before buffers were joined once a step."""
    words = json.loads(text)
    last = words["captured"][-1]
    held = unpacked(last)
    del held["updates"]
    return text.replace(last, packed(held))


@pytest.mark.parametrize("how", ["loaded", "strategies"])
def test_a_file_that_says_nothing_of_buffers_trains_as_one_device(how: str, tmp_path: Path) -> None:
    """The file is loaded and run as it is, or a model takes its strategies."""
    plan = planned(Chain(tied=True), parallel_mode="dynamic_programming")
    path = saved(plan, tmp_path, without_updates)
    loaded = sw.Plan.load(path)
    assert loaded.micro.updates == {} and loaded.fingerprint == plan.fingerprint
    sw.init(devices=8)
    one, net, loss = Chain(tied=True), Chain(tied=True), nn.MSELoss()
    if how == "loaded":
        program = local_pipeline(loaded, ModelAndLoss(net, loss), torch.device("cpu"), True)
    else:
        program = (
            sw.AutoParallel(net, loss).pipeline(**TWO).dataset_strategy("full_batch").load_operator_strategy_file(path)
        )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (one, net)]
    for step in range(3):
        x, y = draw(16, 16, seed=step), draw(16, 16, seed=10 + step)
        expected, found = loss(one(x), y), program(x, y)
        torch.testing.assert_close(found, expected)
        for result, optimizer in zip((expected, found), optimizers):
            optimizer.zero_grad()
            result.backward()
            optimizer.step()
    torch.testing.assert_close(net.state_dict(), one.state_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline": setting("1f1b", 4)}, "the plan has 2 stages, asked for are 4 stages"),
        ({"pipeline": setting("interleaved", 4)}, "asked for are 4 stages on 2 groups of devices"),
        ({"pipeline": None}, "a pipeline of 2 stages, and no pipeline is asked for"),
        ({"devices": 4}, "the plan is for 8 devices, there are 4"),
        ({"pipeline": TWO | {"micro_batches": 2}}, "the model's operator is linear f64[8, 16]"),
        (
            {"pipeline": TWO | {"stage_config": {f"layers.{i}": min(i, 1) for i in range(4)}}},
            "stage 0 of the model has no operator 'linear_1'",
        ),
    ],
)
def test_a_file_of_another_pipeline(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = saved(planned(), tmp_path)
    with pytest.raises(ShardwrightError) as caught:
        planned(strategies=path, **given)
    assert message in str(caught.value) and str(caught.value.source).startswith(str(path))


def test_a_file_of_no_pipeline(tmp_path: Path) -> None:
    planned(pipeline=None).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="of no pipeline, and 2 stages are asked for"):
        planned(strategies=read_document(tmp_path / "plan.json"))


# -- stages of unequal size --------------------------------------------------------------------------------------------


def test_stages_of_other_numbers_of_devices(tmp_path: Path) -> None:
    x = torch.empty(16, 16, dtype=D, device="meta")
    net, loss = Chain(skip=True), nn.MSELoss()
    graph, wide = capture_micro(net, (x, x), {}, 4, loss_fn=loss)

    def planner(part: Any, size: int, input_placement: Any, number: int) -> sw.Plan:
        return make_plan(part, size, Settings("recursive_programming"), input_placement=input_placement)

    plan = pipeline_plan(
        graph,
        wide,
        6,
        "recursive_programming",
        "full_batch",
        schedule("1f1b", 2, 4),
        {f"layers.{i}": i // 2 for i in range(4)},
        planner,
        splits=(True, True),
        sizes=(4, 2),
    )
    path = saved(plan, tmp_path)
    loaded = sw.Plan.load(path)
    assert loaded.fingerprint == plan.fingerprint and loaded.transfers == plan.transfers
    assert [stage.ranks for stage in loaded.stages] == [range(4), range(4, 6)]
    assert [line["ranks"] for line in json.loads(path.read_text())["stages"]] == ["0-3", "4-5"]
    assert pipeline_written(loaded) == path.read_text()
