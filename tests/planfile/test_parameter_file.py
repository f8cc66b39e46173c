"""Files of where parameters lie: written, read, loaded into models; layouts inferred without a step; ranks to be read
from."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from pipeline_networks import Chain, staged
from ranks import run_ranks
from small_networks import D, Marked, draw, labels
from torch import nn
from torch.distributed.tensor import DTensor

import shardwright as sw
from shardwright.errors import LayoutError, PlanError, RuntimeMismatchError, SettingError, StrategyError
from shardwright.planfile.parameter_file import ParameterStrategies

DEVICES = 8


class Normed(nn.Module):
    """A tied weight, a batch norm's buffers, one that is not stored, and a layer that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.again, self.unused = (
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 8, False),
            nn.Linear(2, 3),
        )
        self.again.weight = self.up.weight
        self.register_buffer("scale", torch.ones(()), persistent=False)
        sw.shard(self.up, ((2, 1), (4, 1)))
        sw.shard(self.again, ((2, 1), (4, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.norm(self.up(x))) * self.scale


def plan_of(net: nn.Module, mode: str = "semi_auto", devices: int = DEVICES, **given: Any) -> sw.Plan:
    return sw.plan(net, (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=devices, parallel_mode=mode, **given)


def model_of(
    mode: str = "semi_auto", net: nn.Module | None = None, devices: int = DEVICES, **given: Any
) -> sw.AutoParallel:
    sw.init(devices=devices)
    return sw.AutoParallel(net or Marked(), nn.CrossEntropyLoss(), mode, **given).dataset_strategy("full_batch")


def storages(parameters: Any) -> dict[str, sw.Layout]:
    return {name: parameter.storage for name, parameter in parameters.items()}


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    words = json.loads(path.read_text())
    change(words)
    head = ",\n".join(
        f"{json.dumps(k)}: {json.dumps(v)}" for k, v in words.items() if k not in ("parameters", "buffers")
    )
    lines = ["{\n" + head]
    for section in ("parameters", "buffers"):
        if section in words:
            lines.append(f'"{section}": [\n' + ",\n".join(map(json.dumps, words[section])) + "\n]")
    path.write_text(",\n".join(lines) + "\n}\n")
    return path


def written(tmp_path: Path, plan: Any = None) -> Path:
    path = tmp_path / "parameters.json"
    (_of_marked() if plan is None else ParameterStrategies.of(plan)).save(path)
    return path


@cache
def _of_marked() -> ParameterStrategies:
    return ParameterStrategies.of(plan_of(Marked()))


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_small_stable_and_reviewable(tmp_path: Path) -> None:
    path = written(tmp_path, plan_of(Marked(), hsdp={"threshold": 0}))
    assert (
        path.read_text()
        == """{
  "schema": 1,
  "kind": "parameter strategies",
  "devices": 8,
  "parameters": [
    {"name": "w1", "shape": [8, 16], "dtype": "float64", "storage": {"device_matrix": [2, 4], "alias_name": \
["a", "b"], "layout": [["b", "a"], "None"]}},
    {"name": "w2", "shape": [16, 16], "dtype": "float64", "storage": [8, 1]},
    {"name": "head.weight", "shape": [8, 16], "dtype": "float64", "storage": [8, 1]},
    {"name": "head.bias", "shape": [8], "dtype": "float64", "storage": [8]}
  ]
}
"""
    )
    assert ParameterStrategies.read(path).text() == path.read_text()


@pytest.mark.parametrize(
    "mode, hsdp",
    [
        ("semi_auto", None),
        ("semi_auto", {"threshold": 0, "shard_size": 2}),
        ("data_parallel", {"threshold": 0}),
        ("dynamic_programming", None),
    ],
)
def test_a_file_and_a_plan_say_the_same(mode: str, hsdp: Any, tmp_path: Path) -> None:
    plan = plan_of(Normed().double(), mode, hsdp=hsdp)
    message, path = ParameterStrategies.of(plan), tmp_path / "plan.json"
    plan.save(path)
    assert ParameterStrategies.read(path) == message == ParameterStrategies.read(written(tmp_path, plan))
    assert set(message.parameters) == {n for n, _ in Normed().named_parameters()}  # a tied one once
    assert set(message.buffers) == {n for n, _ in Normed().named_buffers()}
    for name, held in message.all.items():
        assert all(held.slice(rank) == plan.parameters[name].slice(rank) for rank in range(DEVICES))


def test_of_a_pipeline_each_line_names_its_ranks(tmp_path: Path) -> None:
    plan = sw.plan(
        Chain(),
        (draw(16, 16),),
        nn.MSELoss(),
        draw(16, 16),
        devices=DEVICES,
        hsdp={"threshold": 0},
        pipeline={"stages": 2, "micro_batches": 4, "stage_config": staged(2)},
    )
    message = ParameterStrategies.read(written(tmp_path, plan))
    assert message == ParameterStrategies.of(plan) and message.devices == DEVICES
    with pytest.raises(SettingError, match='stages="auto"'):
        sw.plan(
            Chain(),
            (draw(16, 16),),
            nn.MSELoss(),
            draw(16, 16),
            devices=DEVICES,
            pipeline={"stages": "auto"},
            param_strategies=tmp_path / "parameters.json",
        )
    assert [(held.ranks, held.layout.devices) for held in message.parameters.values()] == [(range(0, 4), 4)] * 4 + [
        (range(4, 8), 4)
    ] * 4
    for name, held in message.parameters.items():
        assert all(held.slice(rank) == plan.parameters[name].slice(rank) for rank in range(DEVICES))


@settings(max_examples=30)
@given(st.lists(st.sampled_from([1, 2, 3, 4, 7]), min_size=1, max_size=3), st.data())
def test_boxes_fill_a_tensor_and_do_not_overlap(cuts: list[int], data: st.DataObject) -> None:
    devices = torch.Size(cuts).numel() * data.draw(st.sampled_from([1, 2, 3]))
    shape = tuple(data.draw(st.integers(0, 9)) for _ in cuts)
    held = ParameterStrategies(devices + 2, {"w": _lying(shape, sw.Layout.from_cuts(devices, cuts), 1)}, {}).all["w"]
    seen = torch.zeros(shape, dtype=torch.int64)
    for box, ranks in held.boxes:
        seen[box] += 1
        assert all(held.slice(rank) == box for rank in ranks)
    assert bool((seen == 1).all())
    assert all(held.slice(rank) == (slice(0, 0),) * len(shape) for rank in (0, devices + 1))


def _lying(shape: tuple[int, ...], layout: sw.Layout, first: int = 0) -> Any:
    from shardwright.planfile.parameter_file import TensorStorage as Storage

    return Storage(shape, "float64", layout, first)


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: w["parameters"][1].update(storage=[3, 1]), r"'w2' \(.*:7\): the cuts \(3, 1\)"),
        (lambda w: w["parameters"][1].update(storage=[4]), r"'w2' \(.*:7\): the layout has 1 dims"),
        (lambda w: w["parameters"][1].update(storage="whole"), r"'w2' \(.*:7\): 'whole' is no layout"),
        (lambda w: w["parameters"][1].update(shape=[12, 16], storage=[8, 1]), r"'w2' \(.*:7\): dim 0 of \(12, 16\)"),
        (lambda w: w["parameters"][1].update(shape="16x16"), r"'w2' \(.*:7\): shape"),
        (lambda w: w["parameters"][1].update(dtype=None), r"'w2' \(.*:7\): dtype"),
        (lambda w: w["parameters"][1].update(ranks="4-11"), r"'w2' \(.*:7\): ranks"),
        (lambda w: w["parameters"][1].update(ranks="0-3"), r"'w2' \(.*:7\): .*4"),
        (lambda w: w["parameters"][1].update(name="w1"), r":7: a second line for 'w1'"),
        (lambda w: w["parameters"][1].pop("name"), r"parameters\[1\] names none"),
        (lambda w: w.update(devices=0), "devices: 0"),
        (lambda w: w.update(schema=2), "schema 2"),
        (lambda w: w.update(kind="recipes"), "neither"),
        (lambda w: w.pop("parameters"), "no parameters"),
        (lambda w: w.update(buffers=[w["parameters"][0]]), "'w1' is a parameter too"),
    ],
)
def test_a_line_that_cannot_be(change: Callable, says: str, tmp_path: Path) -> None:
    path = edited(written(tmp_path), change)
    with pytest.raises((PlanError, LayoutError), match=says) as error:
        ParameterStrategies.read(path)
    assert str(path) in str(error.value) and error.value.legal


@pytest.mark.parametrize(
    "text, says", [("", "cut short"), ("[]", "neither"), ('{"a": 1}', "neither"), (None, "No such file")]
)
def test_no_such_file(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError, match=says):
        sw.AutoParallel(Marked()).load_param_strategy_file(path)


# -- on a model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel", "sharding_propagation", "dynamic_programming"])
def test_a_model_stores_its_parameters_as_a_file_says(mode: str, tmp_path: Path) -> None:
    """Whatever its own mode would have them, and trains as ever."""
    path = written(tmp_path, plan_of(Marked(), hsdp={"threshold": 0}))
    before = ParameterStrategies.read(path)
    first = ((2, 4), (4, 1)) if mode == "sharding_propagation" else None  # which wants a mark

    def trained(*files: Path) -> tuple[list[float], sw.AutoParallel]:
        model, losses = model_of(mode, Marked(first, None, None)), []
        for file in files:
            model.load_param_strategy_file(file)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(draw(16, 8), labels(16))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model

    losses, model = trained(path)
    assert ParameterStrategies.of(model.plan) == before
    plain, other = trained()
    assert losses == pytest.approx(plain, abs=1e-10) and storages(other.plan.parameters) != storages(
        model.plan.parameters
    )
    asked = plan_of(Marked(first, None, None), mode, param_strategies=path)
    assert asked.fingerprint == model.plan.fingerprint


def test_lines_may_be_edited_and_left_out(tmp_path: Path) -> None:
    def change(words: dict[str, Any]) -> None:
        words["parameters"] = words["parameters"][1:2]
        words["parameters"][0]["storage"] = [2, 4]

    path = edited(written(tmp_path), change)
    found = model_of().load_param_strategy_file(path).infer_layout(draw(16, 8), labels(16))
    plain = model_of().infer_layout(draw(16, 8), labels(16))
    assert found["w2"].storage == sw.Layout.from_cuts(8, (2, 4)) != plain["w2"].storage
    assert found["w2"].layout == plain["w2"].layout  # the operator's is what it was
    assert all(found[name] == plain[name] for name in plain if name != "w2")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: w["parameters"][1].update(name="w3"), r":7: the model has no parameter 'w3'.*\n.*w"),
        (
            lambda w: w["parameters"][1].update(shape=[32, 16]),
            r"'w2' \(.*:7\): the line is of float64\[32, 16\], the model has",
        ),
        (lambda w: w["parameters"][1].update(dtype="float32"), r"'w2' \(.*:7\): the line is of float32"),
        (lambda w: (w.update(devices=16), w["parameters"].pop(0)), "for 16 devices, there are 8"),
        (
            lambda w: w.update(buffers=[{"name": "b", "shape": [8], "dtype": "float32", "storage": [8]}]),
            ":1.*no buffer 'b'",
        ),
        (lambda w: w["parameters"][1].update(ranks="0-3", storage=[4, 1]), r"'w2' \(.*:7\): "),
    ],
)
def test_a_file_of_another_model(change: Callable, says: str, tmp_path: Path) -> None:
    path = edited(written(tmp_path), change)
    with pytest.raises((PlanError, LayoutError), match=says):
        model_of().load_param_strategy_file(path)(draw(16, 8), labels(16))
    with pytest.raises((PlanError, LayoutError), match=says):
        plan_of(Marked(), param_strategies=path)


def test_cuts_that_do_not_divide_want_a_model_that_allows_them(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 13, dtype=D)
            sw.shard(self.up, ((1, 1), (8, 1)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.up(x)

    sw.init(devices=8)
    path = tmp_path / "parameters.json"
    model = sw.AutoParallel(Odd(), uneven=True).dataset_strategy("full_batch").save_param_strategy_file(path)
    found = model.infer_layout(draw(16, 8))
    assert [found["up.weight"].local_shape(rank)[0] for rank in range(8)] == [2] * 6 + [1, 0]
    assert json.loads(path.read_text())["uneven"] is True
    again = sw.AutoParallel(Odd(), uneven=True).dataset_strategy("full_batch").load_param_strategy_file(path)
    assert again.infer_layout(draw(16, 8)) == found
    words = json.loads(path.read_text())
    words["parameters"][1]["storage"] = {"device_matrix": [2, 4], "alias_name": ["a", "b"], "layout": [["b", "a"]]}
    (tmp_path / "odd.json").write_text(json.dumps(words))
    with pytest.raises(LayoutError, match="several digits"):
        sw.AutoParallel(Odd(), uneven=True).dataset_strategy("full_batch").load_param_strategy_file(
            tmp_path / "odd.json"
        ).infer_layout(draw(16, 8))
    net = Odd()
    sw.shard(net.up, ((8, 1), (1, 1)))
    with pytest.raises(LayoutError, match=r"'up.weight' .*do not divide"):
        sw.AutoParallel(net).dataset_strategy("full_batch").load_param_strategy_file(path)(draw(16, 8))


def test_buffers_are_whole(tmp_path: Path) -> None:
    path = edited(written(tmp_path, plan_of(Normed().double())), lambda w: w["buffers"][1].update(storage=[8]))
    assert json.loads(path.read_text())["buffers"][1]["shape"] == [8]
    with pytest.raises(LayoutError, match="of a buffer"):
        plan_of(Normed().double(), param_strategies=path)


def test_when_files_are_taken_and_written(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"
    model = model_of()
    assert model.save_param_strategy_file(path) is model and not path.exists()
    with pytest.raises(SettingError, match="no folder"):
        model.save_param_strategy_file(tmp_path / "no" / "such.json")
    model(draw(16, 8), labels(16))
    assert ParameterStrategies.read(path) == ParameterStrategies.of(model.plan)
    with pytest.raises(SettingError, match="too late"):
        model.load_param_strategy_file(path)
    model.save_param_strategy_file(tmp_path / "late.json")
    assert (tmp_path / "late.json").read_text() == path.read_text()
    for mode in ("stand_alone", "hybrid_parallel"):
        with pytest.raises(SettingError, match=mode):
            sw.AutoParallel(Marked(), parallel_mode=mode).load_param_strategy_file(path)
        with pytest.raises(SettingError, match=mode):
            plan_of(Marked(None, None, None), mode, param_strategies=path)


def test_a_pipeline_by_a_file(tmp_path: Path) -> None:
    path = tmp_path / "parameters.json"

    def piped(**given: Any) -> sw.AutoParallel:
        sw.init(devices=4)
        return (
            sw.AutoParallel(Chain(), nn.MSELoss())
            .dataset_strategy("full_batch")
            .pipeline(stages=2, micro_batches=4, stage_config=staged(2))
        )

    stored = piped().hsdp(threshold=0).save_param_strategy_file(path).infer_layout(draw(16, 16), draw(16, 16))
    model = piped().load_param_strategy_file(path)
    loss = model(draw(16, 16), draw(16, 16))
    assert storages(model.plan.parameters) == storages(stored)
    assert loss.item() == pytest.approx(piped()(draw(16, 16), draw(16, 16)).item(), abs=1e-12)
    moved = (
        sw.AutoParallel(Chain(), nn.MSELoss())
        .dataset_strategy("full_batch")
        .pipeline(stages=2, micro_batches=4, stage_config={"layers.0": 0, "layers.1": 1, "layers.2": 1, "layers.3": 1})
    )
    with pytest.raises(
        PlanError, match=r"'layers.1.weight' \(.*parameters.json:8\): the plan cannot store it so.*ranks 2-3"
    ):
        moved.load_param_strategy_file(path)(draw(16, 16), draw(16, 16))
    sw.init(devices=4)
    other = sw.AutoParallel(Chain(), nn.MSELoss()).dataset_strategy("full_batch").load_param_strategy_file(path)
    with pytest.raises((PlanError, LayoutError), match="layers.0.weight"):
        other(draw(16, 16), draw(16, 16))


# -- layouts without a step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["semi_auto", "data_parallel", "recursive_programming", "stand_alone"])
def test_inferred_layouts_are_those_of_the_call(mode: str) -> None:
    model = model_of(mode, Marked() if mode == "semi_auto" else Marked(None, None, None))
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = model.infer_layout(draw(16, 8), labels(16))
    with pytest.raises(SettingError, match="no plan before the first call"):
        model.plan
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    model.dataset_strategy("full_batch")  # settings may still come
    model(draw(16, 8), labels(16))
    assert found == model.plan.parameters == model.infer_layout(draw(16, 8), labels(16))
    assert found["w1"].shape == (8, 16)
    assert storages(model.infer_layout(draw(32, 8), labels(32))) == storages(found)  # they lie where they lie


def test_no_parameter_is_made() -> None:
    sw.init(devices=1024)
    with sw.no_init_parameters():
        net = nn.Linear(1 << 20, 1 << 20)  # 4 TiB
    sw.shard(net, ((1, 1), (1024, 1)))
    model = sw.AutoParallel(net).dataset_strategy("full_batch")
    found = model.infer_layout(torch.empty(4, 1 << 20, device="meta"))
    assert found["weight"].local_shape(77) == (1024, 1 << 20) and net.weight.is_meta


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(StrategyError, match="matmul1"):
        model_of(net=Marked(first=((3, 1), (1, 1)))).infer_layout(draw(16, 8), labels(16))


def _on_ranks(rank: int, world: int, folder: str) -> Any:
    path = Path(folder) / "parameters.json"
    sw.init()
    torch.manual_seed(rank)  # values differ: nothing is compared until something runs
    net = Marked(((1, 2), (2, 1)), ((2, 1),), ((1, 2), (2, 1)))
    with torch.no_grad():
        net.w1.normal_()
    model = sw.AutoParallel(net, nn.CrossEntropyLoss()).dataset_strategy("full_batch").hsdp(threshold=0)
    found = model.save_param_strategy_file(path).infer_layout(draw(16, 8), labels(16))
    assert not any(isinstance(p, DTensor) for p in net.parameters())
    assert path.exists() or rank
    try:
        model.infer_layout(draw(16 + 16 * (rank == 1), 8), labels(16 + 16 * (rank == 1)))
    except RuntimeMismatchError as error:
        assert "ranks [1] feed other inputs" in str(error)
    else:
        raise AssertionError("nobody noticed")
    torch.distributed.barrier()
    torch.manual_seed(0)
    model = sw.AutoParallel(Marked(None, None, None), nn.CrossEntropyLoss()).dataset_strategy("full_batch")
    model.load_param_strategy_file(path)
    loss = model(draw(16, 8), labels(16))
    assert {n: tuple(p.to_local().shape) for n, p in model.named_parameters()} == {
        n: p.local_shape(rank) for n, p in found.items()
    }
    return loss.item(), {n: str(p.storage) for n, p in found.items()}


def test_in_processes(tmp_path: Path) -> None:
    reported = run_ranks(_on_ranks, 2, str(tmp_path))
    assert all(t == reported[0] for t in reported)
    assert reported[0][0] == pytest.approx(
        model_of(net=Marked(None, None, None))(draw(16, 8), labels(16)).item(), abs=1e-12
    )


# -- which ranks to read from ------------------------------------------------------------------------------------------


def _file(tmp_path: Path, name: str, devices: int, **layouts: sw.Layout) -> Path:
    path = tmp_path / name
    ParameterStrategies(devices, {n: _lying((8, 16), layout) for n, layout in layouts.items()}, {}).save(path)
    return path


def test_ranks_that_a_rank_is_made_of(tmp_path: Path) -> None:
    cut = sw.Layout.from_cuts
    rows8 = _file(tmp_path, "rows8", 8, w=cut(8, (8, 1)))
    rows4 = _file(tmp_path, "rows4", 4, w=cut(4, (4, 1)))
    columns4 = _file(tmp_path, "columns4", 4, w=cut(4, (1, 4)))
    replicas = _file(tmp_path, "replicas", 8, w=cut(8, (2, 1)))
    both = _file(tmp_path, "both", 8, w=cut(8, (2, 1)), v=sw.Layout.of(8, [[sw.Digit(2, 1)], []]))
    whole8 = _file(tmp_path, "whole8", 8, w=cut(8, (1, 1)))
    ranks = sw.rank_list_for_transform
    assert [ranks(r, rows8, rows4) for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [ranks(r, rows4, rows8) for r in (0, 1, 7)] == [[0], [0], [3]]
    assert ranks(2, rows8, columns4) == list(range(8))
    assert ranks(0, rows8) == list(range(8)) and ranks(0) == [0] and ranks(3, None, rows4) == [0]
    assert [ranks(r, replicas, rows4) for r in range(4)] == [[0], [0], [4], [4]]
    assert ranks(0, both, _file(tmp_path, "two", 2, w=cut(2, (1, 1)), v=cut(2, (1, 1)))) == [0, 1, 4]
    assert ranks(5, whole8, rows8) == [0]
    for wrong in (-1, 4, True, "0"):
        with pytest.raises(SettingError, match="rank_id"):
            ranks(wrong, rows8, rows4)
    with pytest.raises(PlanError, match="no 'v' of shape"):
        ranks(0, both, rows4)
