"""The goldens of sharding_propagation: what is marked is as the original has it, and the rest is no dearer by our
costs."""

from __future__ import annotations

import ast
import json
from functools import cache

import pytest
import torch
from golden_reading import SHARED, layout_of
from resnet_like import KINDS, NAMES, ResNetLike, expanded_cross_entropy
from test_goldens_semi_auto import golden_sent, sent
from torch import nn

import shardwright as sw
from shardwright.cluster import Cluster
from shardwright.cost.cost_model import CostModel

DEVICES, MODE = 8, "sharding_propagation"
CLUSTERS = ["cpu", "a100x8"]


@cache
def load(name: str) -> dict:
    return json.loads((SHARED / "goldens" / "search" / f"{name}.json").read_text())["ranks"]


def strategy(record: dict) -> tuple:
    """The strategy of an operator; one with a single input is written without the last comma."""
    made = ast.literal_eval(record["strategy"])
    return made if isinstance(made[0], tuple) or not made[0] else (made,)


def seconds(plan: sw.Plan, cluster: str) -> float:
    return CostModel(Cluster.of(cluster, DEVICES), DEVICES).plan(plan).total


class Squared(nn.Module):
    """The mean of squared differences, in the original's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.sub, self.square, self.mean = (sw.Operator(f) for f in (torch.sub, torch.square, torch.mean))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.mean(self.square(self.sub(x, target)))


class QuickStart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.w2 = nn.Parameter(torch.empty(32, 16)), nn.Parameter(torch.empty(16, 16))
        self.matmul, self.relu = sw.Operator(torch.matmul), sw.Operator(torch.relu)
        self.matmul2 = sw.Operator(torch.matmul)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.matmul2(self.relu(self.matmul(x, self.w)), self.w2)


def quick_start(marks: dict[str, tuple], mode: str, cluster: str) -> sw.Plan:
    """The network with some of its operators, those of the loss among them, marked."""
    net, loss = QuickStart(), Squared()
    for name, given in marks.items():
        getattr(net if hasattr(net, name) else loss, name).shard(given)
    return sw.plan(
        net,
        (torch.empty(16, 32),),
        loss,
        torch.empty(16, 16),
        parallel_mode=mode,
        devices=DEVICES,
        dataset_strategy="data_parallel",
        cluster=cluster,
    )


ORDER = ("matmul", "relu", "matmul2", "sub", "square", "mean")


def as_marks(golden: dict) -> dict[str, tuple]:
    """All of the original's strategies, by our names."""
    assert [r["op"] for r in golden["operators"]] == ["MatMul", "ReLU", "MatMul", "Sub", "Square", "ReduceMean"]
    return {name: strategy(record) for name, record in zip(ORDER, golden["operators"])}


HINTS = {"quick_start_sharding_propagation_train": ("matmul",), "propagation_conflict_two_hints": ("matmul", "matmul2")}
PARAMETERS = {"matmul": "w", "matmul2": "w2"}


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("name", HINTS)
def test_quick_start(name: str, cluster: str, figures) -> None:
    for rank, golden in load(name).items():
        marks = as_marks(golden)
        ours = quick_start({n: marks[n] for n in HINTS[name]}, MODE, cluster)
        for hint in HINTS[name]:
            parameter = PARAMETERS[hint]
            record = golden["parameters"][parameter]
            assert ours.parameters[parameter].slice(int(rank)) == layout_of(record).slice(record["shape"], int(rank))
            record = golden["operators"][ORDER.index(hint)]
            inputs, outputs = ours.operator(hint).local_shapes(int(rank))
            assert [*map(list, inputs)] == record["local_inputs"] and [*map(list, outputs)] == record["local_outputs"]
        assert seconds(ours, cluster) <= seconds(quick_start(marks, "semi_auto", cluster), cluster) * (1 + 1e-12)
        mine, theirs = sent(ours, int(rank)), golden_sent(golden["collectives"], DEVICES)
        figures(f"{name}, {cluster}, rank {rank}", mine, theirs)
        assert mine <= theirs


def test_two_hints_are_a_conflict() -> None:
    """The product before and the product after ask the ReLU for rows and for columns."""
    marks = as_marks(load("propagation_conflict_two_hints")["0"])
    plan = quick_start({n: marks[n] for n in ("matmul", "matmul2")}, MODE, "cpu")
    relu = next(d for d in plan.decisions.values() if d.op.kind == "relu")
    assert relu.note in plan.notes
    assert "matmul asks for ((2, 1),)" in relu.note and "matmul2 asks for ((1, 8),)" in relu.note


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_hint(cluster: str) -> None:
    """The original takes the batch for a hint, as it is fed."""
    for rank, golden in load("propagation_no_hint").items():
        plan = quick_start({}, MODE, cluster)
        assert [o.in_strategy for o in plan.operators] == [strategy(record) for record in golden["operators"]]
        for name, record in golden["parameters"].items():
            assert plan.parameters[name].slice(int(rank)) == layout_of(record).slice(record["shape"], int(rank))
        assert sent(plan, int(rank)) <= golden_sent(golden["collectives"], DEVICES)


def resnet(mode: str, cluster: str, stem: tuple | None = None) -> sw.Plan:
    shape = load("resnet_like_propagation_conv_hint")["0"]["inputs"][0][0]
    with torch.device("meta"):
        net = ResNetLike()
        x, target = torch.empty(shape[0] * DEVICES, *shape[1:]), torch.empty(shape[0] * DEVICES, dtype=torch.int64)
    if stem is not None:
        sw.shard(net.stem[0], stem)
    return sw.plan(
        net,
        (x,),
        expanded_cross_entropy,
        target,
        parallel_mode=mode,
        devices=DEVICES,
        dataset_strategy="data_parallel",
        cluster=cluster,
    )


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_resnet_with_its_stem_marked(cluster: str, figures) -> None:
    ranks = load("resnet_like_propagation_conv_hint")
    stem = strategy(ranks["0"]["operators"][0])
    ours, theirs = resnet(MODE, cluster, stem), resnet("semi_auto", cluster)
    for rank, golden in ranks.items():
        # All of the original's operators follow the batch: its plan is semi_auto's without a mark.
        shapes = [(KINDS[o["op"]], o["local_inputs"][:2]) for o in golden["operators"] if o["op"] in KINDS]
        assert shapes == [
            (o.op, [*map(list, o.local_shapes(int(rank))[0][:2])]) for o in theirs.operators if o.op in KINDS.values()
        ]
        record = golden["parameters"]["stem.0.weight"]
        assert ours.parameters["stem.0.weight"].slice(int(rank)) == layout_of(record).slice(record["shape"], int(rank))
        inputs, outputs = ours.operator("stem.0").local_shapes(int(rank))
        assert [*map(list, inputs)] == golden["operators"][0]["local_inputs"]
        assert [*map(list, outputs)] == golden["operators"][0]["local_outputs"]
        for name, other in golden["parameters"].items():
            module, _, last = name.rpartition(".")
            assert f"{module}.{NAMES.get(last, last)}" in ours.parameters
            assert list(ours.parameters[f"{module}.{NAMES.get(last, last)}"].shape) == other["shape"]
        # Batch norms apart, as in the golden of semi_auto: theirs exchange nothing.
        layers = [o.name for o in ours.operators if o.op == "batch_norm"]
        moved = [c for c in ours.collectives(int(rank)) if c.cause != "parameter" and c.operator not in layers]
        mine, allowed = sum(c.sent for c in moved), golden_sent(golden["collectives"], DEVICES)
        figures(f"resnet_like, stem marked, {cluster}, rank {rank}", mine, allowed)
        assert mine <= allowed
    assert seconds(ours, cluster) <= seconds(theirs, cluster) * (1 + 1e-12)
