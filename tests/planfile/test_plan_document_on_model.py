"""A plan's document on a model: its lines as marks, in one process and in several."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_documents import DEVICES, gpt, made, odd, resnet, sent, tutorial
from ranks import run_ranks
from small_networks import Marked, draw, labels
from torch import nn

import shardwright as sw
from shardwright.planfile.document_writer import written


def trained(
    path: Path | None, mode: str = "semi_auto", net: Any = None, steps: int = 2, **given: Any
) -> tuple[sw.AutoParallel, list[float]]:
    sw.init(devices=DEVICES)
    net = net or Marked(None, None, None)
    model = sw.AutoParallel(net, nn.CrossEntropyLoss(), mode, **given).dataset_strategy("full_batch")
    if path is not None:
        model.load_operator_strategy_file(path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = model(draw(16, 8), labels(16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel", "dynamic_programming"])
def test_a_saved_plan_on_a_model_without_marks(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sw.init(devices=DEVICES)
    marked = sw.AutoParallel(Marked(), nn.CrossEntropyLoss()).dataset_strategy("full_batch")
    assert marked.save_operator_strategy_file(path) is marked and not path.exists()
    expected = marked(draw(16, 8), labels(16))
    assert path.exists()
    model, losses = trained(path, mode)
    assert model.plan.mode == mode and all(o.cause == "mark" for o in model.plan.operators)
    assert sent(model.plan) == sent(marked.plan)
    assert [o.in_layouts for o in model.plan.operators] == [o.in_layouts for o in marked.plan.operators]
    assert losses[0] == pytest.approx(expected.item(), abs=1e-12)
    model.save_operator_strategy_file(tmp_path / "again.json")
    assert sent(sw.Plan.load(tmp_path / "again.json")) == sent(marked.plan)


@pytest.mark.parametrize(
    "name, again",
    [
        ("tutorial by Layouts", lambda path: tutorial(strategies=path)),
        ("gpt, recomputed", lambda path: gpt(marked=True, strategies=path)),
        ("gpt, uneven", lambda path: gpt(vocabulary=61, uneven=True, strategies=path)),
        ("resnet, data_parallel", lambda path: resnet(parallel_mode="data_parallel", strategies=path)),
        ("odd", lambda path: odd(strategies=path)),
    ],
)
def test_a_model_planned_by_a_document(name: str, again: Callable[[Path], sw.Plan], tmp_path: Path) -> None:
    plan, path = made(name), tmp_path / "plan.json"
    plan.save(path)
    asked = again(path)
    assert sent(asked) == sent(plan) and asked.regions == plan.regions and asked.parameters == plan.parameters
    assert [o.out_layouts for o in asked.operators] == [o.out_layouts for o in plan.operators]


def test_a_searched_plan_runs_as_it_was_saved(tmp_path: Path) -> None:
    """Down to the sums that stay open between operators."""
    path = tmp_path / "plan.json"
    found = sw.plan(
        Marked(None, None, None),
        (draw(16, 8),),
        nn.CrossEntropyLoss(),
        labels(16),
        devices=DEVICES,
        parallel_mode="dynamic_programming",
    )
    found.save(path)
    model, losses = trained(path)
    assert model.plan.collectives(3) == found.collectives(3) and model.plan.cost == found.cost
    assert losses == pytest.approx(trained(None)[1], abs=1e-10)


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel", "dynamic_programming"])
def test_lines_that_were_taken_out_are_left_to_the_mode(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    words = json.loads(written(sw.plan(Marked(), (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=DEVICES)))
    words["operators"] = [line for line in words["operators"] if line["name"] in ("matmul2", "linear")]
    words["operators"][0]["in_strategy"] = [[2, 4], [4, 1]]
    path.write_text(json.dumps(words))
    model, losses = trained(path, mode, net=Marked())
    plan = model.plan
    assert plan.mode == mode
    assert plan.operator("matmul2").in_strategy == ((2, 4), (4, 1)), "over the model's own mark"
    assert plan.operator("matmul1").in_strategy == ((2, 4), (4, 1)) and plan.operator("relu1").cause == "mark"
    assert losses == pytest.approx(trained(None)[1], abs=1e-10)


def test_later_shapes_take_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    marked = Marked(second=((2, 4), (4, 1)))
    sw.plan(marked, (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=DEVICES).save(path)
    for net, name in ((Marked(None, None, None), "matmul2"), (Marked(), "matmul2")):
        model, _ = trained(path, net=net)
        with pytest.warns(sw.RecaptureWarning):
            model(draw(8, 8), labels(8))
        assert model.plan.operator(name).in_strategy == ((2, 4), (4, 1))
        assert model.plan.operator(name).in_shapes[0] == (8, 16)


def test_a_plan_for_another_model_batch_or_number_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sw.plan(
        Marked(),
        (draw(16, 8),),
        nn.CrossEntropyLoss(),
        labels(16),
        devices=4,
        marks={"matmul1": ((2, 2), (2, 1)), "matmul2": ((1, 4), (4, 1))},
    ).save(path)
    with pytest.raises(sw.PlanError, match=r"(?s)plan.json.*for 4 devices, there are 8"):
        trained(path)
    sw.plan(Marked(), (draw(32, 8),), nn.CrossEntropyLoss(), labels(32), devices=8).save(path)
    with pytest.raises(sw.PlanError, match=r"(?s)matmul1 \(.*plan.json:\d+\).*f64\[32, 8\].*f64\[16, 8\]"):
        trained(path, net=Marked())
    sw.plan(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), (draw(16, 8),), devices=8).save(path)
    with pytest.raises(sw.PlanError, match=r"(?s)plan.json:\d+.*no parameter '0.weight'|no operator"):
        trained(path)


def test_settings_of_the_wrapper(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sw.plan(Marked(), (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=DEVICES).save(path)
    for mode in ("stand_alone", "hybrid_parallel"):
        with pytest.raises(sw.SettingError, match=f"{mode} runs operators as they stand"):
            sw.AutoParallel(Marked(), parallel_mode=mode).load_operator_strategy_file(path)
        with pytest.raises(sw.SettingError, match="as they stand"):
            sw.plan(Marked(), (draw(16, 8),), parallel_mode=mode, strategies=path)
    model, _ = trained(path)
    with pytest.raises(sw.SettingError, match="comes too late"):
        model.load_operator_strategy_file(path)
    with pytest.raises(sw.SettingError, match="no folder"):
        model.save_operator_strategy_file(tmp_path / "nowhere" / "plan.json")
    with pytest.raises(sw.PlanError, match="nowhere.json"):
        sw.AutoParallel(Marked()).load_operator_strategy_file(tmp_path / "nowhere.json")
    sw.init()
    model = sw.AutoParallel(nn.Sequential(nn.Linear(8, 8, dtype=torch.float64))).dataset_strategy("full_batch")
    sw.plan(model.net, (draw(16, 8),), devices=4).save(path)
    model.load_operator_strategy_file(path)(draw(16, 8))
    assert model.plan.devices == 4, "the plan says how many where nobody else does"


def in_processes(rank: int, world: int, folder: str) -> tuple:
    """Each rank reads the plan, each runs its own part, the first one writes."""
    saved = Path(folder) / f"saved_by_{rank}.json"
    sw.init()
    model = sw.AutoParallel(Marked(None, None, None), nn.CrossEntropyLoss()).dataset_strategy("full_batch")
    model.load_operator_strategy_file(Path(folder) / "plan.json").save_operator_strategy_file(saved)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(draw(16, 8), labels(16))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    broken = sw.AutoParallel(Marked(None), nn.CrossEntropyLoss())
    broken.load_operator_strategy_file(Path(folder) / "other.json")
    try:
        broken.dataset_strategy("full_batch")(draw(16, 8), labels(16))
        text = ""
    except sw.PlanError as error:
        text = str(error)
    return losses, sent(model.plan) if rank == 0 else None, tuple(model.w1.to_local().shape), saved.exists(), text


def test_in_processes(tmp_path: Path) -> None:
    marked = Marked(((2, 2), (2, 1)), ((4, 1),), ((1, 4), (4, 1)))
    plan = sw.plan(marked, (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=4)
    plan.save(tmp_path / "plan.json")
    sw.plan(Marked(None, None, None), (draw(32, 8),), nn.CrossEntropyLoss(), labels(32), devices=4).save(
        tmp_path / "other.json"
    )
    ranks = run_ranks(in_processes, 4, str(tmp_path))
    local = trained(None)[1]
    for rank, (losses, _, shape, exists, text) in enumerate(ranks):
        assert losses == pytest.approx(local, abs=1e-10)
        assert shape == plan.parameters["w1"].local_shape(rank)
        assert exists == (rank == 0)
        assert "other.json:" in text and "f64[32, 8]" in text, "the same error on every rank"
    assert [c[:-1] for c in ranks[0][1]] == [c[:-1] for c in sent(plan, 0)]
