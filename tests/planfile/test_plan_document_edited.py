"""A plan's document changed by hand: an edited line is a mark, an impossible one is named, as is what is no plan."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import operator_functional
import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from plan_documents import DEVICES, edited, made, meta
from torch import nn

import shardwright as sw
from shardwright.planfile.document_writer import written
from shardwright.planfile.encoding import fingerprint_of, packed

# -- edited by hand ----------------------------------------------------------------------------------------------------


def test_an_edited_line_is_a_mark(tmp_path: Path) -> None:
    plan, path = made("tutorial"), tmp_path / "plan.json"
    edited(path, plan, "matmul_2", in_strategy=[[2, 4], [4, 1]])
    loaded = sw.Plan.load(path)
    assert loaded.operator("matmul_2").cause == "mark" and loaded.operator("flatten").cause == "follow"
    with torch.device("meta"):
        net = operator_functional.Network(torch.float32)
    asked = sw.plan(
        net,
        (meta(32, 1, 28, 28),),
        nn.CrossEntropyLoss(),
        meta(32, dtype=torch.int64),
        devices=DEVICES,
        marks={"matmul_2": ((2, 4), (4, 1))},
    )
    assert loaded.fingerprint == asked.fingerprint != plan.fingerprint
    assert loaded.cost == asked.cost and loaded.collectives(3) == asked.collectives(3)
    loaded.save(path)
    assert sw.Plan.load(path).operator("matmul_2").cause == "mark", "it stays one"


def test_what_is_written_otherwise_and_means_the_same_is_no_edit(tmp_path: Path) -> None:
    plan, path = made("tutorial"), tmp_path / "plan.json"
    edited(
        path,
        plan,
        "matmul_2",
        in_strategy=[["a", "None"], ["None", "None"]],
        device_matrix=[8],
        alias_name=["a"],
        seconds=17.0,
    )
    assert sw.Plan.load(path).operator("matmul_2").cause == "batch"
    path.write_text(json.dumps(json.loads(written(plan))))
    assert sw.Plan.load(path).fingerprint == plan.fingerprint, "a document in one line is one too"


def test_a_bound_holds_for_what_was_searched_alone(tmp_path: Path) -> None:
    plan, path = made("tutorial, searched"), tmp_path / "plan.json"
    plan.save(path)
    assert sw.Plan.load(path).bound == plan.bound is not None
    edited(path, plan, "matmul_2", in_strategy=[[1, 1], [1, 1]], device_matrix=None, alias_name=None, open=None)
    loaded = sw.Plan.load(path)
    assert loaded.bound is None and loaded.cost > plan.cost
    text = json.loads(written(plan))
    text["cluster"]["memory"] *= 2  # which costs nothing
    path.write_text(json.dumps(text))
    loaded = sw.Plan.load(path)
    assert loaded.bound is None and loaded.cost == plan.cost


def test_a_parameter_s_line_settles_how_it_is_stored(tmp_path: Path) -> None:
    plan, path = made("tutorial"), tmp_path / "plan.json"
    edited(path, plan, "w3", "parameters", storage=[8, 1])
    loaded = sw.Plan.load(path)
    assert loaded.parameters["w3"].storage.cuts == (8, 1) and loaded.parameters["w3"].layout.cuts == (1, 1)
    gathers = [c for c in loaded.collectives(0) if c.phase == "storage"]
    assert [(c.op, c.operator) for c in gathers] == [("all_gather", "matmul_2")]
    loaded.save(path)
    assert sw.Plan.load(path).fingerprint == loaded.fingerprint
    line = edited(path, plan, "w3", "parameters", storage=[1, 8])
    with pytest.raises(sw.LayoutError, match=rf"(?s)'w3'.*plan.json:{line}.*8"):
        sw.Plan.load(path)


CUTS = st.lists(st.lists(st.sampled_from([1, 1, 2, 2, 3, 4, 8]), max_size=3), min_size=1, max_size=3)


@given(name=st.sampled_from(["matmul1", "relu1", "matmul_2", "cross_entropy_loss", "flatten"]), cuts=CUTS)
@example(name="relu1", cuts=[[1, 2], [1, 2]])
@example(name="matmul1", cuts=[[1, 2], [1, 2]])
@settings(max_examples=60)
def test_an_edited_line_is_heeded_or_named(name: str, cuts: list[list[int]], tmp_path_factory: Any) -> None:
    plan, path = made("tutorial"), tmp_path_factory.getbasetemp() / "edited.json"
    line = edited(path, plan, name, in_strategy=cuts)
    try:
        loaded = sw.Plan.load(path)
    except sw.ShardwrightError as error:
        assert name in str(error.operator) and error.source == f"{path}:{line}" and error.legal
    else:
        asked = tuple(map(tuple, cuts))
        if "matmul" in name and asked[0] == asked[1] and asked[0][0] != asked[0][1]:
            asked = (asked[0][0], 1), (1, asked[0][1])  # both operands are gathered, as of such a mark
        assert loaded.operator(name).in_strategy == asked
        same = loaded.operator(name).in_strategy == plan.operator(name).in_strategy
        assert loaded.operator(name).cause == (plan.operator(name).cause if same else "mark")
        assert {o.name for o in loaded.operators if o.in_strategy != plan.operator(o.name).in_strategy} == (
            set() if same else {name}
        )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"in_strategy": [[2, 3], [3, 1]]}, "does not divide by 3"),
        ({"in_strategy": [[2, 4], [2, 1]]}, "shared factor"),
        ({"in_strategy": [[32, 1], [1, 1]]}, "32 devices"),
        ({"in_strategy": [[2, 4]]}, "1 entries"),
        ({"in_strategy": "whole"}, "in_strategy is 'whole'"),
        ({"in_strategy": None}, "in_strategy is None"),
        ({"in_strategy": [["a", "b"], ["b", "None"]]}, "names axes"),
        ({"in_strategy": [["a", "b"], ["b", "None"]], "device_matrix": [2, 2], "alias_name": ["a", "b"]}, "4 devices"),
        (
            {"in_strategy": [["a", "b"], ["b", "None"]], "device_matrix": [2, 4], "alias_name": ["a", "a"]},
            "repeats a name",
        ),
        ({"in_strategy": [["a", "z"], ["z", "None"]], "device_matrix": [2, 4], "alias_name": ["a", "b"]}, "axis 'z'"),
        ({"in_strategy": [["a", "a"], ["a", "None"]], "device_matrix": [2, 4], "alias_name": ["a", "b"]}, "used twice"),
        ({"out_strategy": [[3, 1]]}, "3"),
        ({"out_strategy": [[2, 1], [2, 1]]}, "one entry per output"),
        ({"open": {"device_matrix": [2, 4], "alias_name": ["a", "b"], "axes": ["a"]}}, "does not come to it"),
        ({"open": 5}, "names no axes"),
        ({"recompute": {"call": "first"}}, "recompute"),
        ({"op": "conv2d"}, "the line is of conv2d"),
        ({"shapes": "f32[64, 784], f32[784, 512] -> f32[64, 512]"}, r"the line is of matmul f32\[64, 784\]"),
    ],
)
def test_an_impossible_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    line = edited(path, made("tutorial"), "matmul1", **changes)
    with pytest.raises(sw.ShardwrightError, match=message) as raised:
        sw.Plan.load(path)
    assert "matmul1" in str(raised.value) and f"plan.json:{line}" in str(raised.value) and raised.value.legal


# -- files that are no plans -------------------------------------------------------------------------------------------


def changed(path: Path, change: Callable[[dict[str, Any]], None], name: str = "tutorial") -> None:
    words = json.loads(written(made(name)))
    change(words)
    path.write_text(json.dumps(words, indent=1))


def recaptured(change: Callable[[dict[str, Any]], None]) -> Callable[[dict[str, Any]], None]:
    def apply(words: dict[str, Any]) -> None:
        held = json.loads(zlib.decompress(base64.b64decode(words["captured"])))
        change(held["graph"])
        words.update(captured=packed(held), graph=fingerprint_of(held["graph"]))

    return apply


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda w: w.update(schema=2), "a plan of schema 2"),
        (lambda w: w.pop("schema"), "it has no schema"),
        (lambda w: w.pop("operators"), "the plan has no operators"),
        (lambda w: w.pop("parameters"), "the plan has no parameters"),
        (lambda w: w.pop("captured"), "no captured graph"),
        (lambda w: w.update(captured=w["captured"][:200]), "the captured graph cannot be read"),
        (lambda w: w.update(captured=packed([1])), "the captured graph cannot be read"),
        (lambda w: w.update(graph="0123456789abcdef"), "the plan is of '0123456789abcdef'"),
        (lambda w: w.update(devices=0), "devices: 0"),
        (lambda w: w.update(devices="8"), "devices: '8'"),
        (lambda w: w.update(mode="by_chance"), "mode: 'by_chance'"),
        (lambda w: w.update(dataset_strategy="thrice"), "unknown dataset_strategy 'thrice'"),
        (lambda w: w.update(dataset_strategy=[[3, 1, 1, 1], [3]]), "dataset_strategy"),
        (lambda w: w.update(hsdp={"level": 3}), "hsdp"),
        (lambda w: w.update(optimizer="by_hand"), "optimizer='by_hand'"),
        (lambda w: w.update(cluster={"name": "c"}), "the field 'levels' is missing"),
        (lambda w: w["operators"].append({"op": "relu"}), r"operators\[7\] names none"),
        (lambda w: w["operators"].append(dict(w["operators"][1])), "a second line for 'matmul1'"),
        (lambda w: w["operators"][1].update(name="matmul7"), r"(?s)no operator 'matmul7'.*matmul1"),
        (lambda w: w["operators"].pop(1), "no line for matmul1"),
        (lambda w: w["parameters"][0].update(name="w7"), "no parameter 'w7'"),
        (lambda w: w.update(hspd=None), r"(?s)unknown field 'hspd'.*\"hsdp\""),
        (lambda w: w["operators"][1].update(in_stratgey=[[1, 8]]), r"(?s)json:\d+: .*'matmul1'.*\"in_strategy\""),
        (lambda w: w["parameters"][0].update(storge=[1, 8]), r"(?s)unknown field 'storge'.*\"storage\""),
    ],
)
def test_a_document_that_is_none(change: Callable, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    changed(path, change)
    with pytest.raises(sw.ShardwrightError, match=message) as raised:
        sw.Plan.load(path)
    assert "broken.json" in str(raised.value)


def test_devices_that_do_not_fit_name_the_first_line_that_they_break(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    changed(path, lambda w: w.update(devices=4, dataset_strategy="full_batch"))
    with pytest.raises(sw.StrategyError, match=r"(?s)matmul1 \(plan|matmul1.*plan.json:\d+.*8 devices, there are 4"):
        sw.Plan.load(path)
    changed(path, lambda w: w.update(devices=16))
    with pytest.raises(
        sw.PlanError, match=r"(?s)plan.json.*'h100x8' has 8 devices, the plan 16.*legal: levels with 16"
    ):
        sw.Plan.load(path)
    changed(path, lambda w: w.update(devices=16, cluster=sw.Cluster.of("h100x8x2").to_dict()))
    loaded = sw.Plan.load(path)
    assert loaded.devices == 16
    assert {o.cause for o in loaded.operators if math.prod(map(math.prod, o.in_strategy)) > 1} == {"mark"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "a", "None", "mark", "full_batch", "level2"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "call", "layout", "device_matrix"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(data=st.data())
@settings(max_examples=100)
def test_whatever_stands_in_a_document_it_is_read_or_refused(data: st.DataObject, tmp_path_factory: Any) -> None:
    words = json.loads(written(made(data.draw(st.sampled_from(["tutorial, hsdp", "hybrid_parallel"])))))
    place: Any = words
    for _ in range(data.draw(st.integers(0, 3))):
        inner = [x for x in (place.values() if isinstance(place, dict) else place) if isinstance(x, (dict, list)) and x]
        if inner:
            place = data.draw(st.sampled_from(inner))
    keys = list(place) if isinstance(place, dict) else list(range(len(place)))
    extra = ["open", "out_strategy", "recompute", "leaves", "device_matrix", "alias_name", "uneven", "own", "settled"]
    key = data.draw(st.sampled_from(keys + (extra if isinstance(place, dict) else [])))
    place[key] = data.draw(JSON)
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps(words))
    try:
        loaded = sw.Plan.load(path)
    except sw.ShardwrightError as error:
        assert "fuzzed.json" in str(error)
    else:
        assert loaded.price.total > 0


@given(part=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60)
def test_a_document_that_is_cut_short(part: float, tmp_path_factory: Any) -> None:
    path, text = tmp_path_factory.getbasetemp() / "short.json", written(made("tutorial")).rstrip()
    path.write_text(text[: int(part * len(text))])
    with pytest.raises(sw.PlanError, match="short.json"):
        sw.Plan.load(path)


def test_no_document_at_all(tmp_path: Path) -> None:
    with pytest.raises(sw.PlanError, match=r"(?s)nowhere.json.*No such file"):
        sw.Plan.load(tmp_path / "nowhere.json")
    with pytest.raises(sw.PlanError, match="directory"):
        sw.Plan.load(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(sw.PlanError, match="it is not text"):
        sw.Plan.load(tmp_path / "bytes")
    (tmp_path / "list").write_text("[1, 2]")
    with pytest.raises(sw.PlanError, match="the plan is a list, and no object"):
        sw.Plan.load(tmp_path / "list")


@pytest.mark.parametrize(
    "old, new, message",
    [
        (
            "document_tests.doubled.default",
            "document_tests.tripled.default",
            "no operator document_tests.tripled.default",
        ),
        (
            "plan_documents:Triple",
            "plan_documents:Other",
            "no torch.autograd.Function Other in the module plan_documents",
        ),
    ],
)
def test_an_operator_that_is_not_registered_here(old: str, new: str, message: str, tmp_path: Path) -> None:
    path, name = tmp_path / "plan.json", old.split(".")[-2].split(":")[-1] if "." in old else "Triple"

    def renamed(graph: dict[str, Any]) -> None:
        text = json.dumps(graph).replace(old, new)
        assert text != json.dumps(graph)
        graph.update(json.loads(text))

    changed(path, recaptured(renamed), "odd")
    with pytest.raises(sw.PlanError, match=message) as raised:
        sw.Plan.load(path)
    assert name in str(raised.value) and "import" in raised.value.legal
