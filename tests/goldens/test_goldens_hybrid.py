"""The goldens of pipelines: blocks on two stages, and the network of the hybrid tutorial, with and without stages."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from golden_reading import SHARED, layout_of, ranks_of, sent_by_golden
from test_goldens_search import strategy
from torch import Tensor, nn

import shardwright as sw

FOLDER = SHARED / "goldens" / "hybrid"
BLOCKS, REFUSED = "pipeline2_micro4", "pipeline_micro_lt_stages"
PIPED, PLAIN = "hybrid_tutorial_recursive_pipeline2_optpar", "hybrid_tutorial_recursive_no_pipeline"
MICRO_BATCHES = 4
SEARCHES = ("recursive_programming", "dynamic_programming")
CLUSTERS = ("h100x8", "a100x8")


@cache
def golden(name: str, rank: int) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())["ranks"][str(rank)]


def theirs_sent(expected: dict, which: Callable[[dict], bool] = lambda c: True) -> float:
    """Bytes that a rank sends in the original's collectives, what it sends to another stage among them. Where no ranks
    are told, they are those of the forward's collective of this shape, or, in the sum of a gradient, those that hold
    the slice."""
    total, forward = 0.0, {}
    for c in expected["collectives"]:
        if c["op"] in ("Send", "Receive"):
            total += math.prod(c["in"][0]) * 4 * (c["op"] == "Send") * which(c)
            continue
        shape = tuple(c["in"][0])
        if c["ranks"] is not None:
            forward[c["op"], shape] = c["ranks"]
        elif is_sum(c):
            alike = min(
                math.prod(d.size for d in layout_of(record).replicas)
                for record in expected["parameters"].values()
                if tuple(record["slice_shape"]) == shape
            )
            c = c | {"ranks": "-".join(map(str, range(alike)))}
        elif c["op"] == "AllReduce":
            c = c | {"ranks": forward[c["op"], shape]}
        total += sent_by_golden(c, 8) * which(c)
    return total


def is_sum(collective: dict) -> bool:
    return collective["kind"].startswith("gradient sum")


class Layer(nn.Module):
    """A product with a weight and the addition of a bias, as two operators."""

    def __init__(self, ins: int, outs: int, product: tuple | None = None, added: tuple | None = None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(outs, ins)), nn.Parameter(torch.randn(outs))
        self.product, self.added = sw.Operator(F.linear), sw.Operator(torch.add)
        if product is not None:
            self.product.shard(product), self.added.shard(added)

    def forward(self, x: Tensor) -> Tensor:
        return self.added(self.product(x, self.weight), self.bias)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d1 = Layer(256, 512, ((2, 1), (2, 1)), ((2, 2), (2,)))
        self.d2 = Layer(512, 256, ((2, 2), (1, 2)), ((2, 1), (1,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.d2(torch.relu(self.d1(x)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        return self.b[1](self.b[0](x))


def squares(x: Tensor, target: Tensor) -> Tensor:
    return ((x - target) ** 2).mean()


def blocks(micro_batches: int = MICRO_BATCHES) -> sw.PipelinePlan:
    with torch.device("meta"):
        net, x = Blocks(), torch.empty(32, 256)
    return sw.plan(
        net,
        (x,),
        squares,
        x,
        devices=8,
        dataset_strategy="data_parallel",
        pipeline=dict(stages=2, micro_batches=micro_batches, stage_config={"b.0": 0, "b.1": 1}),
    )


def compare_parameters(plan: sw.Plan | sw.PipelinePlan, expected: dict[str, Any], rank: int) -> dict[str, sw.Layout]:
    """The slices of all parameters on a rank; gives the golden's layouts."""
    layouts = {}
    for name, record in expected["parameters"].items():
        if not name.startswith("accu_grads."):
            layouts[name] = layout_of(record)
            assert not record["opt_shard_group"]
            position = rank % layouts[name].devices
            assert plan.parameters[name].slice(rank) == layouts[name].slice(record["shape"], position), name
    others = set(plan.parameters) - set(layouts)
    assert all(math.prod(plan.parameters[n].local_shape(rank)) == 0 for n in others)
    return layouts


def test_two_blocks_are_refused_in_one_micro_batch() -> None:
    for rank in (0, 5):
        assert "micro_batch must be greater than or equal to stage_num" in golden(REFUSED, rank)["error"][1]
    with pytest.raises(sw.ShardwrightError, match=r"micro_batches=1.*\n?.*2 stages"):
        blocks(1)


@pytest.mark.parametrize("rank", [0, 5])
def test_two_blocks(rank: int, figures: Any) -> None:
    plan, expected = blocks(), golden(BLOCKS, rank)
    layouts = compare_parameters(plan, expected, rank)
    block = f"b.{rank // 4}"
    assert set(layouts) == {f"{block}.{d}.{p}" for d in ("d1", "d2") for p in ("weight", "bias")}

    marked = [f"{block}.{d}.{op}" for d in ("d1", "d2") for op in ("product", "added")]
    theirs = [o for o in expected["operators"] if o["op"] in ("MatMul", "BiasAdd")]
    assert len(theirs) == len(marked) * MICRO_BATCHES
    for i, record in enumerate(theirs):
        inputs, outputs = plan.operator(marked[i % len(marked)]).local_shapes(rank % 4)
        assert [*map(list, inputs), *map(list, outputs)] == record["local_inputs"] + record["local_outputs"]

    mine = plan.collectives(rank)
    inside = [c for c in expected["collectives"] if c["kind"] == "inside the operator" and c["in"] != [[]]]
    completing = [(c.ranks, list(c.shape)) for c in mine if c.cause == "operator" and c.phase == "forward" and c.shape]
    assert completing == [(ranks_of(c["ranks"], 8), c["in"][0]) for c in inside] and len(inside) == MICRO_BATCHES
    sums = [c for c in mine if c.phase == "gradient"]
    assert Counter(c.shape for c in sums) == Counter(tuple(c["in"][0]) for c in expected["collectives"] if is_sum(c))
    first = rank - 2 * (rank % 4 // 2)
    assert {c.ranks for c in sums} == {(first, first + 2)}  # the batch's other half

    sends = [c for c in mine if c.op in ("send", "recv")]
    away = [c for c in expected["collectives"] if c["op"] in ("Send", "Receive")]
    peer = (rank + 4) % 8
    assert all(set(c.ranks) == {rank, peer} for c in sends)  # the same position
    assert Counter((c.op, c.shape) for c in sends) == Counter(
        ("send" if c["op"] == "Send" else "recv", tuple(c["in" if c["op"] == "Send" else "out"][0])) for c in away
    )
    # Ours in the order of 1F1B: two forwards of the first stage before its first backward.
    kinds = [c.phase[0] + c.op[0] for c in sends]
    assert kinds == (["fs", "fs", "br", "fs", "br", "fs", "br", "br"] if rank < 4 else ["fr", "bs"] * MICRO_BATCHES)

    for title, which in (("a step", lambda c: True), ("gradients", is_sum)):
        ours = sum(c.sent for c in (mine if title == "a step" else sums))
        original = theirs_sent(expected, which)
        figures(f"two blocks on two stages, {title}, rank {rank}", ours, original)
        assert ours <= original


# -- the tutorial's network --------------------------------------------------------------------------------------------

#: Operators of the network in the original's order, by the name that the network has for them.
NAMES = (
    "flatten",
    "layer1.product",
    "layer1.added",
    "relu1",
    "layer2.product",
    "layer2.added",
    "relu2",
    "layer3.product",
    "layer3.added",
    "sub",
    "abs",
    "mean",
)


class Tutorial(nn.Module):
    """784, 512, 512, 1, and the mean absolute error. Those of `NAMES` that are given strategies are marked."""

    def __init__(self, strategies: dict[str, tuple] | None = None) -> None:
        super().__init__()
        self.layer1, self.layer2, self.layer3 = Layer(784, 512), Layer(512, 512), Layer(512, 1)
        for name, function in (
            ("flatten", torch.flatten),
            ("relu1", torch.relu),
            ("relu2", torch.relu),
            ("sub", torch.sub),
            ("abs", torch.abs),
            ("mean", torch.mean),
        ):
            setattr(self, name, sw.Operator(function))
        for name, given in (strategies or {}).items():
            attrgetter(name)(self).shard(given)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.relu1(self.layer1(self.flatten(x, 1)))
        x = self.layer3(self.relu2(self.layer2(x)))
        return self.mean(self.abs(self.sub(x, y)))


def lines(name: str) -> list[dict]:
    """The operators of one micro-batch on all stages."""
    if name == PLAIN:
        return golden(name, 0)["operators"]
    picked: list[dict] = []
    for rank in (0, 5):
        kept = [o for o in golden(name, rank)["operators"] if o["op"] not in ("StridedSlice", "Receive", "Add")]
        picked += kept[: len(kept) // MICRO_BATCHES]
    return picked


@cache
def planned(name: str, mode: str, cluster: str) -> sw.Plan | sw.PipelinePlan:
    """Our plan; in semi_auto that of the golden's strategies."""
    marks = None
    if mode == "semi_auto":
        marks = {own: strategy(line["strategy"]) for own, line in zip(NAMES, lines(name), strict=True)}
    rows, pipeline, hsdp = 256, None, None
    with torch.device("meta"):
        net = Tutorial(marks)
        if name == PIPED:
            rows, hsdp = 128, {}
            pipeline = dict(stages=2, micro_batches=MICRO_BATCHES, stage_config={"layer1": 0, "layer2": 1, "layer3": 1})
        batch = torch.empty(rows, 1, 28, 28), torch.empty(rows, 1)
    return sw.plan(
        net,
        batch,
        parallel_mode=mode,
        devices=8,
        dataset_strategy="data_parallel",
        cluster=cluster,
        hsdp=hsdp,
        pipeline=pipeline,
        recompute=(lambda op: op.kind == "relu" or None) if pipeline else None,
    )


@pytest.mark.parametrize("name", [PLAIN, PIPED])
@pytest.mark.parametrize("mode", SEARCHES)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_not_dearer_than_the_golden(name: str, mode: str, cluster: str) -> None:
    ours, theirs = planned(name, mode, cluster), planned(name, "semi_auto", cluster)
    assert 0 < ours.cost <= theirs.cost * (1 + 1e-12)


@pytest.mark.parametrize("name", [PLAIN, PIPED])
@pytest.mark.parametrize("rank", [0, 5])
def test_as_marks_the_golden_is_what_it_was(name: str, rank: int, figures: Any) -> None:
    plan, expected = planned(name, "semi_auto", CLUSTERS[0]), golden(name, rank)
    compare_parameters(plan, expected, rank)
    if name == PIPED:
        assert [region.operators for stage in plan.stages for region in stage.plan.regions] == [("relu1",), ("relu2",)]
    picked = lines(name)
    for own, line in zip(NAMES, picked, strict=True):
        stage = plan.stage_of(own) if name == PIPED else None
        if stage is None or rank in stage.ranks:
            inputs, outputs = plan.operator(own).local_shapes(rank % 4 if stage else rank)
            assert [*map(list, inputs), *map(list, outputs)] == line["local_inputs"] + line["local_outputs"], own

    mine = plan.collectives(rank)
    completing = Counter((c.ranks, c.shape) for c in mine if c.cause == "operator" and c.phase == "forward")
    inside = Counter(
        (ranks_of(c["ranks"], 8), tuple(c["in"][0]))
        for c in expected["collectives"]
        if c["kind"] == "inside the operator"
    )
    assert completing == inside
    sends = Counter((c.op, c.shape) for c in mine if c.op in ("send", "recv"))
    assert sends == Counter(
        ("send", tuple(c["in"][0])) if c["op"] == "Send" else ("recv", tuple(c["out"][0]))
        for c in expected["collectives"]
        if c["op"] in ("Send", "Receive")
    )
    sums = Counter(c.shape for c in mine if c.phase == "gradient")
    original = Counter(tuple(c["in"][0]) for c in expected["collectives"] if is_sum(c))
    assert not sums - original
    ours, theirs = sum(c.sent for c in mine), theirs_sent(expected)
    figures(f"{name}, rank {rank}", ours, theirs)
    assert ours <= theirs
