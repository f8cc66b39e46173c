"""A plan as a document: what is loaded is what was saved, an edited line is a mark, an impossible one is named."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpt import GPT, mark
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import operator_functional
import layout_functional
import shardwright as sw
from networks import Marked, draw, labels
from ranks import run_ranks
from shardwright.layout import Digit
from shardwright.plan.document_writing import written
from shardwright.plan.graph_document import fingerprint, packed, read_graph, unpacked, write_graph
from shardwright.plan.spelling import read_assignment, read_layout, spell_assignment, spell_layout
from shardwright.report.difference import difference
from test_goldens_resnet import ResNetLike, expanded_cross_entropy

DEVICES = 8


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# -- networks ----------------------------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross_entropy = sw.Operator(F.cross_entropy)

    def forward(self, scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.cross_entropy(scores.flatten(0, 1), target.flatten())


def gpt(marked: bool = False, dropout: float = 0.0, vocabulary: int = 64, **given: Any) -> sw.Plan:
    with torch.device("meta"):
        net, loss = GPT(vocabulary=vocabulary, length=16, layers=1, width=32, heads=8, dropout=dropout), Loss()
    if marked:
        mark(net, loss, 2, 4)
    tokens = meta(8, 16, dtype=torch.int64)
    return sw.plan(net, (tokens,), loss, tokens, devices=DEVICES, **given)


def tutorial(script: Any = operator_functional, **given: Any) -> sw.Plan:
    with torch.device("meta"):
        net = script.Network(torch.float32)
    return sw.plan(net, (meta(32, 1, 28, 28),), nn.CrossEntropyLoss(), meta(32, dtype=torch.int64), devices=DEVICES,
                   **given)


def resnet(**given: Any) -> sw.Plan:
    with torch.device("meta"):
        net = ResNetLike()
    return sw.plan(net, (meta(16, 3, 16, 16),), expanded_cross_entropy, meta(16, dtype=torch.int64), devices=DEVICES,
                   **given)


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor, words):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * 3, None, None


@torch.library.custom_op("document_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda ctx, grad: grad * 2)
sw.rule(doubled, "... -> ...")


class Odd(nn.Module):
    """What a graph may hold beside plain operators: an operator and a function of the user's, a constant, buffers that
    change, complex and infinite numbers, a dtype, outputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.product = sw.shard(torch.matmul, ((2, 4), (4, 1)), ((8, 1),))
        self.weight = nn.Parameter(torch.empty(16, 16))
        self.table = torch.arange(16.0)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> dict[str, Any]:
        x = Triple.apply(doubled(self.norm(self.linear(x))), 3.0, {"how": "so"}) + self.table + shift
        x = self.product(x.clamp(min=-math.inf), self.weight).expand(3, -1, -1)
        return {"scores": x.to(torch.float64), "largest": x.detach().amax(-1), "seven": 7}


def odd(**given: Any) -> sw.Plan:
    return sw.plan(Odd(), (torch.empty(16, 8), torch.empty(16)), devices=DEVICES, **given)


def hybrid() -> sw.Plan:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = sw.layerwise_parallel(nn.Parameter(torch.empty(8, 2)))
            self.out = nn.Linear(2, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(sw.ops.all_reduce(x @ self.w))

    return sw.plan(Net(), (meta(16, 8),), nn.MSELoss(), meta(16, 4), devices=4, parallel_mode="hybrid_parallel",
                   dataset_strategy="data_parallel")


PLANS: dict[str, Callable[[], sw.Plan]] = {
    "tutorial": tutorial,
    "tutorial by Layouts": lambda: tutorial(layout_functional),
    "tutorial, its own part fed": lambda: tutorial(dataset_strategy="data_parallel"),
    "tutorial, fed by Layouts": lambda: tutorial(
        dataset_strategy=(sw.Layout((2, 2, 2), ("a", "b", "c"))(("b", "c"), "None", "None", "None"), (8,))),
    "tutorial, data_parallel": lambda: tutorial(parallel_mode="data_parallel", dataset_strategy="data_parallel"),
    "tutorial, stand_alone": lambda: tutorial(parallel_mode="stand_alone"),
    "tutorial, hsdp": lambda: tutorial(hsdp={"shard_size": 2, "threshold": 0, "optimizer_level": "level3"}),
    "tutorial, on a cluster": lambda: tutorial(cluster="h100x8"),
    "tutorial, propagated": lambda: tutorial(parallel_mode="sharding_propagation"),
    "tutorial, searched": lambda: tutorial(parallel_mode="dynamic_programming", cluster="h100x8"),
    "gpt": lambda: gpt(dropout=0.1),
    "gpt, marked": lambda: gpt(marked=True),
    "gpt, recomputed": lambda: gpt(marked=True, recompute=lambda op: op.kind == "gelu" or op.kind == "linear"),
    "gpt, hsdp": lambda: gpt(marked=True, hsdp={"threshold": 0, "optimizer_level": "level2"}),
    "gpt, searched": lambda: gpt(parallel_mode="dynamic_programming", hsdp={}),
    "gpt, uneven": lambda: gpt(marked=True, vocabulary=61, uneven=True),
    "resnet": resnet,
    "resnet, data_parallel": lambda: resnet(parallel_mode="data_parallel"),
    "resnet, hsdp": lambda: resnet(hsdp={}),
    "odd": odd,
    "odd, uneven": lambda: odd(uneven=True),
    "hybrid_parallel": hybrid,
}


@cache
def made(name: str) -> sw.Plan:
    return PLANS[name]()


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
    for name in ("devices", "mode", "fed", "carries", "stored", "hsdp", "own", "cluster", "found", "optimizer",
                 "regions"):
        assert getattr(loaded, name) == getattr(plan, name), name
    for decision, same in zip(plan.decisions.values(), loaded.decisions.values(), strict=True):
        for field in fields(decision):
            if field.name not in ("op", "rule"):
                assert getattr(same, field.name) == getattr(decision, field.name), field.name
    assert written(loaded) == written(plan) == path.read_text(), "the same text again"


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
    assert (back.inputs, back.parameters, back.buffers, back.outputs) == (graph.inputs, graph.parameters, graph.buffers,
                                                                         graph.outputs)
    assert (back.updates, back.aliases, back.in_spec, back.out_spec) == (graph.updates, graph.aliases, graph.in_spec,
                                                                        graph.out_spec)
    assert {n: (t.shape, t.dtype) for n, t in back.constants.items()} == \
        {n: (t.shape, t.dtype) for n, t in graph.constants.items()}


def test_a_document_has_all_that_a_plan_has() -> None:
    """Whatever is added to one is asked for in `test_what_is_loaded_is_what_was_saved`."""
    assert {f.name for f in fields(sw.Plan)} == {
        "graph", "devices", "mode", "fed", "decisions", "carries", "stored", "hsdp", "own", "cluster", "found",
        "optimizer"}


def test_one_operator_a_line_in_the_order_of_the_program() -> None:
    plan = made("gpt, marked")
    lines = written(plan).splitlines()
    begin, end = lines.index('  "operators": ['), lines.index('  "parameters": [')
    names = [json.loads(line.strip().rstrip(","))["name"] for line in lines[begin + 1:end - 1]]
    assert names == [op.name for op in plan.graph.ops]
    line = next(line for line in lines if '"blocks.0.up"' in line or '"name": "blocks.0.attention.query"' in line)
    said = json.loads(line.strip().rstrip(","))
    operator = plan.operator(said["name"])
    assert tuple(map(tuple, said["in_strategy"])) == operator.in_strategy
    assert said["seconds"] == pytest.approx(plan.price.by_operator[said["name"]], rel=1e-3)
    head = json.loads("\n".join(lines))
    assert head["total"] == {"seconds": plan.cost, "bound": None, "gap": None, "memory": plan.memory(0),
                             "peak": plan.peak}
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
    plans = [made("gpt"), made("resnet"), sw.plan(net, (meta(24, 24, 12, 12),), devices=1),
             sw.plan(Broadcasts(), (meta(24, 24),), devices=1)]
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
    said = {line["name"]: line for line in json.loads(written(made("tutorial")))["operators"]}
    assert said["matmul1"]["in_strategy"] == [[2, 4], [4, 1]] and "device_matrix" not in said["matmul1"]
    said = {line["name"]: line for line in json.loads(written(made("tutorial by Layouts")))["operators"]}
    assert said["matmul1"]["device_matrix"] == [2, 2, 2] and said["matmul1"]["alias_name"] == ["a", "b", "c"]
    assert said["matmul1"]["in_strategy"] == [["c", ["b", "a"]], [["b", "a"], "None"]]


# -- edited by hand ----------------------------------------------------------------------------------------------------


def edited(path: Path, plan: sw.Plan, name: str, section: str = "operators", **changes: Any) -> int:
    """Write the plan with other words in one line; the line's number. None takes a word out."""
    out, number = [], 0
    inside = False
    for i, line in enumerate(written(plan).splitlines(), 1):
        inside = line.startswith(f'  "{section}"') or inside and not line.startswith('  "')
        if inside and f'"name": "{name}",' in line:
            words = json.loads(line.strip().rstrip(",")) | changes
            words = {key: value for key, value in words.items() if value is not None}
            line, number = "    " + json.dumps(words) + ("," if line.endswith(",") else ""), i
        out.append(line)
    path.write_text("\n".join(out) + "\n")
    assert number
    return number


def test_an_edited_line_is_a_mark(tmp_path: Path) -> None:
    plan, path = made("tutorial"), tmp_path / "plan.json"
    edited(path, plan, "matmul_2", in_strategy=[[2, 4], [4, 1]])
    loaded = sw.Plan.load(path)
    assert loaded.operator("matmul_2").cause == "mark" and loaded.operator("flatten").cause == "follow"
    with torch.device("meta"):
        net = operator_functional.Network(torch.float32)
    asked = sw.plan(net, (meta(32, 1, 28, 28),), nn.CrossEntropyLoss(), meta(32, dtype=torch.int64), devices=DEVICES,
                    marks={"matmul_2": ((2, 4), (4, 1))})
    assert loaded.fingerprint == asked.fingerprint != plan.fingerprint
    assert loaded.cost == asked.cost and loaded.collectives(3) == asked.collectives(3)
    loaded.save(path)
    assert sw.Plan.load(path).operator("matmul_2").cause == "mark", "it stays one"


def test_what_is_written_otherwise_and_means_the_same_is_no_edit(tmp_path: Path) -> None:
    plan, path = made("tutorial"), tmp_path / "plan.json"
    edited(path, plan, "matmul_2", in_strategy=[["a", "None"], ["None", "None"]], device_matrix=[8], alias_name=["a"],
           seconds=17.0)
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
@settings(max_examples=60)
def test_an_edited_line_is_heeded_or_named(name: str, cuts: list[list[int]], tmp_path_factory: Any) -> None:
    plan, path = made("tutorial"), tmp_path_factory.getbasetemp() / "edited.json"
    line = edited(path, plan, name, in_strategy=cuts)
    try:
        loaded = sw.Plan.load(path)
    except sw.ShardwrightError as error:
        assert name in str(error.operator) and error.source == f"{path}:{line}" and error.legal
    else:
        assert loaded.operator(name).in_strategy == tuple(map(tuple, cuts))
        same = loaded.operator(name).in_strategy == plan.operator(name).in_strategy
        assert loaded.operator(name).cause == (plan.operator(name).cause if same else "mark")
        assert {o.name for o in loaded.operators if o.in_strategy != plan.operator(o.name).in_strategy} == \
            (set() if same else {name})


@pytest.mark.parametrize("changes, message", [
    ({"in_strategy": [[2, 3], [3, 1]]}, "does not divide by 3"),
    ({"in_strategy": [[2, 4], [2, 1]]}, "shared factor"),
    ({"in_strategy": [[32, 1], [1, 1]]}, "32 devices"),
    ({"in_strategy": [[2, 4]]}, "1 entries"),
    ({"in_strategy": "whole"}, "in_strategy is 'whole'"),
    ({"in_strategy": None}, "in_strategy is None"),
    ({"in_strategy": [["a", "b"], ["b", "None"]]}, "names axes"),
    ({"in_strategy": [["a", "b"], ["b", "None"]], "device_matrix": [2, 2], "alias_name": ["a", "b"]}, "4 devices"),
    ({"in_strategy": [["a", "b"], ["b", "None"]], "device_matrix": [2, 4], "alias_name": ["a", "a"]}, "repeats a name"),
    ({"in_strategy": [["a", "z"], ["z", "None"]], "device_matrix": [2, 4], "alias_name": ["a", "b"]}, "axis 'z'"),
    ({"in_strategy": [["a", "a"], ["a", "None"]], "device_matrix": [2, 4], "alias_name": ["a", "b"]}, "used twice"),
    ({"out_strategy": [[3, 1]]}, "3"),
    ({"out_strategy": [[2, 1], [2, 1]]}, "one entry per output"),
    ({"open": {"device_matrix": [2, 4], "alias_name": ["a", "b"], "axes": ["a"]}}, "does not come to it"),
    ({"open": 5}, "names no axes"),
    ({"recompute": {"call": "first"}}, "recompute"),
    ({"op": "conv2d"}, "the line is of conv2d"),
    ({"shapes": "f32[64, 784], f32[784, 512] -> f32[64, 512]"}, r"the line is of matmul f32\[64, 784\]"),
])
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
        words["captured"] = packed(held)
    return apply


@pytest.mark.parametrize("change, message", [
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
])
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
    loaded = sw.Plan.load(path)
    assert loaded.devices == 16
    assert {o.cause for o in loaded.operators if math.prod(map(math.prod, o.in_strategy)) > 1} == {"mark"}


JSON = st.recursive(st.none() | st.booleans() | st.integers(-2, 9) | st.floats(allow_nan=False) | st.sampled_from(
    ["", "a", "None", "mark", "full_batch", "level2"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["a", "call", "layout", "device_matrix"]), inner, max_size=3), max_leaves=6)


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
    path.write_text(text[:int(part * len(text))])
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
    with pytest.raises(sw.PlanError, match="not a plan"):
        sw.Plan.load(tmp_path / "list")


@pytest.mark.parametrize("old, new, message", [
    ("document_tests.doubled.default", "document_tests.tripled.default", "no operator document_tests.tripled.default"),
    ("test_document:Triple", "test_document:Other", "no torch.autograd.Function Other in the module test_document"),
])
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


# -- on a model --------------------------------------------------------------------------------------------------------


def sent(plan: sw.Plan, rank: int = 0) -> list[tuple]:
    """What a rank sends, whatever the operators are called: the marked ones have names of their own."""
    return [(c.op, c.ranks, c.shape, c.phase, c.cause) for c in plan.collectives(rank)]


def trained(path: Path | None, mode: str = "semi_auto", net: Any = None, steps: int = 2, **given: Any
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


@pytest.mark.parametrize("name, again", [
    ("tutorial by Layouts", lambda path: tutorial(strategies=path)),
    ("gpt, recomputed", lambda path: gpt(marked=True, strategies=path)),
    ("gpt, uneven", lambda path: gpt(vocabulary=61, uneven=True, strategies=path)),
    ("resnet, data_parallel", lambda path: resnet(parallel_mode="data_parallel", strategies=path)),
    ("odd", lambda path: odd(strategies=path)),
])
def test_a_model_planned_by_a_document(name: str, again: Callable[[Path], sw.Plan], tmp_path: Path) -> None:
    plan, path = made(name), tmp_path / "plan.json"
    plan.save(path)
    asked = again(path)
    assert sent(asked) == sent(plan) and asked.regions == plan.regions and asked.parameters == plan.parameters
    assert [o.out_layouts for o in asked.operators] == [o.out_layouts for o in plan.operators]


def test_a_searched_plan_runs_as_it_was_saved(tmp_path: Path) -> None:
    """Down to the sums that stay open between operators."""
    path = tmp_path / "plan.json"
    found = sw.plan(Marked(None, None, None), (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=DEVICES,
                    parallel_mode="dynamic_programming")
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
    for net, name in ((Marked(None, None, None), "matmul_1"), (Marked(), "matmul2")):
        model, _ = trained(path, net=net)
        with pytest.warns(sw.RecaptureWarning):
            model(draw(8, 8), labels(8))
        assert model.plan.operator(name).in_strategy == ((2, 4), (4, 1))
        assert model.plan.operator(name).in_shapes[0] == (8, 16)


def test_a_plan_for_another_model_batch_or_number_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    sw.plan(Marked(), (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=4,
            marks={"matmul1": ((2, 2), (2, 1)), "matmul2": ((1, 4), (4, 1))}).save(path)
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
        said = ""
    except sw.PlanError as error:
        said = str(error)
    return losses, sent(model.plan) if rank == 0 else None, tuple(model.w1.to_local().shape), saved.exists(), said


def test_in_processes(tmp_path: Path) -> None:
    marked = Marked(((2, 2), (2, 1)), ((4, 1),), ((1, 4), (4, 1)))
    plan = sw.plan(marked, (draw(16, 8),), nn.CrossEntropyLoss(), labels(16), devices=4)
    plan.save(tmp_path / "plan.json")
    sw.plan(Marked(None, None, None), (draw(32, 8),), nn.CrossEntropyLoss(), labels(32), devices=4).save(
        tmp_path / "other.json")
    ranks = run_ranks(in_processes, 4, str(tmp_path), timeout=120.0)
    local = trained(None)[1]
    for rank, (losses, _, shape, exists, said) in enumerate(ranks):
        assert losses == pytest.approx(local, abs=1e-10)
        assert shape == plan.parameters["w1"].local_shape(rank)
        assert exists == (rank == 0)
        assert "other.json:" in said and "f64[32, 8]" in said, "the same error on every rank"
    assert [c[:-1] for c in ranks[0][1]] == [c[:-1] for c in sent(plan, 0)]


# -- two plans ---------------------------------------------------------------------------------------------------------


def test_the_difference_of_two_plans(tmp_path: Path) -> None:
    plan = made("tutorial")
    assert difference(plan, made("tutorial")).equal
    other = tutorial(marks={"matmul_2": ((2, 4), (4, 1))})
    found = difference(plan, other)
    assert not found.equal and not found.settings
    assert [line.split()[1] for line in found.operators] == ["matmul_2:"]
    assert "((8, 1), (1, 1))" in found.operators[0] and "((2, 4), (4, 1))" in found.operators[0]
    assert found.operators[0].count(" us") == 2, "both prices"
    assert [line.split(":")[0] for line in found.parameters] == ["~ parameter w3"]
    assert "1 operators and 1 parameters differ" in found.lines[-1]


def test_the_difference_of_plans_of_different_models() -> None:
    def of(*layers: nn.Module, **given: Any) -> sw.Plan:
        return sw.plan(nn.Sequential(*layers), (meta(16, 8),), devices=DEVICES, **given)
    found = difference(of(nn.Linear(8, 8), nn.ReLU()), of(nn.Linear(8, 16), nn.Tanh(), hsdp={}, cluster="a100x8"))
    assert [line.split(":")[0] for line in found.operators] == ["~ linear", "- relu", "+ tanh"]
    assert [line.split(":")[0] for line in found.settings] == ["hsdp", "cluster"]
    assert "f32[8, 8]" in found.operators[0] and "f32[16, 8]" in found.operators[0]
    assert [line.split(":")[0] for line in found.parameters] == ["~ parameter 0.weight", "~ parameter 0.bias"]


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
    return replace(plan, decisions={name: replace(d, open=()) for name, d in plan.decisions.items()})


def test_sums_that_stay_open_are_a_difference_where_there_are_some(tmp_path: Path) -> None:
    assert difference(made("gpt"), closed(made("gpt"))).operators == ()
    plan, path = sw.plan(Passing(), (meta(64, 64),), devices=DEVICES), tmp_path / "plan.json"
    assert sent(plan)[0][0] == "reduce_scatter" and sent(closed(plan))[0][0] == "all_reduce"
    found = difference(plan, closed(plan))
    assert [line.split()[1] for line in found.operators] == ["reshape:"] and "open ['a']" in found.operators[0]
    closed(plan).save(path)
    assert sent(sw.Plan.load(path)) == sent(closed(plan))
    assert sent(sw.plan(Passing(), (meta(64, 64),), devices=DEVICES, strategies=path)) == sent(closed(plan))
    words = json.loads(path.read_text())
    assert words["open"] == [] and not any("open" in line for line in words["operators"]), "said once"
    words["operators"][1]["open"] = None
    path.write_text(json.dumps(words))
    assert sent(sw.Plan.load(path)) == sent(plan)
